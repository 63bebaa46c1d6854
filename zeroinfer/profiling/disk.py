"""Direct-read rate over chunk size x queue depth, measured on the user's own weight files.

Reads only. A disk drifts by a factor of two within minutes, so cells are compared in interleaved
slices and the worse half is dropped after each round; what remains gets more of the time. Reads
start at random places, since a host may cache what was read a moment ago.
"""

import contextlib
import mmap
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from zeroinfer.errors import StorageError
from zeroinfer.native import DIRECT_ALIGNMENT, Reader, ReadTicket, ThreadReader
from zeroinfer.planner import DiskCell
from zeroinfer.units import MIB, align_down, align_up, ceil_div

__all__ = ["DiskProfile", "ReaderFactory", "measure_disk"]

_CHUNKS = (MIB // 2, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
_DEPTHS = (1, 2, 4, 8, 16, 32)
_MAX_INFLIGHT_BYTES = 16 * MIB
_RING_BYTES = 4 * _MAX_INFLIGHT_BYTES
_SPAN_BYTES = 4 * MIB
"""Smallest read that is waited for by itself, so that waiting costs what it does in a run."""
_NUM_SURVIVORS = 3
_SLICES_PER_ROUND = 2
_CONFIRM_SHARE = 0.2
_NUM_CONFIRMATIONS = 3
_TIE = 0.97
"""Rates this close to the best count as equal; the smaller depth then wins."""


class ReaderFactory(Protocol):
    """Opens a reader; ``ThreadReader.open`` is one."""

    def __call__(self, *, io_chunk_bytes: int, queue_depth: int) -> Reader:
        """Open a reader with this chunk and depth."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskProfile:
    """Every measured cell and the chosen one."""

    best: DiskCell
    grid: tuple[DiskCell, ...]


@dataclass(slots=True, eq=False)
class _Trial:
    io_chunk_bytes: int
    queue_depth: int
    rates: list[float] = field(default_factory=list)

    @property
    def cell(self) -> DiskCell:
        return DiskCell(self.io_chunk_bytes, self.queue_depth, statistics.median(self.rates))


def measure_disk(
    paths: Sequence[Path],
    *,
    budget_s: float,
    open_reader: ReaderFactory = ThreadReader.open,
    clock: Callable[[], float] = time.perf_counter,
    seed: int | None = None,
) -> DiskProfile:
    """Find the chunk and depth at which these files are read fastest.

    Args:
        paths: Files to read; larger ones are read more.
        budget_s: Seconds to spend in all; 3 settles a quiet disk.
        open_reader: Opens a reader for one cell.
        clock: Seconds, monotonic.
        seed: Makes the places read repeatable; None for new ones each time.

    Moves:
        nvme to dram, into a scratch of 64 MiB, blocking.

    Raises:
        StorageError: a file cannot be read, or all are empty.
    """
    source = random.Random(seed)
    trials = [
        _Trial(chunk, depth)
        for chunk in _CHUNKS
        for depth in _DEPTHS
        if chunk * depth <= _MAX_INFLIGHT_BYTES
    ]
    ring = _create_ring()
    sampler = _Sampler(paths, open_reader=open_reader, clock=clock, source=source, ring=ring)
    finalists = _halve(trials, sampler, budget_s * (1 - _CONFIRM_SHARE), source)
    grid = tuple(trial.cell for trial in trials)
    best = _choose([trial.cell for trial in finalists])
    # Longer slices weigh filling and draining the queue less, so their rate is the one to plan by.
    confirmed = _Trial(best.io_chunk_bytes, best.queue_depth)
    for _ in range(_NUM_CONFIRMATIONS):
        slice_s = budget_s * _CONFIRM_SHARE / _NUM_CONFIRMATIONS
        confirmed.rates.append(sampler.measure(confirmed, slice_s))
    return DiskProfile(best=confirmed.cell, grid=grid)


def _halve(
    trials: list[_Trial], sampler: "_Sampler", budget_s: float, source: random.Random
) -> list[_Trial]:
    """Measure in rounds, each of the same time and with half of the cells of the one before."""
    num_rounds = 1
    while len(trials) >> num_rounds >= _NUM_SURVIVORS:
        num_rounds += 1
    deadline_s = sampler.clock() + budget_s
    survivors = list(trials)
    for round_idx in range(num_rounds):
        if round_idx:
            survivors.sort(key=lambda trial: trial.cell.read_bytes_per_s, reverse=True)
            survivors = survivors[: ceil_div(len(survivors), 2)]
        # A slow disk overruns its slices; later rounds then share what is left.
        round_s = max(0.0, deadline_s - sampler.clock()) / (num_rounds - round_idx)
        slice_s = round_s / (len(survivors) * _SLICES_PER_ROUND)
        for _ in range(_SLICES_PER_ROUND):
            for trial in source.sample(survivors, len(survivors)):
                if trial.rates and sampler.clock() >= deadline_s:
                    continue
                trial.rates.append(sampler.measure(trial, slice_s))
    return survivors


def _choose(cells: list[DiskCell]) -> DiskCell:
    """Return the fastest cell, or one within 3 % of it with fewer bytes in flight."""
    best = max(cell.read_bytes_per_s for cell in cells)
    good = [cell for cell in cells if cell.read_bytes_per_s >= _TIE * best]
    return min(good, key=lambda cell: (cell.queue_depth, cell.io_chunk_bytes))


@dataclass(slots=True)
class _Place:
    path: Path
    size_bytes: int


class _Sampler:
    """Reads slices of the files with one cell at a time."""

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        open_reader: ReaderFactory,
        clock: Callable[[], float],
        source: random.Random,
        ring: memoryview,
    ) -> None:
        self.clock = clock
        self._open_reader = open_reader
        self._source = source
        self._ring = ring
        self._places = _find_places(paths)

    def measure(self, trial: _Trial, slice_s: float) -> float:
        """Read for about `slice_s` and return bytes per second, filling and draining included."""
        chunk, depth = trial.io_chunk_bytes, trial.queue_depth
        span = max(chunk, _SPAN_BYTES)
        # One span more than is in flight keeps the queue from draining.
        window = ceil_div(chunk * depth, span) + 1
        with contextlib.closing(
            self._open_reader(io_chunk_bytes=chunk, queue_depth=depth)
        ) as reader:
            stream = _Stream(reader, self._ring, span)
            stream.seek(*self._random_place(span))
            start_s = self.clock()
            while self.clock() < start_s + slice_s or not stream.num_bytes:
                while len(stream.tickets) < window:
                    if not stream.submit_next():
                        stream.seek(*self._random_place(span))
                stream.wait_oldest()
            while stream.tickets:
                stream.wait_oldest()
            return stream.num_bytes / max(self.clock() - start_s, 1e-9)

    def _random_place(self, span: int) -> tuple[Path, int, int]:
        """Return a file, a start in it, at least a span before its end if it is that long."""
        weights = [place.size_bytes for place in self._places]
        (place,) = self._source.choices(self._places, weights=weights)
        last_start = max(0, place.size_bytes - span)
        start = align_down(self._source.randint(0, last_start), DIRECT_ALIGNMENT)
        return place.path, start, place.size_bytes


class _Stream:
    """Reads a file in order, span by span, into a ring that wraps around."""

    def __init__(self, reader: Reader, ring: memoryview, span: int) -> None:
        self.num_bytes = 0
        self.tickets: list[ReadTicket] = []
        self._reader = reader
        self._ring = ring
        self._span = span
        self._slot_start = 0
        self._position = self._size_bytes = 0

    def seek(self, path: Path, start: int, size_bytes: int) -> None:
        """Go on from here."""
        self._file = self._reader.open_file(path)
        self._position, self._size_bytes = start, size_bytes

    def submit_next(self) -> bool:
        """Submit the next span; False at the end of the file."""
        num_bytes = min(self._span, self._size_bytes - self._position)
        if num_bytes <= 0:
            return False
        length = align_up(num_bytes, DIRECT_ALIGNMENT)
        if self._slot_start + length > len(self._ring):
            self._slot_start = 0
        slot = self._ring[self._slot_start : self._slot_start + length]
        self.tickets.append(
            self._reader.submit(self._file, self._position, slot, required_bytes=num_bytes)
        )
        self._slot_start += length
        self._position += num_bytes
        self.num_bytes += num_bytes
        return True

    def wait_oldest(self) -> None:
        """Wait for the read that was submitted first."""
        self._reader.wait(self.tickets.pop(0))


def _find_places(paths: Sequence[Path]) -> list[_Place]:
    try:
        places = [_Place(path, path.stat().st_size) for path in paths]
    except OSError as error:
        raise StorageError(
            f"cannot measure {error.filename}: {error.strerror}; check the weight files"
        ) from error
    places = [place for place in places if place.size_bytes > 0]
    if not places:
        raise StorageError(f"cannot measure the disk: got {len(paths)} files, all empty; need data")
    return places


def _create_ring() -> memoryview:
    """Map memory as the landing ring is mapped, and write every page: first touch is slow."""
    mapping = mmap.mmap(-1, _RING_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Kernels built without huge pages refuse the advice.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    ring = memoryview(mapping)
    for start in range(0, len(ring), mmap.PAGESIZE):
        ring[start] = 0
    return ring
