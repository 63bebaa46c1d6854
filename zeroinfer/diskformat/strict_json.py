"""JSON objects read strictly: a repeated key is a contradiction, not a last word."""

import json
import stat
from pathlib import Path
from typing import Any

from zeroinfer.errors import CheckpointError, StorageError

__all__ = ["link_fault", "parse_json_object", "read_json_object"]


class _RepeatedKeyError(ValueError):
    """A key stands twice in one object."""


def parse_json_object(data: bytes, *, what: str) -> dict[str, Any]:
    """Parse UTF-8 bytes that must hold one JSON object.

    Args:
        data: The bytes.
        what: The thing in the messages, such as ``header of model.safetensors``.

    Raises:
        CheckpointError: not UTF-8, not JSON, not an object, or a key stands twice.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys)
    except _RepeatedKeyError as error:
        raise CheckpointError(
            f"{what} holds the key {error} twice, need it once; write the file again"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{what} is no valid JSON: {_short(error)}; fetch or write the file again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{what} is no JSON object: got {type(value).__name__}, need key: value pairs; "
            "fetch or write the file again"
        )
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that must hold one JSON object.

    Raises:
        CheckpointError: the file is missing, empty, a dangling link or no JSON object.
        StorageError: the file cannot be read.
    """
    try:
        # Looked at before it is opened: a named pipe would block the open for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(link_fault(path))
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(link_fault(path)) from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    if not data.strip():
        raise CheckpointError(f"{path} is empty, need a JSON object; fetch the file again")
    return parse_json_object(data, what=str(path))


def link_fault(path: Path) -> str:
    """Say why a path is no readable file; a dangling link is named with its target."""
    if path.is_symlink() and not path.exists():
        return (
            f"{path} is a link to {path.readlink()}, which does not exist; "
            "fetch the file again or copy the model without links"
        )
    if path.exists():
        return f"{path} is not a regular file; put the model's file in its place"
    return f"{path} does not exist; fetch the file again"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise _RepeatedKeyError(repr(key))
        value[key] = item
    return value


def _short(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= 200 else text[:200] + "..."
