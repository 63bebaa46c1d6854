"""A storage reader made of sleeping threads that call ``preadv`` with O_DIRECT.

It needs nothing but POSIX, so it works where io_uring is forbidden. Each thread takes the next
chunk of the oldest read; a read is finished before the next one begins, yet threads never pause
at the border between two reads. Chunks are counted from the start of the range, not on a grid of
the file: a range then costs the fewest calls and only its last chunk is smaller.

The surprising part: a short direct read of an odd number of bytes cannot be continued where it
stopped, since offset and address must stay aligned; the last partial block is read again.
"""

import ctypes
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeroinfer.closing import Closing
from zeroinfer.counters import IoCounters, Trace
from zeroinfer.errors import StorageError
from zeroinfer.native.open_direct import open_for_reading
from zeroinfer.native.reader import DIRECT_ALIGNMENT, OpenFile, ReadTicket
from zeroinfer.units import align_down, ceil_div

__all__ = ["PreadvCall", "ThreadReader"]

PreadvCall = Callable[[int, Sequence[memoryview], int], int]
"""The signature of ``os.preadv``: file descriptor, buffers, offset; returns bytes read."""

_IDLE_CHECK_S = 1.0
"""How often an idle thread looks whether the interpreter is ending; see ``_next_chunk``."""


@dataclass(slots=True, eq=False)
class _Ticket:
    """A read that was submitted; all fields but `is_done` are guarded by the reader's lock."""

    file: OpenFile
    offset: int
    destination: memoryview
    required_bytes: int
    num_bytes: int
    next_start: int = 0
    num_inflight: int = 0
    failure: str | None = None
    cause: OSError | None = None
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Bytes ``start`` to ``stop`` of a ticket's destination."""

    ticket: _Ticket
    start: int
    stop: int

    @property
    def file_offset(self) -> int:
        return self.ticket.offset + self.start

    @property
    def required_bytes(self) -> int:
        return max(0, min(self.stop, self.ticket.required_bytes) - self.start)


@dataclass(slots=True)
class _Outcome:
    """What reading one chunk gave."""

    bytes_arrived: int = 0
    bytes_read: int = 0
    num_reads: int = 0
    cause: OSError | None = None


class ThreadReader(Closing):
    """Keeps up to `queue_depth` direct reads in flight; implements ``Reader``.

    Use it as a context manager or call ``close``. See ``Reader`` for lifetime and thread rules.
    A failed ticket counts as done only when none of its chunks is in flight any more, so its
    destination may be used again after ``wait`` raised.
    """

    def __init__(
        self, *, io_chunk_bytes: int, queue_depth: int, trace: Trace, preadv: PreadvCall
    ) -> None:
        self.io_chunk_bytes = io_chunk_bytes
        self.queue_depth = queue_depth
        self._trace = trace
        self._preadv = preadv
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._queue: deque[_Ticket] = deque()
        self._urgent_queue: deque[_Ticket] = deque()
        self._counters = IoCounters()
        self._num_inflight = 0
        self._busy_since_s = 0.0
        self._is_closing = False
        self._files: dict[Path, OpenFile] = {}
        self._files_lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    @classmethod
    def open(
        cls,
        *,
        io_chunk_bytes: int,
        queue_depth: int,
        trace: Trace | None = None,
        preadv: PreadvCall = os.preadv,
    ) -> "ThreadReader":
        """Start the threads.

        Args:
            io_chunk_bytes: Bytes of one read call; a positive multiple of DIRECT_ALIGNMENT.
            queue_depth: Threads, so reads in flight; at least 1.
            trace: Receives one event per chunk in the lanes ``read 0``, ``read 1``, ...
            preadv: The read call; tests pass one that is slow, comes short or fails.

        Raises:
            ValueError: chunk size or depth is out of range.
        """
        if io_chunk_bytes <= 0 or io_chunk_bytes % DIRECT_ALIGNMENT:
            raise ValueError(
                f"io_chunk_bytes must be a positive multiple of {DIRECT_ALIGNMENT}, "
                f"got {io_chunk_bytes}"
            )
        if queue_depth < 1:
            raise ValueError(f"queue_depth must be at least 1, got {queue_depth}")
        reader = cls(
            io_chunk_bytes=io_chunk_bytes,
            queue_depth=queue_depth,
            trace=trace or Trace(),
            preadv=preadv,
        )
        reader._start_threads()
        return reader

    @property
    def counters(self) -> IoCounters:
        """Bytes, reads and busy time so far; the same object each time, so it goes on counting."""
        with self._lock:
            if self._num_inflight:
                self._count_busy_time()
            return self._counters

    def open_file(self, path: Path) -> OpenFile:
        """Open a file once; see ``Reader.open_file``."""
        with self._files_lock:
            file = self._files.get(path)
            if file is None:
                if self._is_closing:
                    raise StorageError(f"cannot open {path}: the reader is closed")
                file = self._files[path] = open_for_reading(path)
            return file

    def submit(
        self,
        file: OpenFile,
        offset: int,
        destination: memoryview,
        *,
        required_bytes: int,
        is_urgent: bool = False,
    ) -> ReadTicket:
        """Queue a read and return at once; see ``Reader.submit``.

        Raises:
            ValueError: offset, address or length does not suit a direct file, or
                `required_bytes` is larger than the destination.
            StorageError: the reader is closed.
        """
        view = destination.cast("B")
        _check_range(file, offset, view, required_bytes)
        ticket = _Ticket(file, offset, view, required_bytes, view.nbytes)
        with self._lock:
            if self._is_closing:
                raise StorageError(f"cannot read {file.path}: the reader is closed")
            if ticket.num_bytes == 0:
                ticket.is_done = True
                return ticket
            (self._urgent_queue if is_urgent else self._queue).append(ticket)
            self._work.notify(ceil_div(ticket.num_bytes, self.io_chunk_bytes))
        return ticket

    def wait(self, ticket: ReadTicket) -> None:
        """Block, asleep, until the read is complete; see ``Reader.wait``."""
        assert isinstance(ticket, _Ticket), f"not a ticket of this reader: {ticket!r}"
        if not ticket.is_done:
            with self._lock:
                while not ticket.is_done:
                    self._done.wait()
        if ticket.failure is not None:
            error = StorageError(ticket.failure)
            if ticket.cause is not None:
                error.errno = ticket.cause.errno
            raise error from ticket.cause

    def close(self) -> None:
        """Wait for reads in flight, drop queued ones, stop threads, close files; idempotent."""
        with self._lock:
            self._is_closing = True
            for queue in (self._urgent_queue, self._queue):
                for ticket in queue:
                    self._fail(ticket, f"read of {ticket.file.path} dropped: reader closed", None)
                queue.clear()
            self._work.notify_all()
        for thread in self._threads:
            thread.join()
        with self._files_lock:
            while self._files:
                os.close(self._files.popitem()[1].fd)

    def _start_threads(self) -> None:
        try:
            for idx in range(self.queue_depth):
                thread = threading.Thread(target=self._run, args=(f"read {idx}",), daemon=False)
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            self.close()
            raise StorageError(
                f"cannot start reader threads: got {len(self._threads)}, need "
                f"{self.queue_depth}; lower the queue depth"
            ) from error

    def _run(self, lane: str) -> None:
        """Read chunks until the reader closes; the body of each thread."""
        while (chunk := self._next_chunk()) is not None:
            start_s = time.perf_counter()
            outcome = self._read_chunk(chunk)
            if self._trace.is_enabled:
                name = f"{chunk.ticket.file.path.name} at {chunk.file_offset}"
                self._trace.add(lane, name, start_s, time.perf_counter())
            self._finish_chunk(chunk, outcome)
            # A sleeping thread must not keep the caller's memory alive.
            del chunk

    def _next_chunk(self) -> _Chunk | None:
        """Take the next chunk, asleep until there is one; None when the thread should end.

        The wait has a limit because the interpreter joins threads before it runs any clean-up: a
        program that ends without ``close`` (an exception, Ctrl-C) would otherwise hang.
        """
        with self._lock:
            while not (queue := self._urgent_queue or self._queue):
                if self._is_closing or not threading.main_thread().is_alive():
                    return None
                self._work.wait(_IDLE_CHECK_S)
            ticket = queue[0]
            start = ticket.next_start
            ticket.next_start = stop = min(start + self.io_chunk_bytes, ticket.num_bytes)
            if stop == ticket.num_bytes:
                queue.popleft()
            ticket.num_inflight += 1
            if self._num_inflight == 0:
                self._busy_since_s = time.perf_counter()
            self._num_inflight += 1
            return _Chunk(ticket, start, stop)

    def _read_chunk(self, chunk: _Chunk) -> _Outcome:
        """Read until the chunk is full, or holds what is required of it and came short."""
        outcome = _Outcome()
        file = chunk.ticket.file
        try:
            while self._read_once(chunk, outcome):
                pass
            if not file.is_direct:
                length = chunk.stop - chunk.start
                os.posix_fadvise(file.fd, chunk.file_offset, length, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            # The traceback's frames would keep the caller's memory alive.
            outcome.cause = error.with_traceback(None)
        return outcome

    def _read_once(self, chunk: _Chunk, outcome: _Outcome) -> bool:
        """Make one read call; whether another one is needed."""
        ticket = chunk.ticket
        done = outcome.bytes_arrived
        if ticket.file.is_direct:
            done = align_down(done, DIRECT_ALIGNMENT)
        with ticket.destination[chunk.start + done : chunk.stop] as view:
            count = self._preadv(ticket.file.fd, (view,), chunk.file_offset + done)
        outcome.num_reads += 1
        outcome.bytes_read += count
        is_at_end = done + count <= outcome.bytes_arrived
        outcome.bytes_arrived = max(outcome.bytes_arrived, done + count)
        is_enough = outcome.bytes_arrived >= chunk.required_bytes
        return not is_enough and not is_at_end

    def _finish_chunk(self, chunk: _Chunk, outcome: _Outcome) -> None:
        ticket = chunk.ticket
        with self._lock:
            self._counters.bytes_read += outcome.bytes_read
            self._counters.num_reads += outcome.num_reads
            self._num_inflight -= 1
            if self._num_inflight == 0:
                self._count_busy_time()
            ticket.num_inflight -= 1
            if outcome.cause is not None or outcome.bytes_arrived < chunk.required_bytes:
                self._fail(ticket, _describe_failure(chunk, outcome), outcome.cause)
            else:
                self._complete_if_last(ticket)

    def _fail(self, ticket: _Ticket, message: str, cause: OSError | None) -> None:
        """Drop the chunks of a ticket that were not begun; the lock is held."""
        if ticket.failure is None:
            ticket.failure, ticket.cause = message, cause
        if ticket.next_start < ticket.num_bytes:
            ticket.next_start = ticket.num_bytes
            if not self._is_closing:
                queue = self._queue if ticket in self._queue else self._urgent_queue
                queue.remove(ticket)
        self._complete_if_last(ticket)

    def _complete_if_last(self, ticket: _Ticket) -> None:
        """Mark a ticket done when all its chunks are; the lock is held."""
        if ticket.num_inflight == 0 and ticket.next_start == ticket.num_bytes:
            ticket.destination = memoryview(b"")
            ticket.is_done = True
            self._done.notify_all()

    def _count_busy_time(self) -> None:
        """Add the time since the last count; the lock is held and reads were in flight."""
        now_s = time.perf_counter()
        self._counters.busy_s += now_s - self._busy_since_s
        self._busy_since_s = now_s


def _check_range(file: OpenFile, offset: int, view: memoryview, required_bytes: int) -> None:
    """Refuse what the kernel would refuse later, in another thread, as EINVAL."""
    if view.readonly:
        raise ValueError(f"destination of a read of {file.path} is read-only; need writable memory")
    if not 0 <= required_bytes <= view.nbytes:
        raise ValueError(f"required_bytes must be 0 to {view.nbytes}, got {required_bytes}")
    if not file.is_direct or view.nbytes == 0:
        return
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    for name, value in (("offset", offset), ("address", address), ("length", view.nbytes)):
        if value % DIRECT_ALIGNMENT:
            raise ValueError(
                f"{name} of a direct read of {file.path} must be a multiple of "
                f"{DIRECT_ALIGNMENT}, got {value}"
            )


def _describe_failure(chunk: _Chunk, outcome: _Outcome) -> str:
    file = chunk.ticket.file
    what = f"read of {chunk.stop - chunk.start} bytes at {chunk.file_offset} of {file.path}"
    got = f"got {outcome.bytes_arrived} bytes, need {chunk.required_bytes}"
    if outcome.cause is not None:
        code = errno.errorcode.get(outcome.cause.errno or 0, "unknown error")
        return f"{what} failed: {outcome.cause.strerror} ({code}); {got}; check the disk"
    return (
        f"{what} came short: {got}; the file had {file.size_bytes} bytes when it was opened "
        "and was cut since; restore it and run again"
    )
