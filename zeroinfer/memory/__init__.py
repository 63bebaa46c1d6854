"""Memory of the host and of a compute device: budgets, peaks, arenas, and the copies between them.

What needs torch is loaded on first use, so that the probes start at once.
"""

from typing import TYPE_CHECKING, Any

from zeroinfer.memory.budget import MemoryLimit, default_dram_budget, probe_memory_limit
from zeroinfer.memory.usage import (
    limit_malloc_growth,
    measure_base_bytes,
    process_anonymous_bytes,
    process_rss_bytes,
    process_tree_peak_bytes,
)

if TYPE_CHECKING:
    from zeroinfer.memory.arena import Arena
    from zeroinfer.memory.cpu_device import CpuDevice
    from zeroinfer.memory.cuda_device import CudaDevice
    from zeroinfer.memory.double_device import DoubleDevice
    from zeroinfer.memory.pinning import HostPins, MlockPinner, Pinner
    from zeroinfer.memory.transfer import (
        DEVICE_ALIGNMENT,
        DeviceMemory,
        Event,
        LinkCounters,
        TransferEngine,
    )

__all__ = [
    "DEVICE_ALIGNMENT",
    "Arena",
    "CpuDevice",
    "CudaDevice",
    "DeviceMemory",
    "DoubleDevice",
    "Event",
    "HostPins",
    "LinkCounters",
    "MemoryLimit",
    "MlockPinner",
    "Pinner",
    "TransferEngine",
    "default_dram_budget",
    "limit_malloc_growth",
    "measure_base_bytes",
    "probe_memory_limit",
    "process_anonymous_bytes",
    "process_rss_bytes",
    "process_tree_peak_bytes",
]

_HEAVY = {
    "Arena": "arena",
    "CpuDevice": "cpu_device",
    "CudaDevice": "cuda_device",
    "DEVICE_ALIGNMENT": "transfer",
    "DeviceMemory": "transfer",
    "DoubleDevice": "double_device",
    "Event": "transfer",
    "HostPins": "pinning",
    "LinkCounters": "transfer",
    "MlockPinner": "pinning",
    "Pinner": "pinning",
    "TransferEngine": "transfer",
}


def __getattr__(name: str) -> Any:
    if name in _HEAVY:
        from importlib import import_module

        return getattr(import_module(f"zeroinfer.memory.{_HEAVY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
