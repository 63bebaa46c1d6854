"""Headers of safetensors files: tensor names, shapes, element types and file offsets.

Only the header is read: eight bytes of length and that many bytes of JSON. Everything the data
section must satisfy follows from the header and the size of the file, so a cut or padded file is
refused before a byte of a tensor is read.
"""

import math
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroinfer.diskformat.strict_json import link_fault, parse_json_object
from zeroinfer.dtypes import DType, TensorSpec
from zeroinfer.errors import CheckpointError, StorageError, UnsupportedModelError

__all__ = [
    "FileIdentity",
    "SafetensorsFile",
    "TensorExtent",
    "open_safetensors",
    "read_safetensors_header",
]

MAX_HEADER_BYTES = 100_000_000
"""The limit of the format's own library."""
_PREFIX_BYTES = 8
_MAX_DIM = 1 << 63
_MAX_RANK = 64
_DTYPES = {dtype.value: dtype for dtype in DType}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorExtent:
    """Where the bytes of one tensor lie."""

    spec: TensorSpec
    path: Path
    offset: int
    """Bytes from the start of the file; the extent is ``spec.nbytes`` long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileIdentity:
    """What tells a file from a later version of itself."""

    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileIdentity":
        """Take the identity from a stat result."""
        return cls(size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class SafetensorsFile:
    """One file: its extents in file order, and its identity when the header was read."""

    extents: dict[str, TensorExtent]
    identity: FileIdentity


def read_safetensors_header(path: Path) -> dict[str, TensorExtent]:
    """Read and check a header; the extents come in the order of their offsets.

    Raises:
        CheckpointError: the file is missing, cut, too long, or its header contradicts itself.
        UnsupportedModelError: a tensor has an element type that zeroinfer does not know.
        StorageError: the file cannot be read.
    """
    return open_safetensors(path).extents


def open_safetensors(path: Path) -> SafetensorsFile:
    """Like `read_safetensors_header`, with the identity of the file that was read.

    Raises:
        CheckpointError: the file is missing, cut, too long, or its header contradicts itself.
        UnsupportedModelError: a tensor has an element type that zeroinfer does not know.
        StorageError: the file cannot be read.
    """
    header_bytes, identity = _read_header_bytes(path)
    header = parse_json_object(header_bytes, what=f"header of {path}")
    header.pop("__metadata__", None)
    data_start = _PREFIX_BYTES + len(header_bytes)
    extents = [_parse_entry(path, name, entry, data_start) for name, entry in header.items()]
    # Empty tensors go before the tensor that starts where they lie.
    extents.sort(key=lambda extent: (extent.offset, extent.spec.nbytes))
    _check_layout(path, extents, data_start, identity.size_bytes)
    return SafetensorsFile(
        extents={extent.spec.name: extent for extent in extents}, identity=identity
    )


def _read_header_bytes(path: Path) -> tuple[bytes, FileIdentity]:
    try:
        # Looked at before it is opened: a named pipe would block the open for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(link_fault(path))
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            length = _header_length(path, file.read(_PREFIX_BYTES), status.st_size)
            data = file.read(length)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(link_fault(path)) from error
    except OSError as error:
        raise StorageError(f"header of {path} cannot be read: {error.strerror}") from error
    if len(data) != length:
        raise CheckpointError(f"{path} shrank while it was read; try again when it is complete")
    return data, FileIdentity.of(status)


def _header_length(path: Path, prefix: bytes, size_bytes: int) -> int:
    if len(prefix) < _PREFIX_BYTES:
        raise CheckpointError(
            f"{path} is cut: got {size_bytes} bytes, need at least {_PREFIX_BYTES}; "
            "fetch the file again"
        )
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} is no safetensors file: got a header of {length} bytes, need at most "
            f"{MAX_HEADER_BYTES}; fetch the file again"
        )
    if _PREFIX_BYTES + length > size_bytes:
        raise CheckpointError(
            f"{path} is cut inside its header: expected at least {_PREFIX_BYTES + length} bytes, "
            f"found {size_bytes}; fetch the file again"
        )
    return length


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> TensorExtent:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _entry_error(path, name, "entry", entry, "dtype, shape and data_offsets")
    dtype = _parse_dtype(path, name, entry["dtype"])
    shape = entry["shape"]
    if not _is_int_list(shape) or len(shape) > _MAX_RANK:
        raise _entry_error(path, name, "shape", shape, "a list of integers from 0")
    offsets = entry["data_offsets"]
    if not _is_int_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _entry_error(path, name, "data_offsets", offsets, "[begin, end], 0 <= begin <= end")
    begin, end = offsets
    num_bytes = math.prod(shape) * dtype.itemsize
    if end - begin != num_bytes:
        raise _entry_error(
            path, name, "data_offsets", offsets,
            f"{num_bytes} bytes for shape {_show(shape)} of {dtype.value}",
        )  # fmt: skip
    spec = TensorSpec(name=name, shape=tuple(shape), dtype=dtype)
    return TensorExtent(spec=spec, path=path, offset=data_start + begin)


def _parse_dtype(path: Path, name: str, value: Any) -> DType:
    dtype = _DTYPES.get(value) if isinstance(value, str) else None
    if dtype is None:
        raise UnsupportedModelError(
            f"tensor {name!r} of {path} has an unsupported dtype: got {_show(value)}, need one of "
            f"{', '.join(_DTYPES)}; use a checkpoint in bf16, fp16 or fp32"
        )
    return dtype


def _check_layout(
    path: Path, extents: Iterable[TensorExtent], data_start: int, size_bytes: int
) -> None:
    """Demand that the extents fill the data section, each byte once."""
    end, previous = data_start, "the header"
    for extent in extents:
        name = extent.spec.name
        if extent.offset < end:
            raise CheckpointError(
                f"tensor {name!r} of {path} overlaps {previous}: got offset {extent.offset}, "
                f"need {end}; write the file again"
            )
        if extent.offset > end:
            raise CheckpointError(
                f"{path} has a hole of {extent.offset - end} bytes before tensor {name!r}: got "
                f"offset {extent.offset}, need {end}; write the file again"
            )
        end, previous = end + extent.spec.nbytes, f"tensor {name!r}"
    if size_bytes < end:
        raise CheckpointError(
            f"{path} is cut: expected {end} bytes, found {size_bytes}; fetch the file again"
        )
    if size_bytes > end:
        raise CheckpointError(
            f"{path} has {size_bytes - end} bytes after {previous}: expected {end} bytes, found "
            f"{size_bytes}; fetch the file again"
        )


def _is_int_list(value: Any) -> bool:
    """Whether this is a list of whole numbers that fit a file; true and false are none."""
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < _MAX_DIM for item in value
    )


def _entry_error(path: Path, name: str, field: str, got: Any, need: str) -> CheckpointError:
    return CheckpointError(
        f"{field} of tensor {name!r} in {path} is wrong: got {_show(got)}, need {need}; "
        "write the file again"
    )


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."
