"""What every compute device must do; subclass, and give a `device` fixture.

class TestMine(DeviceSuite):
    @pytest.fixture
    def device(self):
        with MyDevice.open() as opened:
            yield opened
"""

import time

import pytest
import torch

from zeroinfer.memory import DEVICE_ALIGNMENT, Arena

KIB = 1024


class DeviceSuite:
    """Tests over the interface alone; see zeroinfer/memory/README.md."""

    alignment = DEVICE_ALIGNMENT

    @pytest.fixture
    def memory(self, device):
        opened = device.allocate(64 * KIB, name="test memory")
        yield opened
        device.synchronize(device.record())
        opened.close()

    @pytest.fixture
    def source(self):
        with Arena.create(64 * KIB, name="host", is_prefaulted=True) as arena:
            yield arena

    @staticmethod
    def fill(arena, offset, shape, dtype=torch.float32, *, start=1):
        """Return numbers written at an offset of host memory."""
        values = torch.arange(start, start + torch.Size(shape).numel()).view(shape).to(dtype)
        tensor = arena.tensor(offset, shape, dtype)
        tensor.copy_(values)
        return tensor

    @staticmethod
    def seen(device, tensor):
        """Return what computing sees now, on the host."""
        result = tensor.clone()
        device.synchronize(device.record())
        return result.cpu()

    @pytest.mark.parametrize("offset", [0, 1, 3, 4095])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_copy_brings_the_bytes_from_any_address(self, device, memory, source, offset, dtype):
        host = self.fill(source, offset, (5, 7), dtype)
        target = memory.tensor(512, (5, 7), dtype)
        device.wait(device.copy([(target, host)]))
        assert torch.equal(self.seen(device, target), host)
        assert target.device.type == device.torch_device.type

    def test_several_tensors_are_one_copy(self, device, memory, source):
        before = device.counters.num_copies
        pairs = [
            (memory.tensor(1024 * idx, (9,), torch.float32), self.fill(source, 100 * idx, (9,)))
            for idx in range(4)
        ]
        device.synchronize(device.copy(pairs))
        for target, host in pairs:
            assert torch.equal(target.cpu(), host)
        assert device.counters.num_copies == before + 1

    def test_memory_is_aligned_and_ranges_are_checked(self, device, memory):
        assert memory.num_bytes == 64 * KIB
        assert memory.tensor(0, (4,), torch.float32).data_ptr() % self.alignment == 0
        assert memory.tensor(256, (), torch.bfloat16).shape == ()
        with pytest.raises(AssertionError, match="leaves 65536"):
            memory.tensor(64 * KIB - 4, (2,), torch.float32)

    def test_poison_is_nan_in_its_range_alone(self, device, memory):
        tensor = memory.tensor(0, (256,), torch.float32)
        tensor.fill_(1.0)
        memory.poison(256, 512)
        seen = self.seen(device, tensor)
        assert seen.isnan().nonzero().flatten().tolist() == list(range(64, 192))

    def test_copies_run_in_their_order(self, device, memory, source):
        target = memory.tensor(0, (16,), torch.float32)
        first, second = self.fill(source, 0, (16,)), self.fill(source, 4096, (16,), start=100)
        events = [device.copy([(target, host)]) for host in (first, second)]
        device.synchronize(events[1])
        assert events[0].is_done
        assert events[0].done_s <= events[1].done_s
        assert torch.equal(target.cpu(), second)

    def test_copy_waits_for_what_computes_on_its_place(self, device, memory, source):
        target = memory.tensor(0, (4096,), torch.float32)
        device.wait(device.copy([(target, self.fill(source, 0, (4096,)))]))
        totals = [target.double().sum() for _ in range(20)]
        free = device.record()
        landed = device.copy([(target, self.fill(source, 32 * KIB, (4096,), start=7))], after=free)
        device.wait(landed)
        after = self.seen(device, target)
        assert {float(total.cpu()) for total in totals} == {4096 * 4097 / 2}
        assert after[0] == 7

    def test_events_tell_when_they_were_reached(self, device, memory, source):
        start_s = time.perf_counter()
        recorded = device.record()
        landed = device.copy(
            [(memory.tensor(0, (8,), torch.float32), self.fill(source, 0, (8,)))], after=recorded
        )
        device.synchronize(landed)
        assert recorded.is_done
        assert landed.is_done
        # A device's own clock is only known to the host to some precision.
        stop_s = time.perf_counter() + 1e-3
        assert start_s - 1e-3 <= recorded.done_s <= landed.done_s + 1e-3
        assert landed.done_s <= stop_s

    def test_counters_see_every_byte(self, device, memory, source):
        before = device.counters.bytes_copied, device.counters.busy_s
        host = self.fill(source, 0, (1000,))
        for _ in range(3):
            last = device.copy([(memory.tensor(0, (1000,), torch.float32), host)])
        device.synchronize(last)
        assert device.counters.bytes_copied - before[0] == 3 * 4000
        assert device.counters.busy_s > before[1]

    def test_standing_still_is_counted(self, device, memory, source):
        device.record()
        before_s = device.counters.idle_s
        device.wait(
            device.copy([(memory.tensor(0, (8,), torch.float32), self.fill(source, 0, (8,)))])
        )
        device.synchronize(device.record())
        assert device.counters.idle_s >= before_s

    def test_empty_memory_and_empty_tensors_are_memory_too(self, device, memory):
        device.allocate(0, name="nothing").close()
        assert memory.tensor(0, (0, 3), torch.bfloat16).shape == (0, 3)

    def test_close_may_be_repeated(self, device, memory):
        memory.close()
        memory.close()
        device.close()
        device.close()
