"""Writing a store: a folder of safetensors files that is either whole or not there.

A store lives at ``<nvme>/models/<name>-<dtype>-<address>``, where the address is a hash of the
source's identity, the element type and, of a striped store, all its folders. It is written file by
file in a hidden folder beside its place and appears by one rename. After a kill the finished files,
with their checksums, are taken over. A striped store keeps part of its files under the further
folders, and a link to each of them, so that it opens like any other folder.
"""

import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeroinfer.checkpoint.manifest import (
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
from zeroinfer.checkpoint.sources import identify_folder, is_unchanged
from zeroinfer.checkpoint.staging import (
    MODELS_FOLDER,
    Staging,
    locked,
    new_file,
    remove_left_overs,
    sync,
    write_durably,
)
from zeroinfer.errors import CheckpointError, ConfigError, StorageError
from zeroinfer.log import get_logger

__all__ = [
    "Progress",
    "StoreContent",
    "check_file",
    "check_store",
    "find_store",
    "is_store",
    "write_store",
]

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes of the whole store's weights."""

_ADDRESS_VERSION = 1
"""Part of every address; raised only when stores of the same source must not be mistaken for the
older ones, which a new version of the manifest alone does not ask for."""
_logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreContent:
    """What a store is to hold."""

    name: str
    """Readable part of the folder's name."""
    dtype: str
    """Element type of the weights, ``mixed`` if they have several."""
    auto_dtype: str
    source: SourceFile
    tensors: Sequence[TensorSource]
    """In order of use."""
    documents: Mapping[str, bytes]
    """Config and tokenizer files by name."""

    def folder_name(self, nvme_dirs: Sequence[Path] = ()) -> str:
        """Return the name of the store's folder; equal content has an equal name.

        Args:
            nvme_dirs: all folders of a striped store: those of two stores may be partly the same,
                and there neither must take the other's files for its own. Empty for other stores.
        """
        key = f"{_ADDRESS_VERSION}:{self.dtype}:{self.source.sha256}"
        key += "".join(f":{os.path.realpath(path)}" for path in nvme_dirs)
        address = hashlib.sha256(os.fsencode(key)).hexdigest()[:16]
        return f"{_slug(self.name)}-{self.dtype}-{address}"


def is_store(folder: Path) -> bool:
    """Whether a folder says that it is a store.

    Raises:
        StorageError: the folder cannot be searched.
    """
    with _read_errors(folder):
        return (folder / MANIFEST_NAME).is_file()


def find_store(
    nvme_dir: Path, source: Path, *, dtype: str | None, stripes: Sequence[Path] | None = None
) -> Path | None:
    """Find a finished store of a source by its path, size and time, reading no weights.

    Args:
        nvme_dir: the folder stores are kept under.
        source: the file or folder to be converted.
        dtype: wanted element type, ``auto`` for the source's own, or None for any.
        stripes: further folders that the store must be spread over; None takes any store.

    Returns:
        The folder, or None if there is none.

    Raises:
        CheckpointError: a store is there but a file of it is missing or has another size.
        OSError: the source cannot be looked at.
    """
    known = _quick_identity(source)
    for path in sorted((nvme_dir / MODELS_FOLDER).glob(f"[!.]*/{MANIFEST_NAME}")):
        # Other stores, damaged or of other users, are no reason not to make this one.
        with contextlib.suppress(CheckpointError, StorageError):
            manifest = read_manifest(path.parent)
            wanted = {None: manifest.dtype, "auto": manifest.auto_dtype}.get(dtype, dtype)
            is_wanted = manifest.dtype == wanted
            if is_wanted and _is_same(manifest.source, known) and _lies_over(manifest, stripes):
                break
    else:
        return None
    check_store(path.parent)
    return path.parent


def check_store(folder: Path) -> Manifest:
    """Check that every file of a store is there with its recorded size; reads no weights.

    Configs and tokenizers are read and compared with their checksums.

    Raises:
        CheckpointError: naming the file or folder at fault.
        StorageError: a file cannot be read.
    """
    manifest = read_manifest(folder)
    with _read_errors(folder):
        _check_files(folder, manifest)
    return manifest


def check_file(folder: Path, name: str, stored: StoredFile) -> None:
    """Compare a file of a store with its checksum; reads all of it.

    Raises:
        CheckpointError: it is another; both checksums are named.
        StorageError: it cannot be read.
    """
    path = folder / name
    try:
        sha256 = hash_file(path)
    except OSError as error:
        raise StorageError(f"read of {path} failed: {error.strerror}") from error
    if sha256 != stored.sha256:
        raise CheckpointError(
            f"{path} is damaged: sha256 is {sha256}, recorded {stored.sha256}; "
            f"remove {folder} and convert again"
        )


def write_store(
    nvme_dir: Path,
    content: StoreContent,
    *,
    stripes: Sequence[Path] = (),
    shard_bytes: int | None = None,
    progress: Progress | None = None,
    is_verified: bool = False,
) -> Path:
    """Write a store, or return the one that is there; blocks while another process writes it.

    Args:
        nvme_dir: the folder stores are kept under; created if missing.
        content: what to write.
        stripes: further folders, which must exist, to spread the files over.
        shard_bytes: size of a file; None chooses by the total.
        progress: told the bytes done.
        is_verified: read each file from the disk again and compare, and demand at the end that the
            source is what it was.

    Moves: every piece of ``content.tensors`` from DRAM to NVMe, each file flushed; blocking.

    Raises:
        CapacityError: a file system has less room than needed; checked before writing.
        StorageError: a write failed, or a folder cannot be used.
        CheckpointError: a folder of that name is there and is not an intact store.
        ConfigError: a folder is given twice.
    """
    models = nvme_dir / MODELS_FOLDER
    with _storage_errors(models):
        stripes = _check_stripes(nvme_dir, stripes)
    name = content.folder_name((nvme_dir, *stripes) if stripes else ())
    staging = Staging.of(models.absolute() / name, stripes)
    folder = models / staging.folder.name
    with _storage_errors(models):
        models.mkdir(parents=True, exist_ok=True)
        remove_left_overs(models, besides=folder.name)
        with locked(models, folder.name):
            if folder.exists():
                check_store(folder)
                return folder
            writer = _Writer(staging=staging, content=content, progress=progress,
                             is_verified=is_verified)  # fmt: skip
            writer.write(shard_bytes)
    return folder


@dataclass(frozen=True, kw_only=True, slots=True)
class _Writer:
    """Writes one store under its lock."""

    staging: Staging
    content: StoreContent
    progress: Progress | None
    is_verified: bool

    def write(self, shard_bytes: int | None) -> None:
        """Write what is missing and publish the store."""
        content, staging = self.content, self.staging
        total_bytes = sum(source.spec.nbytes for source in content.tensors)
        shards = plan_shards(
            content.tensors,
            shard_bytes=shard_bytes or default_shard_bytes(total_bytes),
            num_stripes=1 + len(staging.stripes),
        )
        documents = {**content.documents, INDEX_NAME: index_document(shards)}
        staging.create()
        finished = staging.adopt(shards)
        if finished:
            name, total = staging.folder.name, len(shards)
            _logger.info("continuing %s: %d of %d files are there", name, len(finished), total)
        missing = [shard for shard in shards if shard.name not in finished]
        staging.check_space(missing, sum(map(len, documents.values())))
        try:
            self._write_shards(shards, finished)
            self._check_source()
            files = {shard.name: StoredFile(size_bytes=shard.nbytes, sha256=finished[shard.name])
                     for shard in shards}  # fmt: skip
            self._publish(shards, files, documents, total_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                staging.remove()
            raise

    def _write_shards(self, shards: Sequence[Shard], finished: dict[str, str]) -> None:
        """Write the files that are not finished, and note each when it is."""
        self.staging.record(self.content.source, finished)
        total = sum(shard.nbytes for shard in shards)
        done = sum(shard.nbytes for shard in shards if shard.name in finished)

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if self.progress is not None:
                self.progress(done, total)

        for shard in shards:
            if shard.name in finished:
                continue
            with new_file(self.staging.path(shard)) as partial:
                sha256 = write_shard(shard, partial, progress=advance)
                if self.is_verified:
                    _read_back(partial, sha256)
            finished[shard.name] = sha256
            self.staging.record(self.content.source, finished)

    def _check_source(self) -> None:
        if self.is_verified and not is_unchanged(self.content.source):
            raise CheckpointError(
                f"{self.content.source.path} changed while it was copied; copy it again when "
                "nothing writes to it"
            )

    def _publish(
        self,
        shards: Sequence[Shard],
        files: dict[str, StoredFile],
        documents: Mapping[str, bytes],
        total_bytes: int,
    ) -> None:
        staging = self.staging
        for name, data in documents.items():
            write_durably(staging.root / name, data)
            sha256 = hashlib.sha256(data).hexdigest()
            files[name] = StoredFile(size_bytes=len(data), sha256=sha256)
        staging.link(shards)
        manifest = Manifest(
            dtype=self.content.dtype,
            auto_dtype=self.content.auto_dtype,
            weight_bytes=total_bytes,
            source=self.content.source,
            files=files,
            stripes=tuple(map(str, staging.stripes)),
        )
        write_durably(staging.root / MANIFEST_NAME, render_manifest(manifest))
        staging.publish()


def _read_back(path: Path, sha256: str) -> None:
    """Compare what the disk holds, not what the page cache does."""
    sync(path)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    found = hash_file(path)
    if found != sha256:
        raise StorageError(
            f"{path} reads back otherwise than it was written: sha256 is {found}, need {sha256}; "
            "check the disk"
        )


def _check_stripes(nvme_dir: Path, stripes: Sequence[Path]) -> tuple[Path, ...]:
    """Return the further folders as absolute paths; a missing one may be a disk not mounted."""
    for path in stripes:
        # Before links are followed: a loop of them is no folder.
        if not path.is_dir():
            raise StorageError(
                f"folder {path} of a striped store does not exist; mount its disk or make it"
            )
    # resolve() would raise for a loop of links, and not as an OSError.
    resolved = [Path(os.path.realpath(path)) for path in (nvme_dir, *stripes)]
    for idx, path in enumerate(resolved):
        if path in resolved[:idx]:
            raise ConfigError(f"folder {path} is given twice; give each --nvme folder once")
    return tuple(resolved[1:])


def _quick_identity(source: Path) -> SourceFile:
    """Identify a source without reading it; the checksum of a file is left open."""
    if source.is_dir():
        return identify_folder(source)
    status = source.stat()
    return SourceFile(path=str(source.resolve()), size_bytes=status.st_size,
                      mtime_ns=status.st_mtime_ns, sha256="")  # fmt: skip


def _is_same(found: SourceFile, known: SourceFile) -> bool:
    if known.sha256 not in ("", found.sha256):
        return False
    return (found.path, found.size_bytes, found.mtime_ns) == (
        known.path, known.size_bytes, known.mtime_ns
    )  # fmt: skip


def _lies_over(manifest: Manifest, stripes: Sequence[Path] | None) -> bool:
    """Whether the further folders of a store are these, in this order."""
    if stripes is None:
        return True
    dirs = [Path(path).parent.parent for path in manifest.stripes]
    return dirs == [path.resolve() for path in stripes]


def _check_files(folder: Path, manifest: Manifest) -> None:
    for stripe in manifest.stripes:
        if not Path(stripe).is_dir():
            raise CheckpointError(
                f"store {folder} is spread over several folders, and {stripe} is missing; mount "
                f"its disk again, or remove {folder} and convert again"
            )
    for name, stored in manifest.files.items():
        path = folder / name
        size_bytes = path.stat().st_size if path.is_file() else None
        if size_bytes != stored.size_bytes:
            found = "is missing" if size_bytes is None else f"has {size_bytes} bytes"
            raise CheckpointError(
                f"{path} {found}, need {stored.size_bytes} bytes; remove {folder} and convert again"
            )
        if not name.endswith(".safetensors"):
            check_file(folder, name, stored)
    # One of another name could be taken for the model.
    foreign = {path.name for path in folder.glob("*.safetensors")} - manifest.files.keys()
    if foreign:
        raise CheckpointError(
            f"store {folder} holds {min(foreign)}, which convert did not write; remove that file"
        )


@contextlib.contextmanager
def _read_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be read: {error.strerror} ({error.filename or folder}); check its "
            "modes and its disk"
        ) from error


@contextlib.contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "unknown")
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = (
            "what was written is removed again; free space there or give another --nvme folder"
            if is_full
            else "give a writable --nvme folder"
        )
        raise StorageError(
            f"writing a store in {folder} failed at {error.filename or folder}: "
            f"{error.strerror} ({name}); {advice}"
        ) from error


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:80].strip("-.") or "model"
