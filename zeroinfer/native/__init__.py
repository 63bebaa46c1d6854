"""Storage readers behind one protocol, and matrix products on a fixed grid."""

from typing import TYPE_CHECKING, Any

from zeroinfer.native.open_direct import find_mount_point
from zeroinfer.native.reader import DIRECT_ALIGNMENT, OpenFile, Reader, ReadTicket
from zeroinfer.native.thread_reader import PreadvCall, ThreadReader

if TYPE_CHECKING:
    from zeroinfer.native.products import ProductKernel

__all__ = [
    "DIRECT_ALIGNMENT",
    "OpenFile",
    "PreadvCall",
    "ProductKernel",
    "ReadTicket",
    "Reader",
    "ThreadReader",
    "find_mount_point",
]


def __getattr__(name: str) -> Any:
    """Resolve what needs torch on first use, so that readers open without it."""
    if name == "ProductKernel":
        from zeroinfer.native.products import ProductKernel

        return ProductKernel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
