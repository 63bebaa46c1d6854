"""Reading a whole store back and comparing it with its manifest."""

from collections.abc import Callable
from pathlib import Path

from zeroinfer.checkpoint.manifest import hash_file
from zeroinfer.checkpoint.store import check_store
from zeroinfer.errors import CheckpointError, StorageError

__all__ = ["verify_store"]


def verify_store(folder: Path, *, progress: Callable[[int, int], None] | None = None) -> None:
    """Compare every file of a store with its recorded checksum; reads all of it, blocking.

    Args:
        folder: a folder that convert wrote.
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
        try:
            sha256 = hash_file(folder / name)
        except OSError as error:
            raise StorageError(f"read of {folder / name} failed: {error.strerror}") from error
        if sha256 != stored.sha256:
            raise CheckpointError(
                f"{folder / name} is damaged: sha256 is {sha256}, recorded {stored.sha256}; "
                f"remove {folder} and convert again"
            )
        done += stored.size_bytes
        if progress is not None:
            progress(done, total)
