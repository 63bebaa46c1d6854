"""Lines of OpenAI batch files: ``custom_id``, ``method``, ``url``, ``body``.

Fields of the protocol that zeroinfer does not have are accepted at their neutral value, and
refused by name at any other: an answer never differs in silence from what was asked.
"""

import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroinfer.engine import SAMPLING_FIELDS
from zeroinfer.errors import RequestError
from zeroinfer.fields import json_type, read_int, read_text, refuse_unknown_keys
from zeroinfer.jobs.rows import RowError, RowStyle

__all__ = ["OpenAILine", "is_openai_line", "read_openai_line"]

_LINE_FIELDS = ("custom_id", "method", "url", "body")
_URLS = {"/v1/completions": RowStyle.COMPLETION, "/v1/chat/completions": RowStyle.CHAT}
_PROMPT_FIELD = {RowStyle.COMPLETION: "prompt", RowStyle.CHAT: "messages"}

# Values at which an unsupported field changes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "stream_options": (),
}
# Labels for the caller's own books; they never change an answer.
_LABELS = ("user", "metadata", "store", "service_tier")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenAILine:
    """A line taken apart; either `error` is set or `prompt_field` is a key of `fields`."""

    style: RowStyle
    custom_id: str | None = None
    model: str | None = None
    prompt_field: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The body, with max_completion_tokens under the name max_tokens."""
    error: RowError | None = None


def is_openai_line(record: Mapping[str, Any]) -> bool:
    """Tell OpenAI lines from plain ones; any key of the outer form decides."""
    return any(key in record for key in _LINE_FIELDS)


def read_openai_line(record: Mapping[str, Any], *, model_names: Collection[str]) -> OpenAILine:
    """Take a line apart and check all but the prompt and the sampling values.

    Args:
        record: the parsed line.
        model_names: names by which the body may call the model; empty allows all.
    """
    url = record.get("url")
    style = _URLS.get(url, RowStyle.COMPLETION) if isinstance(url, str) else RowStyle.COMPLETION
    custom_id: str | None = None
    model: str | None = None
    try:
        custom_id = read_text("custom_id", _need(record, "custom_id", where="the line"))
        body = _check_line(record)
        model = _read_model(body)
        if model is not None and model_names and model not in model_names:
            error = RowError(
                message=f"model {model!r} is not the model of this job; "
                f"got {model!r}, need {' or '.join(repr(name) for name in sorted(model_names))}",
                type="model_not_found",
                status_code=404,
            )
            return OpenAILine(style=style, custom_id=custom_id, model=model, error=error)
        fields = _check_body(body, _PROMPT_FIELD[style])
    except RequestError as error:
        message = RowError(message=str(error))
        return OpenAILine(style=style, custom_id=custom_id, model=model, error=message)
    return OpenAILine(
        style=style,
        custom_id=custom_id,
        model=model,
        prompt_field=_PROMPT_FIELD[style],
        fields=fields,
    )


def _need(record: Mapping[str, Any], key: str, *, where: str) -> Any:
    if record.get(key) is None:
        raise RequestError(f"{where} has no {key}; need {', '.join(_LINE_FIELDS)}")
    return record[key]


def _check_line(record: Mapping[str, Any]) -> Mapping[str, Any]:
    refuse_unknown_keys(record, _LINE_FIELDS, where="the line")
    method = record.get("method", "POST")
    if method != "POST":
        raise RequestError(f"method is not supported: got {method!r}, need 'POST'")
    url = read_text("url", _need(record, "url", where="the line"))
    if url not in _URLS:
        raise RequestError(f"url is not supported: got {url!r}, need {' or '.join(_URLS)}")
    body = _need(record, "body", where="the line")
    if not isinstance(body, dict):
        raise RequestError(f"body has the wrong type: got {json_type(body)}, need an object")
    return body


def _read_model(body: Mapping[str, Any]) -> str | None:
    return None if body.get("model") is None else read_text("model", body["model"])


def _check_body(body: Mapping[str, Any], prompt_field: str) -> Mapping[str, Any]:
    known = ("model", prompt_field, "max_completion_tokens", *SAMPLING_FIELDS, *_NEUTRAL, *_LABELS)
    refuse_unknown_keys(body, known, where="body")
    if body.get(prompt_field) is None:
        raise RequestError(f"body has no {prompt_field}")
    for key, neutral in _NEUTRAL.items():
        value = body.get(key)
        if value is not None and value not in neutral:
            need = f"{neutral[0]!r} or nothing" if neutral else "nothing"
            raise RequestError(f"{key} is not supported: got {reprlib.repr(value)}, need {need}")
    return _merge_max_tokens(body)


def _merge_max_tokens(body: Mapping[str, Any]) -> Mapping[str, Any]:
    newer = body.get("max_completion_tokens")
    if newer is None:
        return body
    read_int("max_completion_tokens", newer)
    older = body.get("max_tokens")
    if older is not None and older != newer:
        raise RequestError(
            f"max_tokens and max_completion_tokens contradict each other: got {older!r} and "
            f"{newer}, need one of them"
        )
    return {**body, "max_tokens": newer}
