"""Input files: JSONL lines of four forms, or one prompt a line, to rows.

A line that cannot run becomes a row with an error; it never ends the job. Only what makes the
answers ambiguous does: two lines with one ``custom_id``.
"""

import json
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from zeroinfer.engine import SamplingParams
from zeroinfer.errors import ConfigError, RequestError, ZeroInferError
from zeroinfer.jobs.fields import (
    SAMPLING_FIELDS,
    json_type,
    read_sampling,
    read_text,
    refuse_unknown_keys,
)
from zeroinfer.jobs.lines import HashedLines, open_input
from zeroinfer.jobs.openai import OpenAILine, is_openai_line, read_openai_line
from zeroinfer.jobs.rows import JobInput, Row, RowError, RowStyle

__all__ = ["InputReader", "TextEncoder", "read_job_input"]

_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
_CUSTOM_ID = re.compile(rb'"custom_id"\s*:\s*("(?:[^"\\]|\\.)*")')


class TextEncoder(Protocol):
    """What reading an input needs of a tokenizer."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the ids of a prompt."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        """Return the ids of a conversation in the model's template, ready for the answer."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class InputReader:
    """Reads lines into rows for one model."""

    tokenizer: TextEncoder | None
    """None where the model folder has none; then only prompt_token_ids serve."""
    defaults: SamplingParams
    """Sampling of every row that does not set its own; the seed is that of row 0."""
    vocab_size: int | None = None
    max_model_len: int | None = None
    """Most tokens of prompt and answer together; None where the model sets no limit."""
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
            return self._finish(row, self._encode_text(text), sampling)
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
            return self._encode_messages(value)
        if name == "prompt_token_ids":
            return self._check_ids(name, value)
        return self._encode_prompt(value)

    def _encode_prompt(self, value: object) -> Sequence[int]:
        """Take a text, ids, or (as OpenAI's endpoint does) a list that holds one of either."""
        if isinstance(value, str):
            return self._encode_text(read_text("prompt", value))
        if not isinstance(value, list):
            raise RequestError(
                f"prompt has the wrong type: got {json_type(value)}, need a string or token ids"
            )
        if not value or type(value[0]) is int:
            return self._check_ids("prompt", value)
        if len(value) > 1:
            raise RequestError(
                f"prompt holds {len(value)} entries, need one; write one line for each"
            )
        if isinstance(value[0], list):
            return self._check_ids("prompt", value[0])
        return self._encode_text(read_text("prompt[0]", value[0]))

    def _encode_text(self, text: str) -> Sequence[int]:
        if not text:
            raise RequestError("the prompt is empty; need at least one token")
        return self._run_tokenizer(lambda tokenizer: tokenizer.encode(text))

    def _encode_messages(self, value: object) -> Sequence[int]:
        messages = _check_messages(value)
        return self._run_tokenizer(lambda tokenizer: tokenizer.encode_chat(messages))

    def _run_tokenizer(self, encode: Callable[[TextEncoder], Sequence[int]]) -> Sequence[int]:
        if self.tokenizer is None:
            raise RequestError(
                "the model folder has no tokenizer, so text cannot be read; give prompt_token_ids"
            )
        try:
            return encode(self.tokenizer)
        except RequestError:
            raise
        except ZeroInferError as error:
            # A missing chat template, for one, is a fault of the line that needs it.
            raise RequestError(str(error)) from error

    def _check_ids(self, name: str, value: object) -> Sequence[int]:
        if not isinstance(value, list):
            raise RequestError(
                f"{name} has the wrong type: got {json_type(value)}, need a list of integers"
            )
        limit = self.vocab_size or 2**32
        if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < limit:
            return value
        for idx, token_id in enumerate(value):
            if type(token_id) is not int:
                raise RequestError(
                    f"{name}[{idx}] has the wrong type: got {json_type(token_id)}, need an integer"
                )
            if not 0 <= token_id < limit:
                raise RequestError(
                    f"{name}[{idx}] is not in the vocabulary: got {token_id}, need 0 to {limit - 1}"
                )
        return value

    def _finish(self, row: Row, ids: Sequence[int], sampling: SamplingParams) -> Row:
        if not len(ids):
            raise RequestError("the prompt is empty; need at least one token")
        if self.vocab_size is not None and max(ids) >= self.vocab_size:
            raise RequestError(
                f"the tokenizer gives id {max(ids)}, but the model knows ids below "
                f"{self.vocab_size}; model and tokenizer do not belong together"
            )
        if self.max_model_len is not None:
            if len(ids) >= self.max_model_len:
                raise RequestError(
                    f"the prompt is too long: got {len(ids)} tokens, and the model's window of "
                    f"{self.max_model_len} must hold it and one new token; shorten it"
                )
            # An answer ends at the window with finish_reason "length".
            room = self.max_model_len - len(ids)
            if sampling.max_tokens > room:
                sampling = replace(sampling, max_tokens=room)
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


def _check_messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RequestError(f"messages has the wrong type: got {json_type(value)}, need a list")
    if not value:
        raise RequestError("messages is empty; need at least one message")
    return [_check_message(f"messages[{idx}]", message) for idx, message in enumerate(value)]


def _check_message(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{name} has the wrong type: got {json_type(value)}, need an object")
    refuse_unknown_keys(value, ("role", "content", "name"), where=name)
    for key in ("role", "content"):
        if value.get(key) is None:
            raise RequestError(f"{name} has no {key}; need role and content")
    message = dict(value, role=read_text(f"{name}.role", value["role"]))
    message["content"] = _join_content(f"{name}.content", value["content"])
    return message


def _join_content(name: str, value: object) -> str:
    """Take a text, or OpenAI's list of text parts."""
    if not isinstance(value, list):
        return read_text(name, value)
    texts = []
    for idx, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else json_type(part)
        if kind != "text":
            raise RequestError(f"{name}[{idx}] is not supported: got {kind!r}, need a text part")
        texts.append(read_text(f"{name}[{idx}].text", part.get("text")))
    return "".join(texts)


def _give_style(rows: list[Row]) -> tuple[Row, ...]:
    """Give lines that could not be parsed at all the form of the file they stand in."""
    is_openai = any(row.style.is_openai for row in rows)
    has_plain = any(row.error is None and not row.style.is_openai for row in rows)
    if not is_openai or has_plain:
        return tuple(rows)
    return tuple(
        row if row.style.is_openai else replace(row, style=RowStyle.COMPLETION) for row in rows
    )
