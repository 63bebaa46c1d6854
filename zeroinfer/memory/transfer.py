"""The interface of a compute device: its memory, one copy queue, one compute queue, and events.

Weights arrive by copies that run beside the computing. Order between the two queues is kept by
events alone: a copy waits for the event after which its place is free, the computing waits for the
event of the copy. Nothing waits for a whole device, and no wait spins.

Tests: any implementation passes ``tests/unit/memory/test_devices.py``; see README.md beside this.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zeroinfer.memory.pinning import Pinner

__all__ = [
    "DEVICE_ALIGNMENT",
    "CopyPair",
    "DeviceMemory",
    "Event",
    "LinkCounters",
    "TransferEngine",
]

DEVICE_ALIGNMENT = 256
"""Bytes that a tensor's address on the device is a multiple of: what kernels load at once, and
what the device's own allocator gives."""

CopyPair = tuple[torch.Tensor, torch.Tensor]
"""Destination and source: contiguous, of equal shape and dtype, the source at any address."""


@dataclass(slots=True)
class LinkCounters:
    """What the link to the device carried, and what the computing waited for it."""

    bytes_copied: int = 0
    num_copies: int = 0
    busy_s: float = 0.0
    """Seconds in which a copy was under way."""
    idle_s: float = 0.0
    """Seconds the computing stood still, from the event recorded last to the end of a `wait`."""


class Event(Protocol):
    """A point in a queue of a device."""

    @property
    def is_done(self) -> bool:
        """Whether everything queued before it is done; never blocks."""
        ...

    @property
    def done_s(self) -> float:
        """When it was done, on the clock of `time.perf_counter`; only once it is done."""
        ...


class DeviceMemory(Protocol):
    """Memory of fixed size on a device; tensors are views of it and must not outlive it."""

    @property
    def num_bytes(self) -> int:
        """Usable size in bytes."""
        ...

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor over the bytes at `offset`, without a copy."""
        ...

    def poison(self, offset: int, length: int) -> None:
        """Fill a range with 0xFF, NaN in every float type, in the order of the computing."""
        ...

    def close(self) -> None:
        """Give the memory back; idempotent."""
        ...


class TransferEngine(Protocol):
    """A place that computes, and the copies that bring weights to it.

    Lifetime: both tensors of a copy must stay valid, and its source unchanged, until its event is
    done. Threads: one, except that events may be asked from any. Queues: copies run one after the
    other; what the caller computes on `torch_device` runs in the order of its calls.
    """

    name: str
    """`cpu`, `cuda` or `double`."""
    torch_device: torch.device
    free_bytes: int | None
    """Memory that could be taken when the device was opened; None if it is the host's memory."""
    link_bytes_per_s: float | None
    """Rate of copies where it is known; None where it must be measured."""
    is_asynchronous: bool
    """Whether a computation may still run when its call returns."""
    pinner: Pinner | None
    """Locks host memory for copies; None if they need no locked memory."""

    @property
    def counters(self) -> LinkCounters:
        """What was copied so far; copies under way count when they are done."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Most device memory in use at once; 0 where it is the host's memory."""
        ...

    def allocate(self, num_bytes: int, *, name: str) -> DeviceMemory:
        """Take memory, aligned to DEVICE_ALIGNMENT.

        Raises:
            CapacityError: there is not enough.
        """
        ...

    def copy(self, pairs: Sequence[CopyPair], *, after: Event | None = None) -> Event:
        """Queue a copy and return at once.

        Args:
            pairs: at least one; copied as one transfer.
            after: the copy begins once this is done; everything queued for copying before is done
                by then as well.

        Moves: host to device on the copy queue; never blocks where the source is locked memory.
        """
        ...

    def record(self) -> Event:
        """Return the event after all that was computed so far."""
        ...

    def wait(self, event: Event) -> Event:
        """Let whatever is computed from now on wait for an event; may return before it is done.

        Returns:
            the point from which the computing goes on.
        """
        ...

    def synchronize(self, event: Event) -> None:
        """Block the caller, asleep, until an event is done."""
        ...

    def close(self) -> None:
        """Wait for copies in flight and end; memory that was allocated is closed by its owner."""
        ...
