"""Storage readers behind one protocol."""

from zeroinfer.native.open_direct import find_mount_point
from zeroinfer.native.reader import DIRECT_ALIGNMENT, OpenFile, Reader, ReadTicket
from zeroinfer.native.thread_reader import PreadvCall, ThreadReader

__all__ = [
    "DIRECT_ALIGNMENT",
    "OpenFile",
    "PreadvCall",
    "ReadTicket",
    "Reader",
    "ThreadReader",
    "find_mount_point",
]
