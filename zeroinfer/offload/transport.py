"""Bringing a unit to its home: the coordinator says when, a transport says how.

On the CPU a read from storage lands in the home itself. On a device a copy follows; see
device_transport.
"""

import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from zeroinfer.counters import Trace
from zeroinfer.errors import StorageError
from zeroinfer.memory import Event
from zeroinfer.native import Reader, ReadTicket
from zeroinfer.offload.waiting import wait_all
from zeroinfer.offload.weight_store import Home

__all__ = ["DirectTransport", "Transport", "submit_reads"]


class Transport(Protocol):
    """Moves units for one coordinator, from its thread; a ticket is opaque to the coordinator."""

    @property
    def bytes_needed(self) -> int:
        """Tensor bytes asked of the storage so far."""
        ...

    @property
    def wait_s(self) -> float:
        """Seconds the computing stood still for units so far."""
        ...

    def submit(self, home: Home) -> Any:
        """Begin to fill a home whose former unit was released, and return a ticket at once."""
        ...

    def wait(self, ticket: Any) -> Event | None:
        """Let the computing that follows find the unit in its home; blocks, asleep, where needed.

        Returns:
            the point from which the computing goes on; None if that is now.

        Raises:
            StorageError: a read of the unit failed.
        """
        ...

    def release(self, home: Home) -> None:
        """Note that all that uses the home has been given to the compute device."""
        ...

    def load(self, home: Home) -> None:
        """Block until a unit that stays in host memory is there, wherever the coordinator stands.

        Raises:
            StorageError: a read of the unit failed.
        """
        ...

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """Return what was gathered or made in host memory where the computing finds it."""
        ...

    def drain(self, tickets: Iterable[Any]) -> None:
        """Block until nothing of these tickets is in flight, whatever became of it."""
        ...


class DirectTransport:
    """Reads into the home itself; see `Transport`."""

    def __init__(self, reader: Reader, trace: Trace) -> None:
        self._reader = reader
        self._trace = trace
        self.bytes_needed = 0
        self.wait_s = 0.0

    def submit(self, home: Home) -> list[ReadTicket]:
        """Submit the unit's reads; see `Transport.submit`."""
        self.bytes_needed += home.num_bytes
        return submit_reads(self._reader, home)

    def wait(self, ticket: Sequence[ReadTicket]) -> None:
        """Sleep until the unit has landed; see `Transport.wait`."""
        was_done = all(read.is_done for read in ticket)
        start_s = time.perf_counter()
        wait_all(self._reader, ticket)
        if not was_done:
            stop_s = time.perf_counter()
            self.wait_s += stop_s - start_s
            self._trace.add("wait", "unit", start_s, stop_s)

    def release(self, home: Home) -> None:
        """Do nothing: what used the home has been computed."""

    def load(self, home: Home) -> None:
        """Never called: every home is the coordinator's own."""
        raise AssertionError(f"unit {home.unit_idx} has no home of its own beside the others")

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values: they are where they are used."""
        return values

    def drain(self, tickets: Iterable[Sequence[ReadTicket]]) -> None:
        """Wait for every read; see `Transport.drain`."""
        for ticket in tickets:
            with contextlib.suppress(StorageError):
                wait_all(self._reader, ticket)


def submit_reads(reader: Reader, home: Home) -> list[ReadTicket]:
    """Submit the reads that fill a home in host memory."""
    return [
        reader.submit(
            run.file, run.run.offset, run.destination, required_bytes=run.run.required_bytes
        )
        for run in home.runs
    ]
