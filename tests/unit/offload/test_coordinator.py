"""When units are read, where they land, and what happens when reads fail or a step is cut short."""

import os
from itertools import product

import pytest
import torch

from tests.helpers.io_shim import PreadvShim, ShimReader, random_latency
from tests.helpers.streams import open_stream, write_weights
from zeroinfer.errors import StorageError
from zeroinfer.native import ThreadReader

HALF = 70_000
"""About half of the weights of a file of six layers."""


@pytest.fixture
def weights(tmp_path):
    return write_weights(tmp_path / "weights.bin")


def shim_reader(shim=None, *, queue_depth=3):
    return ThreadReader.open(
        io_chunk_bytes=8192, queue_depth=queue_depth, preadv=shim or PreadvShim()
    )


def check_order(stream, num_steps):
    """Replay the events against the plan: no place is reused early, depth is never exceeded."""
    plan = stream.plan
    position_of = {idx: position for position, idx in enumerate(plan.streamed)}
    passes = {"submit": {}, "landed": {}, "release": {}}
    done = {"submit": set(), "landed": set(), "release": set()}
    num_ahead = 0
    for index, (kind, _, unit_idx) in enumerate(stream.events):
        pass_idx = passes[kind].get(unit_idx, 0)
        passes[kind][unit_idx] = pass_idx + 1
        key = (pass_idx, unit_idx)
        if kind == "submit":
            is_on_demand = stream.events[index + 1][::2] == ("landed", unit_idx)
            num_ahead += 1
            assert num_ahead - is_on_demand <= max(plan.prefetch_depth, 0), (index, stream.events)
            if unit_idx in position_of:
                position = position_of[unit_idx]
                blocker = pass_idx * len(plan.streamed) + position - plan.ring.lookback[position]
                if blocker >= 0:
                    before, at = divmod(blocker, len(plan.streamed))
                    assert (before, plan.streamed[at]) in done["release"], (index, unit_idx)
        elif kind == "landed":
            num_ahead -= 1
            assert key in done["submit"]
        else:
            assert key in done["landed"]
        done[kind].add(key)
    wanted = {(step, idx) for step in range(num_steps) for idx in plan.streamed}
    assert done["release"] == wanted
    assert {key for key in done["landed"] if key[1] in position_of} == wanted
    assert num_ahead == 0


@pytest.mark.parametrize(
    ("depth", "limit"), [*product([None, 0, 1, 2, 5, 50], [None, HALF, 20_000, 1_000_000])]
)
def test_units_land_before_use_and_places_are_reused_only_after_release(weights, depth, limit):
    kind = "nvme" if limit is None else "auto"
    settings = {"weights": kind, "prefetch_depth": depth, "dram_weights_bytes": limit}
    with open_stream(weights, **settings) as stream:
        for step in range(4):
            stream.run_step(has_next=step < 3)
        check_order(stream, num_steps=4)
        num_fetches = 4 * len(stream.plan.streamed) + len(stream.plan.resident)
        assert len(stream.kinds("landed")) == num_fetches


def test_depth_0_fetches_when_asked_and_never_ahead(weights):
    with open_stream(weights, weights="nvme", prefetch_depth=0) as stream:
        for _ in range(2):
            stream.run_step(has_next=True)
        kinds = [kind for kind, _, _ in stream.events]
        assert kinds == ["submit", "landed", "release"] * (2 * len(stream.plan.streamed))
        assert stream.fetch.num_hits == 0


def test_prefetch_crosses_the_borders_of_units_and_of_steps(weights):
    with open_stream(weights, weights="nvme", prefetch_depth=2) as stream:
        stream.run_step(has_next=True)
        ahead = stream.kinds("submit")[len(stream.plan.streamed) :]
        assert ahead == list(stream.plan.streamed[:2])
        submitted = [(kind, idx) for kind, _, idx in stream.events]
        second, first = stream.plan.streamed[1], stream.plan.streamed[0]
        assert submitted.index(("submit", second)) < submitted.index(("landed", first))
        stream.run_step(has_next=False)


def test_last_step_fetches_nothing_for_a_step_that_will_not_come(weights):
    with open_stream(weights, weights="nvme") as stream:
        stream.run_step(has_next=False)
        assert len(stream.kinds("submit")) == len(stream.plan.streamed)


def test_step_that_was_not_announced_still_runs(weights):
    with open_stream(weights, weights="nvme") as stream:
        stream.run_step(has_next=False)
        stream.run_step(has_next=False)
        check_order(stream, num_steps=2)


def test_every_unit_but_the_first_was_prefetched(weights):
    with open_stream(weights, weights="nvme", prefetch_depth=1) as stream:
        stream.run_step(has_next=False)
        assert stream.fetch.num_acquired == len(stream.plan.streamed)
        assert stream.fetch.num_hits == stream.fetch.num_acquired


@pytest.mark.parametrize("limit", [None, HALF])
def test_bytes_needed_are_those_of_the_tensors_and_reads_add_only_the_alignment(weights, limit):
    kind = "nvme" if limit is None else "auto"
    with open_stream(weights, weights=kind, dram_weights_bytes=limit) as stream:
        for step in range(3):
            stream.run_step(has_next=step < 2)
        plan = stream.plan
        resident = sum(plan.units[idx].num_bytes for idx in plan.resident)
        assert stream.fetch.bytes_needed == resident + 3 * (plan.streamed_bytes + 2 * 128)
        footprints = sum(plan.footprints[idx] for idx in plan.resident)
        footprints += 3 * sum(plan.footprints[idx] for idx in plan.streamed) + 3 * 2 * 8192
        read = stream.reader.counters.bytes_read
        # Direct reads deliver whole blocks; the last block of the file may be short.
        assert stream.fetch.bytes_needed <= read <= footprints


def test_resident_model_is_read_once(weights):
    with open_stream(weights) as stream:
        stream.run_step(has_next=True)
        first = stream.reader.counters.bytes_read
        for _ in range(3):
            stream.run_step(has_next=True)
        assert stream.reader.counters.bytes_read == first
        assert not stream.plan.streamed


@pytest.mark.parametrize(("depth", "num_units"), [*product([0, 1, 4, 50], [0, 1, 7, 13])])
def test_step_that_was_cut_short_begins_again_at_the_first_unit(weights, depth, num_units):
    with open_stream(weights, dram_weights_bytes=HALF, prefetch_depth=depth) as stream:
        stream.run_step(has_next=True, num_units=num_units)
        stream.fetch.restart()
        loaded = set(stream.kinds("landed")) & stream.plan.resident
        stream.events.clear()
        for step in range(3):
            stream.run_step(has_next=step < 2)
        landed = stream.kinds("landed")
        assert not loaded & set(landed), "a resident unit that was there is fetched again"
        check_order(stream, num_steps=3)


def test_step_cut_short_after_full_steps_begins_again_at_the_first_unit(weights):
    with open_stream(weights, dram_weights_bytes=HALF) as stream:
        stream.run_step(has_next=True)
        stream.run_step(has_next=True, num_units=9)
        stream.fetch.restart()
        stream.events.clear()
        stream.run_step(has_next=True)
        stream.run_step(has_next=False)
        check_order(stream, num_steps=2)


def test_released_place_turns_into_nan_even_for_views_that_were_kept(weights):
    with open_stream(weights, weights="nvme", prefetch_depth=0) as stream:
        stream.fetch.start_step(has_next=False)
        unit = stream.units[3]
        for each in stream.units[:3]:
            stream.use(each)
            stream.fetch.release(each.unit_idx)
        stale = stream.use(unit)
        stream.fetch.release(unit.unit_idx)
        for piece in unit.slices:
            assert torch.isnan(stale[piece.name]).all()


def test_released_place_keeps_its_bytes_without_poison(weights):
    with open_stream(weights, weights="nvme", prefetch_depth=0, is_poisoned=False) as stream:
        stream.fetch.start_step(has_next=False)
        unit = next(unit for unit in stream.units if unit.slices)
        for each in stream.units[: stream.units.index(unit)]:
            stream.use(each)
        landed = stream.use(unit)
        stream.fetch.release(unit.unit_idx)
        assert torch.equal(landed[unit.slices[0].name], stream.expected(unit.slices[0]))


def test_resident_units_are_never_poisoned(weights):
    with open_stream(weights) as stream:
        for _ in range(3):
            stream.run_step(has_next=True)
        assert "release" not in [kind for kind, _, _ in stream.events]


@pytest.mark.parametrize("prefix_bytes", [0, 1, 3, 511, 4095, 4096, 4097])
def test_tensors_may_lie_at_any_byte_of_the_file(tmp_path, prefix_bytes):
    weights = write_weights(tmp_path / "odd.bin", prefix_bytes=prefix_bytes, columns=63)
    with open_stream(weights, dram_weights_bytes=HALF) as stream:
        stream.run_step(has_next=True)
        stream.run_step(has_next=False)


def test_random_delays_change_no_bit_in_50_runs(tmp_path):
    weights = write_weights(tmp_path / "weights.bin", num_layers=8)

    def checksums(**settings):
        sums = []
        with open_stream(weights, is_poisoned=False, **settings) as stream:
            for step in range(2):
                stream.fetch.start_step(has_next=step == 0)
                for unit in stream.units:
                    landed = stream.fetch.acquire(unit.unit_idx)
                    tensors = [landed[piece.name] for piece in unit.slices]
                    sums += [float(each.double().sum()) for each in tensors for _ in range(3)]
                    stream.fetch.release(unit.unit_idx)
        return sums

    resident = checksums()
    for run in range(50):
        shim = PreadvShim(latency_s=random_latency(max_s=4e-4, seed=run))
        # Two of the largest units: each lands while the other is in use.
        settings = {"weights": "nvme", "prefetch_depth": 1}
        assert checksums(reader=shim_reader(shim), **settings) == resident, run
        assert len(shim.calls) > 40


def test_slow_link_is_waited_for_and_nothing_is_read_twice_in_a_step(weights):
    with open_stream(
        weights, weights="nvme", reader=ShimReader(shim_reader(), latency_s=1e-3)
    ) as stream:
        stream.run_step(has_next=False)
        assert stream.fetch.fetch_wait_s > 0
        submits = [offset for _, offset, _, is_row in stream.reader.submits if not is_row]
        assert len(set(submits)) == len(submits), "something is read twice in one step"


def first_run(stream, unit_idx):
    return stream.store.homes[unit_idx].runs[0].run


def read_of(stream, unit):
    return next(f"at {run.run.offset} of" for run in stream.store.homes[unit.unit_idx].runs)


def test_failed_read_stops_the_step_with_file_offset_and_bytes(weights):
    bad_offsets = set()
    shim = PreadvShim(fails_at=lambda call: call.offset in bad_offsets)
    with open_stream(weights, weights="nvme", reader=shim_reader(shim)) as stream:
        stream.run_step(has_next=False)
        victim = stream.units[8]
        bad_offsets.add(first_run(stream, victim.unit_idx).offset)
        with pytest.raises(StorageError) as caught:
            stream.run_step(has_next=False)
        message = str(caught.value)
        assert str(weights.path) in message
        assert read_of(stream, victim) in message
        assert "(EIO)" in message
        assert "got 0 bytes, need " in message
        landed = [idx for kind, step, idx in stream.events if kind == "landed" and step == 1]
        assert victim.unit_idx not in landed, "stale bytes of the step before were handed out"


def test_step_after_a_failed_one_is_whole_again(weights):
    shim = PreadvShim()
    with open_stream(weights, dram_weights_bytes=HALF, reader=shim_reader(shim)) as stream:
        stream.run_step(has_next=True)
        shim.fails_at = lambda call: True
        with pytest.raises(StorageError):
            stream.run_step(has_next=True)
        # Reads that were queued ahead fail as well; that must not hide the first error.
        stream.fetch.restart()
        shim.fails_at = lambda call: False
        stream.events.clear()
        stream.run_step(has_next=True)
        stream.run_step(has_next=False)
        check_order(stream, num_steps=2)


def test_failed_read_leaves_no_other_read_of_the_unit_in_flight(tmp_path):
    # Two runs in one unit, since the tensors between them belong to others.
    weights = write_weights(tmp_path / "weights.bin")
    shim = PreadvShim()
    with open_stream(weights, weights="nvme", reader=shim_reader(shim)) as stream:
        shim.fails_at = lambda call: True
        stream.fetch.start_step(has_next=False)
        unit = next(unit for unit in stream.units if unit.slices)
        for each in stream.units[: stream.units.index(unit)]:
            stream.fetch.acquire(each.unit_idx)
        with pytest.raises(StorageError):
            stream.fetch.acquire(unit.unit_idx)
        stream.fetch.restart()
        assert not stream.fetch._tickets


def test_short_reads_are_continued_and_nothing_of_the_gap_is_used(weights):
    shim = PreadvShim(max_bytes_at=lambda call: 5000 if call.num_bytes > 4096 else None)
    with open_stream(weights, weights="nvme", reader=shim_reader(shim)) as stream:
        stream.run_step(has_next=True)
        stream.run_step(has_next=False)


def test_file_cut_while_running_is_an_error_of_the_unit_beyond_its_end(weights):
    with open_stream(weights, weights="nvme", prefetch_depth=0) as stream:
        stream.run_step(has_next=False)
        victim = stream.units[-1]
        run = first_run(stream, victim.unit_idx)
        os.truncate(weights.path, run.offset + 100)
        with pytest.raises(StorageError) as caught:
            stream.run_step(has_next=False)
        message = str(caught.value)
        assert "came short: got 100 bytes, need " in message
        assert "was cut since" in message
        assert str(weights.path) in message
