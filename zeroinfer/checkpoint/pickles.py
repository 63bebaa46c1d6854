"""Weights in PyTorch's ``.bin`` files, read without running what their pickles ask for.

The only place that calls ``torch.load``: with ``weights_only``, which builds tensors and refuses
everything else, and with the file mapped, so that only the pages in use take memory. Files of
PyTorch before 1.6 cannot be mapped and are held whole, one at a time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zeroinfer.checkpoint.shards import METADATA_KEY, TensorSource
from zeroinfer.dtypes import DType, TensorSpec
from zeroinfer.errors import CheckpointError, StorageError, UnsupportedModelError
from zeroinfer.log import get_logger
from zeroinfer.units import MIB, ceil_div

__all__ = ["open_pickles"]

_ZIP_MAGIC = b"PK\x03\x04"
_PIECE_BYTES = 8 * MIB
_DTYPES = {
    torch.bfloat16: DType.BF16, torch.float16: DType.F16, torch.float32: DType.F32,
    torch.float64: DType.F64, torch.int64: DType.I64, torch.int32: DType.I32,
    torch.int16: DType.I16, torch.int8: DType.I8, torch.uint8: DType.U8, torch.bool: DType.BOOL,
}  # fmt: skip
_logger = get_logger(__name__)


def open_pickles(paths: tuple[Path, ...]) -> list[TensorSource]:
    """Describe the tensors of some files, in the order in which they were saved.

    Raises:
        CheckpointError: a file cannot be loaded without running code, is damaged, holds something
            else than tensors, or a name stands twice.
        UnsupportedModelError: a tensor has a type or layout that cannot be written.
        StorageError: a file cannot be read.
    """
    _logger.warning(
        "%s holds its weights as pickles; they are read by a loader that builds tensors and runs "
        "nothing; prefer safetensors where there are any", paths[0].parent,
    )  # fmt: skip
    shelf = _Shelf()
    sources: dict[str, TensorSource] = {}
    for path in paths:
        for spec in _specs(path, shelf.load(path)):
            if spec.name in sources:
                raise CheckpointError(
                    f"tensor {spec.name!r} is in {path} and in another file, need it once; remove "
                    "the file that does not belong to the model"
                )
            read = partial(_read, shelf, path, spec.name)
            sources[spec.name] = TensorSource(spec=spec, read=read)
    shelf.clear()
    return list(sources.values())


@dataclass(slots=True)
class _Shelf:
    """Holds the tensors of the file that was read last."""

    path: Path | None = None
    tensors: Mapping[str, torch.Tensor] | None = None
    size_bytes: int = 0

    def load(self, path: Path) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a file; those of another one go first."""
        if self.path != path or self.tensors is None:
            self.clear()
            # Before it is mapped: what is cut while it loads must show.
            size_bytes = _size(path)
            self.tensors = _load(path)
            self.path, self.size_bytes = path, size_bytes
        return self.tensors

    def check(self, path: Path) -> None:
        """Refuse a file that was cut: reading its mapped pages would end the process by a signal.

        Raises:
            CheckpointError: it is shorter than it was.
            StorageError: it cannot be looked at.
        """
        size_bytes = _size(path)
        if size_bytes < self.size_bytes:
            raise CheckpointError(
                f"{path} was cut while it was read: got {size_bytes} bytes, need "
                f"{self.size_bytes}; fetch it again"
            )

    def clear(self) -> None:
        """Let the file go."""
        self.path = self.tensors = None


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        with path.open("rb") as file:
            is_zip = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    except OSError as error:
        raise StorageError(f"read of {path} failed: {error.strerror}") from error
    try:
        state = torch.load(str(path), map_location="cpu", weights_only=True, mmap=is_zip)
    # The loader raises what the bytes make it raise.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{path} cannot be loaded as tensors alone: {reason}; what needs code to run is "
            "refused and a damaged file must be fetched again; safetensors have neither fault"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} holds a {type(state).__name__}, need tensors by name; it is no model"
        )
    for name, value in state.items():
        if name == METADATA_KEY:
            raise CheckpointError(f"{path} holds a tensor called {name}, need another name")
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{path} holds {name!r:.80} of type {type(value).__name__}, need tensors by name; "
                "save the model's state_dict alone"
            )
        if value.is_meta:
            raise CheckpointError(
                f"{path} holds tensor {name!r:.80} without its values; save the model when its "
                "weights are loaded"
            )
    return state


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise StorageError(f"read of {path} failed: {error.strerror}") from error


def _specs(path: Path, tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    return [_spec(path, name, tensor) for name, tensor in tensors.items()]


def _spec(path: Path, name: str, tensor: torch.Tensor) -> TensorSpec:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or tensor.is_quantized:
        raise UnsupportedModelError(
            f"tensor {name!r} of {path} is {tensor.dtype} in layout {tensor.layout}, need a dense "
            f"tensor of one of {', '.join(d.short_name for d in DType)}"
        )
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype)


def _read(shelf: _Shelf, path: Path, name: str) -> Iterator[npt.NDArray[Any]]:
    """Yield the values in pieces of whole rows, in the order of the view's own rows."""
    tensor = shelf.load(path)[name].detach()
    rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
    if rows.numel() == 0:
        return
    num_pieces = ceil_div(rows.numel() * rows.element_size(), _PIECE_BYTES)
    for piece in rows.chunk(max(1, min(num_pieces, len(rows)))):
        shelf.check(path)
        # A copy: a view would keep the file while the next one is loaded.
        yield _to_numpy(piece.clone(memory_format=torch.contiguous_format))


def _to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    array: npt.NDArray[Any] = tensor.numpy()
    return array
