import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroinfer.engine.request import Request, SamplingParams
from zeroinfer.engine.scheduler import Scheduler
from zeroinfer.engine.sequence import Sequence
from zeroinfer.kvcache import BlockPool


def _sequence(request_id, num_prompt, max_tokens=4, num_generated=0):
    request = Request(
        request_id=request_id,
        prompt_token_ids=(1,) * num_prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
        generated_token_ids=(2,) * num_generated,
    )
    return Sequence(request, tokenizer=None, eos_token_ids=frozenset(), max_model_len=1000)


def _scheduler(*, num_blocks=1000, max_num_seqs=4, max_num_batched_tokens=64, chunk=16):
    pool = BlockPool(num_blocks=num_blocks, block_size=4)
    scheduler = Scheduler(
        block_pool=pool,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prompt_chunk_tokens=chunk,
    )
    return scheduler, pool


def _step(scheduler):
    """Schedule, pretend to compute, retire what ended; returns {request_id: tokens computed}."""
    scheduled = scheduler.schedule()
    for item in scheduled:
        has_logits = item.has_logits
        item.sequence.num_computed_tokens += item.num_scheduled_tokens
        if has_logits:
            item.sequence.append(7)
    for sequence in [sequence for sequence in scheduler.running if sequence.is_finished]:
        scheduler.retire(sequence)
    return {item.sequence.request.request_id: item.num_scheduled_tokens for item in scheduled}


def test_first_come_first_served_up_to_the_places():
    scheduler, _ = _scheduler(max_num_seqs=2)
    for request_id in range(3):
        scheduler.add(_sequence(request_id, 3))
    assert _step(scheduler) == {0: 3, 1: 3}
    assert [sequence.request.request_id for sequence in scheduler.waiting] == [2]


def test_freed_place_is_filled_by_the_next_step():
    scheduler, _ = _scheduler(max_num_seqs=2)
    for request_id, max_tokens in enumerate((1, 3, 1)):
        scheduler.add(_sequence(request_id, 3, max_tokens))
    assert set(_step(scheduler)) == {0, 1}
    assert _step(scheduler) == {1: 1, 2: 3}


def test_decodes_go_before_prompts():
    scheduler, _ = _scheduler(max_num_batched_tokens=17)
    scheduler.add(_sequence(0, 2))
    assert _step(scheduler) == {0: 2}
    scheduler.add(_sequence(1, 40))
    assert _step(scheduler) == {0: 1, 1: 16}
    assert _step(scheduler) == {0: 1, 1: 16}
    assert _step(scheduler) == {0: 1, 1: 8}


@pytest.mark.parametrize(
    ("budget", "cuts"), [(16, [16, 16, 8]), (39, [32, 8]), (40, [40]), (31, [16, 24])]
)
def test_prompts_are_cut_on_the_grid_alone(budget, cuts):
    scheduler, _ = _scheduler(max_num_batched_tokens=budget)
    scheduler.add(_sequence(0, 40, max_tokens=1))
    assert [_step(scheduler)[0] for _ in cuts] == cuts
    assert not scheduler.has_unfinished()


def test_prompt_waits_when_no_grid_piece_fits():
    scheduler, _ = _scheduler(max_num_batched_tokens=20)
    scheduler.add(_sequence(0, 12))
    scheduler.add(_sequence(1, 40))
    assert _step(scheduler) == {0: 12}
    assert _step(scheduler) == {0: 1, 1: 16}


def test_resumed_sequence_rebuilds_within_the_budget():
    """Generated tokens attend alone, so their pieces may end anywhere."""
    scheduler, _ = _scheduler(max_num_batched_tokens=20)
    scheduler.add(_sequence(0, 10, max_tokens=40, num_generated=25))
    assert [_step(scheduler)[0] for _ in range(3)] == [20, 15, 1]


def test_sequence_waits_for_its_kv_blocks_and_blocks_those_behind():
    scheduler, pool = _scheduler(num_blocks=4)
    scheduler.add(_sequence(0, 8, max_tokens=1))
    scheduler.add(_sequence(1, 8, max_tokens=4))
    scheduler.add(_sequence(2, 1, max_tokens=1))
    assert _step(scheduler) == {0: 8}
    assert pool.num_free == 4
    assert _step(scheduler) == {1: 8, 2: 1}


def test_all_kv_blocks_are_taken_at_admission():
    scheduler, pool = _scheduler()
    sequence = _sequence(0, 5, max_tokens=6)
    scheduler.add(sequence)
    scheduler.schedule()
    assert len(sequence.block_table) == 3
    assert pool.num_free == 997


def test_has_next_step_is_false_only_at_the_end():
    scheduler, _ = _scheduler()
    scheduler.add(_sequence(0, 3, max_tokens=2))
    first = scheduler.schedule()
    assert scheduler.has_next_step(first)
    first[0].sequence.num_computed_tokens = 3
    first[0].sequence.append(7)
    assert not scheduler.has_next_step(scheduler.schedule())


def test_has_next_step_while_requests_wait():
    scheduler, _ = _scheduler(max_num_seqs=1)
    scheduler.add(_sequence(0, 3, max_tokens=1))
    scheduler.add(_sequence(1, 3, max_tokens=1))
    assert scheduler.has_next_step(scheduler.schedule())


REQUESTS = st.lists(
    st.tuples(st.integers(1, 70), st.integers(1, 12), st.integers(0, 11)), min_size=1, max_size=12
)


@given(requests=REQUESTS, places=st.integers(1, 5), extra=st.integers(0, 60))
def test_every_request_ends_and_all_blocks_return(requests, places, extra):
    budget = places + 16 + extra
    scheduler, pool = _scheduler(num_blocks=30, max_num_seqs=places, max_num_batched_tokens=budget)
    sequences = [
        _sequence(idx, prompt, tokens, min(done, tokens - 1))
        for idx, (prompt, tokens, done) in enumerate(requests)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    admitted = []
    for _ in range(400):
        if not scheduler.has_unfinished():
            break
        running_before = len(scheduler.running)
        counts = _step(scheduler)
        assert counts, "a step that computes nothing would go on for ever"
        assert sum(counts.values()) <= budget
        assert len(scheduler.running) <= places
        assert running_before <= places
        admitted += [idx for idx in counts if idx not in admitted]
    assert all(sequence.is_finished for sequence in sequences)
    assert sorted(admitted) == list(range(len(requests)))
    assert pool.num_free == 30
    for sequence, (_, tokens, _) in zip(sequences, requests, strict=True):
        assert sequence.num_generated_tokens == tokens
