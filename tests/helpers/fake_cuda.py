"""Streams and events made of a clock in place of torch.cuda's, so that CUDA code runs on the CPU.

Everything is done when it is recorded; what a real driver does is tested in tests/gpu.
"""

import contextlib
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
        return (later.at_s - self.at_s) * 1e3


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
        self.ranges = [each for each in self.ranges if each[0] != address]
        return 0


def install_fake_cuda(monkeypatch):
    """Stand in for torch.cuda; return the compute stream and the runtime."""
    compute, runtime = _Stream(), _Runtime()
    fakes = {
        "Event": _Event,
        "Stream": _Stream,
        "current_stream": lambda device: compute,
        "stream": lambda stream: contextlib.nullcontext(),
        "cudart": lambda: runtime,
        "mem_get_info": lambda device: (8 << 30, 16 << 30),
        "max_memory_allocated": lambda device: 12345,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return SimpleNamespace(compute=compute, runtime=runtime)
