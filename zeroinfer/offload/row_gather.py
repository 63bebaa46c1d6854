"""Rows of a matrix that is not in memory as a whole: an embedding table on disk.

Rows of resident pieces are copied from memory; the others are read one by one, ahead of queued
chunks, into a small staging arena.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zeroinfer.diskformat import Extent, ReadRun, TensorExtent, plan_runs
from zeroinfer.memory import Arena
from zeroinfer.native import DIRECT_ALIGNMENT, OpenFile, Reader, torch_dtype
from zeroinfer.offload.sources import MAX_GAP_BYTES
from zeroinfer.offload.waiting import wait_all
from zeroinfer.offload.weight_store import Home
from zeroinfer.units import align_up

__all__ = ["RowTable", "staging_bytes"]

_STAGED_ROWS = 256
"""Rows read at once; more would only queue longer."""


def _row_footprint(row_bytes: int) -> int:
    return align_up(row_bytes, DIRECT_ALIGNMENT) + DIRECT_ALIGNMENT


def staging_bytes(row_bytes: Sequence[int]) -> int:
    """Bytes of a staging arena that serves tables of these row sizes."""
    return _STAGED_ROWS * max((_row_footprint(size) for size in row_bytes), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTable:
    """One gathered matrix."""

    name: str
    """Its parameter, whose name may differ from the tensor's in the checkpoint."""
    extent: TensorExtent
    file: OpenFile
    pieces: tuple[Home, ...]
    """Resident homes that hold rows of it, in host memory."""
    staging: Arena
    """Where rows from disk land; of `staging_bytes`, shared by all tables."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.extent.spec.nbytes // self.extent.spec.shape[0]

    def gather(self, ids: torch.Tensor, reader: Reader) -> tuple[torch.Tensor, int]:
        """Return rows `ids` and the bytes that were needed from disk; blocks until they landed.

        Raises:
            StorageError: a read failed.
        """
        spec = self.extent.spec
        unique, inverse = torch.unique(ids, return_inverse=True)
        rows = torch.empty((unique.shape[0], *spec.shape[1:]), dtype=torch_dtype(spec.dtype))
        is_missing = torch.ones(unique.shape, dtype=torch.bool)
        for piece in self.pieces:
            start, tensor = piece.row_starts[self.name], piece.tensors[self.name]
            is_here = (unique >= start) & (unique < start + tensor.shape[0])
            rows[is_here] = tensor[unique[is_here] - start]
            is_missing &= ~is_here
        missing = is_missing.nonzero().flatten().tolist()
        for start in range(0, len(missing), _STAGED_ROWS):
            batch = missing[start : start + _STAGED_ROWS]
            self._read(batch, unique, rows, reader)
        return rows[inverse], len(missing) * self.row_bytes

    def _read(
        self, batch: list[int], unique: torch.Tensor, rows: torch.Tensor, reader: Reader
    ) -> None:
        extents = [
            Extent(
                path=self.extent.path,
                offset=self.extent.offset + int(unique[idx]) * self.row_bytes,
                length=self.row_bytes,
            )
            for idx in batch
        ]
        runs = plan_runs(extents, alignment=DIRECT_ALIGNMENT, max_gap_bytes=MAX_GAP_BYTES)
        placed = list(_place(runs))
        tickets = [
            reader.submit(
                self.file, run.offset, self.staging.view(place, run.length),
                required_bytes=run.required_bytes, is_urgent=True,
            )
            for run, place in placed
        ]  # fmt: skip
        wait_all(reader, tickets)
        for run, place in placed:
            for extent_idx, offset in run.pieces:
                row_idx = batch[extent_idx]
                rows[row_idx] = self.staging.tensor(place + offset, rows.shape[1:], rows.dtype)


def _place(runs: Sequence[ReadRun]) -> Iterator[tuple[ReadRun, int]]:
    position = 0
    for run in runs:
        yield run, position
        position += run.length
