"""Storage readers behind one protocol, matrix products on a fixed grid, kernels of packed rows."""

from typing import TYPE_CHECKING, Any

from zeroinfer.native.extension import extension_error, has_fused_kernels
from zeroinfer.native.open_direct import find_mount_point
from zeroinfer.native.reader import DIRECT_ALIGNMENT, OpenFile, Reader, ReadTicket
from zeroinfer.native.reader_choice import open_reader, resolve_reader
from zeroinfer.native.striped_reader import StripedReader, open_over
from zeroinfer.native.thread_reader import PreadvCall, ThreadReader
from zeroinfer.native.uring_reader import Ring, UringReader, uring_error

if TYPE_CHECKING:
    from zeroinfer.native.kernels import Activation, Rotation, RowKernels, half_to_bf16
    from zeroinfer.native.products import ProductKernel, torch_dtype

__all__ = [
    "DIRECT_ALIGNMENT",
    "Activation",
    "OpenFile",
    "PreadvCall",
    "ProductKernel",
    "ReadTicket",
    "Reader",
    "Ring",
    "Rotation",
    "RowKernels",
    "StripedReader",
    "ThreadReader",
    "UringReader",
    "extension_error",
    "find_mount_point",
    "half_to_bf16",
    "has_fused_kernels",
    "open_over",
    "open_reader",
    "resolve_reader",
    "torch_dtype",
    "uring_error",
]


def __getattr__(name: str) -> Any:
    """Resolve what needs torch on first use, so that readers open without it."""
    if name in ("ProductKernel", "torch_dtype"):
        from zeroinfer.native import products

        return getattr(products, name)
    if name in ("Activation", "Rotation", "RowKernels", "half_to_bf16"):
        from zeroinfer.native import kernels

        return getattr(kernels, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
