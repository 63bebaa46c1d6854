"""The CPU as a compute device: weights are used where they land, so nothing is copied."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zeroinfer.closing import Closing
from zeroinfer.memory.arena import Arena
from zeroinfer.memory.transfer import CopyPair, Event, LinkCounters

if TYPE_CHECKING:
    from zeroinfer.memory.pinning import Pinner

__all__ = ["CpuDevice", "DoneEvent"]


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """A point that was reached when it was made; see `Event`."""

    done_s: float
    is_done: bool = True


class CpuDevice(Closing):
    """Computes in the caller's thread on the host's memory; see `TransferEngine`.

    A plan for the CPU streams into this memory itself and never copies. Copies work all the same,
    at once, so that the interface has its plainest implementation here.
    """

    def __init__(self) -> None:
        self.name = "cpu"
        self.torch_device = torch.device("cpu")
        self.free_bytes: int | None = None
        self.link_bytes_per_s: float | None = None
        self.is_asynchronous = False
        self.pinner: Pinner | None = None
        self._counters = LinkCounters()

    @property
    def counters(self) -> LinkCounters:
        """See `TransferEngine.counters`."""
        return self._counters

    @property
    def peak_bytes(self) -> int:
        """0; the process's own peak counts this memory."""
        return 0

    def allocate(self, num_bytes: int, *, name: str) -> Arena:
        """Map host memory; see `TransferEngine.allocate`."""
        return Arena.create(num_bytes, name=name, is_prefaulted=False)

    def copy(self, pairs: Sequence[CopyPair], *, after: Event | None = None) -> DoneEvent:
        """Copy now; see `TransferEngine.copy`."""
        start_s = time.perf_counter()
        for destination, source in pairs:
            destination.copy_(source)
            self._counters.bytes_copied += source.nbytes
        stop_s = time.perf_counter()
        self._counters.num_copies += 1
        self._counters.busy_s += stop_s - start_s
        return DoneEvent(stop_s)

    def record(self) -> DoneEvent:
        """Return an event that is done; see `TransferEngine.record`."""
        return DoneEvent(time.perf_counter())

    def wait(self, event: Event) -> DoneEvent:
        """Return an event that is done, as `event` is; see `TransferEngine.wait`."""
        return DoneEvent(time.perf_counter())

    def synchronize(self, event: Event) -> None:
        """Do nothing: an event of this device is done."""

    def close(self) -> None:
        """Do nothing."""
