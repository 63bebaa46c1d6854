"""Choosing which units stay resident, spread evenly between the streamed ones."""

from collections.abc import Sequence

from zeroinfer.units import ceil_div

__all__ = ["RING_UNITS", "choose_resident", "split_memory"]

RING_UNITS = 8
"""Units the ring holds where memory allows: enough to bridge a slow read or a slow product."""


def split_memory(
    footprints: Sequence[int], *, available: int, is_kept: bool, prefetch_depth: int | None
) -> tuple[frozenset[int], int]:
    """Split what weights may use into units that stay and a ring for the others.

    Args:
        footprints: bytes of each unit in the order of use.
        available: bytes, 0 or more.
        is_kept: False streams every unit.
        prefetch_depth: what the user asked for; None gives residents more.

    Returns:
        Positions of the units that stay, and the bytes of the ring, which may be too few.
    """
    largest = max(footprints, default=0)
    wanted = largest * _wanted_places(prefetch_depth, len(footprints))
    if not is_kept:
        return frozenset(), min(available, wanted, sum(footprints))
    if sum(footprints) <= available:
        return frozenset(range(len(footprints))), 0
    share = available // 4 if prefetch_depth is None else available
    ring_bytes = max(min(wanted, share), min(2 * largest, wanted, available))
    chosen = choose_resident(footprints, budget_bytes=max(0, available - ring_bytes))
    return chosen, ring_bytes


def _wanted_places(prefetch_depth: int | None, num_units: int) -> int:
    if prefetch_depth is None:
        return RING_UNITS
    # Places repeat every step, so only even laps give each unit the same depth.
    laps = max(1, num_units // (prefetch_depth + 1))
    return ceil_div(num_units, laps)


def choose_resident(footprints: Sequence[int], *, budget_bytes: int) -> frozenset[int]:
    """Return indices of units to keep, of at most `budget_bytes`, evenly spread by bytes.

    Even spreading keeps the link busy: while a resident unit is computed, the next streamed one
    arrives. What even spreading leaves over is filled with the largest units that still fit.

    Args:
        footprints: bytes of each unit in the order of use.
        budget_bytes: 0 or more.
    """
    total = sum(footprints)
    if total <= budget_bytes:
        return frozenset(range(len(footprints)))
    chosen: set[int] = set()
    used, credit = 0, 0.0
    for idx, footprint in enumerate(footprints):
        credit += footprint * budget_bytes / total
        if credit >= footprint and used + footprint <= budget_bytes:
            chosen.add(idx)
            used += footprint
            credit -= footprint
    rest = sorted((idx for idx in range(len(footprints)) if idx not in chosen),
                  key=lambda idx: -footprints[idx])  # fmt: skip
    for idx in rest:
        if used + footprints[idx] <= budget_bytes:
            chosen.add(idx)
            used += footprints[idx]
    return frozenset(chosen)
