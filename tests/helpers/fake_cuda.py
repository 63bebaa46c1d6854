"""Streams and events made of a clock in place of torch.cuda's, so that CUDA code runs on the CPU.

Everything is done when it is recorded; what a real driver does is tested in tests/gpu.
"""

import contextlib
import struct
import time
from types import SimpleNamespace

import torch


class _Event:
    """Done when it is recorded, since everything before it is."""

    def __init__(self, *, enable_timing, blocking):
        assert enable_timing
        assert blocking, "a wait would spin"
        self.at_s = None

    def record(self, stream):
        self.at_s = time.perf_counter()
        stream.calls.append(("record", self))

    def query(self):
        return self.at_s is not None

    def synchronize(self):
        assert self.at_s is not None, "waited for before it was recorded"

    def elapsed_time(self, later):
        """Milliseconds, in as few bits as the driver returns."""
        (rounded,) = struct.unpack("f", struct.pack("f", (later.at_s - self.at_s) * 1e3))
        return rounded


class _Stream:
    def __init__(self, device=None):
        self.calls = []

    def wait_event(self, event):
        self.calls.append(("wait", event))


class _Runtime:
    """Registers ranges until `limit` of them; the codes are CUDA's."""

    def __init__(self):
        self.ranges, self.limit = [], 100

    def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802 - the runtime's name
        if len(self.ranges) == self.limit:
            return 2
        self.ranges.append((address, num_bytes))
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802 - the runtime's name
        kept = [each for each in self.ranges if each[0] != address]
        self.ranges, before = kept, self.ranges
        return 0 if len(kept) < len(before) else 713


class _Allocator:
    """Counts from the moment it is initialised, and refuses to before."""

    def __init__(self):
        self.is_initialized = False
        self.calls = []

    def init(self):
        self.is_initialized = True

    def mem_get_info(self, device):
        self.is_initialized = True
        return (8 << 30, 16 << 30)

    def reset_peak(self, device):
        assert self.is_initialized, "Invalid device argument 0: did you call init?"
        self.calls.append("reset_peak")

    def empty_cache(self):
        self.calls.append("empty_cache")


def install_fake_cuda(monkeypatch):
    """Stand in for torch.cuda; return the compute stream, the runtime and the allocator."""
    compute, runtime, allocator = _Stream(), _Runtime(), _Allocator()
    fakes = {
        "Event": _Event,
        "Stream": _Stream,
        "current_stream": lambda device: compute,
        "stream": lambda stream: contextlib.nullcontext(),
        "cudart": lambda: runtime,
        "init": allocator.init,
        "mem_get_info": allocator.mem_get_info,
        "max_memory_allocated": lambda device: 12345,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "empty_cache": allocator.empty_cache,
        "reset_peak_memory_stats": allocator.reset_peak,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    sdpa = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", sdpa.append)
    return SimpleNamespace(compute=compute, runtime=runtime, allocator=allocator, cudnn_sdpa=sdpa)
