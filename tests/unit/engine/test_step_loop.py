"""The loop alone, over a fake coordinator that records the order of things."""

import pytest
import torch

from zeroinfer.counters import Trace
from zeroinfer.engine.request import StepInterrupted
from zeroinfer.engine.step_loop import StepLoop
from zeroinfer.layers import Apply, Frame, PackedBatch, PlainWeights
from zeroinfer.models import Stage
from zeroinfer.native import ProductKernel
from zeroinfer.planner import FetchUnit, UnitPart


class _Fetch:
    """Hands out nothing and writes down who asked."""

    def __init__(self):
        self.events = []
        self.fetch_wait_s = 0.0

    def start_step(self, *, has_next):
        self.events.append(("start", has_next))

    def acquire(self, unit_idx):
        self.events.append(("acquire", unit_idx))
        return PlainWeights({})

    def release(self, unit_idx):
        self.events.append(("release", unit_idx))


@pytest.fixture
def world():
    """Three stages, the second in two units; every operator writes its name down."""
    fetch = _Fetch()

    def op(name, change):
        def run(frame):
            fetch.events.append(name)
            change(frame)

        return Apply(fn=run)

    def embed(frame):
        frame["hidden"] = torch.ones(2, 3)

    def scratch(frame):
        frame["scratch"] = torch.zeros(1)

    def spoil(frame):
        assert frame.layer_idx == 0
        assert "scratch" in frame.tensors, "temporaries live to the end of their stage"
        frame["hidden"][1] = float("nan")

    def head(frame):
        assert "scratch" not in frame.tensors, "temporaries end with their stage"
        frame["logits"] = torch.zeros(5, 7)

    stages = (
        Stage(name="embed", layer_idx=-1, ops=(op("embed", embed),)),
        Stage(name="layers.0", layer_idx=0, ops=(op("first", scratch), op("second", spoil))),
        Stage(name="head", layer_idx=-1, ops=(op("head", head),), kept=frozenset({"logits"})),
    )
    units = [
        FetchUnit(
            unit_idx=idx, name=str(idx), stage_idx=stage_idx, slices=(),
            parts=(UnitPart(op_idx=op_idx),),
        )
        for idx, stage_idx, op_idx in ((1, 0, 0), (2, 1, 0), (3, 1, 1), (4, 2, 0))
    ]  # fmt: skip
    table = FetchUnit(unit_idx=0, name="t", stage_idx=0, parts=(), slices=(), is_gathered=True)
    stop_after = []
    loop = StepLoop(
        stages=stages,
        units=[table, *units],
        fetch=fetch,
        should_stop=lambda: bool(stop_after) and fetch.events[-1] == ("release", stop_after[0]),
        trace=Trace(),
    )
    return loop, fetch, stop_after


def _frame():
    batch = PackedBatch(
        input_ids=torch.zeros(2), positions=torch.zeros(2), rope_lengths=torch.ones(2),
        logits_indices=torch.tensor([1]), num_rows=2, sequences=(),
    )  # fmt: skip
    kernel = ProductKernel.resolve(torch.float32, num_threads=1)
    return Frame(batch=batch, kernel=kernel, kv=None, prompt_chunk_tokens=4)


def test_fetch_compute_release_in_order(world):
    loop, fetch, _ = world
    logits = loop.run(_frame(), has_next=True)
    assert logits.shape == (1, 7), "rows that only pad are cut off"
    names = ["embed", "first", "second", "head"]
    expected = [("start", True)]
    for unit_idx, name in enumerate(names, start=1):
        expected += [("acquire", unit_idx), name, ("release", unit_idx)]
    assert fetch.events == expected


@pytest.mark.parametrize("unit_idx", [1, 2, 4])
def test_stop_ends_the_step_after_the_unit_in_use(world, unit_idx):
    loop, fetch, stop_after = world
    stop_after.append(unit_idx)
    with pytest.raises(StepInterrupted):
        loop.run(_frame(), has_next=False)
    assert fetch.events[-1] == ("release", unit_idx)


def test_first_bad_stage_of_each_row(world):
    loop, _, _ = world
    loop.run(_frame(), has_next=False)
    assert loop.first_bad_stage(0) is None
    assert loop.first_bad_stage(1).name == "layers.0"


def test_time_is_accounted(world):
    loop, _, _ = world
    assert loop.compute_s == 0
    loop.run(_frame(), has_next=False)
    once = loop.compute_s
    loop.run(_frame(), has_next=False)
    assert 0 < once < loop.compute_s
