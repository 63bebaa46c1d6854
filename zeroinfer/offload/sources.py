"""Where the bytes of fetch units lie: runs of neighbouring extents, and tensors inside them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from zeroinfer.diskformat import Extent, ReadRun, TensorExtent, plan_runs
from zeroinfer.dtypes import DType
from zeroinfer.memory import DEVICE_ALIGNMENT
from zeroinfer.native import DIRECT_ALIGNMENT
from zeroinfer.planner import FetchUnit, TensorSlice
from zeroinfer.units import align_up

__all__ = ["MAX_GAP_BYTES", "SliceSource", "UnitSource", "unit_sources"]

MAX_GAP_BYTES = DIRECT_ALIGNMENT
"""Extents closer than this share a block or nearly so; reading across is cheaper than two reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceSource:
    """A tensor, or rows of one, inside a run."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    row_start: int
    run_idx: int
    offset: int
    """Bytes from the start of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSource:
    """What is read for one fetch unit."""

    unit_idx: int
    runs: tuple[ReadRun, ...]
    slices: tuple[SliceSource, ...]
    num_bytes: int
    """Tensor bytes."""

    @property
    def footprint(self) -> int:
        """Bytes the unit occupies where it lands; every run begins on an alignment border."""
        return sum(run.length for run in self.runs)

    @property
    def run_offsets(self) -> tuple[int, ...]:
        """Where each run begins inside the unit's place."""
        offsets, position = [], 0
        for run in self.runs:
            offsets.append(position)
            position += run.length
        return tuple(offsets)

    @property
    def device_offsets(self) -> tuple[int, ...]:
        """Where each slice begins inside the unit's place on a device, each aligned."""
        return tuple(accumulate(self._aligned_sizes[:-1], initial=0)) if self.slices else ()

    @property
    def device_footprint(self) -> int:
        """Bytes the unit occupies on a device."""
        return sum(self._aligned_sizes)

    @property
    def _aligned_sizes(self) -> list[int]:
        sizes = (math.prod(piece.shape) * piece.dtype.itemsize for piece in self.slices)
        return [align_up(size, DEVICE_ALIGNMENT) for size in sizes]


def unit_sources(
    units: Sequence[FetchUnit], tensors: Mapping[str, TensorExtent]
) -> tuple[UnitSource, ...]:
    """Find the runs of every unit.

    Args:
        units: fetch units with slices by parameter name.
        tensors: parameter name -> extent in the checkpoint.
    """
    return tuple(_unit_source(unit, tensors) for unit in units)


def _unit_source(unit: FetchUnit, tensors: Mapping[str, TensorExtent]) -> UnitSource:
    extents = [_slice_extent(piece, tensors[piece.name]) for piece in unit.slices]
    runs = plan_runs(extents, alignment=DIRECT_ALIGNMENT, max_gap_bytes=MAX_GAP_BYTES)
    places = {
        extent_idx: (run_idx, offset)
        for run_idx, run in enumerate(runs)
        for extent_idx, offset in run.pieces
    }
    slices = tuple(
        SliceSource(
            name=piece.name,
            shape=(piece.row_stop - piece.row_start, *tensors[piece.name].spec.shape[1:]),
            dtype=tensors[piece.name].spec.dtype,
            row_start=piece.row_start,
            run_idx=places[idx][0],
            offset=places[idx][1],
        )
        for idx, piece in enumerate(unit.slices)
    )
    return UnitSource(
        unit_idx=unit.unit_idx, runs=tuple(runs), slices=slices, num_bytes=unit.num_bytes
    )


def _slice_extent(piece: TensorSlice, tensor: TensorExtent) -> Extent:
    return Extent(path=tensor.path, offset=tensor.offset + piece.offset, length=piece.num_bytes)
