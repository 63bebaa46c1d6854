"""Storage readers behind one protocol."""

from zeroinfer.native.reader import DIRECT_ALIGNMENT, OpenFile, Reader, ReadTicket

__all__ = ["DIRECT_ALIGNMENT", "OpenFile", "ReadTicket", "Reader"]
