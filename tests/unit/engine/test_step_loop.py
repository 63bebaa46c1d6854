"""The loop alone, over a fake coordinator that records the order of things."""

import pytest
import torch

from zeroinfer.counters import Trace
from zeroinfer.engine.request import StepInterrupted
from zeroinfer.engine.step_loop import StepLoop
from zeroinfer.layers import Apply, Frame, PackedBatch, PlainWeights
from zeroinfer.memory import CpuDevice
from zeroinfer.memory.cpu_device import DoneEvent
from zeroinfer.models import Stage
from zeroinfer.native import ProductKernel
from zeroinfer.offload import LandedUnit
from zeroinfer.planner import FetchUnit, UnitPart


class _Fetch:
    """Hands out nothing and writes down who asked."""

    def __init__(self):
        self.events = []
        self.fetch_wait_s = 0.0
        self.on_release = None
        self.ready = {}

    def start_step(self, *, has_next):
        self.events.append(("start", has_next))

    def acquire(self, unit_idx):
        self.events.append(("acquire", unit_idx))
        return LandedUnit({}, PlainWeights({}).gather, ready=self.ready.get(unit_idx))

    def release(self, unit_idx):
        self.events.append(("release", unit_idx))
        if self.on_release is not None:
            self.on_release(unit_idx)


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
    loop = StepLoop(stages=stages, units=[table, *units], fetch=fetch, trace=Trace())
    return loop, fetch


def _frame():
    batch = PackedBatch(
        input_ids=torch.zeros(2), positions=torch.zeros(2), rope_lengths=torch.ones(2),
        logits_indices=torch.tensor([1]), num_rows=2, sequences=(),
    )  # fmt: skip
    kernel = ProductKernel.resolve(torch.float32, num_threads=1)
    return Frame(batch=batch, kernel=kernel, kv=None, prompt_chunk_tokens=4)


def test_fetch_compute_release_in_order(world):
    loop, fetch = world
    logits = loop.run(_frame(), has_next=True)
    assert logits.shape == (1, 7), "rows that only pad are cut off"
    names = ["embed", "first", "second", "head"]
    expected = [("start", True)]
    for unit_idx, name in enumerate(names, start=1):
        expected += [("acquire", unit_idx), name, ("release", unit_idx)]
    assert fetch.events == expected


@pytest.mark.parametrize("unit_idx", [1, 2, 4])
def test_stop_ends_the_step_after_the_unit_in_use(world, unit_idx):
    loop, fetch = world

    def stop(released):
        loop.is_stop_requested = released == unit_idx

    fetch.on_release = stop
    with pytest.raises(StepInterrupted):
        loop.run(_frame(), has_next=False)
    assert fetch.events[-1] == ("release", unit_idx)


def test_first_bad_stage_of_each_row(world):
    loop, _ = world
    loop.run(_frame(), has_next=False)
    assert loop.first_bad_stage(0) is None
    assert loop.first_bad_stage(1).name == "layers.0"


def test_time_is_accounted(world):
    loop, _ = world
    assert loop.compute_s == 0
    loop.run(_frame(), has_next=False)
    once = loop.compute_s
    loop.run(_frame(), has_next=False)
    assert 0 < once < loop.compute_s


class _Behind(CpuDevice):
    """Reaches each recorded point a second after the one before, on a clock of its own."""

    def __init__(self):
        super().__init__()
        self.is_asynchronous = True
        self.now_s = 1000.0

    def record(self):
        self.now_s += 1.0
        return DoneEvent(self.now_s)


def test_trace_of_a_device_that_runs_behind_is_in_its_own_time(world):
    """A unit begins when it was there and the one before was over, not when it was launched."""
    loop, fetch = world
    loop._trace, loop._device = Trace(is_enabled=True), _Behind()
    fetch.ready = {1: DoneEvent(1001.25), 3: DoneEvent(1003.5), 4: DoneEvent(1000.0)}
    loop.run(_frame(), has_next=False)
    # Begin of the step 1001, units 1002, 1003, layer 0 at 1004, units 1005, 1006, end 1007.
    assert loop._trace._events == [
        ("compute", "1", 1001.25, 1002.0),
        ("compute", "2", 1002.0, 1003.0),
        ("compute", "3", 1003.5, 1005.0),
        ("compute", "4", 1005.0, 1006.0),
    ]
    assert loop.first_layer_stop_s == 1004.0
    assert loop.compute_s == 6.0


def test_step_of_a_device_that_runs_behind_was_cut_short_and_is_not_traced(world):
    loop, _ = world
    loop._trace, loop._device = Trace(is_enabled=True), _Behind()
    loop.is_stop_requested = True
    with pytest.raises(StepInterrupted):
        loop.run(_frame(), has_next=False)
    loop.is_stop_requested = False
    loop.run(_frame(), has_next=False)
    assert [name for _, name, *_ in loop._trace._events] == ["1", "2", "3", "4"]
