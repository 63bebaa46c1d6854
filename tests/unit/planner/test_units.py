"""Every row of every parameter is in exactly one unit, in order, on the grid."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.plan_inputs import layer_stages
from zeroinfer.planner import OpData, ParamData, StageData, UnitPart, build_units


@st.composite
def random_stages(draw):
    names = iter(range(10_000))

    def param(num_rows, *, max_row_bytes):
        row_bytes = draw(st.integers(1, max_row_bytes))
        return ParamData(name=f"p{next(names)}", num_rows=num_rows, row_bytes=row_bytes)

    def op():
        kind = draw(st.sampled_from(["matrix", "biased", "whole", "vector", "apply", "embed"]))
        num_rows = draw(st.integers(1, 300))
        if kind == "apply":
            return OpData()
        if kind == "vector":
            return OpData(params=(param(num_rows, max_row_bytes=4),))
        if kind == "embed":
            return OpData(gathered=(param(num_rows, max_row_bytes=64),))
        params = (param(num_rows, max_row_bytes=64),)
        if kind == "biased":
            params += (param(num_rows, max_row_bytes=4),)
        tile_rows = 0 if kind == "whole" else draw(st.integers(1, 64))
        flops = draw(st.integers(0, 100)) * num_rows
        return OpData(params=params, tile_rows=tile_rows, flops_per_row=flops)

    return [
        StageData(name=f"s{idx}", ops=tuple(op() for _ in range(draw(st.integers(1, 6)))))
        for idx in range(draw(st.integers(1, 4)))
    ]


TARGETS = st.integers(64, 8192)


def slices_by_name(units):
    found = {}
    for unit in units:
        for piece in unit.slices:
            found.setdefault(piece.name, []).append((piece.row_start, piece.row_stop))
    return found


@given(random_stages(), TARGETS)
def test_every_row_of_every_parameter_is_fetched_once_and_in_order(stages, target_bytes):
    units = build_units(stages, target_bytes=target_bytes)
    found = slices_by_name(units)
    ops = [op for stage in stages for op in stage.ops]
    params = {param.name: param for op in ops for param in (*op.params, *op.gathered)}
    assert found.keys() == params.keys()
    for name, ranges in found.items():
        assert ranges[0][0] == 0
        assert ranges[-1][1] == params[name].num_rows
        assert all(stop == start for (_, stop), (start, _) in pairwise(ranges)), ranges
        assert all(start < stop for start, stop in ranges)


@given(random_stages(), TARGETS)
def test_every_op_runs_whole_or_in_pieces_in_the_order_of_the_model(stages, target_bytes):
    units = build_units(stages, target_bytes=target_bytes)
    assert [unit.unit_idx for unit in units] == list(range(len(units)))
    parts = [
        (unit.stage_idx, part.op_idx, part.row_start or 0) for unit in units for part in unit.parts
    ]
    assert parts == sorted(parts)
    ops = {(stage_idx, op_idx) for stage_idx, op_idx, _ in parts}
    assert ops == {(i, k) for i, stage in enumerate(stages) for k in range(len(stage.ops))}
    for unit in units:
        names = [
            param.name
            for part in unit.parts
            for param in stages[unit.stage_idx].ops[part.op_idx].params
        ]
        if not unit.is_gathered:
            assert [piece.name for piece in unit.slices] == names


@given(random_stages(), TARGETS)
def test_no_unit_holds_two_pieces_of_one_tensor(stages, target_bytes):
    for unit in build_units(stages, target_bytes=target_bytes):
        names = [piece.name for piece in unit.slices]
        assert len(names) == len(set(names)), names


@given(random_stages(), TARGETS)
def test_pieces_begin_on_the_tile_grid(stages, target_bytes):
    for unit in build_units(stages, target_bytes=target_bytes):
        for part in unit.parts:
            op = stages[unit.stage_idx].ops[part.op_idx]
            if part.row_start is not None:
                assert op.tile_rows
                assert part.row_start % op.tile_rows == 0
                assert part.row_stop % op.tile_rows == 0 or part.row_stop == op.params[0].num_rows


@given(random_stages(), TARGETS)
def test_units_exceed_the_target_only_where_the_grid_or_a_whole_operator_forces_them(
    stages, target_bytes
):
    for unit in build_units(stages, target_bytes=target_bytes):
        ops = [stages[unit.stage_idx].ops[part.op_idx] for part in unit.parts]
        # A quarter for crumbs before an operator, a quarter not to leave crumbs after it.
        slack = target_bytes // 2
        forced = [0]
        for op in ops:
            if op.params and not op.tile_rows:
                forced.append(op.num_bytes)
            elif op.params:
                tile_bytes = op.num_bytes * op.tile_rows // op.params[0].num_rows + 1
                forced.append(min(op.num_bytes, target_bytes + tile_bytes))
        if unit.is_gathered:
            forced.append(unit.slices[0].row_bytes)
        assert unit.num_bytes <= max(target_bytes, *forced) + slack


@given(random_stages(), TARGETS)
def test_products_are_divided_among_units_and_none_is_lost(stages, target_bytes):
    units = build_units(stages, target_bytes=target_bytes)
    wanted = sum(op.flops_per_row for stage in stages for op in stage.ops)
    assert sum(unit.flops_per_row for unit in units) == wanted


def test_units_of_a_regular_model_are_near_the_target():
    target = 1 << 21
    units = build_units(layer_stages(), target_bytes=target)
    sizes = [unit.num_bytes for unit in units if not unit.is_gathered and unit.slices]
    assert all(target // 2 <= size <= target * 5 // 4 for size in sizes), sizes


def test_last_crumb_of_a_cut_matrix_stays_with_the_piece_before():
    # 22 rows on a grid of 5: pieces of 10, 10, 2 would leave a crumb.
    op = OpData(params=(ParamData(name="w", num_rows=22, row_bytes=10),), tile_rows=5)
    units = build_units([StageData(name="s", ops=(op,))], target_bytes=100)
    assert [unit.parts for unit in units] == [
        (UnitPart(op_idx=0, row_start=0, row_stop=10),),
        (UnitPart(op_idx=0, row_start=10, row_stop=22),),
    ]


def test_table_that_a_stage_fetches_anyway_gets_no_units_of_its_own():
    table = ParamData(name="tied", num_rows=64, row_bytes=16)
    stages = [
        StageData(name="embed", ops=(OpData(gathered=(table,)),)),
        StageData(name="head", ops=(OpData(params=(table,), tile_rows=8),)),
    ]
    units = build_units(stages, target_bytes=256)
    assert not any(unit.is_gathered for unit in units)
    assert sum(unit.num_bytes for unit in units) == table.num_bytes


def test_gathered_table_is_cut_into_units_that_no_stage_runs():
    units = build_units(layer_stages(1), target_bytes=1 << 20)
    pieces = [unit for unit in units if unit.is_gathered]
    assert len(pieces) == 8
    assert all(not unit.parts and unit.stage_idx == 0 for unit in pieces)


def test_units_of_one_stage_are_numbered_in_their_names():
    units = build_units(layer_stages(1), target_bytes=1 << 21)
    names = [unit.name for unit in units if unit.stage_idx == 1]
    assert names == [f"layers.0[{idx}/{len(names)}]" for idx in range(1, len(names) + 1)]
