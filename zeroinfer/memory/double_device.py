"""The device double: a device of set bandwidth and latency, made of host memory and one thread.

It stands in for a GPU where none is: overlap, order and bits are tested with it, and what a link of
some speed would bring is measured with it. Its copies arrive late, as set; until one is complete
its destination holds NaN.

Computing happens in the caller's thread and is over when a call returns. For studies of overlap and
order it may be given a set time instead: the device then counts as busy for so long after each
wait, while the caller runs ahead, as it does with a GPU.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from zeroinfer.closing import Closing
from zeroinfer.counters import Trace
from zeroinfer.errors import CapacityError
from zeroinfer.memory.arena import Arena
from zeroinfer.memory.pinning import Pinner
from zeroinfer.memory.transfer import CopyPair, Event, LinkCounters
from zeroinfer.units import GIB, format_bytes

__all__ = ["DeviceRecord", "DoubleDevice"]


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """Something that happened on the double, on the clock of `time.perf_counter`.

    Kinds: `begin` and `end` of a copy, with the ranges it reads and writes as (address, bytes);
    `record` when an event is reached, `wait` when computing goes on after one, without ranges.
    """

    kind: str
    at_s: float
    sources: tuple[tuple[int, int], ...] = ()
    destinations: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class _ComputeEvent:
    """A point of the computing that lies at a known time, perhaps ahead; see `Event`."""

    done_s: float

    @property
    def is_done(self) -> bool:
        return time.perf_counter() >= self.done_s

    def wait(self) -> None:
        _sleep_until(self.done_s)


class _CopyEvent:
    """The end of a copy; see `Event`."""

    def __init__(self) -> None:
        self.done_s = 0.0
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def finish(self, done_s: float) -> None:
        self.done_s = done_s
        self._done.set()

    def wait(self) -> None:
        self._done.wait()


@dataclass(frozen=True, slots=True)
class _Copy:
    pairs: tuple[CopyPair, ...]
    after: Event | None
    submitted_s: float
    event: _CopyEvent = field(default_factory=_CopyEvent)

    @property
    def num_bytes(self) -> int:
        return sum(source.nbytes for _, source in self.pairs)


class _DoubleMemory(Arena):
    """An arena that gives its bytes back to the double's count."""

    device: "DoubleDevice | None" = None

    def close(self) -> None:
        device, self.device = self.device, None
        if device is not None:
            device.used_bytes -= self.num_bytes
        super().close()


class DoubleDevice(Closing):
    """See `TransferEngine`; `records` holds what happened, for tests."""

    def __init__(
        self,
        *,
        bytes_per_s: float,
        latency_s: float,
        memory_bytes: int,
        unit_compute_s: float,
        pinner: Pinner | None,
        trace: Trace,
    ) -> None:
        self.name = "double"
        self.torch_device = torch.device("cpu")
        self.free_bytes: int | None = memory_bytes
        self.is_asynchronous = unit_compute_s > 0
        self.pinner = pinner
        self.link_bytes_per_s: float | None = bytes_per_s
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._unit_compute_s = unit_compute_s
        self.used_bytes = 0
        self.records: list[DeviceRecord] = []
        self._peak_bytes = 0
        self._trace = trace
        self._counters = LinkCounters()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queue: deque[_Copy] = deque()
        self._is_closing = False
        self._link_free_s = 0.0
        self._free_s = time.perf_counter()
        self._computing_since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="device double", daemon=True)

    @classmethod
    def open(
        cls,
        *,
        bytes_per_s: float = 1e12,
        latency_s: float = 0.0,
        memory_bytes: int = 64 * GIB,
        unit_compute_s: float = 0.0,
        pinner: Pinner | None = None,
        trace: Trace | None = None,
    ) -> Self:
        """Start the thread of the link.

        Args:
            bytes_per_s: rate of copies.
            latency_s: what each copy takes beside its bytes.
            memory_bytes: size of the device memory; taken from the host as it is used.
            unit_compute_s: how long computing goes on from a `wait` to the next `record`; 0 is as
                long as the caller takes.
            pinner: locks the host memory that copies read; None needs no locked memory.
            trace: receives copies.
        """
        device = cls(
            bytes_per_s=bytes_per_s,
            latency_s=latency_s,
            memory_bytes=memory_bytes,
            unit_compute_s=unit_compute_s,
            pinner=pinner,
            trace=trace or Trace(),
        )
        device._thread.start()
        return device

    @property
    def counters(self) -> LinkCounters:
        """See `TransferEngine.counters`."""
        return self._counters

    @property
    def peak_bytes(self) -> int:
        """Most memory of `allocate` in use at once; activations and KV are not in it."""
        return self._peak_bytes

    def allocate(self, num_bytes: int, *, name: str) -> Arena:
        """Map host memory within the set size; see `TransferEngine.allocate`."""
        free_bytes = (self.free_bytes or 0) - self.used_bytes
        if num_bytes > free_bytes:
            raise CapacityError(
                f"{name}: the device double has {format_bytes(free_bytes)} free, need "
                f"{format_bytes(num_bytes)}; lower --gpu-memory"
            )
        memory = _DoubleMemory.create(num_bytes, name=name, is_prefaulted=False)
        memory.device = self
        self.used_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self.used_bytes)
        return memory

    def copy(self, pairs: Sequence[CopyPair], *, after: Event | None = None) -> Event:
        """Queue a copy for the link's thread; see `TransferEngine.copy`."""
        job = _Copy(tuple(pairs), after, time.perf_counter())
        assert all(to.shape == source.shape for to, source in pairs), "shapes of a copy differ"
        with self._lock:
            assert not self._is_closing, f"copy of {job.num_bytes} bytes on a closed device"
            self._queue.append(job)
            self._work.notify()
        return job.event

    def record(self) -> Event:
        """Return the point at which all that was computed is over; see `TransferEngine.record`."""
        if self._computing_since_s is not None:
            self._free_s = self._computing_since_s + self._unit_compute_s
            self._computing_since_s = None
        self._free_s = max(self._free_s, time.perf_counter())
        self._log(DeviceRecord("record", self._free_s))
        return _ComputeEvent(self._free_s)

    def wait(self, event: Event) -> Event:
        """Block until an event is done, since its bytes are used right away."""
        self.synchronize(event)
        start_s = max(self._free_s, event.done_s)
        self._counters.idle_s += start_s - self._free_s
        self._trace.add("wait", "unit", self._free_s, start_s)
        self._computing_since_s = start_s
        self._log(DeviceRecord("wait", start_s))
        return _ComputeEvent(start_s)

    def synchronize(self, event: Event) -> None:
        """Sleep until an event is done; see `TransferEngine.synchronize`."""
        assert isinstance(event, _CopyEvent | _ComputeEvent), f"not an event of this: {event!r}"
        event.wait()

    def close(self) -> None:
        """Finish queued copies and end the thread; idempotent."""
        with self._lock:
            self._is_closing = True
            self._work.notify()
        self._thread.join()

    def _run(self) -> None:
        """Carry copies one after the other; the body of the link's thread."""
        # Destinations may be made in inference mode, whose tensors change in it alone.
        with torch.inference_mode():
            while (job := self._next()) is not None:
                self._carry(job)

    def _next(self) -> _Copy | None:
        with self._lock:
            while not self._queue:
                if self._is_closing:
                    return None
                self._work.wait()
            return self._queue.popleft()

    def _carry(self, job: _Copy) -> None:
        start_s = max(self._link_free_s, job.submitted_s)
        if job.after is not None:
            self.synchronize(job.after)
            start_s = max(start_s, job.after.done_s)
        # The set times follow each other without what this thread takes to wake up.
        stop_s = start_s + self._latency_s + job.num_bytes / self._bytes_per_s
        ranges = (_ranges(source for _, source in job.pairs), _ranges(to for to, _ in job.pairs))
        self._log(DeviceRecord("begin", start_s, *ranges))
        for destination, _ in job.pairs:
            destination.view(-1).view(torch.uint8).fill_(0xFF)
        _sleep_until(stop_s)
        for destination, source in job.pairs:
            destination.copy_(source)
        self._link_free_s = stop_s
        self._log(DeviceRecord("end", stop_s, *ranges))
        self._counters.bytes_copied += job.num_bytes
        self._counters.num_copies += 1
        self._counters.busy_s += stop_s - start_s
        self._trace.add("copy", f"{job.num_bytes} bytes", start_s, stop_s)
        job.event.finish(stop_s)

    def _log(self, record: DeviceRecord) -> None:
        with self._lock:
            self.records.append(record)


def _ranges(tensors: Iterable[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)


def _sleep_until(deadline_s: float) -> None:
    time.sleep(max(0.0, deadline_s - time.perf_counter()))
