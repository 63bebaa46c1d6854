"""Checks of values that a user wrote: fields of a JSON line, messages of a chat, a prompt.

Each function takes what JSON or a caller gave and returns the typed value, or raises a RequestError
that names the field, what was found and what is needed. A field that is null counts as absent.
"""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from zeroinfer.errors import RequestError

__all__ = [
    "json_type",
    "read_bool",
    "read_int",
    "read_number",
    "read_text",
    "refuse_unknown_keys",
    "wrong_type",
]

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


def wrong_type(name: str, value: object, need: str) -> RequestError:
    """Return the error of a value of another type than the one needed."""
    return RequestError(f"{name} has the wrong type: got {json_type(value)}, need {need}")


def read_int(name: str, value: object) -> int:
    """Return an integer; JSON's true and 2.0 are none."""
    if type(value) is not int:
        raise wrong_type(name, value, "an integer")
    return value


def read_number(name: str, value: object) -> float:
    """Return a number as a float."""
    if type(value) is float:
        return value
    if type(value) is not int:
        raise wrong_type(name, value, "a number")
    try:
        return float(value)
    except OverflowError:
        raise RequestError(
            f"{name} is out of range: an integer of {len(str(value))} digits"
        ) from None


def read_bool(name: str, value: object) -> bool:
    """Return a boolean."""
    if not isinstance(value, bool):
        raise wrong_type(name, value, "true or false")
    return value


def read_text(name: str, value: object) -> str:
    """Return a string that can be written as UTF-8 (JSON's escapes allow lone surrogates)."""
    if not isinstance(value, str):
        raise wrong_type(name, value, "a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} holds half of a surrogate pair at character {error.start}; "
            "write the character itself"
        ) from None
    return value


def refuse_unknown_keys(record: Mapping[str, Any], allowed: Collection[str], *, where: str) -> None:
    """Refuse keys that nothing reads, with the nearest known one.

    Raises:
        RequestError: the record holds a key that is not in `allowed`.
    """
    for key in record:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(allowed))}"
            raise RequestError(f"unknown field {key!r} in {where}; {hint}")
