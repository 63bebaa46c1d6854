"""Fixed places of streamed units in the landing ring.

Units are laid out in laps, each from the ring's start, the same in every step. Laps are balanced:
each carries about the same bytes, so that the border between two steps is like any other border
between laps and the link never waits there. A lap may be packed or, where that fits, stand in the
columns of the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

from zeroinfer.units import ceil_div

__all__ = ["RingLayout", "lay_out_ring"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RingLayout:
    """Where streamed units land; positions count streamed units in the order of use."""

    num_bytes: int
    offsets: tuple[int, ...]
    lookback: tuple[int, ...]
    """Position p may be fetched once position p - lookback[p] (of this step or the one before) was
    released: it is the last one before p whose place overlaps."""

    @property
    def max_depth(self) -> int:
        """Most units that can ever be in flight or landed ahead of the one in use."""
        return max(self.lookback, default=1) - 1


def lay_out_ring(footprints: Sequence[int], *, max_bytes: int) -> RingLayout:
    """Place units of these sizes into at most `max_bytes`.

    Args:
        footprints: bytes each unit occupies, alignment included, in the order of use.
        max_bytes: at least the largest footprint.
    """
    assert max(footprints, default=0) <= max_bytes, (
        f"unit of {max(footprints, default=0)} bytes cannot land in a ring of {max_bytes}"
    )
    laps = _balanced_laps(footprints, max_bytes)
    offsets = _columns(laps)
    if _used_bytes(offsets, footprints) > max_bytes:
        offsets = [offset for lap in laps for offset in accumulate(lap[:-1], initial=0)]
    return RingLayout(
        num_bytes=_used_bytes(offsets, footprints),
        offsets=tuple(offsets),
        lookback=tuple(_lookback(offsets, footprints, idx) for idx in range(len(footprints))),
    )


def _used_bytes(offsets: Sequence[int], footprints: Sequence[int]) -> int:
    ends = (offset + size for offset, size in zip(offsets, footprints, strict=True))
    return max(ends, default=0)


def _columns(laps: Sequence[Sequence[int]]) -> list[int]:
    """Start the nth units of all laps at one offset.

    Packed units of nearly one size would drift from lap to lap, and each would wait for two
    others to leave.
    """
    widths = (max(column) for column in zip_longest(*laps, fillvalue=0))
    starts = list(accumulate(widths, initial=0))
    return [start for lap in laps for start in starts[: len(lap)]]


def _balanced_laps(footprints: Sequence[int], max_bytes: int) -> list[list[int]]:
    """Return the footprints of each lap, with as few even laps as fit."""
    num_laps = ceil_div(sum(footprints), max(1, max_bytes))
    while True:
        laps = _even_laps(footprints, num_laps)
        if max(map(sum, laps), default=0) <= max_bytes:
            return laps
        num_laps += 1


def _even_laps(footprints: Sequence[int], num_laps: int) -> list[list[int]]:
    """Put each unit into the lap in whose share of all bytes its middle lies."""
    laps: list[list[int]] = [[] for _ in range(num_laps)]
    start, total = 0, sum(footprints)
    for footprint in footprints:
        middle = 2 * start + footprint
        laps[middle * num_laps // (2 * total)].append(footprint)
        start += footprint
    return [lap for lap in laps if lap]


def _lookback(offsets: Sequence[int], footprints: Sequence[int], idx: int) -> int:
    count = len(offsets)
    start, stop = offsets[idx], offsets[idx] + footprints[idx]
    for distance in range(1, count):
        other = (idx - distance) % count
        if offsets[other] < stop and start < offsets[other] + footprints[other]:
            return distance
    return count
