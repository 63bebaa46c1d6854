# Torch leaves its CUDA classes untyped.
# mypy: disable-error-code="no-untyped-call"
"""One NVIDIA GPU: torch's streams and events behind the device's interface.

Copies have a stream of their own. Computing runs on the stream that was current when the device was
opened, which is the one torch uses for everything. Events sleep (cudaEventBlockingSync) and keep
their time, so that busy and idle seconds are read from them later, without any wait.
"""

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from zeroinfer.closing import Closing
from zeroinfer.counters import Trace
from zeroinfer.errors import BackendUnavailableError, CapacityError
from zeroinfer.memory.transfer import CopyPair, Event, LinkCounters
from zeroinfer.units import format_bytes

if TYPE_CHECKING:
    from zeroinfer.memory.pinning import Pinner

__all__ = ["CudaDevice"]

_ORIGIN_READINGS = 3
"""The first wait for an event also wakes the driver up, and takes longer than a reading should."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """An event that is done, and when that was on the host's clock."""

    event: torch.cuda.Event
    at_s: float

    @classmethod
    def measure(cls, stream: torch.cuda.Stream) -> "_Origin":
        """Record events and wait for them; the one that was bracketed most closely counts."""
        readings: list[tuple[float, _Origin]] = []
        for _ in range(_ORIGIN_READINGS):
            event = torch.cuda.Event(enable_timing=True, blocking=True)
            before_s = time.perf_counter()
            event.record(stream)
            event.synchronize()
            after_s = time.perf_counter()
            readings.append((after_s - before_s, cls(event, (before_s + after_s) / 2)))
        return min(readings, key=lambda reading: reading[0])[1]


class _CudaEvent:
    """An event to be recorded next, later than its origin; see `Event`."""

    def __init__(self, origin: _Origin, sources: Sequence[torch.Tensor] = ()) -> None:
        self.inner = torch.cuda.Event(enable_timing=True, blocking=True)
        # Until the event is done the engine may read them.
        self._sources = tuple(sources)
        self._origin = origin

    @property
    def is_done(self) -> bool:
        if not self.inner.query():
            return False
        self._sources = ()
        return True

    @property
    def done_s(self) -> float:
        return self._origin.at_s + float(self._origin.event.elapsed_time(self.inner)) / 1e3


class _CudaPinner:
    """Registers host memory with the driver; see `Pinner`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime = torch.cuda.cudart()

    def pin(self, address: int, num_bytes: int) -> str | None:
        code = int(self._runtime.cudaHostRegister(address, num_bytes, 0))
        if code == 0:
            return None
        self._take_error()
        return f"cudaHostRegister failed ({code})"

    def unpin(self, address: int, num_bytes: int) -> None:
        if int(self._runtime.cudaHostUnregister(address)) != 0:
            self._take_error()

    def _take_error(self) -> None:
        """Launch something: the runtime keeps a refusal and hands it to whoever launches next."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)


class _CudaMemory(Closing):
    """A piece of device memory; see `DeviceMemory`."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat: torch.Tensor | None = flat
        self.num_bytes = flat.numel()

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        length = torch.Size(shape).numel() * dtype.itemsize
        return self._range(offset, length).view(dtype).view(tuple(shape))

    def poison(self, offset: int, length: int) -> None:
        self._range(offset, length).fill_(0xFF)

    def close(self) -> None:
        flat, self._flat = self._flat, None
        if flat is not None:
            # Views of it may live on as objects; the bytes are given back now.
            flat.untyped_storage().resize_(0)

    def _range(self, offset: int, length: int) -> torch.Tensor:
        assert self._flat is not None, "device memory is closed"
        assert 0 <= offset <= offset + length <= self.num_bytes, (
            f"range of {length} bytes at {offset} leaves {self.num_bytes}"
        )
        return self._flat[offset : offset + length]


class CudaDevice(Closing):
    """See `TransferEngine`."""

    def __init__(self, torch_device: torch.device, *, trace: Trace) -> None:
        self.name = "cuda"
        self.torch_device = torch_device
        self.is_asynchronous = True
        self.pinner: Pinner | None = _CudaPinner(torch_device)
        self.free_bytes: int | None = torch.cuda.mem_get_info(torch_device)[0]
        self.link_bytes_per_s: float | None = None
        self._trace = trace
        self._compute = torch.cuda.current_stream(torch_device)
        self._copies = torch.cuda.Stream(torch_device)
        self._origin = _Origin.measure(self._compute)
        self._last_record = self._record()
        self._counters = LinkCounters()
        self._open_copies: deque[tuple[_CudaEvent, _CudaEvent, int]] = deque()
        self._open_waits: deque[tuple[_CudaEvent, _CudaEvent]] = deque()

    @classmethod
    def open(cls, *, index: int = 0, trace: Trace | None = None) -> Self:
        """Make the context of a GPU and start counting its memory.

        Attention through cuDNN is turned off for the whole process: it builds a plan for every new
        pair of lengths, in up to a second, and lengths grow with every token.

        Raises:
            BackendUnavailableError: torch finds no such device.
        """
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise BackendUnavailableError(
                f"CUDA device {index} is not available: torch {torch.__version__} finds "
                f"{torch.cuda.device_count() if torch.cuda.is_available() else 0} device(s); "
                "use compute.device=cpu, or install a CUDA build of torch and its driver"
            )
        # The allocator has no counters to reset before it was initialised.
        torch.cuda.init()
        torch.backends.cuda.enable_cudnn_sdp(False)
        # What an earlier engine gave back counts as used until the allocator lets go of it.
        torch.cuda.empty_cache()
        device = cls(torch.device("cuda", index), trace=trace or Trace())
        device.reset_peak()
        return device

    @property
    def counters(self) -> LinkCounters:
        """See `TransferEngine.counters`."""
        self._settle()
        return self._counters

    @property
    def peak_bytes(self) -> int:
        """Peak of torch's allocator; the driver's own context is not in it."""
        return int(torch.cuda.max_memory_allocated(self.torch_device))

    def reset_peak(self) -> None:
        """Count `peak_bytes` anew from what is in use; what the allocator only keeps goes."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def allocate(self, num_bytes: int, *, name: str) -> _CudaMemory:
        """Take device memory; see `TransferEngine.allocate`."""
        try:
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{name}: the device refused {format_bytes(num_bytes)}, "
                f"{format_bytes(torch.cuda.mem_get_info(self.torch_device)[0])} is free; lower "
                "--gpu-memory or end what else runs there"
            ) from error
        return _CudaMemory(flat)

    def copy(self, pairs: Sequence[CopyPair], *, after: Event | None = None) -> Event:
        """Queue a copy on the copy stream; see `TransferEngine.copy`."""
        begin = _CudaEvent(self._origin)
        end = _CudaEvent(self._origin, [source for _, source in pairs])
        if after is not None:
            assert isinstance(after, _CudaEvent), f"copy after an event of another device: {after}"
            self._copies.wait_event(after.inner)
        begin.inner.record(self._copies)
        with torch.cuda.stream(self._copies):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
        end.inner.record(self._copies)
        self._open_copies.append((begin, end, sum(source.nbytes for _, source in pairs)))
        return end

    def record(self) -> Event:
        """Record an event on the compute stream; see `TransferEngine.record`."""
        self._last_record = self._record()
        return self._last_record

    def wait(self, event: Event) -> Event:
        """Let the compute stream wait; see `TransferEngine.wait`."""
        assert isinstance(event, _CudaEvent), f"not an event of this device: {event!r}"
        self._compute.wait_event(event.inner)
        after = self._record()
        self._open_waits.append((self._last_record, after))
        return after

    def synchronize(self, event: Event) -> None:
        """Sleep until an event is done; see `TransferEngine.synchronize`."""
        assert isinstance(event, _CudaEvent), f"not an event of this device: {event!r}"
        event.inner.synchronize()
        self._settle()
        # Times since an origin come as 32-bit floats of milliseconds: precise only if it is near.
        self._origin = _Origin(event.inner, event.done_s)

    def close(self) -> None:
        """Wait for the copy stream; idempotent."""
        last = _CudaEvent(self._origin)
        last.inner.record(self._copies)
        last.inner.synchronize()
        self._settle()

    def _record(self) -> _CudaEvent:
        event = _CudaEvent(self._origin)
        event.inner.record(self._compute)
        return event

    def _settle(self) -> None:
        """Count what is done by now, in order."""
        counters = self._counters
        while self._open_copies and self._open_copies[0][1].is_done:
            begin, end, num_bytes = self._open_copies.popleft()
            start_s, stop_s = begin.done_s, end.done_s
            counters.bytes_copied += num_bytes
            counters.num_copies += 1
            counters.busy_s += stop_s - start_s
            self._trace.add("copy", f"{num_bytes} bytes", start_s, stop_s)
        while self._open_waits and self._open_waits[0][1].is_done:
            before, after = self._open_waits.popleft()
            start_s, stop_s = before.done_s, max(before.done_s, after.done_s)
            counters.idle_s += stop_s - start_s
            self._trace.add("wait", "unit", start_s, stop_s)
