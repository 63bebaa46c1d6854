"""Storage to a device: bits, order, and what happens when reads fail or a step is cut short."""

import time
from itertools import product

import pytest
import torch

from tests.helpers.io_shim import PreadvShim, ShimReader, random_latency
from tests.helpers.streams import open_stream, write_weights
from zeroinfer.errors import StorageError
from zeroinfer.memory import DoubleDevice
from zeroinfer.memory.double_device import DeviceRecord
from zeroinfer.native import ThreadReader

SMALL_RING = 40_000
"""Device memory of about three units."""
HALF = 75_000
SHAPE = {"max_num_seqs": 1, "max_num_batched_tokens": 128}
WAYS = {
    "dram": {"weights": "dram", "gpu_bytes": SMALL_RING},
    "nvme": {"weights": "nvme", "gpu_bytes": SMALL_RING},
    "gpu": {"weights": "gpu"},
    "gpu-dram": {"gpu_bytes": HALF},
    "gpu-dram-nvme": {"gpu_bytes": HALF, "dram_weights_bytes": 130_000},
    "gpu-nvme": {"gpu_bytes": HALF, "dram_weights_bytes": 40_000},
}


@pytest.fixture
def weights(tmp_path):
    return write_weights(tmp_path / "weights.bin")


def open_double(**options):
    return DoubleDevice.open(**{"bytes_per_s": 1e9, "latency_s": 1e-4, **options})


def open_way(weights, way, *, device=None, **settings):
    device = device or open_double()
    return open_stream(weights, device=device, **{**SHAPE, **WAYS[way], **settings})


def shim_reader(shim):
    return ThreadReader.open(io_chunk_bytes=8192, queue_depth=3, preadv=shim)


class _Log(ShimReader):
    """Writes reads into the double's records."""

    def __init__(self, inner, device):
        super().__init__(inner)
        self.device = device

    def submit(self, file, offset, destination, *, required_bytes, is_urgent=False):
        address = torch.frombuffer(destination, dtype=torch.uint8).data_ptr()
        read = DeviceRecord(
            "read", time.perf_counter(), destinations=((address, destination.nbytes),)
        )
        self.device.records.append(read)
        return super().submit(
            file, offset, destination, required_bytes=required_bytes, is_urgent=is_urgent
        )


def overlap(some, others):
    return any(a < b + m and b < a + n for a, n in some for b, m in others)


def check_records(device):
    """No place is written while something that was queued before still reads it.

    A copy's sources may not be read into before its end. Its destinations are in use from the wait
    for it to the record after; no copy may begin to write them in between. The nth wait is for the
    nth copy, since both keep their order.

    Returns:
        how many copies began while something was computed.
    """
    copying, landed, in_use = [], [], None
    num_waits = num_overlaps = 0
    for record in sorted(device.records, key=lambda record: record.at_s):
        if record.kind == "read":
            for copy in copying:
                assert not overlap(record.destinations, copy.sources), "a staging place is reused"
        elif record.kind == "begin":
            if in_use is not None:
                assert not overlap(record.destinations, in_use), "a place in use is overwritten"
                num_overlaps += 1
            copying.append(record)
        elif record.kind == "end":
            copying = [copy for copy in copying if copy.sources != record.sources]
            landed.append(record.destinations)
        elif record.kind == "wait":
            in_use = landed[num_waits]
            num_waits += 1
        else:
            in_use = None
    return num_overlaps


@pytest.mark.parametrize(("way", "depth"), [*product(WAYS, [None, 0, 1, 2])])
def test_units_are_right_and_no_place_is_reused_early(weights, way, depth):
    device = open_double(unit_compute_s=1e-3)
    reader = _Log(ThreadReader.open(io_chunk_bytes=8192, queue_depth=3), device)
    settings = {"reader": reader, "prefetch_depth": depth}
    with open_way(weights, way, device=device, **settings) as stream:
        for step in range(3):
            stream.run_step(has_next=step < 2)
        plan = stream.plan
        assert bool(plan.resident) == ("gpu" in way)
        assert bool(plan.streamed) == (way != "gpu")
        assert bool(plan.streamed_bytes) == ("nvme" in way)
    num_overlaps = check_records(device)
    # Units that stay are copied once, all others in every step.
    assert device.counters.num_copies == len(plan.resident) + 3 * len(plan.streamed)
    if depth == 0 and not plan.resident:
        assert num_overlaps == 0, "something was copied while something was computed"
    if depth != 0 and way == "dram":
        assert num_overlaps > 0, "nothing was copied while something was computed"


def test_check_of_the_order_can_fail(weights):
    """A copy that does not wait for its place comes too early where the caller runs ahead."""
    device = open_double(unit_compute_s=3e-3, latency_s=0)
    copy = device.copy
    device.copy = lambda pairs, *, after=None: copy(pairs)
    with open_way(weights, "dram", device=device, is_poisoned=False) as stream:
        for step in range(2):
            stream.run_step(has_next=step < 1)
    with pytest.raises(AssertionError, match="a place in use is overwritten"):
        check_records(device)


@pytest.mark.parametrize("way", WAYS)
def test_bytes_are_counted_where_they_move(weights, way):
    device = open_double()
    with open_way(weights, way, device=device) as stream:
        for step in range(3):
            stream.run_step(has_next=step < 2)
        plan, units = stream.plan, stream.plan.units
        once = sum(units[idx].num_bytes for idx in plan.resident | plan.gpu.dram)
        rows = 0 if plan.gathered_bytes == 0 else 3 * 2 * 128
        assert stream.fetch.bytes_needed == once + 3 * plan.streamed_bytes + rows
        resident = sum(units[idx].num_bytes for idx in plan.resident)
        assert device.counters.bytes_copied == resident + 3 * plan.h2d_bytes


def test_dram_tier_is_read_once_and_locked_as_planned(weights):
    device = open_double(pinner=_CountingPinner())
    with open_way(weights, "dram", device=device) as stream:
        stream.run_step(has_next=True)
        first = stream.reader.counters.bytes_read
        for _ in range(3):
            stream.run_step(has_next=True)
        assert stream.reader.counters.bytes_read == first
        assert stream.store.pinned_bytes == stream.plan.pinned_bytes == stream.plan.resident_bytes
        assert stream.plan.gpu.num_staging_slots == 0


def test_staging_is_locked_place_by_place(weights):
    pinner = _CountingPinner()
    with open_way(weights, "nvme", device=open_double(pinner=pinner)) as stream:
        gpu = stream.plan.gpu
        assert pinner.sizes == [gpu.staging_slot_bytes] * gpu.num_staging_slots
        assert stream.store.pinned_bytes == stream.plan.pinned_bytes
        stream.run_step(has_next=False)
    assert pinner.sizes == []


class _CountingPinner:
    def __init__(self):
        self.sizes = []

    def pin(self, address, num_bytes):
        self.sizes.append(num_bytes)
        return

    def unpin(self, address, num_bytes):
        self.sizes.remove(num_bytes)


def test_tensors_are_realigned_on_the_device(weights):
    with open_way(weights, "nvme") as stream:
        for home in stream.store.homes.values():
            base = home.arena.tensor(0, (1,), torch.uint8).data_ptr()
            assert home.runs == ()
            for tensor in home.tensors.values():
                assert (tensor.data_ptr() - base) % 256 == 0
        staged = stream.store.stage(stream.units[1].unit_idx, 0)
        assert any(tensor.data_ptr() % 256 for tensor in staged.tensors.values())


@pytest.mark.parametrize("way", ["nvme", "gpu-dram-nvme"])
def test_random_delays_change_no_bit(weights, way):
    for seed in range(12):
        shim = PreadvShim(latency_s=random_latency(max_s=6e-4, seed=seed))
        device = open_double(latency_s=seed % 3 * 2e-4)
        settings = {"reader": shim_reader(shim), "prefetch_depth": seed % 4}
        with open_way(weights, way, device=device, **settings) as stream:
            stream.run_step(has_next=True)
            stream.run_step(has_next=False)
        check_records(device)


@pytest.mark.parametrize(("way", "num_units"), [*product(["dram", "gpu-nvme"], [0, 1, 7, 13])])
def test_step_that_was_cut_short_begins_again_at_the_first_unit(weights, way, num_units):
    with open_way(weights, way) as stream:
        stream.run_step(has_next=True, num_units=num_units)
        stream.fetch.restart()
        for step in range(3):
            stream.run_step(has_next=step < 2)


def test_failed_read_stops_the_step_and_the_next_one_is_whole(weights):
    shim = PreadvShim()
    with open_way(weights, "nvme", reader=shim_reader(shim)) as stream:
        stream.run_step(has_next=False)
        victim = stream.store.stage(stream.units[8].unit_idx, 0).runs[0].run
        shim.fails_at = lambda call: call.offset == victim.offset
        with pytest.raises(StorageError, match=r"\(EIO\)"):
            stream.run_step(has_next=False)
        landed = [idx for kind, step, idx in stream.events if kind == "landed" and step == 1]
        assert stream.units[8].unit_idx not in landed
        shim.fails_at = lambda call: True
        stream.fetch.restart()
        with pytest.raises(StorageError):
            stream.run_step(has_next=True)
        stream.fetch.restart()
        shim.fails_at = lambda call: False
        stream.run_step(has_next=True)
        stream.run_step(has_next=False)


@pytest.mark.parametrize("way", ["dram", "gpu-dram"])
def test_unit_of_the_dram_tier_whose_read_failed_is_read_again(weights, way):
    shim = PreadvShim(fails_at=lambda call: call.offset > 20_000)
    with open_way(weights, way, reader=shim_reader(shim)) as stream:
        with pytest.raises(StorageError):
            stream.run_step(has_next=True)
        stream.fetch.restart()
        shim.fails_at = lambda call: False
        stream.run_step(has_next=True)
        stream.run_step(has_next=False)


def test_released_place_on_the_device_turns_into_nan(weights):
    with open_way(weights, "dram", prefetch_depth=0) as stream:
        stream.fetch.start_step(has_next=False)
        unit = stream.units[1]
        stream.fetch.acquire(stream.units[0].unit_idx)
        stale = stream.use(unit)
        stream.fetch.release(unit.unit_idx)
        for piece in unit.slices:
            assert stale[piece.name].isnan().all()


def test_standing_still_is_measured(weights):
    device = open_double(latency_s=2e-3)
    with open_way(weights, "dram", device=device, prefetch_depth=0) as stream:
        stream.run_step(has_next=False)
        assert stream.fetch.fetch_wait_s >= 2e-3 * len(stream.plan.streamed)
