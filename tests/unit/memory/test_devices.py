"""The devices that need no GPU, against the suite of all."""

import itertools
import time

import pytest
import torch

from tests.helpers.device_suite import DeviceSuite
from zeroinfer.errors import BackendUnavailableError, CapacityError
from zeroinfer.memory import Arena, CpuDevice, CudaDevice, DoubleDevice
from zeroinfer.units import MIB


class TestCpu(DeviceSuite):
    @pytest.fixture
    def device(self):
        with CpuDevice() as opened:
            yield opened


class TestDouble(DeviceSuite):
    @pytest.fixture
    def device(self):
        with DoubleDevice.open(bytes_per_s=1e9, latency_s=1e-4) as opened:
            yield opened


@pytest.fixture
def host():
    with Arena.create(MIB, name="host", is_prefaulted=True) as arena:
        arena.tensor(0, (MIB // 4,), torch.float32).fill_(1.0)
        yield arena


def tensors(device, host, num_elements):
    memory = device.allocate(4 * num_elements, name="x")
    return memory.tensor(0, (num_elements,), torch.float32), host.tensor(
        0, (num_elements,), torch.float32
    )


def test_cpu_copies_at_once_and_has_no_memory_of_its_own(host):
    with CpuDevice() as device:
        target, source = tensors(device, host, 100)
        assert device.copy([(target, source)]).is_done
        assert torch.equal(target, source)
        assert device.free_bytes is None
        assert device.pinner is None
        assert device.peak_bytes == 0


def test_double_takes_latency_and_bytes_over_rate(host):
    with DoubleDevice.open(bytes_per_s=20e6, latency_s=0.005) as device:
        pair = tensors(device, host, 100_000)
        start_s = time.perf_counter()
        events = [device.copy([pair]) for _ in range(2)]
        assert time.perf_counter() - start_s < 0.01, "the caller waits for the copy"
        device.synchronize(events[1])
        assert 0.05 <= time.perf_counter() - start_s < 0.1
        assert 0.025 <= events[0].done_s - start_s < 0.045
        assert device.counters.busy_s == pytest.approx(0.05)


def test_double_holds_nan_until_a_copy_is_complete(host):
    with DoubleDevice.open(latency_s=0.02) as device:
        target, source = tensors(device, host, 100)
        target.zero_()
        landed = device.copy([(target, source)])
        deadline_s = time.perf_counter() + 5
        while not device.records and time.perf_counter() < deadline_s:
            time.sleep(0.001)
        time.sleep(0.002)
        assert target.isnan().all()
        device.wait(landed)
        assert torch.equal(target, source)


def test_double_writes_down_what_happened(host):
    with DoubleDevice.open() as device:
        target, source = tensors(device, host, 100)
        device.wait(device.copy([(target, source)], after=device.record()))
        kinds = [record.kind for record in device.records]
        assert kinds == ["record", "begin", "end", "wait"]
        times = [record.at_s for record in device.records]
        assert times == sorted(times)
        assert device.records[1].sources == ((source.data_ptr(), 400),)
        assert device.records[1].destinations == ((target.data_ptr(), 400),)


def test_double_computes_for_a_set_time_after_each_wait(host):
    with DoubleDevice.open(unit_compute_s=0.02) as device:
        pair = tensors(device, host, 10)
        landed = device.copy([pair])
        device.wait(landed)
        over = device.record()
        assert not over.is_done, "the caller does not run ahead"
        assert over.done_s - landed.done_s == pytest.approx(0.02)
        device.synchronize(over)
        assert time.perf_counter() - landed.done_s >= 0.02
        assert device.record().done_s - over.done_s < 0.02, "no wait came before"


def test_double_has_so_much_memory_and_counts_the_peak():
    with DoubleDevice.open(memory_bytes=1000) as device:
        first = device.allocate(600, name="first")
        with pytest.raises(CapacityError) as caught:
            device.allocate(401, name="second")
        assert str(caught.value) == (
            "second: the device double has 400 B free, need 401 B; lower --gpu-memory"
        )
        first.close()
        device.allocate(900, name="third").close()
        assert device.peak_bytes == 900


def test_double_refuses_a_copy_between_unequal_shapes(host):
    with DoubleDevice.open() as device:
        target, source = tensors(device, host, 100)
        with pytest.raises(AssertionError, match="shapes of a copy differ"):
            device.copy([(target, source[:50])])


def test_double_finishes_queued_copies_when_it_closes(host):
    device = DoubleDevice.open(latency_s=0.003)
    pair = tensors(device, host, 100)
    events = [device.copy([pair]) for _ in range(5)]
    device.close()
    assert all(event.is_done for event in events)
    assert all(a.done_s <= b.done_s for a, b in itertools.pairwise(events))
    with pytest.raises(AssertionError, match="on a closed device"):
        device.copy([pair])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_without_a_gpu_is_refused_by_name():
    with pytest.raises(BackendUnavailableError) as caught:
        CudaDevice.open()
    message = str(caught.value)
    assert message.startswith("CUDA device 0 is not available: torch ")
    assert message.endswith(
        "use compute.device=cpu, or install a CUDA build of torch and its driver"
    )
