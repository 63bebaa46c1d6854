"""Reading GGUF files: metadata, the table of tensors, and rows as float32.

The header is parsed by the gguf package. Tensor data is not read through its memory map: a read
error there would be a signal, and the touched pages would count as our memory.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from gguf.gguf_reader import READER_SUPPORTED_VERSIONS
from gguf.quants import dequantize

from zeroinfer.checkpoint.reading import PIECE_BYTES, read_exactly
from zeroinfer.errors import CheckpointError, StorageError, UnsupportedModelError
from zeroinfer.units import align_down

__all__ = ["GgufFile", "GgufTensor", "open_gguf"]

_MAGIC = b"GGUF"
_VERSION_BYTES = 4
_T = TypeVar("_T")

_FLOATS = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16})


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """A tensor of the file; the shape is in the order of numpy and PyTorch, rows first."""

    name: str
    shape: tuple[int, ...]
    encoding: GGMLQuantizationType
    offset: int
    """First byte, counted from the start of the file."""
    nbytes: int

    @property
    def is_quantized(self) -> bool:
        """Whether the values are packed rather than plain floats."""
        return self.encoding not in _FLOATS


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufFile:
    """A parsed header."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def get(self, key: str, kind: type[_T], *, default: _T | None = None) -> _T:
        """Return a value of the metadata; an integer is taken where a float is asked for.

        Raises:
            CheckpointError: the key is missing and has no default, or its type is another.
        """
        value = self.metadata.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path}: metadata key {key} is missing; fetch a whole file")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(
                f"{self.path}: metadata key {key} is {value!r:.80}, need {kind.__name__}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise CheckpointError(
                f"{self.path}: metadata key {key} is {value}, need a finite number; fetch it again"
            )
        return value

    def get_list(self, key: str, kind: type[_T], *, default: list[_T] | None = None) -> list[_T]:
        """Return an array of the metadata; integers are taken where floats are asked for.

        Raises:
            CheckpointError: the key is missing and has no default, or is no array of this type.
        """
        values = self.get(key, list, default=default)
        allowed: set[type] = {int, float} if kind is float else {kind}
        wrong = set(map(type, values)) - allowed
        if wrong:
            raise CheckpointError(
                f"{self.path}: metadata key {key} holds {min(t.__name__ for t in wrong)}, need "
                f"{kind.__name__} alone; fetch it again"
            )
        return values

    def read_rows(
        self, tensor: GgufTensor, *, rows_multiple: int = 1
    ) -> Iterator[npt.NDArray[Any]]:
        """Yield the values in order as float32 in pieces of whole rows, about 8 MiB each.

        Args:
            tensor: one of ``tensors``.
            rows_multiple: every piece has a multiple of this many rows; must divide the rows.

        Moves: the tensor's bytes from NVMe to DRAM, blocking, buffered by the kernel.

        Raises:
            StorageError: the file cannot be read.
            CheckpointError: the file has become shorter since it was opened.
        """
        # A vector is read as one row: packed groups may span its elements.
        num_rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        row_bytes = tensor.nbytes // num_rows
        decoded_row_bytes = 4 * math.prod(tensor.shape) // num_rows
        step = max(align_down(PIECE_BYTES // decoded_row_bytes, rows_multiple), rows_multiple)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(tensor.offset)
                for begin in range(0, num_rows, step):
                    count = min(step, num_rows - begin)
                    raw = read_exactly(file, count * row_bytes, name=tensor.name)
                    rows = dequantize(raw.reshape(count, row_bytes), tensor.encoding)
                    yield rows if len(tensor.shape) > 1 else rows[0]
        except OSError as error:
            raise StorageError(f"read of {self.path} failed: {error.strerror}") from error

    def has_same_data(self, first: GgufTensor, second: GgufTensor) -> bool:
        """Whether two tensors hold the same values packed alike; reads both, blocking.

        Raises:
            StorageError: the file cannot be read.
            CheckpointError: the file has become shorter since it was opened.
        """
        if (first.shape, first.encoding) != (second.shape, second.encoding):
            return False
        pieces = zip(self.read_rows(first), self.read_rows(second), strict=True)
        return all(np.array_equal(one, other) for one, other in pieces)


def open_gguf(path: Path) -> GgufFile:
    """Parse a GGUF file's header and check that all tensor data is there.

    Raises:
        CheckpointError: no GGUF file, cut short, or contradicting itself.
        UnsupportedModelError: a tensor is packed in a way that cannot be decoded.
        StorageError: the file cannot be read.
    """
    _check_start(path)
    try:
        reader = _BoundedReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {t.name: _tensor(path, reader, t) for t in reader.tensors}
        _check_layout(path, int(reader.data_offset), tensors.values())
    except OSError as error:
        raise StorageError(f"read of {path} failed: {error.strerror}") from error
    except (CheckpointError, MemoryError):
        raise
    except (
        ValueError, LookupError, EOFError, ArithmeticError, TypeError, RecursionError,
    ) as error:  # fmt: skip
        raise CheckpointError(
            f"GGUF file {path} is cut or damaged: {error}; fetch it again"
        ) from error
    return GgufFile(
        path=path, metadata=MappingProxyType(metadata), tensors=MappingProxyType(tensors)
    )


class _BoundedReader(GGUFReader):
    """The package's reader, with every access inside the file.

    The package's own accessor returns what is left at the end of the file, so that a wild array
    length loops over empty values; it also makes a memory-map object per value, which takes
    seconds for a vocabulary.
    """

    def _get(
        self,
        offset: int,
        dtype: npt.DTypeLike,
        count: int = 1,
        override_order: Literal["I", "S", "<"] | None = None,
    ) -> npt.NDArray[Any]:
        item = np.dtype(dtype).newbyteorder(override_order or self.byte_order)
        end = int(offset) + item.itemsize * int(count)
        if end > self.data.nbytes:
            raise EOFError(f"has {self.data.nbytes} bytes, need at least {end}")
        return np.frombuffer(self.data, dtype=item, count=int(count), offset=int(offset))


def _check_start(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic, version_bytes = file.read(len(_MAGIC)), file.read(_VERSION_BYTES)
    except FileNotFoundError as error:
        raise CheckpointError(f"GGUF file {path} does not exist") from error
    except OSError as error:
        raise StorageError(f"read of {path} failed: {error.strerror}") from error
    if magic != _MAGIC:
        raise CheckpointError(f"{path} is no GGUF file: begins with {magic!r}, need {_MAGIC!r}")
    orders = [int.from_bytes(version_bytes, order) for order in ("little", "big")]
    if len(version_bytes) == _VERSION_BYTES and not {*orders} & {*READER_SUPPORTED_VERSIONS}:
        raise UnsupportedModelError(
            f"{path} is GGUF of version {orders[0]}, need one of "
            f"{', '.join(map(str, READER_SUPPORTED_VERSIONS))}; write it again in one of them"
        )


def _check_layout(path: Path, data_start: int, tensors: Iterable[GgufTensor]) -> None:
    """Demand that every tensor has bytes of its own behind the header."""
    end, previous = data_start, "the header"
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise CheckpointError(
                f"{path}: tensor {tensor.name} overlaps {previous}: got offset {tensor.offset}, "
                f"need {end} or more; fetch it again"
            )
        end, previous = tensor.offset + tensor.nbytes, f"tensor {tensor.name}"


def _tensor(path: Path, reader: GGUFReader, tensor: Any) -> GgufTensor:
    if reader.byte_order != "I":
        raise UnsupportedModelError(
            f"{path} has the other byte order than this machine; convert it to little-endian first"
        )
    if not _can_decode(tensor.tensor_type):
        known = sorted(kind.name for kind in GGML_QUANT_SIZES if _can_decode(kind))
        raise UnsupportedModelError(
            f"{path}: tensor {tensor.name} is packed as {tensor.tensor_type.name}, which cannot be "
            f"decoded; use one of {', '.join(known)}"
        )
    shape = tuple(int(n) for n in reversed(tensor.shape))
    if not shape or 0 in shape:
        raise CheckpointError(
            f"{path}: tensor {tensor.name} has shape {list(shape)}; fetch it again"
        )
    return GgufTensor(name=tensor.name, shape=shape, encoding=tensor.tensor_type,
                      offset=int(tensor.data_offset), nbytes=int(tensor.n_bytes))  # fmt: skip


@functools.cache
def _can_decode(kind: GGMLQuantizationType) -> bool:
    """Whether the package decodes a type; found by trying one group, as it keeps no public list."""
    _, group_bytes = GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros((1, group_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
