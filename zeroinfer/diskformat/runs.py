"""Reads that serve many extents: neighbours join into aligned runs.

Pure arithmetic on (path, offset, length). Two runs of one file never share a block, so no block is
read twice; the last run of a file may reach beyond its end, where a direct read returns less.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeroinfer.units import align_down, align_up

__all__ = ["Extent", "ReadRun", "plan_runs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """A byte range of a file."""

    path: Path
    offset: int
    length: int

    @property
    def end(self) -> int:
        """First byte after the range."""
        return self.offset + self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRun:
    """One aligned byte range to read, and the extents inside it."""

    path: Path
    offset: int
    """A multiple of the alignment."""
    length: int
    """A multiple of the alignment; may reach beyond the end of the file."""
    needed_bytes: int
    """Bytes of extents in the run; bytes that extents share count once."""
    required_bytes: int
    """Bytes from `offset` to the end of the last extent: what a read must deliver at least."""
    pieces: tuple[tuple[int, int], ...]
    """(index of the extent, its offset inside the run), by offset."""


def plan_runs(extents: Sequence[Extent], *, alignment: int, max_gap_bytes: int) -> list[ReadRun]:
    """Join extents into aligned runs, sorted by path and offset.

    Extents join when at most `max_gap_bytes` lie between them, or when reading the gap costs no
    block more than not reading it. Each extent lies whole in exactly one run; an empty extent lies
    in none. Extents may overlap.

    Args:
        extents: Byte ranges of any files, in any order.
        alignment: Bytes that offset and length of each run are multiples of.
        max_gap_bytes: Unneeded bytes worth reading to save a read.
    """
    assert alignment >= 1, f"alignment is {alignment}"
    assert max_gap_bytes >= 0, f"max_gap_bytes is {max_gap_bytes}"
    assert all(e.offset >= 0 and e.length >= 0 for e in extents), "an extent is negative"
    order = sorted(
        (idx for idx, extent in enumerate(extents) if extent.length),
        key=lambda idx: (extents[idx].path, extents[idx].offset, extents[idx].end, idx),
    )
    groups = _joined(extents, order, alignment=alignment, max_gap_bytes=max_gap_bytes)
    return [_make_run(extents, group, alignment) for group in groups]


def _joined(
    extents: Sequence[Extent], order: Sequence[int], *, alignment: int, max_gap_bytes: int
) -> Iterator[list[int]]:
    group: list[int] = []
    end = 0
    for idx in order:
        extent = extents[idx]
        is_free = align_down(extent.offset, alignment) <= align_up(end, alignment)
        is_near = is_free or extent.offset - end <= max_gap_bytes
        if group and (extents[group[0]].path != extent.path or not is_near):
            yield group
            group, end = [], 0
        group.append(idx)
        end = max(end, extent.end)
    if group:
        yield group


def _make_run(extents: Sequence[Extent], group: Sequence[int], alignment: int) -> ReadRun:
    first = extents[group[0]]
    offset = align_down(first.offset, alignment)
    needed_bytes, end = 0, first.offset
    for idx in group:
        extent = extents[idx]
        needed_bytes += max(0, extent.end - max(end, extent.offset))
        end = max(end, extent.end)
    return ReadRun(
        path=first.path,
        offset=offset,
        length=align_up(end, alignment) - offset,
        needed_bytes=needed_bytes,
        required_bytes=end - offset,
        pieces=tuple((idx, extents[idx].offset - offset) for idx in group),
    )
