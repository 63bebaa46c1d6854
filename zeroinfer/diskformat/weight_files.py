"""Which files of a folder hold the model's weights.

The order is transformers': model.safetensors, then the index, then whatever safetensors there are.
Nothing is opened but the index; formats that cannot be streamed in place are refused with the way
to convert them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from zeroinfer.diskformat.strict_json import link_fault, read_json_object
from zeroinfer.errors import CheckpointError
from zeroinfer.log import get_logger

__all__ = ["WeightFiles", "find_weight_files"]

_LOGGER = get_logger(__name__)
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)(\.safetensors)")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFiles:
    """The weight files of a folder and what its index says of them."""

    paths: tuple[Path, ...]
    index_path: Path | None = None
    index: Mapping[str, Path] = field(default_factory=dict)
    """Tensor name -> file; empty without an index."""


def find_weight_files(root: Path) -> WeightFiles:
    """Choose the safetensors files of a model folder.

    Raises:
        CheckpointError: the folder is none, holds no safetensors, or a file of it is missing.
        OSError: the folder cannot be listed.
    """
    names = _list_folder(root)
    candidates = [name for name in names if name.endswith(".safetensors")]
    if _SINGLE in candidates:
        chosen = WeightFiles(paths=(root / _SINGLE,))
    elif _INDEX in names:
        chosen = _read_index(root / _INDEX)
    elif candidates:
        _check_numbering(root, candidates)
        chosen = WeightFiles(paths=tuple(root / name for name in candidates))
    else:
        raise CheckpointError(_no_safetensors(root, names))
    _check_present(root, chosen.paths)
    _log_unused(root, names, chosen)
    return chosen


def _list_folder(root: Path) -> list[str]:
    if root.suffix == ".gguf" and root.is_file():
        raise CheckpointError(_gguf_message(root))
    if not root.is_dir():
        if root.is_symlink() or not root.exists():
            raise CheckpointError(
                f"model folder {link_fault(root)}"
                if root.is_symlink()
                else f"model folder {root} does not exist; give a folder with config.json and "
                "safetensors files"
            )
        raise CheckpointError(
            f"model {root} is a file, need a folder with config.json and safetensors files; "
            f"give {root.parent}"
        )
    return sorted(path.name for path in root.iterdir())


def _read_index(path: Path) -> WeightFiles:
    content = read_json_object(path)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"weight_map of {path} is wrong: got {_kind(weight_map)}, need tensor names with "
            "their files; fetch the file again"
        )
    index = {name: _shard_path(path, name, file) for name, file in weight_map.items()}
    return WeightFiles(paths=tuple(sorted(set(index.values()))), index_path=path, index=index)


def _shard_path(index_path: Path, name: str, file: Any) -> Path:
    """Keep an index from pointing outside of its folder."""
    if not isinstance(file, str) or not _is_inside(file):
        raise CheckpointError(
            f"file of tensor {name!r} in {index_path} is wrong: got {file!r}, need a "
            ".safetensors file of the same folder; fetch the index again"
        )
    return index_path.parent / file


def _is_inside(file: str) -> bool:
    path = PurePosixPath(file)
    return file.endswith(".safetensors") and not path.is_absolute() and ".." not in path.parts


def _check_numbering(root: Path, names: Iterable[str]) -> None:
    """Find the gaps of numbered shards, which nothing else shows where there is no index."""
    seen: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, map(_SHARD.fullmatch, names)):
        seen.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (stem, total), numbers in seen.items():
        expected = set(range(1, int(total) + 1)) if int(total) < 10_000 else set()
        absent = [
            root / f"{stem}-{number:0{len(total)}d}-of-{total}.safetensors"
            for number in sorted(expected - numbers)
        ]
        if absent:
            raise _missing_error(root, absent)


def _check_present(root: Path, paths: Iterable[Path]) -> None:
    absent = [path for path in paths if not path.exists()]
    if absent:
        raise _missing_error(root, absent)


def _missing_error(root: Path, absent: list[Path]) -> CheckpointError:
    names = ", ".join(
        f"{path.relative_to(root)} (a link to {path.readlink()}, which does not exist)"
        if path.is_symlink()
        else str(path.relative_to(root))
        for path in absent
    )
    return CheckpointError(
        f"model folder {root} is incomplete: missing {names}; fetch the missing files again"
    )


def _no_safetensors(root: Path, names: list[str]) -> str:
    ggufs = [name for name in names if name.endswith(".gguf")]
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if ggufs:
        return _gguf_message(root / ggufs[0])
    if pickles:
        return _pickle_message(root, pickles[0])
    found = "config.json alone" if "config.json" in names else f"{len(names)} other files"
    return (
        f"model folder {root} holds no safetensors files: got {found if names else 'nothing'}, "
        "need config.json and *.safetensors; give a model folder or fetch the weights"
    )


def _pickle_message(root: Path, name: str) -> str:
    remedy = (
        f"run zeroinfer convert --model {root} --nvme DIR, which reads it without running code"
        if name.startswith("pytorch_model")
        else "load the model once with transformers where you trust it and write it with "
        "save_pretrained"
    )
    return (
        f"model folder {root} holds its weights as {name}, a pickle that may run code when it is "
        f"loaded; need safetensors: {remedy}"
    )


def _gguf_message(path: Path) -> str:
    return (
        f"model {path} is a GGUF file, need safetensors to stream in place; run "
        f"zeroinfer convert --model {path} --nvme DIR"
    )


def _log_unused(root: Path, names: Iterable[str], chosen: WeightFiles) -> None:
    """Say in one line which other weights of the folder are left alone."""
    used = {str(path.relative_to(root)) for path in chosen.paths}
    suffixes = (".safetensors", ".gguf", *_PICKLES)
    unused = [name for name in names if name.endswith(suffixes) and name not in used]
    # Written by trainers beside any model; not weights.
    unused = [name for name in unused if name != "training_args.bin"]
    if unused:
        _LOGGER.info("using safetensors of %s; not opened: %s", root, ", ".join(unused))


def _kind(value: Any) -> str:
    return "an empty object" if value == {} else type(value).__name__
