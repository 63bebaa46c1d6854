"""Choosing which units stay resident, spread evenly between the streamed ones."""

from collections.abc import Sequence

__all__ = ["choose_resident"]


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
