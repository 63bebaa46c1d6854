"""Fixed places of streamed units in the landing ring.

Units are laid out in laps, each from the ring's start, the same in every step. Laps are balanced:
each carries about the same bytes, so that the border between two steps is like any other border
between laps and the link never waits there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
        """Largest prefetch depth that no unit's place cuts short; at least 0."""
        return max(0, min(self.lookback, default=1) - 1)


def lay_out_ring(footprints: Sequence[int], *, max_bytes: int) -> RingLayout:
    """Place units of these sizes into at most `max_bytes`.

    Args:
        footprints: bytes each unit occupies, alignment included, in the order of use.
        max_bytes: at least the largest footprint.
    """
    assert max(footprints, default=0) <= max_bytes, (
        f"unit of {max(footprints, default=0)} bytes cannot land in a ring of {max_bytes}"
    )
    capacity = _balanced_capacity(footprints, max_bytes)
    offsets, used, offset = [], 0, 0
    for footprint in footprints:
        if offset + footprint > capacity:
            offset = 0
        offsets.append(offset)
        offset += footprint
        used = max(used, offset)
    return RingLayout(
        num_bytes=used,
        offsets=tuple(offsets),
        lookback=tuple(_lookback(offsets, footprints, idx) for idx in range(len(footprints))),
    )


def _num_laps(footprints: Sequence[int], capacity: int) -> int:
    laps, offset = 1, 0
    for footprint in footprints:
        if offset + footprint > capacity:
            laps, offset = laps + 1, 0
        offset += footprint
    return laps


def _balanced_capacity(footprints: Sequence[int], max_bytes: int) -> int:
    """Smallest capacity that needs no more laps than `max_bytes` does."""
    low, high = max(footprints, default=0), max_bytes
    laps = _num_laps(footprints, max_bytes)
    while low < high:
        middle = (low + high) // 2
        if _num_laps(footprints, middle) <= laps:
            high = middle
        else:
            low = middle + 1
    return high


def _lookback(offsets: Sequence[int], footprints: Sequence[int], idx: int) -> int:
    count = len(offsets)
    start, stop = offsets[idx], offsets[idx] + footprints[idx]
    for distance in range(1, count):
        other = (idx - distance) % count
        if offsets[other] < stop and start < offsets[other] + footprints[other]:
            return distance
    return count
