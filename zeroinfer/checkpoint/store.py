"""Writing a store: a folder of safetensors files that is either whole or not there.

A store lives at ``<nvme>/models/<name>-<dtype>-<address>``, where the address is a hash of the
source's content, the element type and the format version. It is written shard by shard in a
hidden folder beside its place and appears by one rename. After a kill the finished shards, with
their checksums, are taken over. Only that hidden folder is ever deleted.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeroinfer.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Manifest,
    SourceFile,
    StoredFile,
    hash_file,
    read_manifest,
    render_manifest,
)
from zeroinfer.checkpoint.shards import (
    INDEX_NAME,
    Shard,
    TensorSource,
    default_shard_bytes,
    index_document,
    plan_shards,
    write_shard,
)
from zeroinfer.errors import CapacityError, CheckpointError, StorageError
from zeroinfer.log import get_logger
from zeroinfer.units import MIB, format_bytes

__all__ = ["Progress", "StoreContent", "check_store", "find_store", "write_store"]

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes of the whole store's weights."""

_MODELS_FOLDER = "models"
_JOURNAL_NAME = "finished.json"
_logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreContent:
    """What a store is to hold."""

    name: str
    """Readable part of the folder's name."""
    dtype: str
    auto_dtype: str
    source: SourceFile
    tensors: Sequence[TensorSource]
    """In order of use."""
    documents: Mapping[str, bytes]
    """Config and tokenizer files by name."""

    @property
    def folder_name(self) -> str:
        """Name of the store's folder; equal content has an equal name."""
        key = f"{FORMAT_VERSION}:{self.dtype}:{self.source.sha256}"
        address = hashlib.sha256(key.encode()).hexdigest()[:16]
        return f"{_slug(self.name)}-{self.dtype}-{address}"


def find_store(nvme_dir: Path, source: Path, *, dtype: str) -> Path | None:
    """Find a finished store of a source file by its path, size and time, reading no weights.

    Args:
        nvme_dir: the folder stores are kept under.
        source: the file to be converted.
        dtype: wanted element type, or ``auto``.

    Returns:
        The folder, or None if there is none.

    Raises:
        CheckpointError: a store is there but a file of it is missing or has another size.
    """
    status = source.stat()
    wanted = (str(source.resolve()), status.st_size, status.st_mtime_ns)
    for path in sorted((nvme_dir / _MODELS_FOLDER).glob(f"[!.]*/{MANIFEST_NAME}")):
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(path.parent)
            found = (manifest.source.path, manifest.source.size_bytes, manifest.source.mtime_ns)
            if found == wanted and manifest.dtype == _resolve(dtype, manifest):
                break
    else:
        return None
    check_store(path.parent)
    return path.parent


def check_store(folder: Path) -> Manifest:
    """Check that every file of a store is there with its recorded size; reads no weights.

    Raises:
        CheckpointError: naming the file, its size and the recorded one.
    """
    manifest = read_manifest(folder)
    for name, stored in manifest.files.items():
        path = folder / name
        size_bytes = path.stat().st_size if path.is_file() else None
        if size_bytes != stored.size_bytes:
            found = "is missing" if size_bytes is None else f"has {size_bytes} bytes"
            raise CheckpointError(
                f"{path} {found}, need {stored.size_bytes} bytes; remove {folder} and convert again"
            )
    return manifest


def write_store(
    nvme_dir: Path,
    content: StoreContent,
    *,
    shard_bytes: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a store, or return the one that is there; blocks while another process writes it.

    Args:
        nvme_dir: the folder stores are kept under; created if missing.
        content: what to write.
        shard_bytes: size of a file; None chooses by the total.
        progress: told the bytes done.

    Moves: every piece of ``content.tensors`` from DRAM to NVMe, each file flushed; blocking.

    Raises:
        CapacityError: the file system has less room than needed; checked before writing.
        StorageError: a write failed, or the folder cannot be used.
        CheckpointError: a folder of that name is there and is not an intact store.
    """
    models = nvme_dir / _MODELS_FOLDER
    folder = models / content.folder_name
    with _storage_errors(models):
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{folder.name}.lock"):
            if folder.exists():
                check_store(folder)
                return folder
            _write_new(folder, content, shard_bytes=shard_bytes, progress=progress)
    return folder


def _write_new(
    folder: Path, content: StoreContent, *, shard_bytes: int | None, progress: Progress | None
) -> None:
    total_bytes = sum(source.spec.nbytes for source in content.tensors)
    shards = plan_shards(
        content.tensors, shard_bytes=shard_bytes or default_shard_bytes(total_bytes)
    )
    documents = {**content.documents, INDEX_NAME: index_document(shards)}
    staging = folder.with_name(f".partial-{folder.name}")
    staging.mkdir(exist_ok=True)
    files = _adopt_finished(staging, shards)
    _check_space(staging, [s for s in shards if s.name not in files], documents)
    try:
        _write_shards(staging, shards, files, progress=progress)
        _write_documents(staging, documents, files)
        manifest = Manifest(
            dtype=content.dtype,
            auto_dtype=content.auto_dtype,
            weight_bytes=total_bytes,
            source=content.source,
            files=files,
        )
        _write_durably(staging / MANIFEST_NAME, render_manifest(manifest))
        _publish(staging, folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _adopt_finished(staging: Path, shards: Sequence[Shard]) -> dict[str, StoredFile]:
    """Keep the shards an earlier run finished: recorded checksum right, header as planned now."""
    journal = _read_journal(staging)
    files: dict[str, StoredFile] = {}
    for shard in shards:
        path = staging / shard.name
        if shard.name not in journal or not path.is_file():
            continue
        if _has_header(path, shard.header) and hash_file(path) == journal[shard.name]:
            files[shard.name] = StoredFile(size_bytes=shard.nbytes, sha256=journal[shard.name])
    for path in staging.iterdir():
        if path.name not in files and path.name != _JOURNAL_NAME:
            path.unlink()
    if files:
        _logger.info(
            "continuing %s: %d of %d files are there", staging.name, len(files), len(shards)
        )
    return files


def _read_journal(staging: Path) -> dict[str, str]:
    try:
        journal = json.loads((staging / _JOURNAL_NAME).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return journal if isinstance(journal, dict) else {}


def _has_header(path: Path, header: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(header)) == header


def _check_space(staging: Path, missing: Sequence[Shard], documents: Mapping[str, bytes]) -> None:
    # A margin of 1 MiB for folders, the journal and block rounding of the small files.
    needed = sum(s.nbytes for s in missing) + sum(map(len, documents.values())) + MIB
    free = shutil.disk_usage(staging).free
    if needed > free:
        if not any(staging.iterdir()):
            staging.rmdir()
        raise CapacityError(
            f"store in {staging.parent} needs {format_bytes(needed)} but {format_bytes(free)} is "
            f"free ({needed} and {free} bytes); free space there or give another --nvme folder"
        )


def _write_shards(
    staging: Path,
    shards: Sequence[Shard],
    files: dict[str, StoredFile],
    *,
    progress: Progress | None,
) -> None:
    total = sum(shard.nbytes for shard in shards)
    done = sum(stored.size_bytes for stored in files.values())

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, total)

    for shard in shards:
        if shard.name in files:
            continue
        with _new_file(staging / shard.name) as partial:
            sha256 = write_shard(shard, partial, progress=advance)
        files[shard.name] = StoredFile(size_bytes=shard.nbytes, sha256=sha256)
        journal = {name: stored.sha256 for name, stored in files.items()}
        _write_durably(staging / _JOURNAL_NAME, json.dumps(journal).encode())


def _write_documents(
    staging: Path, documents: Mapping[str, bytes], files: dict[str, StoredFile]
) -> None:
    for name, data in documents.items():
        _write_durably(staging / name, data)
        sha256 = hashlib.sha256(data).hexdigest()
        files[name] = StoredFile(size_bytes=len(data), sha256=sha256)


def _publish(staging: Path, folder: Path) -> None:
    (staging / _JOURNAL_NAME).unlink(missing_ok=True)
    _sync(staging)
    staging.rename(folder)
    _sync(folder.parent)


def _write_durably(path: Path, data: bytes) -> None:
    with _new_file(path) as partial:
        partial.write_bytes(data)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary name; the file is flushed and renamed after, or removed on an error."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        _sync(partial)
        partial.rename(path)
        _sync(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; waits for its holder, who is named in the log.

    The file stays: removing it would let two holders lock two files of one name.
    """
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            _logger.info("waiting for process %s, which writes %s", file.read().strip(), path.name)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


@contextlib.contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "unknown")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(
                f"writing a store in {folder} failed: {error.strerror} ({name}); what was written "
                "is removed again; free space there or give another --nvme folder"
            ) from error
        raise StorageError(
            f"writing a store in {folder} failed at {error.filename or folder}: "
            f"{error.strerror} ({name}); give a writable --nvme folder"
        ) from error


def _resolve(dtype: str, manifest: Manifest) -> str:
    return manifest.auto_dtype if dtype == "auto" else dtype


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:80].strip("-.") or "model"
