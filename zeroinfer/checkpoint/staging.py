"""Where a store is while it is written: its folders, the journal of finished files, the lock.

Everything here is ours alone: hidden folders beside the finished stores, and the folders of the
further stripes, which become part of a store only when its manifest names them.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroinfer.checkpoint.manifest import SourceFile, hash_file
from zeroinfer.checkpoint.shards import Shard
from zeroinfer.checkpoint.sources import is_unchanged
from zeroinfer.errors import CapacityError, StorageError
from zeroinfer.log import get_logger
from zeroinfer.units import MIB, format_bytes

__all__ = [
    "MODELS_FOLDER",
    "Staging",
    "locked",
    "new_file",
    "remove_left_overs",
    "sync",
    "write_durably",
]

MODELS_FOLDER = "models"
_PREFIX = ".partial-"
_JOURNAL_NAME = "finished.json"
_MARGIN_BYTES = MIB
"""For folders, the journal and block rounding of small files."""
_logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Journal:
    """What is known of an unfinished store."""

    source: SourceFile | None = None
    stripes: tuple[Path, ...] = ()
    finished: Mapping[str, str] = field(default_factory=dict)
    """File name -> checksum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Staging:
    """The folders of one store that is being written."""

    folder: Path
    """Where the store will be."""
    stripes: tuple[Path, ...]
    """Where the files of the further stripes go, already under their final names."""

    @classmethod
    def of(cls, folder: Path, further_dirs: Sequence[Path]) -> "Staging":
        """Name the folders of a store; makes none.

        Args:
            folder: where the store will be.
            further_dirs: ``--nvme`` folders besides the first.
        """
        stripes = tuple(
            nvme_dir / MODELS_FOLDER / f"{folder.name}.part-{idx + 1}"
            for idx, nvme_dir in enumerate(further_dirs)
        )
        return cls(folder=folder, stripes=stripes)

    @property
    def root(self) -> Path:
        """The hidden folder that becomes the store by one rename."""
        return self.folder.with_name(f"{_PREFIX}{self.folder.name}")

    def path(self, shard: Shard) -> Path:
        """Return where a file is written."""
        folder = self.stripes[shard.stripe - 1] if shard.stripe else self.root
        return folder / shard.name

    def create(self) -> None:
        """Make the folders."""
        for folder in (self.root, *self.stripes):
            folder.mkdir(parents=True, exist_ok=True)

    def remove(self) -> None:
        """Remove all that was written."""
        for folder in (self.root, *self.stripes):
            shutil.rmtree(folder, ignore_errors=True)

    def adopt(self, shards: Sequence[Shard]) -> dict[str, str]:
        """Keep the files an earlier run finished, and remove everything else.

        Returns:
            checksums by name of the files whose recorded checksum is right and whose header is as
            planned now.
        """
        recorded = _read_journal(self.root).finished
        kept: dict[Path, str] = {}
        for shard in shards:
            path = self.path(shard)
            sha256 = recorded.get(shard.name)
            is_there = sha256 is not None and path.is_file() and _has_header(path, shard.header)
            if sha256 is not None and is_there and hash_file(path) == sha256:
                kept[path] = sha256
        for folder in (self.root, *self.stripes):
            for path in folder.iterdir():
                if path not in kept and path.name != _JOURNAL_NAME:
                    _remove(path)
        return {path.name: sha256 for path, sha256 in kept.items()}

    def check_space(self, missing: Sequence[Shard], small_bytes: int) -> None:
        """Check each file system once, whatever number of the folders lies on it.

        Args:
            missing: files still to be written.
            small_bytes: size of the documents, which go to the first folder.

        Raises:
            CapacityError: one has less room than needed.
        """
        folders: dict[int, Path] = {}
        needed: dict[int, int] = {}
        for stripe, folder in enumerate((self.root, *self.stripes)):
            device = folder.stat().st_dev
            folders.setdefault(device, folder)
            num_bytes = sum(shard.nbytes for shard in missing if shard.stripe == stripe)
            small = small_bytes if stripe == 0 else 0
            needed[device] = needed.get(device, _MARGIN_BYTES) + num_bytes + small
        for device, folder in folders.items():
            free = shutil.disk_usage(folder).free
            if needed[device] > free:
                self._remove_if_empty()
                raise CapacityError(
                    f"store in {folder.parent} needs {format_bytes(needed[device])} but "
                    f"{format_bytes(free)} is free ({needed[device]} and {free} bytes); free space "
                    "there or give another --nvme folder"
                )

    def record(self, source: SourceFile, finished: Mapping[str, str]) -> None:
        """Write the journal, so that a later run can go on or clean up."""
        journal = {
            "source": dataclasses.asdict(source),
            "stripes": [str(path) for path in self.stripes],
            "finished": dict(finished),
        }
        write_durably(self.root / _JOURNAL_NAME, json.dumps(journal).encode())

    def link(self, shards: Sequence[Shard]) -> None:
        """Let the first folder name every file: those elsewhere by a link."""
        for shard in shards:
            if shard.stripe:
                (self.root / shard.name).symlink_to(self.path(shard))

    def publish(self) -> None:
        """Make the store appear."""
        (self.root / _JOURNAL_NAME).unlink(missing_ok=True)
        sync(self.root)
        self.root.rename(self.folder)
        sync(self.folder.parent)

    def _remove_if_empty(self) -> None:
        for folder in (self.root, *self.stripes):
            if not any(folder.iterdir()):
                folder.rmdir()


def remove_left_overs(models: Path, *, besides: str) -> None:
    """Remove unfinished stores that no run can go on with: their source has changed or gone.

    Args:
        models: the folder of all stores.
        besides: name of the store that is about to be written.
    """
    for root in models.glob(f"{_PREFIX}*"):
        name = root.name.removeprefix(_PREFIX)
        journal = _read_journal(root)
        if name == besides or journal.source is None or is_unchanged(journal.source):
            continue
        try:
            with locked(models, name, is_waiting=False):
                _logger.info("removing %s: its source %s has changed", root, journal.source.path)
                own = [path for path in journal.stripes if path.name.startswith(f"{name}.part-")]
                Staging(folder=models / name, stripes=tuple(own)).remove()
        except BlockingIOError:
            continue  # Somebody works on it.
        except OSError as error:
            # It may be another user's: no reason not to write this store.
            _logger.warning("%s is left over and cannot be removed: %s; remove it", root, error)


@contextlib.contextmanager
def locked(models: Path, name: str, *, is_waiting: bool = True) -> Iterator[None]:
    """Hold the lock of a store; waits for its holder, who is named in the log.

    The file stays: removing it would let two holders lock two files of one name.

    Args:
        models: the folder of all stores.
        name: of the store.
        is_waiting: wait for another holder.

    Raises:
        BlockingIOError: somebody else holds the lock, and waiting was not asked for.
    """
    with (models / f".{name}.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not is_waiting:
                raise
            file.seek(0)
            _logger.info("waiting for process %s, which writes %s", file.read().strip(), name)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file so that it is there whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    with new_file(path) as partial:
        partial.write_bytes(data)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary name; the file is flushed and renamed after, or removed on an error."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        sync(partial)
        partial.rename(path)
        sync(path.parent)
    except BaseException as error:
        is_own = isinstance(error, StorageError)
        if isinstance(error, OSError) and not is_own and error.filename is None:
            # A failed write does not say of which file.
            error.filename = str(path)
        partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_journal(root: Path) -> _Journal:
    try:
        journal: Any = json.loads((root / _JOURNAL_NAME).read_bytes())
        # fspath refuses what is no path: null or a number would be taken for one.
        return _Journal(
            source=SourceFile(
                **{**journal["source"], "path": os.fspath(journal["source"]["path"])}
            ),
            stripes=tuple(Path(path) for path in journal["stripes"]),
            finished=dict(journal["finished"]),
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return _Journal()


def _has_header(path: Path, header: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(header)) == header


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
