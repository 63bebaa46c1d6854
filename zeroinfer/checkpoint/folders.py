"""Content of a store made from a model folder, of safetensors or of pickles.

Without a dtype every tensor keeps its own type and exact bytes. With one, all float tensors are
rounded to it; single numbers and integers stay, as they are buffers and no weights.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt

from zeroinfer.checkpoint.kinds import ModelKind, find_pickles, model_kind
from zeroinfer.checkpoint.manifest import SourceFile
from zeroinfer.checkpoint.reading import read_extent
from zeroinfer.checkpoint.shards import TensorSource
from zeroinfer.checkpoint.sources import document_paths
from zeroinfer.checkpoint.store import StoreContent
from zeroinfer.checkpoint.values import TORCH_NAMES, round_values, to_float32, weight_dtype
from zeroinfer.diskformat import open_checkpoint, read_json_object
from zeroinfer.dtypes import DType

__all__ = ["OrderOfUse", "folder_content"]

OrderOfUse = Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], Sequence[str]]
"""From config.json and the tensors' shapes to their names in order of use; some may be left out."""


def folder_content(
    folder: Path, source: SourceFile, *, dtype: str, order: OrderOfUse | None = None
) -> StoreContent:
    """Describe what a store of this folder holds; reads headers and small files.

    Args:
        folder: the model.
        source: its identity.
        dtype: element type of the weights; ``auto`` keeps each tensor's own.
        order: puts the tensors into the order of their use; None keeps the folder's.

    Raises:
        CheckpointError: the folder is no whole model, or a pickle needs code to run.
        ConfigError: dtype is no type that weights are written in.
    """
    config, tensors = _open(folder)
    if order is not None:
        tensors = _in_order(tensors, order(config, {t.spec.name: t.spec.shape for t in tensors}))
    auto = _dtype_name(tensors)
    wanted = None if dtype == "auto" else weight_dtype(dtype)
    if wanted is not None:
        tensors = [_rounded(folder, tensor, wanted) for tensor in tensors]
    return StoreContent(
        name=folder.resolve().name,
        dtype=auto if wanted is None else wanted.short_name,
        auto_dtype=auto,
        source=source,
        tensors=tensors,
        documents=_documents(folder, config, wanted),
    )


def _open(folder: Path) -> tuple[dict[str, Any], list[TensorSource]]:
    if model_kind(folder) is ModelKind.PICKLES:
        from zeroinfer.checkpoint.pickles import open_pickles  # noqa: PLC0415 - loads torch

        config = read_json_object(folder / "config.json")
        return config, open_pickles(find_pickles(folder))
    checkpoint = open_checkpoint(folder)
    extents = sorted(checkpoint.tensors.values(), key=lambda e: (e.path, e.offset))
    return checkpoint.config, [
        TensorSource(spec=extent.spec, read=partial(read_extent, extent)) for extent in extents
    ]


def _in_order(tensors: list[TensorSource], names: Sequence[str]) -> list[TensorSource]:
    rank = {name: idx for idx, name in enumerate(names)}
    return sorted(tensors, key=lambda tensor: rank.get(tensor.spec.name, len(rank)))


def _is_weight(tensor: TensorSource) -> bool:
    return tensor.spec.dtype.is_floating_point and bool(tensor.spec.shape)


def _dtype_name(tensors: Sequence[TensorSource]) -> str:
    names = {tensor.spec.dtype.short_name for tensor in tensors if _is_weight(tensor)}
    return names.pop() if len(names) == 1 else "mixed"


def _rounded(folder: Path, tensor: TensorSource, dtype: DType) -> TensorSource:
    if not _is_weight(tensor) or tensor.spec.dtype is dtype:
        return tensor
    where = f"{folder}: tensor {tensor.spec.name}"
    return TensorSource(
        spec=replace(tensor.spec, dtype=dtype), read=partial(_round_pieces, tensor, dtype, where)
    )


def _round_pieces(tensor: TensorSource, dtype: DType, where: str) -> Iterator[npt.NDArray[Any]]:
    for piece in tensor.read():
        yield round_values(to_float32(piece, tensor.spec.dtype), dtype, where=where)


def _documents(folder: Path, config: dict[str, Any], dtype: DType | None) -> dict[str, bytes]:
    documents = {str(p.relative_to(folder)): p.read_bytes() for p in document_paths(folder)}
    if dtype is not None:
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
        changed: dict[str, Any] = {**config, **dict.fromkeys(keys, TORCH_NAMES[dtype])}
        documents["config.json"] = json.dumps(changed, indent=2).encode() + b"\n"
    return documents
