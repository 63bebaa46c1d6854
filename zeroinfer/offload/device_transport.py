"""From storage to a device: read into host memory, copy on the device's own queue.

Each unit is a flight with two legs. Its read goes into a place of the staging buffer, or once into
its host home if it belongs to the DRAM tier; its copy follows, in the order of submission, when the
read is complete. Two events guard each place on the device: *landed*, which the computing waits
for, and *free*, recorded at the release of the unit before, which the copy waits for. A staging
place is read into again only after the copy that read from it is done.

The coordinator above decides how far ahead flights begin, as it does for reads on the CPU. Copies
that became possible are queued whenever it calls, so a device that computes by itself is kept fed
by a host that only sleeps.
"""

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from zeroinfer.errors import StorageError
from zeroinfer.memory import Event, TransferEngine
from zeroinfer.native import Reader, ReadTicket
from zeroinfer.offload.device_store import DeviceStore
from zeroinfer.offload.transport import submit_reads
from zeroinfer.offload.waiting import wait_all
from zeroinfer.offload.weight_store import Home

__all__ = ["DeviceTransport"]


@dataclass(kw_only=True, slots=True, eq=False)
class _Flight:
    """One fetch of a unit, on its way to `home`."""

    home: Home
    free: Event
    """Once this is done nothing computes on the home's former bytes."""
    host: Home | None = None
    """Where the read lands; None while no staging place is free."""
    reads: Sequence[ReadTicket] = ()
    landed: Event | None = None
    error: StorageError | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the copy is still to be queued."""
        return self.landed is None and self.error is None

    @property
    def holds_its_slot(self) -> bool:
        """Whether its staging place is being read into or copied from."""
        return self.is_waiting or (self.landed is not None and not self.landed.is_done)


class DeviceTransport:
    """Fills homes on a device; see `Transport`."""

    def __init__(
        self,
        *,
        store: DeviceStore,
        reader: Reader,
        device: TransferEngine,
        is_poisoned: bool = False,
    ) -> None:
        self._store = store
        self._reader = reader
        self._device = device
        self._is_poisoned = is_poisoned
        self._waiting: deque[_Flight] = deque()
        self._slots: list[_Flight | None] = [None] * store.num_slots
        self._num_staged = 0
        self._host_reads: dict[int, Sequence[ReadTicket]] = {}
        self._free = device.record()
        self.bytes_needed = 0

    @property
    def wait_s(self) -> float:
        """Seconds the device stood still for units; see `Transport.wait_s`."""
        return self._device.counters.idle_s

    def submit(self, home: Home) -> _Flight:
        """Begin a flight; see `Transport.submit`."""
        flight = _Flight(home=home, free=self._free)
        self._waiting.append(flight)
        self._advance()
        return flight

    def wait(self, ticket: _Flight) -> Event:
        """Sleep until the copy is queued and let the computing wait for it; see `Transport.wait`.

        Moves: host to device, the unit's tensors, on the copy queue.
        """
        # Standing still begins where the computing that was queued so far ends.
        self._device.record()
        while ticket.is_waiting:
            self._wait_for_oldest()
            self._advance()
        if ticket.error is not None:
            try:
                raise ticket.error
            finally:
                # As in `wait_all`: this frame must not refer to what it raised.
                del ticket
        assert ticket.landed is not None, f"unit {ticket.home.unit_idx} was never copied"
        return self._device.wait(ticket.landed)

    def release(self, home: Home) -> None:
        """Record that the home is free once the computing comes here; see `Transport.release`."""
        self._free = self._device.record()
        if self._store.is_plain:
            self._device.synchronize(self._free)
        self._advance()

    def load(self, home: Home) -> None:
        """Sleep until a host home is filled; see `Transport.load`."""
        reads = self._read_once(home)
        try:
            wait_all(self._reader, reads)
        except StorageError:
            del self._host_reads[home.unit_idx]
            raise

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """Copy in the order of the computing; see `Transport.upload`."""
        return values.to(self._device.torch_device)

    def drain(self, tickets: Iterable[_Flight]) -> None:
        """Wait for reads and copies; flights whose copy was not queued end; see `Transport`."""
        for flight in self._waiting:
            try:
                wait_all(self._reader, flight.reads)
            except StorageError:
                self._host_reads.pop(flight.home.unit_idx, None)
        self._waiting.clear()
        # Copies of units that were acquired already may still read from the staging buffer.
        for each in (*tickets, *filter(None, self._slots)):
            if each.landed is not None:
                self._device.synchronize(each.landed)
        self._slots = [None] * self._store.num_slots
        # A unit in use when the pass ended may still be computed on.
        self._free = self._device.record()

    def _advance(self) -> None:
        """Begin reads as places allow, then queue the copies of what was read, in order."""
        for flight in self._waiting:
            if flight.host is None and not self._begin_read(flight):
                break
        while self._waiting and self._is_read(self._waiting[0]):
            self._begin_copy(self._waiting.popleft())

    @staticmethod
    def _is_read(flight: _Flight) -> bool:
        return flight.host is not None and all(read.is_done for read in flight.reads)

    def _begin_read(self, flight: _Flight) -> bool:
        """Submit the reads of a flight; False if its staging place is taken."""
        unit_idx = flight.home.unit_idx
        flight.host = self._store.host_homes.get(unit_idx)
        if flight.host is not None:
            flight.reads = self._read_once(flight.host)
            return True
        slot = self._num_staged % len(self._slots)
        blocker = self._slots[slot]
        if blocker is not None and blocker.holds_its_slot:
            return False
        self._slots[slot] = flight
        self._num_staged += 1
        flight.host = self._store.stage(unit_idx, slot)
        if self._is_poisoned:
            flight.host.arena.poison(flight.host.offset, flight.host.footprint)
        flight.reads = self._read(flight.host)
        return True

    def _begin_copy(self, flight: _Flight) -> None:
        """Queue the copy of what was read; a failed read ends the flight instead."""
        assert flight.host is not None, f"unit {flight.home.unit_idx} was not read"
        try:
            wait_all(self._reader, flight.reads)
        except StorageError as error:
            flight.error = error.with_traceback(None)
            self._host_reads.pop(flight.home.unit_idx, None)
            return
        targets = flight.home.tensors
        pairs = [(targets[name], tensor) for name, tensor in flight.host.tensors.items()]
        flight.landed = self._device.copy(pairs, after=flight.free)

    def _wait_for_oldest(self) -> None:
        """Sleep until the oldest waiting flight can go on."""
        oldest = self._waiting[0]
        if oldest.host is None:
            blocker = self._slots[self._num_staged % len(self._slots)]
            assert blocker is not None, "a flight waits for a free staging place"
            assert blocker.landed is not None, "a staging place is held by a younger flight"
            self._device.synchronize(blocker.landed)
            return
        # What failed is said by the flight's own wait.
        with contextlib.suppress(StorageError):
            wait_all(self._reader, oldest.reads)

    def _read_once(self, home: Home) -> Sequence[ReadTicket]:
        """Return the reads that fill a host home, submitting them the first time."""
        if home.unit_idx not in self._host_reads:
            self._store.pin(home)
            self._host_reads[home.unit_idx] = self._read(home)
        return self._host_reads[home.unit_idx]

    def _read(self, home: Home) -> Sequence[ReadTicket]:
        self.bytes_needed += home.num_bytes
        return submit_reads(self._reader, home)
