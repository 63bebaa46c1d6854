"""Homes of weights for a device: on it, in host memory, and the staging buffer in between.

A unit's device home is fixed by the plan, with every tensor on the device's alignment, whatever its
alignment in the file. Beside it a unit of the DRAM tier has a host home, which is read into once;
any other passes through one of the staging places whenever it is fetched.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from zeroinfer.closing import Closing
from zeroinfer.memory import Arena, DeviceMemory, HostPins, TransferEngine
from zeroinfer.native import Reader, torch_dtype
from zeroinfer.offload.sources import UnitSource
from zeroinfer.offload.weight_store import Home, place_unit
from zeroinfer.planner import Plan

__all__ = ["DeviceStore"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _HostMemory:
    """What lies in host memory, and which of it is locked."""

    weights: Arena
    staging: Arena
    pins: HostPins


class DeviceStore(Closing):
    """Owns all memory that weights take, on both sides of the link."""

    def __init__(
        self,
        *,
        plan: Plan,
        sources: Sequence[UnitSource],
        reader: Reader,
        device_memory: Sequence[DeviceMemory],
        host: _HostMemory,
    ) -> None:
        assert plan.gpu is not None, "a device store needs a plan with a device"
        self._plan = plan
        self._gpu = plan.gpu
        self._sources = sources
        self._reader = reader
        self._device_memory = device_memory
        self._host = host
        self.homes: Mapping[int, Home] = self._device_homes()
        """Homes on the device, of every unit that is fetched as a whole."""
        self.host_homes: Mapping[int, Home] = self._dram_homes()
        """Homes in host memory, of the units of the DRAM tier."""

    @classmethod
    def open(
        cls, plan: Plan, sources: Sequence[UnitSource], *, reader: Reader, device: TransferEngine
    ) -> Self:
        """Allocate on both sides, lock the staging places, build the views.

        Host homes get their pages, and their locks, when they are read into.

        Raises:
            CapacityError: the device or the system refuses the memory.
            StorageError: a file cannot be opened.
        """
        assert plan.gpu is not None, "a device store needs a plan with a device"
        with contextlib.ExitStack() as stack:
            device_memory = [
                device.allocate(plan.gpu_resident_bytes, name="resident weights on the device"),
                device.allocate(plan.ring.num_bytes, name="landing ring on the device"),
            ]
            for memory in device_memory:
                stack.callback(memory.close)
            host = _HostMemory(
                weights=stack.enter_context(
                    Arena.create(plan.resident_bytes, name="weights in DRAM", is_prefaulted=False)
                ),
                staging=stack.enter_context(
                    Arena.create(plan.gpu.staging_bytes, name="staging buffer", is_prefaulted=True)
                ),
                pins=stack.enter_context(HostPins(device.pinner)),
            )
            for slot in range(plan.gpu.num_staging_slots):
                size = plan.gpu.staging_slot_bytes
                host.pins.pin(host.staging, slot * size, size)
            store = cls(
                plan=plan, sources=sources, reader=reader, device_memory=device_memory, host=host
            )
            stack.pop_all()
        return store

    @property
    def device_homes(self) -> Mapping[int, Home]:
        """Homes on the device: all but `host_homes`."""
        return self.homes

    @property
    def num_slots(self) -> int:
        """Places of the staging buffer."""
        return self._gpu.num_staging_slots

    @property
    def is_plain(self) -> bool:
        """Whether nothing may overlap: fetch, compute, release, the oracle of all else."""
        return self._plan.prefetch_depth == 0

    @property
    def pinned_bytes(self) -> int:
        """Host bytes that are locked now."""
        return self._host.pins.num_bytes

    def pin(self, home: Home) -> None:
        """Lock the place of a host home."""
        self._host.pins.pin(self._host.weights, home.offset, home.footprint)

    def stage(self, unit_idx: int, slot: int) -> Home:
        """Return a home for one fetch of a unit, in a place of the staging buffer."""
        offset = slot * self._gpu.staging_slot_bytes
        return place_unit(self._sources[unit_idx], self._host.staging, offset, self._reader)

    def close(self) -> None:
        """Give all memory back; idempotent. No read and no copy may be in flight."""
        self.homes = self.host_homes = {}
        self._host.pins.close()
        self._host.weights.close()
        self._host.staging.close()
        for memory in self._device_memory:
            memory.close()

    def _device_homes(self) -> dict[int, Home]:
        resident, ring = self._device_memory
        homes, offset = {}, 0
        for idx in sorted(self._plan.resident):
            homes[idx] = _device_home(self._sources[idx], resident, offset, is_resident=True)
            offset += self._gpu.footprints[idx]
        for idx, place in zip(self._plan.streamed, self._plan.ring.offsets, strict=True):
            homes[idx] = _device_home(self._sources[idx], ring, place, is_resident=False)
        return homes

    def _dram_homes(self) -> dict[int, Home]:
        homes, offset = {}, 0
        for idx in sorted(self._gpu.dram):
            homes[idx] = place_unit(
                self._sources[idx], self._host.weights, offset, self._reader, is_resident=True
            )
            offset += self._sources[idx].footprint
        return homes


def _device_home(
    source: UnitSource, memory: DeviceMemory, offset: int, *, is_resident: bool
) -> Home:
    tensors = {
        piece.name: memory.tensor(offset + place, piece.shape, torch_dtype(piece.dtype))
        for piece, place in zip(source.slices, source.device_offsets, strict=True)
    }
    return Home(
        unit_idx=source.unit_idx,
        is_resident=is_resident,
        arena=memory,
        offset=offset,
        footprint=source.device_footprint,
        num_bytes=source.num_bytes,
        runs=(),
        tensors=tensors,
        row_starts={piece.name: piece.row_start for piece in source.slices},
    )
