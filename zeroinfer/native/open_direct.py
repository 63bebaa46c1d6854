"""Opening weight files for direct reads, with a fall-back to buffered ones.

ramfs and some network and overlay file systems refuse O_DIRECT at open, others only at the first
read, so a block is read on trial. tmpfs accepts it although it has no disk behind it.
"""

import errno
import mmap
import os
import stat
from pathlib import Path

from zeroinfer.errors import StorageError
from zeroinfer.log import get_logger, warn_once
from zeroinfer.native.reader import DIRECT_ALIGNMENT, OpenFile

__all__ = ["find_mount_point", "open_for_reading"]

_logger = get_logger(__name__)


def open_for_reading(path: Path) -> OpenFile:
    """Open a regular file with O_DIRECT, or buffered where its file system has none.

    The fall-back is said once per file system. The trial read is not counted anywhere.

    Raises:
        StorageError: the file is missing, not a regular file or not readable.
    """
    try:
        # Opening a pipe would block, so the kind is checked first.
        if not stat.S_ISREG(path.stat().st_mode):
            raise StorageError(f"cannot read {path}: got a folder or device, need a regular file")
        fd = _open_direct(path)
        is_direct = fd is not None
        if fd is None:
            _warn_buffered(path)
            fd = _open_fd(path, os.O_RDONLY | os.O_CLOEXEC)
        size_bytes = os.fstat(fd).st_size
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"cannot open {path}: {error.strerror} ({errno.errorcode.get(error.errno or 0)}); "
            "check that the file exists and that you may read it"
        ) from error
    return OpenFile(path=path, fd=fd, size_bytes=size_bytes, is_direct=is_direct)


def find_mount_point(path: Path) -> Path:
    """Return the topmost folder above `path` that lies on the same file system."""
    folder = path.resolve().parent
    device = folder.stat().st_dev
    while folder != folder.parent and folder.parent.stat().st_dev == device:
        folder = folder.parent
    return folder


def _open_direct(path: Path) -> int | None:
    """Open with O_DIRECT; None where the file system refuses that."""
    try:
        fd = _open_fd(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
    if _can_read_direct(fd):
        return fd
    os.close(fd)
    return None


def _open_fd(path: Path, flags: int) -> int:
    """Call ``os.open``; tests replace it."""
    return os.open(path, flags)


def _can_read_direct(fd: int) -> bool:
    """Try one block; a failure other than EINVAL is left to the first real read."""
    with mmap.mmap(-1, DIRECT_ALIGNMENT) as block:
        try:
            os.preadv(fd, [block], 0)
        except OSError as error:
            return error.errno != errno.EINVAL
    return True


def _warn_buffered(path: Path) -> None:
    warn_once(
        _logger,
        f"the file system at {find_mount_point(path)} has no direct I/O: weights are read "
        "through the page cache, which is slower; ext4 and XFS have it",
    )
