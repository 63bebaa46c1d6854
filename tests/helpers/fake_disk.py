"""A disk with a clock of its own: reading takes no real time, so that rates are exact."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from zeroinfer.counters import IoCounters
from zeroinfer.native import OpenFile


@dataclass(slots=True)
class FakeDisk:
    """Delivers each cell's rate and nothing else."""

    rate_of: Callable[[int, int], float]
    """Bytes per second of a chunk size and queue depth."""
    drift: Callable[[float], float] = lambda now_s: 1.0
    """Factor on all rates at a time."""
    now_s: float = 0.0
    reads: list[tuple[Path, int, int]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now_s

    def open(self, *, io_chunk_bytes: int, queue_depth: int) -> "FakeReader":
        return FakeReader(self, self.rate_of(io_chunk_bytes, queue_depth))


@dataclass(frozen=True, slots=True)
class FakeTicket:
    num_bytes: int
    is_done: bool = True


@dataclass(slots=True)
class FakeReader:
    disk: FakeDisk
    bytes_per_s: float
    counters: IoCounters = field(default_factory=IoCounters)

    def open_file(self, path):
        return OpenFile(path=path, fd=-1, size_bytes=path.stat().st_size, is_direct=True)

    def submit(self, file, offset, destination, *, required_bytes, is_urgent=False):
        self.disk.reads.append((file.path, offset, len(destination)))
        return FakeTicket(len(destination))

    def wait(self, ticket):
        rate = self.bytes_per_s * self.disk.drift(self.disk.now_s)
        self.disk.now_s += ticket.num_bytes / rate

    def close(self):
        pass
