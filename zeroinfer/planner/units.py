"""Cutting the stages of a model into fetch units.

A fetch unit is a stage, some of its operators, or rows of one large matrix on the weight grid.
Small operators travel together up to the target size; a larger matrix is cut into even pieces.
Matrices of which only rows are gathered get units of their own, used only if they become resident.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from zeroinfer.units import align_up, ceil_div

__all__ = [
    "FetchUnit",
    "OpData",
    "ParamData",
    "StageData",
    "TensorSlice",
    "UnitPart",
    "build_units",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamData:
    """A parameter as rows of equal size; a vector is rows of one element."""

    name: str
    num_rows: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.num_rows * self.row_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class OpData:
    """An operator as the planner sees it."""

    params: tuple[ParamData, ...] = ()
    gathered: tuple[ParamData, ...] = ()
    tile_rows: int = 0
    """Grid on which its output rows may be cut; 0 if it may not be cut."""
    flops_per_row: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes fetched before the operator runs."""
        return sum(param.num_bytes for param in self.params)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageData:
    """A stage as the planner sees it."""

    name: str
    ops: tuple[OpData, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSlice:
    """Rows [row_start, row_stop) of a parameter."""

    name: str
    row_start: int
    row_stop: int
    row_bytes: int

    @property
    def offset(self) -> int:
        """Bytes before the slice inside the tensor."""
        return self.row_start * self.row_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the slice."""
        return (self.row_stop - self.row_start) * self.row_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPart:
    """An operator of the unit's stage, or rows of it."""

    op_idx: int
    row_start: int | None = None
    row_stop: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchUnit:
    """What is fetched, used and released together."""

    unit_idx: int
    name: str
    stage_idx: int
    parts: tuple[UnitPart, ...]
    slices: tuple[TensorSlice, ...]
    flops_per_row: int = 0
    is_gathered: bool = False
    """A piece of a gathered matrix: never streamed, resident or read by row."""

    @property
    def num_bytes(self) -> int:
        """Tensor bytes of the unit."""
        return sum(piece.num_bytes for piece in self.slices)


def build_units(stages: Sequence[StageData], *, target_bytes: int) -> tuple[FetchUnit, ...]:
    """Cut stages into units of about `target_bytes`, in the order of use.

    A unit exceeds the target by up to a quarter rather than leave crumbs. An operator that may not
    be cut is one unit whatever its size.
    """
    fetched = frozenset(param.name for stage in stages for op in stage.ops for param in op.params)
    drafts = [
        draft
        for stage_idx, stage in enumerate(stages)
        for draft in (
            *_gathered_units(stage, stage_idx, target_bytes, fetched),
            *_stage_units(stage, stage_idx, target_bytes),
        )
    ]
    return tuple(
        FetchUnit(
            unit_idx=idx, name=draft.name, stage_idx=draft.stage_idx, parts=draft.parts,
            slices=draft.slices, flops_per_row=draft.flops_per_row, is_gathered=draft.is_gathered,
        )
        for idx, draft in enumerate(drafts)
    )  # fmt: skip


def _stage_units(stage: StageData, stage_idx: int, target_bytes: int) -> Iterator[FetchUnit]:
    groups: list[list[tuple[UnitPart, OpData]]] = [[]]
    limit = target_bytes + target_bytes // 4
    for op_idx, op in enumerate(stage.ops):
        pieces = list(_pieces(op_idx, op, target_bytes, limit))
        for piece_idx, piece in enumerate(pieces):
            is_crumb = _group_bytes(groups[-1]) <= target_bytes // 4 and piece_idx == 0
            # A unit knows each tensor by name, so it never holds two pieces of one.
            fits = _group_bytes(groups[-1]) + _part_bytes(piece, op) <= limit and piece_idx == 0
            if groups[-1] and _part_bytes(piece, op) and not (fits or is_crumb):
                groups.append([])
            groups[-1].append((piece, op))
    for idx, group in enumerate(groups):
        suffix = f"[{idx + 1}/{len(groups)}]" if len(groups) > 1 else ""
        yield _draft(f"{stage.name}{suffix}", stage_idx, group)


def _pieces(op_idx: int, op: OpData, target_bytes: int, limit: int) -> Iterator[UnitPart]:
    if not op.tile_rows or op.num_bytes <= limit:
        yield UnitPart(op_idx=op_idx)
        return
    num_rows = op.params[0].num_rows
    num_pieces = ceil_div(op.num_bytes, target_bytes)
    step = align_up(ceil_div(num_rows, num_pieces), op.tile_rows)
    starts = list(range(0, num_rows, step))
    # Rounding up to the grid may leave crumbs at the end; they stay with the piece before.
    if len(starts) > 2 and op.num_bytes * (num_rows - starts[-2]) <= limit * num_rows:
        starts.pop()
    for start, stop in pairwise([*starts, num_rows]):
        yield UnitPart(op_idx=op_idx, row_start=start, row_stop=stop)


def _slices(part: UnitPart, op: OpData) -> tuple[TensorSlice, ...]:
    return tuple(
        TensorSlice(
            name=param.name,
            row_start=part.row_start or 0,
            row_stop=param.num_rows if part.row_stop is None else part.row_stop,
            row_bytes=param.row_bytes,
        )
        for param in op.params
    )


def _part_bytes(part: UnitPart, op: OpData) -> int:
    return sum(piece.num_bytes for piece in _slices(part, op))


def _group_bytes(group: Sequence[tuple[UnitPart, OpData]]) -> int:
    return sum(_part_bytes(part, op) for part, op in group)


def _part_flops(part: UnitPart, op: OpData) -> int:
    if part.row_start is None or part.row_stop is None:
        return op.flops_per_row
    return op.flops_per_row * (part.row_stop - part.row_start) // op.params[0].num_rows


def _draft(name: str, stage_idx: int, group: Sequence[tuple[UnitPart, OpData]]) -> FetchUnit:
    return FetchUnit(
        unit_idx=-1,
        name=name,
        stage_idx=stage_idx,
        parts=tuple(part for part, _ in group),
        slices=tuple(piece for part, op in group for piece in _slices(part, op)),
        flops_per_row=sum(_part_flops(part, op) for part, op in group),
    )


def _gathered_units(
    stage: StageData, stage_idx: int, target_bytes: int, fetched: frozenset[str]
) -> Iterator[FetchUnit]:
    """Units of matrices gathered by this stage, unless some stage fetches them anyway (tied)."""
    tables = [param for op in stage.ops for param in op.gathered]
    for table in [table for table in tables if table.name not in fetched]:
        step = max(1, target_bytes // table.row_bytes)
        for start in range(0, table.num_rows, step):
            piece = TensorSlice(
                name=table.name,
                row_start=start,
                row_stop=min(start + step, table.num_rows),
                row_bytes=table.row_bytes,
            )
            yield FetchUnit(
                unit_idx=-1, name=f"{table.name}[{start}:{piece.row_stop}]", stage_idx=stage_idx,
                parts=(), slices=(piece,), is_gathered=True,
            )  # fmt: skip
