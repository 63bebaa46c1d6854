"""Rows of a matrix that is not in memory as a whole: an embedding table on disk.

Rows of resident pieces are copied from memory, the device's own among it; the others are read one
by one, ahead of queued chunks, into a small staging arena.
"""

from collections.abc import Callable, Iterator, Sequence
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
    device_pieces: tuple[Home, ...] = ()
    """The same on a device that computes: a head that is tied to the table, or parts of it."""
    staging: Arena
    """Where rows from disk land; of `staging_bytes`, shared by all tables."""

    @property
    def homes(self) -> tuple[Home, ...]:
        """All resident homes that hold rows of it."""
        return (*self.pieces, *self.device_pieces)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.extent.spec.nbytes // self.extent.spec.shape[0]

    def gather(
        self,
        ids: torch.Tensor,
        reader: Reader,
        *,
        place: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, int]:
        """Return rows `ids` and the bytes that were needed from disk; blocks until they landed.

        Args:
            ids: in host memory.
            reader: reads what is nowhere in memory.
            place: brings what is in host memory to where the rows are used.

        Raises:
            StorageError: a read failed.
        """
        unique, inverse = torch.unique(ids, return_inverse=True)
        parts: list[torch.Tensor] = []
        order: list[torch.Tensor] = []
        is_elsewhere = torch.ones(unique.shape, dtype=torch.bool)
        for piece in self.device_pieces:
            at, local = self._find(piece, unique)
            if len(at):
                parts.append(piece.tensors[self.name].index_select(0, place(local)))
                order.append(at)
                is_elsewhere[at] = False
        elsewhere = is_elsewhere.nonzero().flatten()
        rows, needed_bytes = self._gather_in_host_memory(unique[elsewhere], reader)
        found = torch.cat([place(rows), *parts]) if parts else place(rows)
        # Where in `found` each unique id is.
        rank = torch.cat([elsewhere, *order]).argsort()
        return found.index_select(0, place(rank[inverse])), needed_bytes

    def _gather_in_host_memory(self, ids: torch.Tensor, reader: Reader) -> tuple[torch.Tensor, int]:
        """Return rows of different ids, from pieces in host memory and from disk."""
        spec = self.extent.spec
        rows = torch.empty((len(ids), *spec.shape[1:]), dtype=torch_dtype(spec.dtype))
        is_missing = torch.ones(ids.shape, dtype=torch.bool)
        for piece in self.pieces:
            at, local = self._find(piece, ids)
            rows[at] = piece.tensors[self.name][local]
            is_missing[at] = False
        missing = is_missing.nonzero().flatten().tolist()
        for start in range(0, len(missing), _STAGED_ROWS):
            self._read(missing[start : start + _STAGED_ROWS], ids, rows, reader)
        return rows, len(missing) * self.row_bytes

    def _find(self, piece: Home, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which of the ids a piece holds, by position, and their rows in it."""
        start, num_rows = piece.row_starts[self.name], piece.tensors[self.name].shape[0]
        at = ((ids >= start) & (ids < start + num_rows)).nonzero().flatten()
        return at, ids[at] - start

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
