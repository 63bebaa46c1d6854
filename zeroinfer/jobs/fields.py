"""Checks of the fields of one input line.

Each function takes what JSON gave and returns the typed value, or raises a RequestError that
names the field, what was found and what is needed. A field that is null counts as absent.
"""

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from zeroinfer.engine import SamplingParams
from zeroinfer.errors import RequestError

__all__ = [
    "SAMPLING_FIELDS",
    "json_type",
    "read_bool",
    "read_int",
    "read_number",
    "read_sampling",
    "read_stop",
    "read_text",
    "refuse_unknown_keys",
]

T = TypeVar("T")

SAMPLING_FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos")
"""Sampling fields that a line may set for itself; the names are those of SamplingParams."""

_MAX_SEED = 2**63 - 1
_TYPE_NAMES = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def json_type(value: object) -> str:
    """Name the JSON type of a value, for messages."""
    return _TYPE_NAMES.get(type(value), type(value).__name__)


def _wrong_type(name: str, value: object, need: str) -> RequestError:
    return RequestError(f"{name} has the wrong type: got {json_type(value)}, need {need}")


def read_int(name: str, value: object) -> int:
    """Return an integer; JSON's true and 2.0 are none."""
    if type(value) is not int:
        raise _wrong_type(name, value, "an integer")
    return value


def read_number(name: str, value: object) -> float:
    """Return a number as a float."""
    if type(value) is float:
        return value
    if type(value) is not int:
        raise _wrong_type(name, value, "a number")
    try:
        return float(value)
    except OverflowError:
        raise RequestError(
            f"{name} is out of range: an integer of {len(str(value))} digits"
        ) from None


def read_bool(name: str, value: object) -> bool:
    """Return a boolean."""
    if not isinstance(value, bool):
        raise _wrong_type(name, value, "true or false")
    return value


def read_text(name: str, value: object) -> str:
    """Return a string that can be written as UTF-8 (JSON's escapes allow lone surrogates)."""
    if not isinstance(value, str):
        raise _wrong_type(name, value, "a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} holds half of a surrogate pair at character {error.start}; "
            "write the character itself"
        ) from None
    return value


def read_stop(name: str, value: object) -> tuple[str, ...]:
    """Return stop strings, given as one string or a list of them."""
    if isinstance(value, str):
        return (read_text(name, value),)
    if not isinstance(value, list):
        raise _wrong_type(name, value, "a string or a list of strings")
    return tuple(read_text(f"{name}[{idx}]", item) for idx, item in enumerate(value))


def _read_seed(name: str, value: object) -> int:
    seed = read_int(name, value)
    if not 0 <= seed <= _MAX_SEED:
        raise RequestError(f"{name} is out of range: got {seed}, need 0 to {_MAX_SEED}")
    return seed


_READERS: dict[str, Callable[[str, object], Any]] = {
    "max_tokens": read_int,
    "temperature": read_number,
    "top_p": read_number,
    "top_k": read_int,
    "seed": _read_seed,
    "stop": read_stop,
    "ignore_eos": read_bool,
}


def read_sampling(
    fields: Mapping[str, Any], *, defaults: SamplingParams, row_idx: int
) -> SamplingParams:
    """Apply a line's own sampling fields over the job's.

    Args:
        fields: the line (or the body of an OpenAI line); other keys are not looked at.
        defaults: the job's sampling; its seed is that of row 0.
        row_idx: added to the job's seed where the line has none, so that rows differ and each
            row's seed is known beforehand.

    Raises:
        RequestError: a field has the wrong type or is out of range.
    """
    values: dict[str, Any] = {name: getattr(defaults, name) for name in SAMPLING_FIELDS}
    values["seed"] = (defaults.seed + row_idx) & _MAX_SEED
    for name in SAMPLING_FIELDS:
        if fields.get(name) is not None:
            values[name] = _READERS[name](name, fields[name])
    return SamplingParams(**values)


def refuse_unknown_keys(record: Mapping[str, Any], allowed: Collection[str], *, where: str) -> None:
    """Refuse keys that nothing reads, with the nearest known one.

    Raises:
        RequestError: the record holds a key that is not in `allowed`.
    """
    for key in record:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(allowed))}"
            raise RequestError(f"unknown field {key!r} in {where}; {hint}")
