"""Homes of weights: the resident arena, the landing ring, and fixed tensor views into both.

Every unit has one place, decided by the plan, and its tensors are built once over that place. The
store moves nothing; the coordinator says when a place is filled.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from zeroinfer.closing import Closing
from zeroinfer.diskformat import ReadRun
from zeroinfer.memory import Arena, DeviceMemory
from zeroinfer.native import OpenFile, Reader, torch_dtype
from zeroinfer.offload.sources import UnitSource
from zeroinfer.planner import Plan

__all__ = ["Home", "HomeRun", "WeightStore", "place_unit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HomeRun:
    """One read of a unit, with the memory it lands in."""

    file: OpenFile
    run: ReadRun
    destination: memoryview


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """The place of one unit."""

    unit_idx: int
    is_resident: bool
    arena: DeviceMemory
    offset: int
    footprint: int
    num_bytes: int
    runs: tuple[HomeRun, ...]
    tensors: Mapping[str, torch.Tensor]
    row_starts: Mapping[str, int]
    """First row of each tensor that is a piece of a matrix."""


class WeightStore(Closing):
    """Owns the arenas; knows the home of every unit that is fetched as a whole."""

    def __init__(self, *, resident: Arena, ring: Arena, homes: Mapping[int, Home]) -> None:
        self._resident = resident
        self._ring = ring
        self.homes = homes

    @classmethod
    def open(cls, plan: Plan, sources: Sequence[UnitSource], *, reader: Reader) -> Self:
        """Allocate both arenas and build the views.

        Pages get their memory as the first units land in them, from the threads that read: faulting
        a ring of 260 MB beforehand took 0.5 to 0.8 s of every start.

        Raises:
            CapacityError: the system refuses the memory.
            StorageError: a file cannot be opened.
        """
        with contextlib.ExitStack() as stack:
            resident = stack.enter_context(
                Arena.create(plan.resident_bytes, name="resident weights", is_prefaulted=False)
            )
            ring = stack.enter_context(
                Arena.create(plan.ring.num_bytes, name="landing ring", is_prefaulted=False)
            )
            homes: dict[int, Home] = {}
            offset = 0
            for idx in sorted(plan.resident):
                homes[idx] = place_unit(sources[idx], resident, offset, reader, is_resident=True)
                offset += sources[idx].footprint
            for position, idx in enumerate(plan.streamed):
                place = plan.ring.offsets[position]
                homes[idx] = place_unit(sources[idx], ring, place, reader)
            stack.pop_all()
        return cls(resident=resident, ring=ring, homes=homes)

    @property
    def host_homes(self) -> Mapping[int, Home]:
        """Homes in host memory: all of them."""
        return self.homes

    @property
    def device_homes(self) -> Mapping[int, Home]:
        """Homes on a device: none."""
        return {}

    def close(self) -> None:
        """Give all weight memory back; idempotent. No read may be in flight."""
        self.homes = {}
        self._resident.close()
        self._ring.close()


def place_unit(
    source: UnitSource, arena: Arena, offset: int, reader: Reader, *, is_resident: bool = False
) -> Home:
    """Return the home of a unit at an offset of host memory that its reads fill.

    Raises:
        StorageError: a file cannot be opened.
    """
    runs = tuple(
        HomeRun(
            file=reader.open_file(run.path),
            run=run,
            destination=arena.view(offset + run_offset, run.length),
        )
        for run, run_offset in zip(source.runs, source.run_offsets, strict=True)
    )
    tensors = {
        piece.name: arena.tensor(
            offset + source.run_offsets[piece.run_idx] + piece.offset,
            piece.shape,
            torch_dtype(piece.dtype),
        )
        for piece in source.slices
    }
    return Home(
        unit_idx=source.unit_idx,
        is_resident=is_resident,
        arena=arena,
        offset=offset,
        footprint=source.footprint,
        num_bytes=source.num_bytes,
        runs=runs,
        tensors=tensors,
        row_starts={piece.name: piece.row_start for piece in source.slices},
    )
