"""Files that share extents: one copy on disk, any number of files (FICLONERANGE, ioctl_ficlone(2)).

XFS and btrfs can; ext4, tmpfs and overlays of them cannot.
"""

import fcntl
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

from zeroinfer.errors import BackendUnavailableError

__all__ = ["Clone", "clone_to_end", "require_reflink"]

Clone = Callable[[Path, int, Path, int], None]
"""Called with source, its offset, target, its offset."""

# _IOW(0x94, 13, struct file_clone_range)
_FICLONERANGE = 0x4020940D
_RANGE = struct.Struct("qQQQ")
_PROBE_BYTES = 4096


def clone_to_end(source: Path, source_offset: int, target: Path, target_offset: int) -> None:
    """Share what follows an offset of one file with another, from an offset of its own on.

    Args:
        source: file on the same file system.
        source_offset: multiple of the file system's block.
        target: file that ends at `target_offset`.
        target_offset: multiple of the block.

    Raises:
        OSError: the file system cannot, or the offsets are no multiples of its block.
    """
    source_fd = os.open(source, os.O_RDONLY)
    target_fd = os.open(target, os.O_WRONLY)
    try:
        # A length of 0 means up to the end.
        request = _RANGE.pack(source_fd, source_offset, 0, target_offset)
        fcntl.ioctl(target_fd, _FICLONERANGE, request)
        os.fsync(target_fd)
    finally:
        os.close(target_fd)
        os.close(source_fd)


def require_reflink(folder: Path, clone: Clone = clone_to_end) -> None:
    """Check that files of a folder can share extents, by trying.

    Raises:
        BackendUnavailableError: they cannot.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".reflink-") as scratch:
        source, target = Path(scratch) / "source", Path(scratch) / "target"
        source.write_bytes(bytes(_PROBE_BYTES))
        target.touch()
        try:
            clone(source, 0, target, 0)
        except OSError as error:
            raise BackendUnavailableError(
                f"files in {folder} cannot share data: {error.strerror}; need XFS with reflink or "
                "btrfs: make one with tools/reflink_image.sh, or leave --share-layers out"
            ) from error
