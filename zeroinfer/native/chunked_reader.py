"""What all storage readers share: tickets, the order of their chunks, counters and failures.

A backend takes chunks, has them read and hands them back. A read is finished before the next one
begins, yet nothing pauses at the border between two reads. Chunks are counted from the start of
the range, not on a grid of the file: a range then costs the fewest calls and only its last chunk
is smaller.

The surprising part: a short direct read of an odd number of bytes cannot be continued where it
stopped, since offset and address must stay aligned; the last partial block is read again.
"""

import abc
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

__all__ = ["Chunk", "ChunkedReader", "Ticket", "check_cell"]

_IDLE_CHECK_S = 1.0
"""How often an idle thread looks whether the interpreter is ending; see ``_take_chunk``."""


@dataclass(slots=True, eq=False)
class Ticket:
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


@dataclass(slots=True, eq=False)
class Chunk:
    """Bytes ``start`` to ``stop`` of a ticket's destination, and what has come of them so far."""

    ticket: Ticket
    start: int
    stop: int
    bytes_arrived: int = 0
    bytes_read: int = 0
    num_reads: int = 0
    cause: OSError | None = None
    """Why a read call failed."""

    @property
    def file_offset(self) -> int:
        """Offset in the file of the first byte."""
        return self.ticket.offset + self.start

    @property
    def required_bytes(self) -> int:
        """Bytes that must arrive; the others may lie beyond the end of the file."""
        return max(0, min(self.stop, self.ticket.required_bytes) - self.start)

    def rest(self) -> tuple[memoryview, int]:
        """Return the memory that the next read call fills, and the file offset it begins at."""
        done = self._usable_bytes()
        view = self.ticket.destination[self.start + done : self.stop]
        return view, self.file_offset + done

    def add(self, count: int) -> bool:
        """Count the bytes that a read call brought; return whether another call is needed."""
        stop = self._usable_bytes() + count
        is_at_end = stop <= self.bytes_arrived
        self.num_reads += 1
        self.bytes_read += count
        self.bytes_arrived = max(self.bytes_arrived, stop)
        is_enough = self.bytes_arrived >= self.required_bytes
        return not is_enough and not is_at_end

    def _usable_bytes(self) -> int:
        """Bytes that need not be read again."""
        is_direct = self.ticket.file.is_direct
        return align_down(self.bytes_arrived, DIRECT_ALIGNMENT) if is_direct else self.bytes_arrived


class ChunkedReader(Closing, abc.ABC):
    """Keeps up to `queue_depth` chunks in flight; implements ``Reader`` but for reading itself.

    Use it as a context manager or call ``close``. See ``Reader`` for lifetime and thread rules.
    A failed ticket counts as done only when none of its chunks is in flight any more, so its
    destination may be used again after ``wait`` raised.
    """

    def __init__(self, *, io_chunk_bytes: int, queue_depth: int, trace: Trace | None) -> None:
        self.io_chunk_bytes = io_chunk_bytes
        self.queue_depth = queue_depth
        self._trace = trace or Trace()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._queue: deque[Ticket] = deque()
        self._urgent_queue: deque[Ticket] = deque()
        self._counters = IoCounters()
        self._num_inflight = 0
        self._busy_since_s = 0.0
        self._is_closing = False
        self._files: dict[Path, OpenFile] = {}
        self._files_lock = threading.Lock()
        self._threads: list[threading.Thread] = []

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
        ticket = Ticket(file, offset, view, required_bytes, view.nbytes)
        with self._lock:
            if self._is_closing:
                raise StorageError(f"cannot read {file.path}: the reader is closed")
            if ticket.num_bytes == 0:
                ticket.is_done = True
                return ticket
            (self._urgent_queue if is_urgent else self._queue).append(ticket)
            self._announce(ceil_div(ticket.num_bytes, self.io_chunk_bytes))
        return ticket

    def wait(self, ticket: ReadTicket) -> None:
        """Block, asleep, until the read is complete; see ``Reader.wait``."""
        assert isinstance(ticket, Ticket), f"not a ticket of this reader: {ticket!r}"
        if not ticket.is_done:
            with self._lock:
                while not ticket.is_done:
                    self._done.wait()
        if ticket.failure is not None:
            raise _error_of(ticket, ticket.failure) from ticket.cause

    def close(self) -> None:
        """Wait for reads in flight, drop queued ones, stop threads, close files; idempotent."""
        with self._lock:
            self._drop_queued("reader closed", None)
            self._announce(self.queue_depth)
        for thread in self._threads:
            thread.join()
        with self._files_lock:
            while self._files:
                os.close(self._files.popitem()[1].fd)

    def _announce(self, num_chunks: int) -> None:
        """Wake whoever reads, for new chunks or the end; the lock is held."""
        self._work.notify(num_chunks)

    def _start_threads(self, targets: Sequence[Callable[[], None]]) -> None:
        try:
            for target in targets:
                thread = threading.Thread(target=target, daemon=False)
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            self.close()
            raise StorageError(
                f"cannot start reader threads: got {len(self._threads)}, need {len(targets)}; "
                "lower the queue depth or raise the limit of processes"
            ) from error

    def _take_chunk(self, *, is_blocking: bool = True) -> Chunk | None:
        """Take the next chunk; None when there is none, or when the thread should end.

        A blocking wait, asleep, has a limit because the interpreter joins threads before it runs
        any clean-up: a program that ends without ``close`` (an exception, Ctrl-C) would hang.
        """
        with self._lock:
            while not (queue := self._urgent_queue or self._queue):
                is_ending = self._is_closing or not threading.main_thread().is_alive()
                if is_ending or not is_blocking:
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
            return Chunk(ticket, start, stop)

    def _finish_chunk(self, chunk: Chunk, *, lane: str, start_s: float) -> None:
        """Take a chunk back, with what arrived of it or why nothing did."""
        _drop_pages(chunk)
        ticket = chunk.ticket
        if self._trace.is_enabled:
            name = f"{ticket.file.path.name} at {chunk.file_offset}"
            self._trace.add(lane, name, start_s, time.perf_counter())
        with self._lock:
            self._counters.bytes_read += chunk.bytes_read
            self._counters.num_reads += chunk.num_reads
            self._num_inflight -= 1
            if self._num_inflight == 0:
                self._count_busy_time()
            ticket.num_inflight -= 1
            if chunk.cause is not None or chunk.bytes_arrived < chunk.required_bytes:
                self._fail(ticket, _describe_failure(chunk), chunk.cause)
            else:
                self._complete_if_last(ticket)

    def _drop_queued(self, reason: str, cause: OSError | None) -> None:
        """Refuse new reads and fail those that were not begun; the lock is held."""
        self._is_closing = True
        for queue in (self._urgent_queue, self._queue):
            for ticket in queue:
                self._fail(ticket, f"read of {ticket.file.path} dropped: {reason}", cause)
            queue.clear()

    def _fail(self, ticket: Ticket, message: str, cause: OSError | None) -> None:
        """Drop the chunks of a ticket that were not begun; the lock is held."""
        if ticket.failure is None:
            ticket.failure, ticket.cause = message, cause
        if ticket.next_start < ticket.num_bytes:
            ticket.next_start = ticket.num_bytes
            if not self._is_closing:
                queue = self._queue if ticket in self._queue else self._urgent_queue
                queue.remove(ticket)
        self._complete_if_last(ticket)

    def _complete_if_last(self, ticket: Ticket) -> None:
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


def check_cell(*, io_chunk_bytes: int, queue_depth: int) -> None:
    """Refuse a chunk size or depth that no reader can serve.

    Raises:
        ValueError: one is out of range.
    """
    if io_chunk_bytes <= 0 or io_chunk_bytes % DIRECT_ALIGNMENT:
        raise ValueError(
            f"io_chunk_bytes must be a positive multiple of {DIRECT_ALIGNMENT}, "
            f"got {io_chunk_bytes}"
        )
    if queue_depth < 1:
        raise ValueError(f"queue_depth must be at least 1, got {queue_depth}")


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


def _drop_pages(chunk: Chunk) -> None:
    """Keep a buffered read from filling the page cache with bytes that are not read again soon."""
    file = chunk.ticket.file
    if file.is_direct or chunk.cause is not None:
        return
    try:
        length = chunk.stop - chunk.start
        os.posix_fadvise(file.fd, chunk.file_offset, length, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        # The traceback's frames would keep the caller's memory alive.
        chunk.cause = error.with_traceback(None)


def _error_of(ticket: Ticket, failure: str) -> StorageError:
    """Make the error of a failed read.

    Not where it is raised: with an error in its own frame's variables, all that the frames above
    refer to would stay until the garbage collector comes.
    """
    error = StorageError(failure)
    if ticket.cause is not None:
        error.errno = ticket.cause.errno
    return error


def _describe_failure(chunk: Chunk) -> str:
    file = chunk.ticket.file
    what = f"read of {chunk.stop - chunk.start} bytes at {chunk.file_offset} of {file.path}"
    got = f"got {chunk.bytes_arrived} bytes, need {chunk.required_bytes}"
    if chunk.cause is not None:
        code = errno.errorcode.get(chunk.cause.errno or 0, "unknown error")
        return f"{what} failed: {chunk.cause.strerror} ({code}); {got}; check the disk"
    return (
        f"{what} came short: {got}; the file had {file.size_bytes} bytes when it was opened "
        "and was cut since; restore it and run again"
    )
