"""With batch invariance on, a row's bits do not depend on the rows beside it or on its schedule."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.engines import drive, greedy_requests, open_engine, run_requests
from zeroinfer.engine import Request, SamplingParams

NUM_NEW_TOKENS = 5
ON = {
    "compute.batch_invariant": "on",
    "offload.weights": "dram",
    "scheduler.prompt_chunk_tokens": 16,
    "scheduler.max_num_seqs": 64,
}


def _rows(count):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 45, (count,), generator=generator).tolist()
    return [torch.randint(500, (n,), generator=generator).tolist() for n in lengths]


ROWS = _rows(64)
TARGET = torch.randint(500, (37,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.fixture(params=["native", "upcast", "fused"])
def mode(request, force_mode):
    """Each way of multiplying bf16."""
    force_mode(request.param)
    return request.param


def _requests(rows, *, target_idx):
    rows = [*rows]
    rows.insert(target_idx, TARGET)
    requests = greedy_requests(rows, max_tokens=2)
    sampling = replace(requests[0].sampling, max_tokens=NUM_NEW_TOKENS)
    requests[target_idx] = replace(requests[target_idx], sampling=sampling)
    return requests


def _target(folder, rows=(), *, target_idx=0, settings=ON):
    run = run_requests(folder, _requests(rows, target_idx=target_idx), settings)
    assert run.plan.is_batch_invariant
    return run.ids[target_idx], run.logits[target_idx]


def _assert_same(got, want):
    assert got[0] == want[0]
    assert torch.equal(got[1], want[1]), f"differs by {(got[1] - want[1]).abs().max()}"


@pytest.fixture(scope="module")
def alone_by_mode():
    """Ids and logits of the row by itself, computed once per mode."""
    return {}


@pytest.fixture
def alone(small_llama, mode, alone_by_mode):
    """Ids and logits of the row by itself."""
    if mode not in alone_by_mode:
        alone_by_mode[mode] = _target(small_llama)
    return alone_by_mode[mode]


@pytest.mark.parametrize(("num_rows", "target_idx"), [(7, 0), (7, 6), (64, 0), (64, 40), (64, 63)])
def test_batch_and_place(small_llama, alone, num_rows, target_idx):
    rows = ROWS[: num_rows - 1]
    _assert_same(_target(small_llama, rows, target_idx=target_idx), alone)


def test_batch_and_place_with_torch_alone(small_llama, force_mode):
    force_mode("upcast")
    plain = {**ON, "compute.fused_kernels": "off"}
    alone = _target(small_llama, settings=plain)
    _assert_same(_target(small_llama, ROWS[:7], target_idx=3, settings=plain), alone)


@pytest.mark.parametrize("max_num_batched_tokens", [24, 47, 100, 4096])
def test_cuts_of_the_prompt(small_llama, alone, max_num_batched_tokens):
    """Prompts of up to three chunks, cut differently, some admitted steps later than others."""
    settings = {
        **ON,
        "scheduler.max_num_seqs": 8,
        "scheduler.max_num_batched_tokens": max_num_batched_tokens,
    }
    got = _target(small_llama, ROWS[:11], target_idx=9, settings=settings)
    _assert_same(got, alone)


@pytest.mark.parametrize("num_done", [1, 3, NUM_NEW_TOKENS - 1])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_resume(small_llama, alone, num_done, num_rows):
    """A row that goes on after tokens of an earlier run, beside other rows than then."""
    ids, logits = alone
    requests = _requests(ROWS[: num_rows - 1], target_idx=0)
    requests[0] = replace(requests[0], generated_token_ids=tuple(ids[:num_done]))
    run = run_requests(small_llama, requests, ON)
    _assert_same((run.ids[0], run.logits[0]), (ids, logits[num_done:]))


def test_streamed_in_another_batch(small_llama, alone):
    settings = {**ON, "offload.weights": "nvme", "offload.fetch_unit_bytes": "64KiB"}
    _assert_same(_target(small_llama, ROWS[:6], target_idx=2, settings=settings), alone)


def test_other_families(family_folder, family):
    """Alone, streamed beside others, and taken up again after an interruption."""
    folder = family_folder(family, "bfloat16")
    ids, logits = _target(folder)
    streamed = {**ON, "offload.weights": "nvme", "offload.fetch_unit_bytes": "64KiB"}
    _assert_same(_target(folder, ROWS[:6], target_idx=2, settings=streamed), (ids, logits))
    requests = _requests(ROWS[:3], target_idx=1)
    requests[1] = replace(requests[1], generated_token_ids=tuple(ids[:2]))
    run = run_requests(folder, requests, ON)
    _assert_same((run.ids[1], run.logits[1]), (ids, logits[2:]))


def test_two_threads(small_llama):
    """Thread count may change bits; the batch still may not."""
    folder, settings = small_llama, {**ON, "compute.num_threads": 2}
    want = _target(folder, settings=settings)
    _assert_same(_target(folder, ROWS[:20], target_idx=11, settings=settings), want)


def test_one_engine_after_other_work(small_llama, alone):
    """KV blocks that other rows used before leave no trace."""
    folder = small_llama
    with open_engine(folder, _requests(ROWS[:5], target_idx=5), ON) as engine:
        drive(engine, greedy_requests(ROWS[:6], max_tokens=3))
        run = drive(engine, _requests((), target_idx=0))
    _assert_same((run.ids[0], run.logits[0]), alone)


def test_sampled_ids(small_llama, mode):
    """A seeded row draws the same ids whatever runs beside it. Source: vllm-project/vllm#51226."""
    folder = small_llama
    sampling = SamplingParams(
        max_tokens=NUM_NEW_TOKENS, temperature=0.8, top_k=50, top_p=0.9, seed=5, ignore_eos=True
    )
    target = Request(request_id=99, prompt_token_ids=tuple(TARGET), sampling=sampling)
    want = run_requests(folder, [target], ON).ids[0]
    mates = greedy_requests(ROWS[:6], max_tokens=3)
    mates[1] = replace(mates[1], sampling=replace(sampling, seed=6))
    for place in (0, 3, 6):
        run = run_requests(folder, [*mates[:place], target, *mates[place:]], ON)
        assert run.ids[place] == want
    resumed = replace(target, generated_token_ids=tuple(want[:3]))
    assert run_requests(folder, [resumed], ON).ids[0] == want
    other = replace(target, sampling=replace(sampling, seed=6))
    assert run_requests(folder, [other], ON).ids[0] != want


def test_comparison_can_fail(small_llama, force_mode):
    """Without row tiles other bits come out where a product sees one row or seven."""
    force_mode("upcast")
    off = {**ON, "compute.batch_invariant": "off", "compute.num_threads": 1}
    alone, beside = (
        run_requests(small_llama, _requests(rows, target_idx=0), off).logits[0]
        for rows in ((), ROWS[:6])
    )
    assert not torch.equal(alone, beside)
