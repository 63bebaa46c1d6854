"""Storage that is slow, comes short or fails on chosen reads, and counts what it did.

Pass a ``PreadvShim`` to ``ThreadReader.open(preadv=...)``, or put a ``ShimReader`` in front of any
reader. Both are the only places in the tests that sleep.
"""

import ctypes
import errno
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from zeroinfer.counters import IoCounters
from zeroinfer.native import OpenFile, Reader, ReadTicket


@dataclass(frozen=True, slots=True)
class ReadCall:
    """One read call as the shim saw it."""

    offset: int
    num_bytes: int
    thread: str


@dataclass(slots=True)
class PreadvShim:
    """Stands in for ``os.preadv``; everything defaults to the plain call."""

    latency_s: float | Callable[[], float] = 0.0
    """Seconds slept before each read; see ``random_latency``."""
    fails_at: Callable[[ReadCall], bool] = lambda call: False
    """Reads for which EIO is raised."""
    max_bytes_at: Callable[[ReadCall], int | None] = lambda call: None
    """Most bytes a read may return; None for all."""
    errno_code: int = errno.EIO
    calls: list[ReadCall] = field(default_factory=list)
    bytes_read: int = 0
    max_inflight: int = 0
    _num_inflight: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        (view,) = buffers
        call = ReadCall(offset, view.nbytes, threading.current_thread().name)
        with self._lock:
            self.calls.append(call)
            self._num_inflight += 1
            self.max_inflight = max(self.max_inflight, self._num_inflight)
        try:
            return self._read(fd, view, call)
        finally:
            with self._lock:
                self._num_inflight -= 1

    def _read(self, fd: int, view: memoryview, call: ReadCall) -> int:
        latency_s = self.latency_s() if callable(self.latency_s) else self.latency_s
        if latency_s:
            time.sleep(latency_s)
        if self.fails_at(call):
            raise OSError(self.errno_code, os.strerror(self.errno_code))
        limit = self.max_bytes_at(call)
        count = os.preadv(fd, (view,), call.offset)
        if limit is not None and limit < count:
            # Bytes past the reported ones must not be trusted to be there.
            view[limit:count] = b"\xee" * (count - limit)
            count = limit
        with self._lock:
            self.bytes_read += count
        return count


def random_latency(*, max_s: float, seed: int = 0) -> Callable[[], float]:
    """Return a source of latencies between 0 and `max_s`."""
    source = random.Random(seed)
    return lambda: source.uniform(0.0, max_s)


@dataclass(slots=True)
class Gate:
    """A read call that blocks until the test opens it; deterministic in place of sleeping."""

    shim: PreadvShim = field(default_factory=PreadvShim)
    _opened: threading.Event = field(default_factory=threading.Event)
    _entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._entered.release()
        assert self._opened.wait(30), "the test never opened the gate"
        return self.shim(fd, buffers, offset)

    def wait_entered(self, num_reads: int) -> None:
        """Block until this many reads stand at the gate."""
        for _ in range(num_reads):
            assert self._entered.acquire(timeout=30), "a read never came to the gate"

    def open(self) -> None:
        """Let all reads pass, now and later."""
        self._opened.set()


class ShimReader:
    """A reader in front of another that records submits and makes reads slow.

    `wait` returns no sooner than `latency_s` after a read could have begun on a link that carries
    one read at a time at `bytes_per_s`; `submit` never sleeps.
    """

    def __init__(
        self, inner: Reader, *, latency_s: float = 0.0, bytes_per_s: float | None = None
    ) -> None:
        self.inner = inner
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.submits: list[tuple[Path, int, int, bool]] = []
        self.num_waits = 0
        self._ready_at_s: dict[int, float] = {}
        self._link_free_s = 0.0
        self._lock = threading.Lock()

    @property
    def counters(self) -> IoCounters:
        return self.inner.counters

    def open_file(self, path: Path) -> OpenFile:
        return self.inner.open_file(path)

    def submit(
        self,
        file: OpenFile,
        offset: int,
        destination: memoryview,
        *,
        required_bytes: int,
        is_urgent: bool = False,
    ) -> ReadTicket:
        with self._lock:
            self.submits.append((file.path, offset, destination.nbytes, is_urgent))
            start_s = max(time.perf_counter(), self._link_free_s)
            if self.bytes_per_s is not None:
                self._link_free_s = start_s + destination.nbytes / self.bytes_per_s
            ticket = self.inner.submit(
                file, offset, destination, required_bytes=required_bytes, is_urgent=is_urgent
            )
            self._ready_at_s[id(ticket)] = max(start_s, self._link_free_s) + self.latency_s
        return ticket

    def wait(self, ticket: ReadTicket) -> None:
        self.inner.wait(ticket)
        with self._lock:
            self.num_waits += 1
            ready_at_s = self._ready_at_s.pop(id(ticket), 0.0)
        time.sleep(max(0.0, ready_at_s - time.perf_counter()))

    def close(self) -> None:
        self.inner.close()


def aligned_memory(num_bytes: int) -> memoryview:
    """Return writable page-aligned memory filled with 0xFF; freed with the last view of it."""
    memory = memoryview(mmap.mmap(-1, max(1, num_bytes)))[:num_bytes]
    memory[:] = b"\xff" * num_bytes
    return memory


@contextmanager
def ramfs_mount(folder: Path):
    """Mount a file system without O_DIRECT on an existing folder; needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"ramfs", bytes(folder), b"ramfs", 0, None) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount of ramfs at {folder}: {os.strerror(code)}")
    try:
        yield folder
    finally:
        libc.umount2(bytes(folder), 0)
