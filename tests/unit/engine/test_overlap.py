"""Prefetching hits, and a pass costs the slower of reading and computing."""

import time
from dataclasses import replace

import pytest

from tests.helpers.checkpoints import tiny_llama
from tests.helpers.engines import (
    drive,
    greedy_requests,
    half_resident,
    open_engine,
    run_requests,
    stop_after,
    take_back_stop,
)
from tests.helpers.io_shim import ShimReader
from zeroinfer.engine import StepInterrupted
from zeroinfer.layers import Apply
from zeroinfer.models import build_model
from zeroinfer.native import ThreadReader

NUM_STAGES = 16
STAGE_S = 0.02
STREAMED = {"offload.weights": "nvme"}


class _Link(ShimReader):
    """A link that carries a unit in `STAGE_S`; rows of a table, urgent, cost nothing."""

    def submit(self, file, offset, destination, *, required_bytes, is_urgent=False):
        if is_urgent:
            return self.inner.submit(
                file, offset, destination, required_bytes=required_bytes, is_urgent=True
            )
        return super().submit(file, offset, destination, required_bytes=required_bytes)


def _reader(**options):
    return _Link(ThreadReader.open(io_chunk_bytes=1 << 20, queue_depth=4, trace=None), **options)


@pytest.fixture(scope="module")
def deep_llama(tmp_path_factory):
    """Eight layers, so sixteen stages of equal bytes, and a head of next to none."""
    return tiny_llama(
        tmp_path_factory.mktemp("deep") / "llama", hidden_size=128, intermediate_size=171,
        num_hidden_layers=NUM_STAGES // 2, num_key_value_heads=4, vocab_size=8,
    )  # fmt: skip


@pytest.fixture
def slow_compute(monkeypatch):
    """Each decoder stage computes for `STAGE_S` more."""

    def build(config):
        model = build_model(config)
        pause = Apply(fn=lambda frame: time.sleep(STAGE_S))
        stages = [
            replace(stage, ops=(*stage.ops, pause)) if stage.layer_idx >= 0 else stage
            for stage in model.stages
        ]
        return replace(model, stages=tuple(stages))

    monkeypatch.setattr("zeroinfer.engine.prepare.build_model", build)


def _link(folder, requests):
    """A reader that needs `STAGE_S` for the bytes of a stage."""
    with open_engine(folder, requests, STREAMED) as engine:
        footprints = [engine.plan.footprints[idx] for idx in engine.plan.streamed]
    return _reader(bytes_per_s=max(footprints) / STAGE_S)


def test_prefetch_hits_and_overlaps(deep_llama, slow_compute):
    """Source: deepspeedai/DeepSpeed#1069."""
    requests = greedy_requests([[1, 2, 3]], max_tokens=6)
    run = run_requests(deep_llama, requests, STREAMED, reader=_link(deep_llama, requests))
    num_passes, num_units = len(run.steps), len(run.plan.streamed)
    assert num_units == NUM_STAGES + 1
    assert run.num_acquired == num_passes * num_units
    assert run.num_hits >= run.num_acquired * 15 / 16
    # A busy machine slows any one pass; a counter off by one slows them all.
    fastest = min(step.wall_s for step in run.steps[1:])
    assert fastest <= 1.25 * (NUM_STAGES * STAGE_S + STAGE_S)


def test_first_units_of_a_step_are_read_during_the_step_before(deep_llama):
    """The link never drains at the border of two steps, and reads nothing after the last."""
    requests = greedy_requests([[1, 2, 3]], max_tokens=3)
    with open_engine(deep_llama, requests, STREAMED) as engine:
        events = []
        engine._streaming.fetch._on_event = lambda *event: events.append(event)
        plan = drive(engine, requests).plan
    first, num_units = plan.streamed[0], len(plan.streamed)
    assert [step for kind, step, idx in events if (kind, idx) == ("submit", first)] == [0, 0, 1]
    submits = [(step, idx) for kind, step, idx in events if kind == "submit"]
    assert len(submits) == 3 * num_units
    released = [idx for kind, _, idx in events if kind == "release"]
    assert released == [*plan.streamed] * 3
    for idx in plan.streamed:
        kinds = [kind for kind, _, unit_idx in events if unit_idx == idx]
        assert kinds == ["submit", "landed", "release"] * 3


def test_depth_0_never_hits_and_never_overlaps(deep_llama, slow_compute):
    """The plain loop; the comparison above can fail."""
    requests = greedy_requests([[1, 2, 3]], max_tokens=2)
    settings = {**STREAMED, "offload.prefetch_depth": 0}
    run = run_requests(deep_llama, requests, settings, reader=_link(deep_llama, requests))
    assert run.num_hits == 0
    assert min(step.wall_s for step in run.steps) >= 1.7 * NUM_STAGES * STAGE_S


def test_random_delays_do_not_change_bits(deep_llama):
    """Source: vllm-project/vllm#47282. A ring of two units, reads that come late and unevenly."""
    requests = greedy_requests([[1, 2, 3], [4]], max_tokens=3)
    oracle = run_requests(deep_llama, requests, {"offload.weights": "dram"})
    for latency_s in (0.0, 0.002, 0.005):
        settings = {**STREAMED, "offload.prefetch_depth": 1}
        reader = _reader(latency_s=latency_s)
        run = run_requests(deep_llama, requests, settings, reader=reader)
        assert run.ids == oracle.ids
        assert all((a == b).all() for a, b in zip(run.logits, oracle.logits, strict=True))


@pytest.mark.parametrize("num_steps_before", [0, 1])
@pytest.mark.parametrize("way", ["depth-0", "depth-auto", "half", "resident"])
def test_interrupted_step_counts_nothing_and_is_computed_again(deep_llama, way, num_steps_before):
    requests = greedy_requests([[1, 2, 3]], max_tokens=4)
    settings = {
        "depth-0": {**STREAMED, "offload.prefetch_depth": 0},
        "depth-auto": STREAMED,
        "half": half_resident(deep_llama, requests, fetch_unit_bytes=1 << 16),
        "resident": {"offload.weights": "dram"},
    }[way]
    want = run_requests(deep_llama, requests, settings).ids[0]
    with open_engine(deep_llama, requests, settings) as engine:
        engine.add_request(requests[0])
        ids = [engine.step().new_token_ids[0] for _ in range(num_steps_before)]
        seen = stop_after(engine, 5)
        for _ in range(2):
            with pytest.raises(StepInterrupted):
                engine.step()
        assert len(seen) == 5, "the step went on after the stop"
        assert engine.report()["totals"]["num_generated_tokens"] == num_steps_before
        take_back_stop(engine)
        while engine.has_unfinished_requests():
            ids += engine.step().new_token_ids.values()
    assert ids == want


def test_stop_before_the_first_step(deep_llama):
    requests = greedy_requests([[1]], max_tokens=1)
    with open_engine(deep_llama, requests, STREAMED) as engine:
        engine.add_request(requests[0])
        engine.request_stop()
        with pytest.raises(StepInterrupted):
            engine.step()
        assert engine.report()["totals"]["num_steps"] == 0
