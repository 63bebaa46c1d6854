"""Deciding when each fetch unit is read: ahead of its use, into a place that is free.

The engine's loop says `acquire` and `release` in the order of the plan. In between, the
coordinator keeps reads queued as far ahead as the depth and the ring allow, across unit and step
borders. Nothing else moves weights. With depth 0 it fetches when asked and never ahead: that plain
loop is the oracle of all others.

A resident unit is fetched once, in the first step, on its way through the same loop.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zeroinfer.counters import Trace
from zeroinfer.memory import Event
from zeroinfer.native import Reader
from zeroinfer.offload.row_gather import RowTable
from zeroinfer.offload.transport import DirectTransport, Transport
from zeroinfer.offload.weight_store import Home
from zeroinfer.planner import Plan

__all__ = ["FetchCoordinator", "LandedUnit"]

FetchEvent = Callable[[str, int, int], None]
"""Called with (submit | landed | release, step, unit_idx); for tests and traces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fetch:
    step: int
    unit_idx: int


class LandedUnit:
    """Tensors of an acquired unit; see zeroinfer.layers.LandedWeights."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        gather: Callable[[str, torch.Tensor], torch.Tensor],
        *,
        ready: Event | None = None,
    ) -> None:
        self._tensors = tensors
        self._gather = gather
        self.ready = ready
        """From where the computing finds it; None if it was there before."""

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the landed tensor, or the landed rows of a piece."""
        return self._tensors[name]

    def gather(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Return rows `ids` of a matrix that is not fetched as a whole; blocks."""
        return self._gather(name, ids)


class FetchCoordinator:
    """Keeps fetches in flight for one plan; used from the engine's thread alone."""

    def __init__(
        self,
        *,
        plan: Plan,
        homes: Mapping[int, Home],
        tables: Mapping[str, RowTable],
        reader: Reader,
        transport: Transport | None = None,
        is_poisoned: bool = False,
        trace: Trace | None = None,
        on_event: FetchEvent | None = None,
    ) -> None:
        self._plan = plan
        self._homes = homes
        self._tables = tables
        self._reader = reader
        self._is_poisoned = is_poisoned
        self._trace = trace or Trace()
        self._transport = transport or DirectTransport(reader, self._trace)
        self._on_event = on_event
        self._ring_position = {idx: position for position, idx in enumerate(plan.streamed)}
        self._queue: deque[_Fetch] = deque()
        self._tickets: dict[int, Any] = {}
        self._loaded: set[int] = set()
        self._step = -1
        self._num_steps_queued = 0
        self._num_ahead = 0
        self._num_released = 0
        self._rows_needed_bytes = 0
        self._rows_wait_s = 0.0
        self.num_hits = 0
        """Acquired units that had been submitted before they were asked for."""
        self.num_acquired = 0
        """Acquired units that had to be fetched."""

    @property
    def bytes_needed(self) -> int:
        """Tensor bytes that were asked of the storage, gathered rows included."""
        return self._rows_needed_bytes + self._transport.bytes_needed

    @property
    def fetch_wait_s(self) -> float:
        """Seconds in which nothing was computed because weights were not there."""
        return self._rows_wait_s + self._transport.wait_s

    def start_step(self, *, has_next: bool) -> None:
        """Begin a pass over the units; `has_next` allows prefetching for the one after it."""
        self._step += 1
        while self._num_steps_queued < self._step + (2 if has_next else 1):
            self._queue_step(self._num_steps_queued)
            self._num_steps_queued += 1
        self._advance()

    def acquire(self, unit_idx: int) -> LandedUnit:
        """Wait until a unit has landed.

        Raises:
            StorageError: a read of the unit failed.
        """
        home = self._homes.get(unit_idx)
        if home is None or unit_idx in self._loaded:
            return LandedUnit(home.tensors if home else {}, self.gather)
        self.num_acquired += 1
        if unit_idx in self._tickets:
            self.num_hits += 1
            self._num_ahead -= 1
        else:
            self._submit(self._take(unit_idx))
        ready = self._transport.wait(self._tickets[unit_idx])
        del self._tickets[unit_idx]
        self._event("landed", unit_idx)
        if home.is_resident:
            self._loaded.add(unit_idx)
        self._advance()
        return LandedUnit(home.tensors, self.gather, ready=ready)

    def release(self, unit_idx: int) -> None:
        """Give the unit's place to the next one; nobody may hold its tensors any more."""
        home = self._homes.get(unit_idx)
        if home is None or home.is_resident:
            return
        self._event("release", unit_idx)
        if self._is_poisoned:
            home.arena.poison(home.offset, home.footprint)
        self._transport.release(home)
        self._num_released += 1
        self._advance()

    def gather(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of a gathered matrix; resident pieces are loaded first."""
        table = self._tables[name]
        for home in table.homes:
            if self._homes.get(home.unit_idx) is home:
                self.acquire(home.unit_idx)
            else:
                self._transport.load(home)
        start_s = time.perf_counter()
        rows, needed = table.gather(ids, self._reader, place=self._transport.upload)
        self._rows_needed_bytes += needed
        if needed:
            stop_s = time.perf_counter()
            self._rows_wait_s += stop_s - start_s
            self._trace.add("wait", "rows", start_s, stop_s)
        return rows

    def drain(self) -> None:
        """Wait until nothing is in flight, whatever became of it; before its memory goes."""
        self._transport.drain(self._tickets.values())

    def restart(self) -> None:
        """Forget a pass that was cut short, so that the next `start_step` begins at unit 0.

        Reads in flight are waited for: what has landed ahead is fetched again.
        """
        self.drain()
        self._tickets.clear()
        self._queue.clear()
        self._num_ahead = 0
        self._step = -1
        self._num_steps_queued = 0
        self._num_released = 0

    def _queue_step(self, step: int) -> None:
        if step > 0:
            self._queue.extend(_Fetch(step=step, unit_idx=idx) for idx in self._plan.streamed)
            return
        fetched = [idx for idx in self._homes if idx not in self._loaded]
        self._queue.extend(
            _Fetch(step=step, unit_idx=idx) for idx in sorted(fetched, key=self._first_use)
        )

    def _first_use(self, unit_idx: int) -> tuple[int, int]:
        """Order of the first pass: resident rows of gathered matrices are needed at its start."""
        is_table = any(
            self._homes.get(unit_idx) is home for t in self._tables.values() for home in t.homes
        )
        return (-1 if is_table else 0, unit_idx)

    def _take(self, unit_idx: int) -> _Fetch:
        """Remove the first queued fetch of a unit."""
        fetch = next((item for item in self._queue if item.unit_idx == unit_idx), None)
        assert fetch is not None, (
            f"unit {unit_idx} was acquired in step {self._step} but not queued"
        )
        self._queue.remove(fetch)
        return fetch

    def _advance(self) -> None:
        """Submit queued fetches as far as depth, free places and the next step allow."""
        while self._queue and self._num_ahead < self._plan.prefetch_depth:
            fetch = self._queue[0]
            if not self._is_place_free(fetch):
                return
            self._queue.popleft()
            self._submit(fetch)
            self._num_ahead += 1

    def _is_place_free(self, fetch: _Fetch) -> bool:
        position = self._ring_position.get(fetch.unit_idx)
        if position is None:
            return True
        blocker = fetch.step * len(self._plan.streamed) + position
        return blocker - self._plan.ring.lookback[position] < self._num_released

    def _submit(self, fetch: _Fetch) -> None:
        assert self._is_place_free(fetch), (
            f"place of unit {fetch.unit_idx} is still in use in step {fetch.step}"
        )
        home = self._homes[fetch.unit_idx]
        self._event("submit", fetch.unit_idx)
        self._tickets[fetch.unit_idx] = self._transport.submit(home)

    def _event(self, kind: str, unit_idx: int) -> None:
        if self._on_event is not None:
            self._on_event(kind, self._step, unit_idx)
