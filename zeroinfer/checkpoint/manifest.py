"""The manifest of a store: what it was made from, and the size and checksum of every file.

The manifest carries a checksum of itself, so that a flipped byte in it is found too.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroinfer.errors import CheckpointError, StorageError

__all__ = ["FORMAT_VERSION", "MANIFEST_NAME", "Manifest", "SourceFile", "StoredFile",
           "hash_file", "read_manifest", "render_manifest"]  # fmt: skip

FORMAT_VERSION = 2
_READABLE = (1, 2)
"""Version 1 knew no stripes; all else is the same."""
MANIFEST_NAME = "manifest.json"
_HASH_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """The file or folder a store was made from."""

    path: str
    """Absolute, links resolved."""
    size_bytes: int
    """All files together."""
    mtime_ns: int
    """The newest file's."""
    sha256: str
    """Of a file's content; of names, sizes and times of a folder's files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """Size and checksum of one file of the store."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything the manifest says."""

    dtype: str
    """Element type of the weights, in the command line's spelling."""
    auto_dtype: str
    """The type ``auto`` stands for with this source."""
    weight_bytes: int
    source: SourceFile
    files: Mapping[str, StoredFile]
    """Every other file of the store, by name."""
    stripes: tuple[str, ...] = ()
    """Folders of the files that are links here; absolute, empty for a store in one place."""


def render_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON, its own checksum included."""
    body = {"format_version": FORMAT_VERSION, **dataclasses.asdict(manifest)}
    return json.dumps({**body, "sha256": _checksum(body)}, indent=2).encode() + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """Read a store's manifest.

    Raises:
        CheckpointError: the folder is no store, or the manifest is damaged or of another version.
        StorageError: the manifest cannot be read.
    """
    path = folder / MANIFEST_NAME
    try:
        # Looked at before it is opened: a named pipe would block the open for ever.
        if not path.is_file():
            raise CheckpointError(
                f"{folder} is no store: {MANIFEST_NAME} is missing; give a folder that convert "
                "wrote"
            )
        body = json.loads(path.read_bytes())
    except OSError as error:
        raise StorageError(f"read of {path} failed: {error.strerror}") from error
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}; {_remedy(folder)}") from error
    return _parse(body, path)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal; reads all of it."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_HASH_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _parse(body: Any, path: Path) -> Manifest:
    version = body.get("format_version") if isinstance(body, dict) else None
    if version not in _READABLE:
        raise CheckpointError(
            f"{path} has format_version {version!r}, need {' or '.join(map(str, _READABLE))}; "
            f"{_remedy(path.parent)}"
        )
    recorded = body.pop("sha256", None)
    if recorded != _checksum(body):
        raise CheckpointError(
            f"{path} is damaged: sha256 is {_checksum(body)}, recorded {recorded}; "
            f"{_remedy(path.parent)}"
        )
    try:
        files = {name: StoredFile(**entry) for name, entry in body["files"].items()}
        source = SourceFile(**body["source"])
        return Manifest(dtype=body["dtype"], auto_dtype=body["auto_dtype"],
                        weight_bytes=body["weight_bytes"], source=source, files=files,
                        stripes=tuple(body.get("stripes", ())))  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not what convert writes: {type(error).__name__} {error}; "
            f"{_remedy(path.parent)}"
        ) from error


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _remedy(folder: Path) -> str:
    return f"remove {folder} and convert again"
