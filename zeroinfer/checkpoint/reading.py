"""Reading byte ranges of source files, each piece whole or refused."""

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from zeroinfer.checkpoint.values import numpy_dtype
from zeroinfer.diskformat import TensorExtent
from zeroinfer.errors import CheckpointError, StorageError
from zeroinfer.units import MIB

__all__ = ["PIECE_BYTES", "read_exactly", "read_extent"]

PIECE_BYTES = 8 * MIB
"""What is held in memory at a time."""


def read_exactly(file: BinaryIO, num_bytes: int, *, name: str) -> npt.NDArray[np.uint8]:
    """Read from where the file stands.

    Args:
        file: opened without a buffer.
        num_bytes: bytes that must come.
        name: the tensor, for the message.

    Raises:
        CheckpointError: the file ends before.
        OSError: a read failed.
    """
    raw = np.empty(num_bytes, np.uint8)
    view = raw.data
    while len(view):
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(
                f"{file.name} ended {len(view)} bytes before the end of tensor {name}; "
                "fetch it again"
            )
        view = view[count:]
    return raw


def read_extent(extent: TensorExtent) -> Iterator[npt.NDArray[Any]]:
    """Yield the values of a tensor in pieces of `PIECE_BYTES`, flat.

    Moves: the tensor's bytes from its file to DRAM, blocking, buffered by the kernel.

    Raises:
        StorageError: the file cannot be read.
        CheckpointError: the file has become shorter since its header was read.
    """
    spec = extent.spec
    try:
        with extent.path.open("rb", buffering=0) as file:
            file.seek(extent.offset)
            for begin in range(0, spec.nbytes, PIECE_BYTES):
                count = min(PIECE_BYTES, spec.nbytes - begin)
                yield read_exactly(file, count, name=spec.name).view(numpy_dtype(spec.dtype))
    except OSError as error:
        raise StorageError(f"read of {extent.path} failed: {error.strerror}") from error
