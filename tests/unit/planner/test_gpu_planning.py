"""Plans with a device: both budgets hold, tiers are filled from the fastest down, refusals mend."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.plan_inputs import layer_stages, make_inputs, with_gpu
from zeroinfer.errors import CapacityError
from zeroinfer.planner import Profile, make_plan
from zeroinfer.units import MIB, format_bytes, parse_bytes

WEIGHTS = ["auto", "gpu", "dram", "nvme"]


@st.composite
def random_inputs(draw):
    stages = layer_stages(
        draw(st.integers(1, 6)),
        rows=draw(st.integers(16, 900)),
        vocab=draw(st.integers(16, 2000)),
        tile_rows=draw(st.sampled_from([16, 64, 256])),
    )
    inputs = make_inputs(
        stages=stages,
        target_bytes=draw(st.sampled_from([MIB // 4, MIB, 4 * MIB])),
        budget_bytes=draw(st.integers(1, 200 * MIB)),
        dram_weights_bytes=draw(st.none() | st.integers(1, 40 * MIB)),
        weights=draw(st.sampled_from(WEIGHTS)),
        num_requests=draw(st.integers(1, 300)),
        max_prompt_tokens=draw(st.integers(1, 1000)),
        max_num_seqs=draw(st.none() | st.integers(1, 32)),
        prefetch_depth=draw(st.none() | st.integers(0, 12)),
    )
    budget_bytes = draw(st.integers(1, 200 * MIB))
    return with_gpu(inputs, weight_bytes=0, budget_bytes=budget_bytes)


def plan_or_none(inputs):
    try:
        return make_plan(inputs)
    except CapacityError:
        return None


def refusal(inputs):
    with pytest.raises(CapacityError) as caught:
        make_plan(inputs)
    return str(caught.value)


def inputs_of(*, gpu_bytes, dram_bytes=256 * MIB, h2d_bytes_per_s=10e9, **changes):
    """Return inputs of which weights may use so much of either memory."""
    inputs = make_inputs(max_num_seqs=4, max_num_batched_tokens=104, **changes)
    inputs = with_gpu(inputs, weight_bytes=gpu_bytes, h2d_bytes_per_s=h2d_bytes_per_s)
    plan = make_plan(replace(inputs, budget_bytes=1 << 40, weights="nvme"))
    own_bytes = plan.total_dram_bytes - plan.gpu.staging_bytes
    return replace(inputs, budget_bytes=own_bytes + dram_bytes)


@settings(deadline=None)
@given(random_inputs())
def test_neither_budget_is_exceeded_and_every_unit_has_one_home(inputs):
    plan = plan_or_none(inputs)
    if plan is None:
        return
    assert plan.total_dram_bytes <= inputs.budget_bytes
    assert plan.total_gpu_bytes <= inputs.gpu.budget_bytes
    if inputs.dram_weights_bytes is not None:
        assert plan.resident_bytes + plan.gpu.staging_bytes <= inputs.dram_weights_bytes
    assert set(plan.streamed) == set(inputs.fetched) - plan.resident
    assert plan.gpu.dram <= set(plan.streamed) | set(inputs.gathered)
    assert plan.pinned_bytes == plan.resident_bytes + plan.gpu.staging_bytes
    is_staged = set(inputs.fetched) - plan.gpu.dram
    assert plan.gpu.num_staging_slots >= (2 if is_staged else 0)
    assert all(plan.footprints[idx] <= plan.gpu.staging_slot_bytes for idx in is_staged)


@settings(deadline=None)
@given(random_inputs())
def test_a_tier_that_was_set_holds_all_there_is(inputs):
    plan = plan_or_none(inputs)
    if plan is None:
        return
    if inputs.weights == "gpu":
        assert not plan.streamed
        assert plan.h2d_bytes == 0
    if inputs.weights == "dram":
        assert not plan.resident
        assert plan.gpu.dram == {*inputs.fetched, *inputs.gathered}
        assert plan.streamed_bytes == plan.gathered_bytes == 0
    if inputs.weights == "nvme":
        assert not plan.resident
        assert not plan.gpu.dram


@settings(deadline=None, max_examples=40)
@given(random_inputs())
def test_following_every_suggestion_ends_in_a_plan(inputs):
    for _ in range(4):
        plan = plan_or_none(inputs)
        if plan is not None:
            return
        message = refusal(inputs)
        flag, size = re.search(r"set (--[a-z-]+) (\d+MiB)", message).groups()
        amount = parse_bytes(size)
        if flag == "--gpu-memory":
            inputs = replace(inputs, gpu=replace(inputs.gpu, budget_bytes=amount))
        elif flag == "--dram":
            inputs = replace(inputs, budget_bytes=amount)
        else:
            inputs = replace(inputs, dram_weights_bytes=amount)
    raise AssertionError(refusal(inputs))


def test_device_is_filled_first_then_dram_then_the_disk():
    total = sum(make_inputs().footprints)
    everything = make_plan(inputs_of(gpu_bytes=total))
    assert not everything.streamed
    halves = make_plan(inputs_of(gpu_bytes=total // 2, dram_bytes=total))
    assert 0.3 * total < halves.gpu_resident_bytes < 0.5 * total
    assert halves.streamed_bytes == 0 < halves.h2d_bytes
    little = make_plan(inputs_of(gpu_bytes=total // 2, dram_bytes=36 * MIB))
    assert 0 < little.resident_bytes < halves.resident_bytes
    assert 0 < little.streamed_bytes < little.h2d_bytes


def test_step_costs_the_slowest_of_disk_link_and_products():
    slow_link = make_plan(inputs_of(gpu_bytes=20 * MIB, h2d_bytes_per_s=1e6, weights="dram"))
    assert slow_link.prediction.bound_by == "h2d"
    assert slow_link.prediction.step_s == pytest.approx(slow_link.h2d_bytes / 1e6)
    assert slow_link.is_batch_invariant
    assert slow_link.notes[-1].startswith("the link to the gpu binds: each GiB of --gpu-memory")
    profile = replace(Profile.assumed(), nvme_read_bytes_per_s=1e5)
    slow_disk = make_plan(inputs_of(gpu_bytes=20 * MIB, weights="nvme", profile=profile))
    assert slow_disk.prediction.bound_by == "nvme"
    assert slow_disk.notes[-1].startswith("the disk binds")
    fast = replace(Profile.assumed(), nvme_read_bytes_per_s=1e12)
    quick = make_plan(
        inputs_of(gpu_bytes=20 * MIB, weights="nvme", profile=fast, h2d_bytes_per_s=1e12)
    )
    assert quick.prediction.bound_by == "compute"
    assert quick.notes[-1].endswith("this gpu is the limit")


def test_table_and_dict_show_the_device():
    plan = make_plan(inputs_of(gpu_bytes=30 * MIB, dram_bytes=40 * MIB))
    lines = plan.render().splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["tier", "gpu", "dram", "nvme"]
    assert len({len(line) for line in lines[:4]}) == 1
    assert format_bytes(plan.total_gpu_bytes) in lines[1]
    assert " to the gpu, predicted " in lines[4]
    data = plan.to_dict()
    assert data["weights"]["gpu"] == plan.gpu_resident_bytes > 0
    assert data["kv"] == {"gpu": plan.kv_bytes, "dram": 0, "nvme": 0}
    assert data["total_gpu_bytes"] <= data["gpu_budget_bytes"]
    assert data["h2d_bytes_per_step"] == plan.h2d_bytes
    assert data["pinned_bytes"] == plan.pinned_bytes
    note = f"{format_bytes(plan.pinned_bytes)} of DRAM is locked for copies to the gpu"
    assert any(each.startswith(note) for each in plan.notes)


def test_resident_model_says_that_nothing_is_fetched_after_the_first_step():
    plan = make_plan(inputs_of(gpu_bytes=256 * MIB))
    assert plan.notes[-1].startswith("all weights stay on the gpu")


def test_plan_of_a_cpu_has_nothing_of_a_device():
    plan = make_plan(make_inputs(dram_weights_bytes=40 * MIB))
    assert plan.h2d_bytes == plan.total_gpu_bytes == plan.pinned_bytes == 0
    assert plan.gpu_resident_bytes == 0
    assert not {key for key in plan.to_dict() if "gpu" in key or "h2d" in key or "pinned" in key}
    assert "gpu" not in plan.render()


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_depth_that_was_set_is_reached_where_the_device_has_room(depth):
    inputs = inputs_of(gpu_bytes=200 * MIB, weights="dram", prefetch_depth=depth)
    plan = make_plan(inputs)
    assert plan.prefetch_depth == depth
    assert plan.ring.num_bytes <= 200 * MIB


def test_depth_without_room_names_the_flag_of_the_device():
    plan = make_plan(inputs_of(gpu_bytes=9 * MIB, weights="dram", prefetch_depth=9))
    assert plan.notes[0].startswith("--prefetch-depth 9 is cut to ")
    assert "raise --gpu-memory or lower" in plan.notes[0]


def test_device_that_is_too_small_is_refused_with_its_table():
    message = refusal(replace(inputs_of(gpu_bytes=9 * MIB), gpu=replace(
        inputs_of(gpu_bytes=9 * MIB).gpu, budget_bytes=2 * MIB)))  # fmt: skip
    assert message.startswith("GPU budget 2.0 MiB is too small: need ")
    assert "for 4 sequence(s) of 128 tokens, weights at least " in message
    assert message.endswith("or lower --max-num-seqs")


def test_weights_that_do_not_all_fit_on_the_device_are_refused():
    message = refusal(inputs_of(gpu_bytes=20 * MIB, weights="gpu"))
    assert message.startswith("GPU budget ")
    assert message.endswith("or --weights auto")


def test_dram_that_is_too_small_for_two_staging_places_is_refused():
    inputs = inputs_of(gpu_bytes=64 * MIB, weights="nvme")
    message = refusal(replace(inputs, dram_weights_bytes=MIB))
    assert message.startswith("--dram-weights 1.0 MiB is too small: need ")
    message = refusal(replace(inputs, budget_bytes=40 * MIB))
    assert message.startswith("DRAM budget 40.0 MiB is too small: need ")
    assert "kv" not in message, "keys and values are not in DRAM"


def test_staging_grows_with_the_dram_up_to_four_places():
    small, large = (
        make_plan(inputs_of(gpu_bytes=64 * MIB, dram_bytes=size, weights="nvme"))
        for size in (12 * MIB, 256 * MIB)
    )
    assert (small.gpu.num_staging_slots, large.gpu.num_staging_slots) == (2, 4)
