"""What form a model's weights have, told from names alone; no weight file is opened."""

import enum
import re
from pathlib import Path, PurePosixPath

from zeroinfer.diskformat import read_json_object
from zeroinfer.errors import CheckpointError, StorageError

__all__ = ["ModelKind", "find_pickles", "model_kind"]

_PICKLE_INDEX_NAME = "pytorch_model.bin.index.json"
_PICKLE_NAME = re.compile(r"pytorch_model(?:-(\d+)-of-(\d+))?\.bin")
_MAX_NUM_FILES = 10_000
"""Larger totals are no numbering."""


class ModelKind(enum.Enum):
    """Form of the weights."""

    SAFETENSORS = "safetensors"
    PICKLES = "pickles"
    GGUF = "gguf"
    UNKNOWN = "unknown"


def model_kind(path: Path) -> ModelKind:
    """Tell the form of a model's weights; safetensors go before pickles in one folder.

    Raises:
        StorageError: the path cannot be looked at.
    """
    try:
        if not path.is_dir():
            return ModelKind.GGUF if path.suffix == ".gguf" else ModelKind.UNKNOWN
        names = [entry.name for entry in path.iterdir()]
    except OSError as error:
        raise StorageError(f"model {path} cannot be read: {error.strerror}") from error
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return ModelKind.SAFETENSORS
    if any(_PICKLE_NAME.fullmatch(name) or name == _PICKLE_INDEX_NAME for name in names):
        return ModelKind.PICKLES
    return ModelKind.UNKNOWN


def find_pickles(folder: Path) -> tuple[Path, ...]:
    """Return the ``.bin`` files of a model, those of the index if there is one.

    Raises:
        CheckpointError: the index is malformed, or a file that it or the files' own numbers name
            is missing.
    """
    index_path = folder / _PICKLE_INDEX_NAME
    names = _indexed_names(index_path) if index_path.is_file() else _numbered_names(folder)
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise CheckpointError(
            f"model folder {folder} is incomplete: missing {', '.join(missing)}; fetch the missing "
            "files again"
        )
    return tuple(sorted(folder / name for name in names))


def _indexed_names(index_path: Path) -> set[str]:
    weight_map = read_json_object(index_path).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and _is_inside(name) for name in names):
        raise CheckpointError(
            f"weight_map of {index_path} is wrong: need tensor names with .bin files of the same "
            "folder; fetch the index again"
        )
    return set(names)


def _numbered_names(folder: Path) -> set[str]:
    """Return the files that are there, and those that their numbers say should be."""
    names = set()
    for match in filter(None, (_PICKLE_NAME.fullmatch(path.name) for path in folder.iterdir())):
        names.add(match[0])
        number, total = match.groups()
        if total is not None and int(total) < _MAX_NUM_FILES:
            numbers = range(1, int(total) + 1)
            names |= {f"pytorch_model-{n:0{len(number)}d}-of-{total}.bin" for n in numbers}
    return names


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return name.endswith(".bin") and not path.is_absolute() and ".." not in path.parts
