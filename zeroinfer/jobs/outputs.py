"""Forms of output lines, and reading back an output that a kill cut short.

A plain row leaves as ``{"index", "text", "token_ids", "finish_reason", "usage"}``, or as
``{"index", "line", "error"}``. A line of an OpenAI batch leaves as such a line; its ``id`` ends in
the row's index, which is how a resumed job knows it again.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroinfer.engine import FinishedRequest, FinishReason
from zeroinfer.errors import StorageError
from zeroinfer.jobs.rows import Row, RowError, RowStyle

__all__ = ["RecordFormat", "RecoveredOutput", "is_error_line", "recover_output"]

_ID = re.compile(r"batch_req_([0-9]+)")
_OBJECTS = {RowStyle.COMPLETION: "text_completion", RowStyle.CHAT: "chat.completion"}
_PREFIXES = {RowStyle.COMPLETION: "cmpl", RowStyle.CHAT: "chatcmpl"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordFormat:
    """Writes answers and errors in the form their rows came in."""

    model_name: str
    """Name of the model in OpenAI lines that gave none."""
    clock: Callable[[], float]
    """Seconds since the epoch, for the ``created`` field."""

    def format_result(self, row: Row, finished: FinishedRequest) -> str:
        """Return the output line of a finished request, without its line end."""
        if finished.finish_reason is FinishReason.ERROR:
            message = finished.error or "the engine gave up this row"
            error = RowError(message=message, type="server_error", status_code=500)
            return self.format_error(row, error)
        if row.style.is_openai:
            body = self._openai_body(row, finished)
            return _dump(_openai_record(row, status_code=200, body=body, error=None))
        return _dump(
            {
                "index": row.index,
                "text": finished.text,
                "token_ids": list(finished.token_ids),
                "finish_reason": finished.finish_reason.value,
                "usage": finished.usage,
            }
        )

    def format_error(self, row: Row, error: RowError) -> str:
        """Return the output line of a row that has no answer, without its line end."""
        if not row.style.is_openai:
            detail = {"message": error.message, "type": error.type}
            return _dump({"index": row.index, "line": row.line, "error": detail})
        body = {"error": {"message": error.message, "type": error.type, "code": error.status_code}}
        outer = {"code": error.type, "message": error.message, "line": row.line}
        return _dump(_openai_record(row, status_code=error.status_code, body=body, error=outer))

    def _openai_body(self, row: Row, finished: FinishedRequest) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0}
        if row.style is RowStyle.CHAT:
            choice["message"] = {"role": "assistant", "content": finished.text}
        else:
            choice["text"] = finished.text
        choice["logprobs"] = None
        choice["finish_reason"] = finished.finish_reason.value
        return {
            "id": f"{_PREFIXES[row.style]}-{row.index}",
            "object": _OBJECTS[row.style],
            "created": int(self.clock()),
            "model": row.model if row.model is not None else self.model_name,
            "choices": [choice],
            "usage": finished.usage,
        }


def _openai_record(
    row: Row, *, status_code: int, body: Mapping[str, Any], error: Mapping[str, Any] | None
) -> dict[str, Any]:
    response = {"status_code": status_code, "request_id": f"req_{row.index}", "body": body}
    return {
        "id": f"batch_req_{row.index}",
        "custom_id": row.custom_id,
        "response": response,
        "error": error,
    }


def _dump(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        # Half of a surrogate pair, echoed in an error: only the escaped form can be written.
        return json.dumps(record, separators=(",", ":"))
    return text


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveredOutput:
    """What an output file holds."""

    done: frozenset[int]
    """Indices of the rows that have their line."""
    num_errors: int
    """How many of the lines are errors."""
    whole_bytes: int
    """Length of the whole lines; what follows was cut off by a kill."""
    torn_bytes: int


def is_error_line(line: str) -> bool:
    """Whether an output line of either form is that of a row without an answer."""
    return json.loads(line).get("error") is not None


def recover_output(path: Path, *, num_rows: int) -> RecoveredOutput:
    """Read an output back.

    Raises:
        StorageError: a whole line is no line of this job, or a row stands in it twice.
    """
    done: set[int] = set()
    num_errors = whole_bytes = torn_bytes = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                torn_bytes = len(raw)
                break
            index, is_error = _read_record(raw, where=f"line {number} of {path}")
            if not 0 <= index < num_rows or index in done:
                fault = "appears twice" if index in done else f"is not one of {num_rows} rows"
                raise StorageError(
                    f"line {number} of {path}: row {index} {fault}; use --overwrite to start anew"
                )
            done.add(index)
            num_errors += is_error
            whole_bytes += len(raw)
    return RecoveredOutput(
        done=frozenset(done), num_errors=num_errors, whole_bytes=whole_bytes, torn_bytes=torn_bytes
    )


def _read_record(raw: bytes, *, where: str) -> tuple[int, bool]:
    try:
        record = json.loads(raw)
        is_error = record.get("error") is not None
        if "index" in record:
            return int(record["index"]), is_error
        match = _ID.fullmatch(record["id"])
        if match is not None:
            return int(match.group(1)), is_error
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise StorageError(f"{where} is not a result of this job; use --overwrite to start anew")
