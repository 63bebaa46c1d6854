"""Rings for ``UringReader.open(open_ring=...)``: made of threads, or of faults."""

import os
import queue
from concurrent.futures import ThreadPoolExecutor

from tests.helpers.faults import Faults
from zeroinfer.native import PreadvCall, Ring, ThreadReader, UringReader, uring_error
from zeroinfer.native.extension import extension

__all__ = ["FaultyRing", "PreadvRing", "open_faulty_reader", "open_uring_reader"]


class PreadvRing:
    """A ring whose reads are calls of a function, in threads of its own."""

    def __init__(self, depth: int, preadv: PreadvCall = os.preadv) -> None:
        self._preadv = preadv
        self._pool = ThreadPoolExecutor(depth)
        self._events: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()

    def submit(self, slot: int, fd: int, buffer: memoryview, offset: int) -> None:
        self._pool.submit(self._read, slot, fd, buffer, offset)

    def wait(self) -> list[tuple[int, int]]:
        event = self._events.get()
        return [] if event is None else [event]

    def wake(self) -> None:
        self._events.put(None)

    def close(self) -> None:
        self._pool.shutdown()

    def _read(self, slot: int, fd: int, buffer: memoryview, offset: int) -> None:
        # The pool keeps its arguments a moment longer than the caller has to wait.
        with buffer:
            try:
                result = self._preadv(fd, (buffer,), offset)
            except OSError as error:
                result = -(error.errno or 0)
        self._events.put((slot, result))


class FaultyRing:
    """A ring in front of another: what completes there comes late, in any order, and spoilt."""

    def __init__(self, inner: Ring, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._views: dict[int, memoryview] = {}
        self._held: list[tuple[int, int]] = []

    def submit(self, slot: int, fd: int, buffer: memoryview, offset: int) -> None:
        self._views[slot] = buffer[:]
        self._inner.submit(slot, fd, buffer, offset)

    def wait(self) -> list[tuple[int, int]]:
        if not self._held or (self._views and self._faults.is_late()):
            for slot, result in self._inner.wait():
                with self._views.pop(slot) as view:
                    self._held.append((slot, self._faults.spoil(view, result)))
        released, self._held = self._faults.split(self._held)
        return released

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()


def open_uring_reader(*, preadv: PreadvCall | None = None, **options) -> UringReader:
    """Open a reader that takes what ``ThreadReader.open`` takes, on the kernel's ring if it can."""
    if preadv is None and uring_error() is None:
        return UringReader.open(**options)
    return UringReader.open(
        open_ring=lambda depth: PreadvRing(depth, preadv or os.preadv), **options
    )


def open_faulty_reader(name: str, faults: Faults, **options) -> ThreadReader | UringReader:
    """Open the reader of a name with faults between it and the disk."""
    if name == "threads":
        return ThreadReader.open(preadv=faults.preadv, **options)
    is_real = extension is not None and uring_error() is None
    make = extension.Uring if is_real else PreadvRing
    return UringReader.open(open_ring=lambda depth: FaultyRing(make(depth), faults), **options)
