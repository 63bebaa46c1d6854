"""Reading a whole store back and comparing it with its manifest."""

from collections.abc import Callable
from pathlib import Path

from zeroinfer.checkpoint.store import check_file, check_store

__all__ = ["verify_store"]


def verify_store(folder: Path, *, progress: Callable[[int, int], None] | None = None) -> None:
    """Compare every file of a store with its recorded checksum; reads all of it, blocking.

    Args:
        folder: a folder that convert wrote; of a striped store the one with the manifest.
        progress: told the bytes read so far and in all, after each file.

    Raises:
        CheckpointError: the folder is no store, or a file is missing, cut or changed; names the
            file and both checksums.
        StorageError: a file cannot be read.
    """
    manifest = check_store(folder)
    total = sum(stored.size_bytes for stored in manifest.files.values())
    done = 0
    for name, stored in manifest.files.items():
        check_file(folder, name, stored)
        done += stored.size_bytes
        if progress is not None:
            progress(done, total)
