"""A storage reader on the kernel's io_uring: one sleeping thread, whatever the queue depth.

The thread hands reads to the kernel and sleeps for completions in one system call. It is the only
one to do so: the kernel cancels the reads of a thread that ends, and callers may come and go.
Whoever submits while it sleeps with free slots wakes it through the ring.
"""

import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from zeroinfer.counters import Trace
from zeroinfer.errors import BackendUnavailableError
from zeroinfer.native.chunked_reader import Chunk, ChunkedReader, check_cell
from zeroinfer.native.extension import extension, extension_error

__all__ = ["Ring", "UringReader", "require_uring", "uring_error"]


class Ring(Protocol):
    """Slots that hold one read each; ``zeroinfer._C.Uring`` is one, tests bring others.

    Lifetime: it keeps the memory of a read alive until `wait` returned its slot, or `close` did.
    Threads: one thread submits and waits; until `close`, `wake` may be called from any.
    """

    def submit(self, slot: int, fd: int, buffer: memoryview, offset: int) -> None:
        """Put a read into a free slot; it begins with the next `wait` at the latest."""
        ...

    def wait(self) -> Sequence[tuple[int, int]]:
        """Sleep until reads complete or `wake` is called; return (slot, bytes or -errno) pairs.

        Raises:
            OSError: the ring is broken; nothing will complete any more.
        """
        ...

    def wake(self) -> None:
        """End the wait that is going on, or the next one."""
        ...

    def close(self) -> None:
        """Wait for reads in flight, drop the others; idempotent.

        Raises:
            OSError: they cannot be waited for and may still write to their memory, which is kept
                alive to the end of the process.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Flight:
    """A chunk in a slot, and since when."""

    chunk: Chunk
    start_s: float


def uring_error() -> str | None:
    """Return why the io_uring reader cannot be used here, or None if it can."""
    if extension is None:
        return extension_error
    code = -extension.uring_probe()
    if code == 0:
        return None
    return (
        f"io_uring cannot be set up: {os.strerror(code)} ({errno.errorcode.get(code, code)}); it "
        "needs Linux 5.6, the setting kernel.io_uring_disabled=0 and, in a container, a seccomp "
        "profile that allows it"
    )


def require_uring() -> None:
    """Refuse to go on where the io_uring reader cannot be used.

    Raises:
        BackendUnavailableError: the message says what is missing.
    """
    reason = uring_error()
    if reason is not None:
        raise BackendUnavailableError(
            f"the reader io_uring is not available: {reason}; or use --reader threads"
        )


class UringReader(ChunkedReader):
    """Keeps up to `queue_depth` direct reads in flight with one thread.

    A ring that breaks is drained before its reads fail. If it cannot be, the kernel may write to
    their memory at any time: the error says so, the ring never frees that memory, and the reader,
    closed by then, reads nothing into it again.
    """

    def __init__(
        self, *, io_chunk_bytes: int, queue_depth: int, trace: Trace | None, ring: Ring
    ) -> None:
        super().__init__(io_chunk_bytes=io_chunk_bytes, queue_depth=queue_depth, trace=trace)
        self._ring = ring
        self._flights: list[_Flight | None] = [None] * queue_depth
        self._free_slots = list(reversed(range(queue_depth)))

    @classmethod
    def open(
        cls,
        *,
        io_chunk_bytes: int,
        queue_depth: int,
        trace: Trace | None = None,
        open_ring: Callable[[int], Ring] | None = None,
    ) -> "UringReader":
        """Set up the ring and start its thread.

        Args:
            io_chunk_bytes: Bytes of one read; a positive multiple of DIRECT_ALIGNMENT.
            queue_depth: Reads in flight; at least 1.
            trace: Receives one event per chunk in the lanes ``read 0``, ``read 1``, ...
            open_ring: Makes a ring of a depth in place of the kernel's; for tests.

        Raises:
            ValueError: chunk size or depth is out of range.
            BackendUnavailableError: io_uring is not available.
            StorageError: the thread cannot be started.
        """
        check_cell(io_chunk_bytes=io_chunk_bytes, queue_depth=queue_depth)
        reader = cls(
            io_chunk_bytes=io_chunk_bytes,
            queue_depth=queue_depth,
            trace=trace,
            ring=(open_ring or _open_ring)(queue_depth),
        )
        reader._start_threads([reader._run])
        return reader

    def close(self) -> None:
        """Wait for reads in flight, drop queued ones, free the ring; idempotent."""
        super().close()
        self._ring.close()

    def _announce(self, num_chunks: int) -> None:
        """Wake the thread where it sleeps; with all slots taken it will wake by itself.

        A reader that closes has no more reads to begin, and its ring may be gone.
        """
        super()._announce(num_chunks)
        has_free_slots = 0 < self._num_inflight < self.queue_depth
        if has_free_slots and not self._is_closing:
            self._ring.wake()

    def _run(self) -> None:
        """Keep the slots full until the reader closes; the body of the thread."""
        try:
            while self._fill():
                for slot, result in self._ring.wait():
                    self._complete(slot, result)
        except OSError as error:
            self._abort(error.with_traceback(None))

    def _fill(self) -> bool:
        """Begin chunks while slots are free; False when none is in flight and none will come."""
        while self._free_slots:
            is_idle = len(self._free_slots) == self.queue_depth
            chunk = self._take_chunk(is_blocking=is_idle)
            if chunk is None:
                return not is_idle
            slot = self._free_slots.pop()
            self._flights[slot] = _Flight(chunk, time.perf_counter())
            self._submit(slot, chunk)
        return True

    def _submit(self, slot: int, chunk: Chunk) -> None:
        view, offset = chunk.rest()
        self._ring.submit(slot, chunk.ticket.file.fd, view, offset)

    def _complete(self, slot: int, result: int) -> None:
        """Take what a read brought: the chunk goes on if it came short, and ends if not."""
        flight = self._flights[slot]
        assert flight is not None, f"slot {slot} completed with {result} but held no read"
        if result < 0:
            flight.chunk.cause = OSError(-result, os.strerror(-result))
        elif flight.chunk.add(result):
            self._submit(slot, flight.chunk)
            return
        self._end_flight(slot, flight)

    def _end_flight(self, slot: int, flight: _Flight) -> None:
        self._flights[slot] = None
        self._free_slots.append(slot)
        self._finish_chunk(flight.chunk, lane=f"read {slot}", start_s=flight.start_s)

    def _abort(self, error: OSError) -> None:
        """Fail all reads: a ring that cannot be waited for will never say what has arrived.

        It is drained first, since a read that has failed gives its memory back.
        """
        with self._lock:
            self._drop_queued("the ring is broken", error)
        try:
            self._ring.close()
        except OSError as lost:
            error = OSError(
                lost.errno,
                "the kernel may write to its memory at any time, which is never used again: "
                f"{lost.strerror}",
            )
        for slot, flight in enumerate(self._flights):
            if flight is not None:
                flight.chunk.cause = error
                self._end_flight(slot, flight)


def _open_ring(depth: int) -> Ring:
    require_uring()
    assert extension is not None, "io_uring was found without the extension"
    try:
        ring: Ring = extension.Uring(depth)
    except OSError as error:
        raise BackendUnavailableError(
            f"io_uring with {depth} reads in flight cannot be set up: {error.strerror}; lower "
            "io.queue_depth, raise the limits (ulimit -l, ulimit -n) or use --reader threads"
        ) from error
    return ring
