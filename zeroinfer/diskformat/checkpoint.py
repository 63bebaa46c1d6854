"""A checkpoint folder: its config and the extent of every tensor.

Which files make up the model is decided in `weight_files`; here they are opened, checked against
the index and against each other, and described. Tensor names are carried, never interpreted.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroinfer.diskformat.safetensors_header import (
    FileIdentity,
    SafetensorsFile,
    TensorExtent,
    open_safetensors,
)
from zeroinfer.diskformat.strict_json import link_fault, read_json_object
from zeroinfer.diskformat.weight_files import WeightFiles, find_weight_files
from zeroinfer.errors import CheckpointError, StorageError
from zeroinfer.log import get_logger

__all__ = ["Checkpoint", "open_checkpoint"]

_LOGGER = get_logger(__name__)
_NUM_NAMES_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A model on disk, validated: config and tensor extents, no data."""

    root: Path
    """Absolute path of the folder; links are not resolved."""
    config: dict[str, Any]
    """config.json as it is."""
    generation_config: dict[str, Any]
    """generation_config.json as it is; empty when there is none."""
    tensors: Mapping[str, TensorExtent]
    """By the checkpoint's own names."""
    files: tuple[Path, ...]
    """Weight files, sorted."""
    identities: Mapping[Path, FileIdentity] = field(default_factory=dict)
    """Size and modification time of each weight file when its header was read."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(extent.spec.nbytes for extent in self.tensors.values())

    @property
    def fingerprint(self) -> str:
        """Hash of configs, tensor places, and sizes and times of the files; not of tensor data.

        A moved folder keeps its fingerprint, a rewritten file changes it.
        """
        tensors = sorted(
            (name, extent.spec.dtype.value, extent.spec.shape, self._name(extent.path),
             extent.offset)
            for name, extent in self.tensors.items()
        )  # fmt: skip
        files = sorted(
            (self._name(path), identity.size_bytes, identity.mtime_ns)
            for path, identity in self.identities.items()
        )
        facts = [self.config, self.generation_config, tensors, files]
        text = json.dumps(facts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def verify_unchanged(self) -> None:
        """Compare each weight file with what it was when its header was read.

        Raises:
            CheckpointError: a file is gone, or has another size or modification time.
            StorageError: a file cannot be looked at.
        """
        for path, then in self.identities.items():
            try:
                now = FileIdentity.of(path.stat())
            except FileNotFoundError as error:
                raise CheckpointError(f"{link_fault(path)} (it was there at the start)") from error
            except OSError as error:
                raise StorageError(f"{path} cannot be read: {error.strerror}") from error
            if now != then:
                raise CheckpointError(
                    f"{path} changed since it was opened: got size {now.size_bytes} and mtime "
                    f"{now.mtime_ns} ns, need {then.size_bytes} and {then.mtime_ns}; start again "
                    "when nothing writes to the model"
                )

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.root) if path.is_relative_to(self.root) else path)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read config, index and headers of a model folder and check them against each other.

    Raises:
        CheckpointError: files are missing, cut or contradict each other, or the weights are in a
            format that must be converted first.
        UnsupportedModelError: a tensor has an element type that zeroinfer does not know.
        StorageError: a file cannot be read.
    """
    # Absolute at once: paths stay good when the process changes its working directory.
    root = folder.absolute()
    try:
        return _open(root)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"model folder {root} cannot be read: {error.strerror} ({error.filename})"
        ) from error


def _open(root: Path) -> Checkpoint:
    weight_files = find_weight_files(root)
    config = read_json_object(root / "config.json")
    generation_path = root / "generation_config.json"
    has_generation = generation_path.exists() or generation_path.is_symlink()
    opened = {path: open_safetensors(path) for path in weight_files.paths}
    return Checkpoint(
        root=root,
        config=config,
        generation_config=read_json_object(generation_path) if has_generation else {},
        tensors=_merge(weight_files, opened),
        files=weight_files.paths,
        identities={path: file.identity for path, file in opened.items()},
    )


def _merge(
    weight_files: WeightFiles, opened: Mapping[Path, SafetensorsFile]
) -> dict[str, TensorExtent]:
    indexed = weight_files.index
    tensors = {
        name: opened[path].extents[name]
        for name, path in indexed.items()
        if name in opened[path].extents
    }
    absent = sorted(indexed.keys() - tensors.keys())
    if absent:
        raise _absent_error(absent, weight_files, opened)
    unindexed: dict[str, TensorExtent] = {}
    for path, file in opened.items():
        for name, extent in file.extents.items():
            if name in indexed:
                continue
            if name in unindexed:
                raise CheckpointError(
                    f"tensor {name!r} is both in {unindexed[name].path} and in {path}, need it "
                    "once; remove the file that does not belong to the model"
                )
            unindexed[name] = extent
    if indexed and unindexed:
        _LOGGER.warning(
            "%s does not name %s of its files; taken as they are",
            weight_files.index_path, _listed(sorted(unindexed)),
        )  # fmt: skip
    return tensors | unindexed


def _absent_error(
    absent: list[str], weight_files: WeightFiles, opened: Mapping[Path, SafetensorsFile]
) -> CheckpointError:
    name = absent[0]
    found = [path.name for path, file in opened.items() if name in file.extents]
    place = f"it is in {found[0]}" if found else "no other file has it"
    return CheckpointError(
        f"{weight_files.index_path} names tensors that their files do not hold: "
        f"{_listed(absent)}; {name!r} should be in {weight_files.index[name].name}, {place}; "
        "fetch the index and the files again"
    )


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    text = ", ".join(repr(name) for name in shown[:_NUM_NAMES_SHOWN])
    rest = len(shown) - _NUM_NAMES_SHOWN
    return f"{text} and {rest} more" if rest > 0 else text
