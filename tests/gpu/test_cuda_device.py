"""One GPU behind the interface of all devices."""

import pytest
import torch

from tests.helpers.device_suite import DeviceSuite
from zeroinfer.errors import BackendUnavailableError, CapacityError
from zeroinfer.memory import Arena, CudaDevice, HostPins
from zeroinfer.units import MIB

pytestmark = pytest.mark.gpu


class TestCuda(DeviceSuite):
    @pytest.fixture
    def device(self):
        with CudaDevice.open() as opened:
            yield opened


@pytest.fixture
def device():
    with CudaDevice.open() as opened:
        yield opened


@pytest.fixture
def host():
    with Arena.create(32 * MIB, name="host", is_prefaulted=True) as arena:
        yield arena


def test_locked_places_are_pinned_for_torch_too(device, host):
    with HostPins(device.pinner) as pins:
        for slot in range(4):
            pins.pin(host, slot * 8 * MIB, 8 * MIB)
        assert pins.num_bytes == 32 * MIB
        assert host.tensor(8 * MIB, (8 * MIB,), torch.uint8).is_pinned()
    assert not host.tensor(0, (8,), torch.uint8).is_pinned()


def test_refused_lock_does_not_poison_the_next_launch(device, host):
    reason = device.pinner.pin(host.address + (1 << 46), MIB)
    assert reason.startswith("cudaHostRegister failed (")
    assert torch.ones(4, device=device.torch_device).sum().item() == 4


def test_copy_of_a_locked_place_returns_before_it_is_done(device, host):
    memory = device.allocate(32 * MIB, name="x")
    with HostPins(device.pinner) as pins:
        pins.pin(host, 0, 32 * MIB)
        pair = (
            memory.tensor(0, (32 * MIB,), torch.uint8),
            host.tensor(0, (32 * MIB,), torch.uint8),
        )
        events = [device.copy([pair]) for _ in range(20)]
        assert not events[-1].is_done, "twenty copies of 32 MiB take milliseconds"
        device.synchronize(events[-1])
        assert all(event.is_done for event in events)


def test_memory_goes_back_while_tensors_of_it_live_on(device):
    before = torch.cuda.memory_allocated(device.torch_device)
    memory = device.allocate(64 * MIB, name="x")
    tensor = memory.tensor(0, (16,), torch.float32)
    assert torch.cuda.memory_allocated(device.torch_device) == before + 64 * MIB
    memory.close()
    assert torch.cuda.memory_allocated(device.torch_device) == before
    assert tensor.shape == (16,)


def test_peak_is_counted_anew(device):
    device.allocate(64 * MIB, name="x").close()
    assert device.peak_bytes >= 64 * MIB
    device.reset_peak()
    assert device.peak_bytes < 64 * MIB


def test_attention_never_waits_for_a_plan_of_cudnn(device):
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_more_memory_than_there_is_is_refused(device):
    with pytest.raises(CapacityError, match="lower --gpu-memory"):
        device.allocate(2 * device.free_bytes + MIB, name="too much")


def test_gpu_beyond_the_last_is_refused():
    with pytest.raises(BackendUnavailableError, match="CUDA device 99 is not available"):
        CudaDevice.open(index=99)
