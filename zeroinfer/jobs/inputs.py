"""Input files: JSONL lines of four forms, or one prompt a line, to rows.

A line that cannot run becomes a row with an error; it never ends the job. Only what makes the
answers ambiguous does: two lines with one ``custom_id``.
"""

import json
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zeroinfer.engine import SAMPLING_FIELDS, PromptReader, SamplingParams, read_sampling
from zeroinfer.errors import ConfigError, RequestError
from zeroinfer.fields import json_type, read_text, refuse_unknown_keys, wrong_type
from zeroinfer.jobs.lines import HashedLines, open_input
from zeroinfer.jobs.openai import OpenAILine, is_openai_line, read_openai_line
from zeroinfer.jobs.rows import JobInput, Row, RowError, RowStyle

__all__ = ["InputReader", "read_job_input"]

_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
_CUSTOM_ID = re.compile(rb'"custom_id"\s*:\s*("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True, kw_only=True, slots=True)
class InputReader:
    """Reads lines into rows for one model."""

    prompts: PromptReader
    defaults: SamplingParams
    """Sampling of every row that does not set its own; the seed is that of row 0."""
    model_names: Collection[str] = field(default_factory=frozenset)
    """Names an OpenAI line may call the model by; empty allows all."""

    def read_jsonl(self, raw_lines: Iterable[bytes]) -> JobInput:
        """Read JSONL.

        Raises:
            ConfigError: two lines share a custom_id.
        """
        return self._read(raw_lines, self._read_json_line)

    def read_text(self, raw_lines: Iterable[bytes]) -> JobInput:
        """Read plain text, one prompt a line."""
        return self._read(raw_lines, self._read_text_line)

    def _read(self, raw_lines: Iterable[bytes], read_line: Callable[[Row, bytes], Row]) -> JobInput:
        lines = HashedLines(raw_lines)
        rows: list[Row] = []
        line_of_id: dict[str, int] = {}
        for number, raw in lines:
            row = read_line(Row(index=len(rows), line=number), raw)
            if row.custom_id is not None:
                first = line_of_id.setdefault(row.custom_id, number)
                if first != number:
                    raise ConfigError(
                        f"custom_id {row.custom_id!r} is used twice: lines {first} and {number}; "
                        "give each line its own"
                    )
            rows.append(row)
        return JobInput(rows=_give_style(rows), sha256=lines.sha256)

    def _read_text_line(self, row: Row, raw: bytes) -> Row:
        try:
            text = _decode(raw)
            sampling = read_sampling({}, defaults=self.defaults, row_idx=row.index)
            return self._finish(row, self.prompts.encode_text(text), sampling)
        except RequestError as error:
            return replace(row, error=RowError(message=str(error)))

    def _read_json_line(self, row: Row, raw: bytes) -> Row:
        try:
            record = _parse_object(raw)
        except RequestError as error:
            custom_id = _find_custom_id(raw)
            style = RowStyle.PLAIN if custom_id is None else RowStyle.COMPLETION
            message = RowError(message=str(error))
            return replace(row, style=style, custom_id=custom_id, error=message)
        if is_openai_line(record):
            return self._read_openai(row, record)
        try:
            return self._read_plain(row, record)
        except RequestError as error:
            return replace(row, error=RowError(message=str(error)))

    def _read_plain(self, row: Row, record: Mapping[str, Any]) -> Row:
        refuse_unknown_keys(record, (*_PROMPT_FIELDS, *SAMPLING_FIELDS), where="the line")
        given = [name for name in _PROMPT_FIELDS if record.get(name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"the line needs exactly one of prompt, prompt_token_ids and messages, "
                f"got {' and '.join(given) or 'none'}"
            )
        sampling = read_sampling(record, defaults=self.defaults, row_idx=row.index)
        return self._finish(row, self._encode(given[0], record[given[0]]), sampling)

    def _read_openai(self, row: Row, record: Mapping[str, Any]) -> Row:
        line: OpenAILine = read_openai_line(record, model_names=self.model_names)
        row = replace(row, style=line.style, custom_id=line.custom_id, model=line.model)
        if line.error is not None:
            return replace(row, error=line.error)
        try:
            sampling = read_sampling(line.fields, defaults=self.defaults, row_idx=row.index)
            ids = self._encode(line.prompt_field, line.fields[line.prompt_field])
            return self._finish(row, ids, sampling)
        except RequestError as error:
            return replace(row, error=RowError(message=str(error)))

    def _encode(self, name: str, value: object) -> Sequence[int]:
        if name == "messages":
            return self.prompts.encode_messages(value)
        if name == "prompt_token_ids":
            return self.prompts.check_ids(name, value)
        return self._encode_prompt(value)

    def _encode_prompt(self, value: object) -> Sequence[int]:
        """Take a text, ids, or (as OpenAI's endpoint does) a list that holds one of either."""
        if isinstance(value, str):
            return self.prompts.encode_text(read_text("prompt", value))
        if not isinstance(value, list):
            raise wrong_type("prompt", value, "a string or token ids")
        if not value or type(value[0]) is int:
            return self.prompts.check_ids("prompt", value)
        if len(value) > 1:
            raise RequestError(
                f"prompt holds {len(value)} entries, need one; write one line for each"
            )
        if isinstance(value[0], list):
            return self.prompts.check_ids("prompt", value[0])
        return self.prompts.encode_text(read_text("prompt[0]", value[0]))

    def _finish(self, row: Row, ids: Sequence[int], sampling: SamplingParams) -> Row:
        sampling = self.prompts.fit(ids, sampling)
        return replace(row, prompt_token_ids=array("I", ids), sampling=sampling)


def read_job_input(path: str, reader: InputReader) -> JobInput:
    """Read a whole input: ``.txt`` holds one prompt a line, all else (and ``-``) JSONL.

    Raises:
        StorageError: the file cannot be read.
        ConfigError: two lines share a custom_id.
    """
    with open_input(path) as file:
        if path.lower().endswith(".txt"):
            return reader.read_text(file)
        return reader.read_jsonl(file)


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the line is not UTF-8: byte {raw[error.start]:#04x} at column {error.start + 1}"
        ) from None


def _parse_object(raw: bytes) -> dict[str, Any]:
    text = _decode(raw)
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"the line is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError):
        raise RequestError(
            "the line is not JSON that can be read: nested or long beyond reason"
        ) from None
    if not isinstance(record, dict):
        raise RequestError(f"the line is {json_type(record)}, need a JSON object")
    return record


def _find_custom_id(raw: bytes) -> str | None:
    """Read the custom_id of a line that is no JSON, so that its error can be matched."""
    match = _CUSTOM_ID.search(raw)
    if match is None:
        return None
    try:
        value: str = json.loads(match.group(1))
        return read_text("custom_id", value)
    except ValueError:
        return None


def _give_style(rows: list[Row]) -> tuple[Row, ...]:
    """Give lines that could not be parsed at all the form of the file they stand in."""
    is_openai = any(row.style.is_openai for row in rows)
    has_plain = any(row.error is None and not row.style.is_openai for row in rows)
    if not is_openai or has_plain:
        return tuple(rows)
    return tuple(
        row if row.style.is_openai else replace(row, style=RowStyle.COMPLETION) for row in rows
    )
