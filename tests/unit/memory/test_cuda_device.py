"""The CUDA device over streams and events made of a clock, so that its bookkeeping runs anywhere.

What a real driver does is tested in tests/gpu, with the same suite.
"""

import time
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.device_suite import DeviceSuite
from tests.helpers.fake_cuda import install_fake_cuda
from zeroinfer.counters import Trace
from zeroinfer.errors import BackendUnavailableError, CapacityError
from zeroinfer.memory import Arena, CudaDevice, HostPins
from zeroinfer.memory.cuda_device import _Origin
from zeroinfer.units import MIB


@pytest.fixture
def cuda(monkeypatch):
    return install_fake_cuda(monkeypatch)


@pytest.fixture
def device(cuda):
    with CudaDevice(torch.device("cpu"), trace=Trace(is_enabled=True)) as opened:
        yield opened


class TestCudaOverFakes(DeviceSuite):
    alignment = 64
    """What torch gives on the CPU; 512 on a GPU."""

    @pytest.fixture
    def device(self, cuda):
        with CudaDevice(torch.device("cpu"), trace=Trace()) as opened:
            yield opened


def test_facts_come_from_torch(device):
    assert device.free_bytes == 8 << 30
    assert device.peak_bytes == 12345
    assert device.is_asynchronous
    assert device.link_bytes_per_s is None


def test_copy_waits_for_its_place_and_computing_for_the_copy(device, cuda):
    memory = device.allocate(1024, name="x")
    free = device.record()
    landed = device.copy([(memory.tensor(0, (4,), torch.float32), torch.ones(4))], after=free)
    copies = device._copies.calls
    assert copies[0] == ("wait", free.inner)
    assert [kind for kind, _ in copies] == ["wait", "record", "record"]
    assert copies[-1] == ("record", landed.inner)
    cuda.compute.calls.clear()
    device.wait(landed)
    assert [kind for kind, _ in cuda.compute.calls] == ["wait", "record"]
    assert cuda.compute.calls[0] == ("wait", landed.inner)


def test_copies_are_traced_and_their_sources_kept_until_they_are_done(device):
    memory = device.allocate(1024, name="x")
    event = device.copy([(memory.tensor(0, (4,), torch.float32), torch.ones(4))])
    assert event._sources
    assert event.is_done
    assert not event._sources
    device.synchronize(event)
    assert [lane for lane, *_ in device._trace._events] == ["copy"]


def test_registration_is_of_exact_places_and_undone(device, cuda):
    with Arena.create(4 * MIB, name="host", is_prefaulted=False) as arena:
        with HostPins(device.pinner) as pins:
            pins.pin(arena, MIB, MIB)
            assert cuda.runtime.ranges == [(arena.address + MIB, MIB)]
        assert cuda.runtime.ranges == []


def test_refused_registration_names_the_code(device, cuda):
    cuda.runtime.limit = 0
    assert device.pinner.pin(4096, 4096) == "cudaHostRegister failed (2)"


def test_device_that_is_full_says_how_much_is_free(device, monkeypatch):
    def refuse(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(CapacityError) as caught:
        device.allocate(20 << 30, name="landing ring on the device")
    assert str(caught.value) == (
        "landing ring on the device: the device refused 20.0 GiB, 8.0 GiB is free; lower "
        "--gpu-memory or end what else runs there"
    )


def test_unlocking_what_is_not_locked_leaves_no_error_behind(device, monkeypatch):
    launched = []
    monkeypatch.setattr(torch, "ones", lambda *args, **kwargs: launched.append(args))
    device.pinner.unpin(4096, 4096)
    assert launched == [(1,)]


def test_memory_goes_back_while_tensors_of_it_live_on(device):
    memory = device.allocate(1024, name="x")
    tensor = memory.tensor(256, (4,), torch.float32)
    memory.close()
    assert tensor.untyped_storage().nbytes() == 0


def test_waits_are_traced_from_where_computing_stood_still(device):
    memory = device.allocate(1024, name="x")
    free = device.record()
    landed = device.copy([(memory.tensor(0, (4,), torch.float32), torch.ones(4))], after=free)
    goes_on = device.wait(landed)
    assert goes_on.done_s >= landed.done_s >= free.done_s
    idle_s = device.counters.idle_s
    lane, name, start_s, stop_s = device._trace._events[-1]
    assert (lane, name) == ("wait", "unit")
    assert (start_s, stop_s) == (free.done_s, goes_on.done_s)
    assert idle_s == pytest.approx(stop_s - start_s)


def test_times_stay_precise_after_days(device):
    """The driver counts milliseconds in 24 bits: 8 ms are the least it can tell after a day."""
    old = torch.cuda.Event(enable_timing=True, blocking=True)
    old.at_s = time.perf_counter() - 100_000.0
    device._origin = _Origin(old, old.at_s)
    device.synchronize(device.record())
    first, second = device.record(), device.record()
    assert abs(first.done_s - first.inner.at_s) < 8e-3
    between_s = second.inner.at_s - first.inner.at_s
    assert second.done_s - first.done_s == pytest.approx(between_s, abs=1e-6)


def test_events_of_other_devices_are_refused(device):
    other = SimpleNamespace(is_done=True, done_s=0.0)
    for use in (device.wait, device.synchronize):
        with pytest.raises(AssertionError, match="not an event of this device"):
            use(other)


def test_device_beyond_the_last_is_refused(cuda):
    with pytest.raises(BackendUnavailableError, match=r"CUDA device 1 .* finds 1 device\(s\)"):
        CudaDevice.open(index=1)


def test_open_takes_the_device_of_the_index_and_counts_from_there(cuda):
    device = CudaDevice.open(index=0)
    assert device.torch_device == torch.device("cuda", 0)
    assert cuda.allocator.calls[0] == "empty_cache", "what is free is asked after that"
    assert cuda.allocator.calls[-1] == "reset_peak"
    assert cuda.cudnn_sdpa == [False]
    device.close()


def test_a_peak_is_counted_anew_without_what_the_allocator_keeps(device, cuda):
    device.reset_peak()
    assert cuda.allocator.calls == ["empty_cache", "reset_peak"]
