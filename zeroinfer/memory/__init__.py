"""Memory of the host: what may be used, what is used, and fixed arenas for weights.

Only arenas need torch, so their module is loaded on first use and the probes start at once.
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

__all__ = [
    "Arena",
    "MemoryLimit",
    "default_dram_budget",
    "limit_malloc_growth",
    "measure_base_bytes",
    "probe_memory_limit",
    "process_anonymous_bytes",
    "process_rss_bytes",
    "process_tree_peak_bytes",
]


def __getattr__(name: str) -> Any:
    if name == "Arena":
        from zeroinfer.memory.arena import Arena

        return Arena
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
