"""Page-locking of host memory, so that a device's copy engine may read it by itself.

Places are locked one by one at their exact size: torch's own pinned allocator rounds up to a power
of two, and one registration of a large arena needs all of its pages at once. A copy must not cross
the border of two registrations, so a place is always a whole one.

Locking may be refused: by the limit on locked memory, in containers, under WSL. That costs speed
and nothing else, so it is said once and the places stay as they are.
"""

import ctypes
import errno
import os
from typing import Protocol

from zeroinfer.closing import Closing
from zeroinfer.log import get_logger
from zeroinfer.memory.arena import Arena
from zeroinfer.units import format_bytes

__all__ = ["HostPins", "MlockPinner", "Pinner"]

_logger = get_logger(__name__)


class Pinner(Protocol):
    """Locks ranges of host memory, whole pages; used from one thread."""

    def pin(self, address: int, num_bytes: int) -> str | None:
        """Lock a range; None if that worked, else the reason of the refusal."""
        ...

    def unpin(self, address: int, num_bytes: int) -> None:
        """Unlock a range that `pin` locked."""
        ...


class MlockPinner:
    """Locks pages by the kernel alone: all that a device without a driver of its own needs.

    The device double uses it, so that limits on locked memory show without a GPU.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def pin(self, address: int, num_bytes: int) -> str | None:
        """Call mlock(2); see `Pinner.pin`."""
        if self._libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)) == 0:
            return None
        code = ctypes.get_errno()
        return f"{os.strerror(code)} ({errno.errorcode.get(code, code)})"

    def unpin(self, address: int, num_bytes: int) -> None:
        """Call munlock(2); see `Pinner.unpin`."""
        self._libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes))


class HostPins(Closing):
    """The locked places of some arenas; close it before them."""

    def __init__(self, pinner: Pinner | None) -> None:
        self._pinner = pinner
        self._ranges: set[tuple[int, int]] = set()
        self._is_refused = False

    @property
    def num_bytes(self) -> int:
        """Bytes that are locked."""
        return sum(length for _, length in self._ranges)

    def pin(self, arena: Arena, offset: int, length: int) -> None:
        """Lock a place once, unless locking was refused before; the first refusal is logged.

        Args:
            arena: owns the place.
            offset: of the place, a multiple of the page size.
            length: a multiple of the page size; 0 locks nothing.
        """
        place = (arena.address + offset, length)
        if self._pinner is None or self._is_refused or not length or place in self._ranges:
            return
        reason = self._pinner.pin(*place)
        if reason is None:
            self._ranges.add(place)
            return
        self._is_refused = True
        _logger.warning(
            "locking %s of %s was refused after %s: %s; copies to the device go through unlocked "
            "memory, more slowly and with the same results; raise the limit (ulimit -l)",
            format_bytes(length), arena.name, format_bytes(self.num_bytes), reason,
        )  # fmt: skip

    def close(self) -> None:
        """Unlock everything; idempotent. No copy may be in flight."""
        while self._ranges:
            address, length = self._ranges.pop()
            if self._pinner is not None:
                self._pinner.unpin(address, length)
