"""Measures disk, memory and products, and keeps the profile that the planner reads."""

from typing import TYPE_CHECKING, Any

from zeroinfer.profiling.disk import DiskProfile, ReaderFactory, measure_disk
from zeroinfer.profiling.store import (
    find_profile,
    load_or_measure,
    measure_folder,
    require_writable_folder,
)

if TYPE_CHECKING:
    from zeroinfer.profiling.compute import measure_memory_copy, measure_products
    from zeroinfer.profiling.device import measure_device_products, measure_link

__all__ = [
    "DiskProfile",
    "ReaderFactory",
    "find_profile",
    "load_or_measure",
    "measure_device_products",
    "measure_disk",
    "measure_folder",
    "measure_link",
    "measure_memory_copy",
    "measure_products",
    "require_writable_folder",
]


def __getattr__(name: str) -> Any:
    """Resolve what loads torch on first use."""
    if name in ("measure_memory_copy", "measure_products"):
        from zeroinfer.profiling import compute

        return getattr(compute, name)
    if name in ("measure_device_products", "measure_link"):
        from zeroinfer.profiling import device

        return getattr(device, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
