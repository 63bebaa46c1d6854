"""Fixed pieces of anonymous memory that weights land in.

Nothing is allocated inside an arena: the plan says which bytes belong to whom. The surprise is in
closing: torch keeps a reference to the mapping but no buffer export, so unmapping by hand would
leave tensors that crash. An arena therefore gives its pages back and leaves the unmapping to the
last reference.
"""

import contextlib
import errno
import math
import mmap
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from zeroinfer.closing import Closing
from zeroinfer.errors import CapacityError
from zeroinfer.units import MIB, align_down, align_up, format_bytes

__all__ = ["Arena"]

_MADV_POPULATE_WRITE = 23
"""Linux 5.14; the mmap module does not name it."""

_PREFAULT_STEP_BYTES = 64 * MIB
"""Bytes faulted per call, so that an interrupt is served between calls."""


class Arena(Closing):
    """A page-aligned, private, anonymous mapping of fixed size.

    Views and tensors alias the mapping; they stay safe to touch after `close`, but read as zeros.
    All methods may be called from any thread; overlapping use is the caller's to order.
    """

    def __init__(self, mapping: mmap.mmap, *, num_bytes: int, name: str) -> None:
        self._mapping: mmap.mmap | None = mapping
        self._num_bytes = num_bytes
        self._name = name

    @classmethod
    def create(cls, num_bytes: int, *, name: str, is_prefaulted: bool) -> Self:
        """Map `num_bytes` (0 or more), with huge pages advised.

        Args:
            num_bytes: usable size; the mapping is rounded up to whole pages.
            name: what the arena is for; part of error messages.
            is_prefaulted: give every page its memory now, so that the first reads into it cost no
                page faults and memory that is missing shows now.

        Raises:
            CapacityError: the system refuses the memory.
        """
        try:
            mapping = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # Kernels built without huge pages refuse the advice; small pages serve as well.
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
            if is_prefaulted:
                _prefault(mapping, num_bytes)
        except (OSError, OverflowError) as error:
            raise CapacityError(
                f"{name}: the system refused {format_bytes(num_bytes)} of memory ({error}); "
                "lower --dram or free memory"
            ) from error
        return cls(mapping, num_bytes=num_bytes, name=name)

    @property
    def num_bytes(self) -> int:
        """Usable size in bytes."""
        return self._num_bytes

    @property
    def name(self) -> str:
        """What the arena is for."""
        return self._name

    @property
    def address(self) -> int:
        """Address of byte 0, a multiple of the page size."""
        return int(np.frombuffer(self._open_mapping(), dtype=np.uint8).ctypes.data)

    def view(self, offset: int, length: int) -> memoryview:
        """Return `length` writable bytes at `offset`, without a copy."""
        mapping = self._open_mapping()
        self._check_range(offset, length)
        return memoryview(mapping)[offset : offset + length]

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous CPU tensor over the bytes at `offset`, without a copy.

        Args:
            offset: any byte offset; it need not be a multiple of the element size.
            shape: sizes of the tensor; may be empty for a scalar, or hold zeros.
            dtype: element type that the bytes are read as.
        """
        mapping = self._open_mapping()
        count = math.prod(shape)
        self._check_range(offset, count * dtype.itemsize)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(mapping, dtype=dtype, count=count, offset=offset).view(tuple(shape))

    def poison(self, offset: int, length: int) -> None:
        """Fill a range with 0xFF, which is NaN in every float type."""
        np.asarray(self.view(offset, length)).fill(0xFF)

    def release_pages(self, offset: int, length: int) -> None:
        """Give the whole pages inside a range back to the system; they read as zeros again."""
        mapping = self._open_mapping()
        self._check_range(offset, length)
        start = align_up(offset, mmap.PAGESIZE)
        stop = align_down(offset + length, mmap.PAGESIZE)
        if stop > start:
            mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def close(self) -> None:
        """Give all pages back; idempotent.

        The addresses are unmapped when the last view or tensor is gone, at once if there is none.
        """
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            # Refused for locked pages only, and those go with the mapping.
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_DONTNEED)

    def _open_mapping(self) -> mmap.mmap:
        assert self._mapping is not None, f"arena {self._name} is closed"
        return self._mapping

    def _check_range(self, offset: int, length: int) -> None:
        assert 0 <= offset <= offset + length <= self._num_bytes, (
            f"arena {self._name}: range of {length} bytes at {offset} leaves {self._num_bytes}"
        )


def _prefault(mapping: mmap.mmap, num_bytes: int) -> None:
    """Give every page of the mapping its memory."""
    for start in range(0, num_bytes, _PREFAULT_STEP_BYTES):
        length = min(_PREFAULT_STEP_BYTES, num_bytes - start)
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start, length)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            np.frombuffer(mapping, np.uint8, count=length, offset=start)[:: mmap.PAGESIZE] = 0
