"""Plans stay inside the budget, use it, obey what was set, and refuse with what would do."""

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.plan_inputs import layer_stages, make_inputs
from zeroinfer.errors import CapacityError, ConfigError
from zeroinfer.planner import Profile, choose_resident, make_plan
from zeroinfer.units import MIB, parse_bytes

BUDGETS = st.integers(1, 300 * MIB)


@st.composite
def random_inputs(draw):
    stages = layer_stages(
        draw(st.integers(1, 6)),
        rows=draw(st.integers(16, 900)),
        vocab=draw(st.integers(16, 2000)),
        tile_rows=draw(st.sampled_from([16, 64, 256])),
    )
    return make_inputs(
        stages=stages,
        target_bytes=draw(st.sampled_from([MIB // 4, MIB, 4 * MIB])),
        budget_bytes=draw(BUDGETS),
        dram_weights_bytes=draw(st.none() | st.integers(1, 40 * MIB)),
        weights=draw(st.sampled_from(["auto", "nvme", "dram"])),
        num_requests=draw(st.integers(1, 600)),
        max_prompt_tokens=draw(st.integers(1, 3000)),
        max_num_seqs=draw(st.none() | st.integers(1, 64)),
        prefetch_depth=draw(st.none() | st.integers(0, 20)),
    )


def smallest_budget(inputs):
    """Return the smallest budget that gets a plan, by bisection."""
    low, high = 0, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        try:
            make_plan(replace(inputs, budget_bytes=middle))
            high = middle
        except CapacityError:
            low = middle
    return high


def suggestion(message, flag):
    found = re.search(rf"set {flag} (\d+MiB)", message)
    assert found, message
    return parse_bytes(found.group(1))


def refusal(inputs):
    with pytest.raises(CapacityError) as caught:
        make_plan(inputs)
    return str(caught.value)


@settings(deadline=None)
@given(random_inputs())
def test_plan_never_exceeds_its_budgets_and_places_every_unit_once(inputs):
    try:
        plan = make_plan(inputs)
    except CapacityError:
        return
    assert plan.total_dram_bytes <= inputs.budget_bytes
    if inputs.dram_weights_bytes is not None:
        assert plan.resident_bytes + plan.ring.num_bytes <= inputs.dram_weights_bytes
    stages = {u.unit_idx for u in inputs.units if u.slices and not u.is_gathered}
    assert set(plan.streamed) == stages - plan.resident
    assert list(plan.streamed) == sorted(plan.streamed)
    assert len(plan.ring.offsets) == len(plan.streamed)
    assert plan.num_kv_blocks * plan.kv_block_size >= plan.max_num_seqs * inputs.sequence_tokens
    assert plan.max_num_batched_tokens >= plan.max_num_seqs + inputs.prompt_piece_tokens


@settings(deadline=None)
@given(random_inputs())
def test_explicit_settings_are_obeyed(inputs):
    try:
        plan = make_plan(inputs)
    except CapacityError:
        return
    if inputs.max_num_seqs is not None:
        assert plan.max_num_seqs == inputs.max_num_seqs
    if inputs.prefetch_depth is not None:
        is_cut = plan.prefetch_depth < inputs.prefetch_depth
        assert plan.prefetch_depth <= inputs.prefetch_depth
        assert is_cut == any("--prefetch-depth" in note for note in plan.notes)
    if inputs.weights == "nvme":
        assert not plan.resident
    if inputs.weights == "dram":
        assert plan.resident == {u.unit_idx for u in inputs.units if u.slices}
        assert plan.to_dict()["weights"]["nvme"] == 0


@settings(deadline=None)
@given(random_inputs(), BUDGETS)
def test_more_budget_streams_no_more_bytes(inputs, more_bytes):
    inputs = replace(inputs, max_num_seqs=4, max_num_batched_tokens=2048, weights="auto")
    try:
        small = make_plan(inputs)
    except CapacityError:
        return
    large = make_plan(replace(inputs, budget_bytes=inputs.budget_bytes + more_bytes))
    # Units are whole, so what is left over may be as large as the largest of them.
    assert large.streamed_bytes <= small.streamed_bytes + max(inputs.footprints)


def test_more_budget_streams_no_more_bytes_for_equal_layers():
    inputs = make_inputs(max_num_seqs=4, max_num_batched_tokens=128)
    plans = [make_plan(replace(inputs, budget_bytes=mib * MIB)) for mib in range(50, 160, 3)]
    streamed = [plan.streamed_bytes for plan in plans]
    assert streamed == sorted(streamed, reverse=True)
    assert streamed[0] > 0
    assert streamed[-1] == 0


def test_more_budget_predicts_no_fewer_tokens_per_s():
    inputs = make_inputs()
    plans = [make_plan(replace(inputs, budget_bytes=mib * MIB)) for mib in range(60, 300, 7)]
    for small, large in itertools.pairwise(plans):
        assert large.predicted_tokens_per_s >= 0.97 * small.predicted_tokens_per_s


@settings(deadline=None, max_examples=40)
@given(random_inputs())
def test_suggested_budget_is_the_smallest_that_works_within_its_rounding(inputs):
    inputs = replace(inputs, dram_weights_bytes=None, budget_bytes=1)
    suggested = suggestion(refusal(inputs), "--dram")
    make_plan(replace(inputs, budget_bytes=suggested))
    smallest = smallest_budget(inputs)
    # What is added covers a base that is a little larger in the next run.
    assert smallest + 8 * MIB <= suggested < smallest + 16 * MIB


@settings(deadline=None, max_examples=40)
@given(random_inputs())
def test_suggested_weight_limit_works_and_a_mebibyte_less_does_not(inputs):
    inputs = replace(inputs, budget_bytes=1 << 40, dram_weights_bytes=1)
    suggested = suggestion(refusal(inputs), "--dram-weights")
    make_plan(replace(inputs, dram_weights_bytes=suggested))
    refusal(replace(inputs, dram_weights_bytes=suggested - MIB))


def test_budget_too_small_is_refused_with_the_table_and_the_remedy():
    inputs = make_inputs(budget_bytes=20 * MIB)
    message = refusal(inputs)
    assert message.startswith("DRAM budget 20.0 MiB is too small: need ")
    assert "base 30.0 MiB, workspace " in message
    assert "for 1 sequence(s) of 128 tokens" in message
    assert message.endswith("or lower --max-tokens or offload.fetch_unit_bytes")


def test_refusal_of_several_sequences_says_to_run_fewer():
    message = refusal(make_inputs(budget_bytes=20 * MIB, max_num_seqs=32))
    assert "for 32 sequence(s)" in message
    assert message.endswith("or lower --max-num-seqs")


def test_weights_that_do_not_all_fit_are_refused_when_dram_was_asked_for():
    inputs = make_inputs(budget_bytes=60 * MIB, weights="dram")
    message = refusal(inputs)
    assert message.endswith("or --weights auto")
    plan = make_plan(replace(inputs, budget_bytes=suggestion(message, "--dram")))
    assert not plan.streamed


def test_weights_in_dram_include_the_gathered_table():
    inputs = make_inputs(weights="dram", max_num_seqs=1)
    smallest = smallest_budget(inputs)
    assert make_plan(replace(inputs, budget_bytes=smallest)).gathered_bytes == 0
    auto = make_plan(replace(inputs, budget_bytes=smallest - 1, weights="auto"))
    assert auto.gathered_bytes > 0
    assert not auto.streamed


def test_dram_weights_too_small_is_refused_with_the_remedy():
    message = refusal(make_inputs(dram_weights_bytes=MIB))
    assert message.startswith("--dram-weights 1.0 MiB is too small: need ")
    assert "; set --dram-weights " in message


def test_token_budget_below_a_prompt_piece_is_refused():
    inputs = make_inputs(max_num_seqs=8, max_num_batched_tokens=107)
    need = "got 107, need at least 108 (8 sequences and a prompt piece of 100)"
    with pytest.raises(ConfigError, match=re.escape(need)):
        make_plan(inputs)
    assert make_plan(replace(inputs, max_num_batched_tokens=108)).max_num_batched_tokens == 108


def test_token_budget_limits_the_automatic_number_of_sequences():
    plan = make_plan(make_inputs(num_requests=500, max_num_batched_tokens=120))
    assert plan.max_num_batched_tokens == 120
    assert 1 <= plan.max_num_seqs <= 20


def test_token_budget_for_no_sequence_at_all_is_refused():
    with pytest.raises(ConfigError, match="need at least 101 \\(1 sequences"):
        make_plan(make_inputs(max_num_batched_tokens=100))


def test_automatic_shape_runs_as_many_sequences_as_there_are_requests():
    assert make_plan(make_inputs(num_requests=7)).max_num_seqs <= 7
    assert make_plan(make_inputs(num_requests=1)).max_num_seqs == 1


def test_io_bound_plan_takes_more_sequences_since_they_cost_nothing():
    # A slow disk: a step takes as long for many rows as for one.
    profile = replace(Profile.assumed(), nvme_read_bytes_per_s=1e6)
    plan = make_plan(make_inputs(weights="nvme", profile=profile, num_requests=64))
    assert plan.max_num_seqs == 64
    assert plan.prediction.bound_by == "nvme"
    assert plan.is_batch_invariant
    assert "the disk binds" in plan.notes[-1]


def test_compute_bound_plan_says_so_and_leaves_invariance_off():
    profile = replace(Profile.assumed(), nvme_read_bytes_per_s=1e12)
    plan = make_plan(make_inputs(weights="nvme", profile=profile))
    assert plan.prediction.bound_by == "compute"
    assert not plan.is_batch_invariant
    assert plan.notes == (
        "products bind: fewer bytes from disk would not help; this CPU is the limit",
    )


@pytest.mark.parametrize(("asked", "is_on"), [("on", True), ("off", False)])
def test_batch_invariance_that_was_set_is_kept(asked, is_on):
    assert make_plan(make_inputs(batch_invariant=asked)).is_batch_invariant is is_on


def test_resident_model_says_that_nothing_is_read_after_the_first_step():
    plan = make_plan(make_inputs())
    assert plan.streamed == ()
    assert plan.ring.num_bytes == 0
    assert plan.notes[-1].startswith("all weights stay in DRAM")


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 7])
def test_depth_that_was_set_is_reached_where_memory_allows(depth):
    plan = make_plan(make_inputs(weights="nvme", prefetch_depth=depth, target_bytes=2 * MIB))
    assert plan.prefetch_depth == depth
    assert min(plan.ring.lookback) > depth
    assert not any("--prefetch-depth" in note for note in plan.notes)


def test_depth_that_has_no_room_is_cut_and_said():
    plan = make_plan(make_inputs(weights="nvme", prefetch_depth=9, dram_weights_bytes=9 * MIB))
    assert plan.prefetch_depth < 9
    assert plan.notes[0].startswith(f"--prefetch-depth 9 is cut to {plan.prefetch_depth}: ")


def test_residents_of_a_plan_are_those_of_the_even_spread():
    plan = make_plan(make_inputs(dram_weights_bytes=40 * MIB))
    stages = [u.unit_idx for u in plan.units if u.slices and not u.is_gathered]
    sizes = [plan.footprints[idx] for idx in stages]
    runs, run = [], 0
    for idx, size in zip(stages, sizes, strict=True):
        run = 0 if idx in plan.resident else run + size
        runs.append(run)
    share = plan.resident_bytes / sum(sizes)
    assert 0.3 < share < 0.7
    assert max(runs) <= 2 * max(sizes) / share
    assert choose_resident(sizes, budget_bytes=0) == frozenset()
