"""Counters of bytes and seconds, the age of the process, and trace events in Chrome's JSON format.

Counting happens where the transfer happens; the report and the tests read the same numbers.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

__all__ = ["IoCounters", "Trace", "seconds_since_start"]


def seconds_since_start(at_s: float) -> float:
    """Return seconds from the start of this process, before any exec, to a `perf_counter` time."""
    # Not by the time of boot in /proc/stat, which is cut to whole seconds.
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    return age_s - (time.perf_counter() - at_s)


@dataclass(slots=True)
class IoCounters:
    """What one link carried so far; written by its owner under its own lock."""

    bytes_read: int = 0
    """Bytes that the storage delivered, alignment padding included."""
    num_reads: int = 0
    """Completed read calls."""
    busy_s: float = 0.0
    """Seconds in which at least one read was in flight."""


@dataclass(slots=True)
class Trace:
    """Collects complete events in lanes; a disabled trace costs one attribute test per event."""

    is_enabled: bool = False
    max_events: int = 1_000_000
    lane_prefix: str = ""
    _events: list[tuple[str, str, float, float]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def within(self, name: str) -> "Trace":
        """Return a trace that adds to this one, in lanes of its own.

        Args:
            name: what its lanes belong to; their names begin with it.
        """
        return replace(self, lane_prefix=f"{self.lane_prefix}{name} ")

    def add(self, lane: str, name: str, start_s: float, stop_s: float) -> None:
        """Record one event; times are from ``time.perf_counter``. Safe from any thread."""
        if self.is_enabled and len(self._events) < self.max_events:
            with self._lock:
                self._events.append((self.lane_prefix + lane, name, start_s, stop_s))

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Record the time the body takes."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, name, start_s, time.perf_counter())

    def write(self, path: Path) -> None:
        """Write the events as Chrome/Perfetto JSON, one thread lane each."""
        lanes = {lane: idx for idx, lane in enumerate(sorted({e[0] for e in self._events}))}
        events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": idx, "args": {"name": lane}}
            for lane, idx in lanes.items()
        ]
        origin_s = min((e[2] for e in self._events), default=0.0)
        events += [
            {
                "name": name,
                "ph": "X",
                "pid": 1,
                "tid": lanes[lane],
                "ts": (start_s - origin_s) * 1e6,
                "dur": (stop_s - start_s) * 1e6,
            }
            for lane, name, start_s, stop_s in self._events
        ]
        path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
