"""The CUDA device over streams and events made of a clock, so that its bookkeeping runs anywhere.

What a real driver does is tested in tests/gpu, with the same suite.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.device_suite import DeviceSuite
from tests.helpers.fake_cuda import install_fake_cuda
from zeroinfer.counters import Trace
from zeroinfer.errors import BackendUnavailableError, CapacityError
from zeroinfer.memory import Arena, CudaDevice, HostPins
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


def test_events_of_other_devices_are_refused(device):
    other = SimpleNamespace(is_done=True, done_s=0.0)
    for use in (device.wait, device.synchronize):
        with pytest.raises(AssertionError, match="not an event of this device"):
            use(other)


def test_device_beyond_the_last_is_refused(cuda):
    with pytest.raises(BackendUnavailableError, match=r"CUDA device 1 .* finds 1 device\(s\)"):
        CudaDevice.open(index=1)


def test_open_takes_the_device_of_the_index(cuda):
    device = CudaDevice.open(index=0)
    assert device.torch_device == torch.device("cuda", 0)
    device.close()
