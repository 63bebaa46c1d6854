"""Faults of a disk, drawn from a seeded source: late, out of order, short, empty, failed."""

import errno
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from zeroinfer.native import DIRECT_ALIGNMENT

__all__ = ["Faults"]

T = TypeVar("T")
_MAX_LATENCY_S = 3e-4


@dataclass(slots=True)
class Faults:
    """How often a read is spoilt, and how often it was; safe from any thread."""

    seed: int
    late: float = 0.0
    short: float = 0.0
    """Some of the bytes are there, a block at least: no disk gives less of a direct read."""
    empty: float = 0.0
    """None are, as beyond the end of the file."""
    failed: float = 0.0
    """EIO."""
    num_short: int = 0
    num_fatal: int = 0
    """Reads that may make their ticket fail."""
    _source: random.Random = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._source = random.Random(self.seed)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Stand in for ``os.preadv``; late calls overtake one another."""
        if self.is_late():
            time.sleep(self._source.uniform(0.0, _MAX_LATENCY_S))
        result = self.spoil(buffers[0], os.preadv(fd, buffers, offset))
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    def spoil(self, view: memoryview, result: int) -> int:
        """Return what is reported of a read that brought `result` bytes, and spoil the others."""
        with self._lock:
            chance = self._source.random()
            if chance < self.failed:
                self.num_fatal += 1
                count, reported = 0, -errno.EIO
            elif chance < self.failed + self.empty:
                self.num_fatal += 1
                count = reported = 0
            elif chance < self.failed + self.empty + self.short and result > DIRECT_ALIGNMENT:
                self.num_short += 1
                count = reported = self._source.randrange(DIRECT_ALIGNMENT, result)
            else:
                return result
        # Bytes that were not reported must not be trusted to be there.
        view[count:] = b"\xee" * (len(view) - count)
        return reported

    def is_late(self) -> bool:
        """Draw whether the next completion is late."""
        with self._lock:
            return self._source.random() < self.late

    def split(self, events: list[T]) -> tuple[list[T], list[T]]:
        """Split events, in a new order, into those that come now and those that come later."""
        with self._lock:
            self._source.shuffle(events)
            num_now = self._source.randint(0, len(events))
        return events[:num_now], events[num_now:]
