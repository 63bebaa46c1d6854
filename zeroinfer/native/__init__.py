"""Storage readers behind one protocol, and matrix products on a fixed grid."""

from typing import TYPE_CHECKING, Any

from zeroinfer.native.open_direct import find_mount_point
from zeroinfer.native.reader import DIRECT_ALIGNMENT, OpenFile, Reader, ReadTicket
from zeroinfer.native.thread_reader import PreadvCall, ThreadReader

if TYPE_CHECKING:
    from zeroinfer.native.products import ProductKernel, torch_dtype

__all__ = [
    "DIRECT_ALIGNMENT",
    "OpenFile",
    "PreadvCall",
    "ProductKernel",
    "ReadTicket",
    "Reader",
    "ThreadReader",
    "find_mount_point",
    "torch_dtype",
]


def __getattr__(name: str) -> Any:
    """Resolve what needs torch on first use, so that readers open without it."""
    if name in ("ProductKernel", "torch_dtype"):
        from zeroinfer.native import products

        return getattr(products, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
