"""What a store was made from: a file or a folder, and how either is told from a later version.

A file is known by its content. Hashing a whole folder would read it twice, so it is known by names,
sizes and times of its files, as a checkpoint that is streamed in place is.
"""

import hashlib
import json
import stat
from collections.abc import Iterator
from pathlib import Path

from zeroinfer.checkpoint.manifest import SourceFile, hash_file
from zeroinfer.errors import CheckpointError

__all__ = ["document_paths", "identify_file", "identify_folder", "is_unchanged"]

_DOCUMENT_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_WEIGHT_SUFFIXES = (".safetensors", ".bin")
_TEMPLATE_FOLDER = "additional_chat_templates"
# Names of ours, and what is no weight file whatever its name says.
_NOT_COPIED = frozenset({"manifest.json", "finished.json", "training_args.bin"})


def identify_file(path: Path) -> SourceFile:
    """Describe a file; reads all of it.

    Raises:
        CheckpointError: it is a pipe or device, which may have no end.
        OSError: it cannot be read.
    """
    resolved = path.resolve()
    status = resolved.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise CheckpointError(f"{path} is a pipe or device, need a file; give the model's file")
    return SourceFile(path=str(resolved), size_bytes=status.st_size, mtime_ns=status.st_mtime_ns,
                      sha256=hash_file(resolved))  # fmt: skip


def identify_folder(folder: Path) -> SourceFile:
    """Describe a model folder by its weight files and documents; reads none of them.

    Raises:
        OSError: the folder cannot be listed.
    """
    weights = [p for p in folder.iterdir() if p.name.endswith(_WEIGHT_SUFFIXES) and p.is_file()]
    paths = [p for p in weights if p.name not in _NOT_COPIED] + list(document_paths(folder))
    facts = sorted(
        (str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in paths
    )
    return SourceFile(
        path=str(folder.resolve()),
        size_bytes=sum(size for _, size, _ in facts),
        mtime_ns=max((mtime_ns for _, _, mtime_ns in facts), default=0),
        sha256=hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
    )


def document_paths(folder: Path) -> Iterator[Path]:
    """Yield config, tokenizer and template files of a model folder, indexes of weights left out."""
    for inside in (folder, folder / _TEMPLATE_FOLDER):
        if not inside.is_dir():
            continue
        for path in sorted(inside.iterdir()):
            is_document = path.name.endswith(_DOCUMENT_SUFFIXES) and path.name not in _NOT_COPIED
            if is_document and not path.name.endswith(".index.json") and path.is_file():
                yield path


def is_unchanged(source: SourceFile) -> bool:
    """Whether the source is still there as it was; contents are not read."""
    path = Path(source.path)
    try:
        if path.is_dir():
            return identify_folder(path) == source
        status = path.stat()
    except (OSError, ValueError):
        return False
    return (status.st_size, status.st_mtime_ns) == (source.size_bytes, source.mtime_ns)
