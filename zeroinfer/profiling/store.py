"""The profile kept under the --nvme folder, and measured when it is missing or does not fit."""

import dataclasses
import hashlib
import json
import os
import pwd
import shutil
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zeroinfer.dtypes import DType
from zeroinfer.errors import StorageError
from zeroinfer.log import get_logger
from zeroinfer.native import open_reader, resolve_reader
from zeroinfer.planner import Profile
from zeroinfer.profiling.disk import measure_disk
from zeroinfer.profiling.surroundings import (
    describe_filesystems,
    describe_machine,
    read_io_limits,
)
from zeroinfer.units import MIB, format_bytes

__all__ = ["find_profile", "load_or_measure", "measure_folder", "require_writable_folder"]

_logger = get_logger(__name__)
_MIN_WEIGHT_BYTES = 64 * MIB
"""Less than this is read in a blink and says little about the disk."""
_DISK_S, _FORCED_DISK_S = 2.5, 15.0
_PRODUCTS_S, _FORCED_PRODUCTS_S = 1.2, 5.0
_SCRATCH_BYTES = 256 * MIB
"""Read at random places; more than the buffers that disks and controllers answer from."""
_PRODUCT_DTYPES = (DType.BF16, DType.F16, DType.F32)


def load_or_measure(
    nvme_dir: Path,
    weight_paths: Sequence[Path],
    *,
    reader: str = "auto",
    is_forced: bool = False,
) -> Profile:
    """Return the profile of this machine and the file systems of these weights.

    A kept profile serves as long as processor, CPUs, file systems and the I/O limits of the
    control group are those it was measured under. Weights under 64 MiB are not measured unless
    forced: figures from them would mislead every larger model on the same disk. Weights on several
    file systems are read at once: each has a profile, and the slowest share tells the rate.

    Args:
        nvme_dir: The --nvme folder; profiles lie in ``profiles`` below it.
        weight_paths: Files that will be streamed.
        reader: What will read them: threads, io_uring or auto.
        is_forced: Measure now, and longer (20 s instead of 4).

    Raises:
        BackendUnavailableError: the reader was asked for by name and is not available.
        StorageError: the folder cannot be written, or a weight file cannot be read.
    """
    require_writable_folder(nvme_dir / "profiles")
    path, key = _place(nvme_dir, weight_paths, reader)
    shares = _by_filesystem(weight_paths)
    if len(shares) > 1:
        profiles = [load_or_measure(nvme_dir, share, reader=reader, is_forced=is_forced)
                    for share in shares]  # fmt: skip
        return _joined(profiles, shares, filesystem=key["filesystem"])
    profile = None if is_forced else _load(path, key)
    if profile is not None:
        return profile
    num_bytes = sum(weight_path.stat().st_size for weight_path in weight_paths)
    if num_bytes < _MIN_WEIGHT_BYTES and not is_forced:
        return dataclasses.replace(Profile.assumed(), filesystem=key["filesystem"])
    _logger.info("measuring disk and products (kept in %s)", path)
    profile = _measure(weight_paths, key, is_forced=is_forced)
    _save(path, key, profile)
    return profile


def find_profile(nvme_dir: Path, paths: Sequence[Path], *, reader: str = "auto") -> Profile | None:
    """Return the profile kept for the file system of some paths; measures nothing.

    Args:
        nvme_dir: The --nvme folder.
        paths: Files or folders on one file system; of several, None is returned.
        reader: What will read: threads, io_uring or auto.

    Raises:
        BackendUnavailableError: the reader was asked for by name and is not available.
        StorageError: a path cannot be looked at.
    """
    path, key = _place(nvme_dir, paths, reader)
    return _load(path, key)


def measure_folder(nvme_dir: Path, *, reader: str = "auto") -> Profile | None:
    """Measure the disk of the --nvme folder itself on a scratch file, which is removed again.

    Returns:
        None where there is no room for the scratch file.

    Moves:
        256 MiB from dram to nvme, then nvme to dram for some seconds; blocking.

    Raises:
        BackendUnavailableError: the reader was asked for by name and is not available.
        StorageError: the folder cannot be written or read.
    """
    require_writable_folder(nvme_dir / "profiles")
    if shutil.disk_usage(nvme_dir).free < 2 * _SCRATCH_BYTES:
        return None
    # Without a name from the start, so that a killed run leaves nothing behind.
    with tempfile.TemporaryFile(dir=nvme_dir) as scratch:
        block = os.urandom(MIB)
        try:
            for _ in range(_SCRATCH_BYTES // MIB):
                scratch.write(block)
            scratch.flush()
            os.fsync(scratch.fileno())
        except OSError as error:
            raise StorageError(
                f"cannot write to {nvme_dir}: {error.strerror}; choose another --nvme folder"
            ) from error
        path, key = _place(nvme_dir, [nvme_dir], reader)
        file = Path(f"/proc/self/fd/{scratch.fileno()}")
        profile = _measure([file], key, is_forced=False)
    _save(path, key, profile)
    return profile


def require_writable_folder(folder: Path) -> None:
    """Make a folder if need be and check, by writing, that files can be made in it.

    Raises:
        StorageError: that fails; the message names folder and user.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Modes do not tell: root ignores them and read-only mounts do not show in them.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-"):
            pass
    except OSError as error:
        raise StorageError(
            f"cannot write to {folder} as user {_user_name()}: {error.strerror}; "
            "choose another --nvme folder or change its owner or mode"
        ) from error


def _place(nvme_dir: Path, paths: Sequence[Path], reader: str) -> tuple[Path, dict[str, str]]:
    """Return where the profile of these paths is kept, and what it is valid for."""
    key = {**_describe_key(paths), "reader": resolve_reader(reader)}
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return nvme_dir / "profiles" / f"{name}.json", key


def _by_filesystem(paths: Sequence[Path]) -> list[list[Path]]:
    shares: dict[int, list[Path]] = {}
    for path in paths:
        shares.setdefault(path.stat().st_dev, []).append(path)
    return list(shares.values())


def _joined(
    profiles: Sequence[Profile], shares: Sequence[Sequence[Path]], *, filesystem: str
) -> Profile:
    """Join the profiles of disks that are read at once, each for its share of the bytes."""
    sizes = [sum(path.stat().st_size for path in share) for share in shares]
    seconds = [size / profile.nvme_read_bytes_per_s
               for size, profile in zip(sizes, profiles, strict=True)]  # fmt: skip
    slowest = profiles[seconds.index(max(seconds))]
    rate = sum(sizes) / max(seconds)
    return dataclasses.replace(slowest, nvme_read_bytes_per_s=rate, filesystem=filesystem)


def _describe_key(weight_paths: Sequence[Path]) -> dict[str, str]:
    try:
        filesystem = describe_filesystems(weight_paths)
    except OSError as error:
        raise StorageError(
            f"cannot read {error.filename}: {error.strerror}; check the weight files"
        ) from error
    return {
        "machine": describe_machine(),
        "filesystem": filesystem,
        "io_limits": read_io_limits(),
        "num_threads": str(_num_threads()),
        "products": _product_modes(),
    }


def _num_threads() -> int:
    """Threads that products run on; a count the user set changes every rate."""
    import torch  # noqa: PLC0415 - whoever wants a profile is about to compute

    return torch.get_num_threads()


def _product_modes() -> str:
    """Kernels that products run on; other ones have other rates."""
    from zeroinfer.native import ProductKernel, torch_dtype  # noqa: PLC0415 - as above

    kernels = [ProductKernel.resolve(torch_dtype(dtype)) for dtype in _PRODUCT_DTYPES]
    return " ".join(kernel.mode for kernel in kernels)


def _load(path: Path, key: dict[str, str]) -> Profile | None:
    """Read a kept profile; None, with one line said, when it does not serve."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["key"] != key:
            raise ValueError("it was measured under other conditions")
        profile = Profile.from_dict(data["profile"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _logger.warning("profile %s cannot be used and is measured again: %s", path, error)
        return None
    return dataclasses.replace(profile, source="cached")


def _measure(weight_paths: Sequence[Path], key: dict[str, str], *, is_forced: bool) -> Profile:
    # Deferred because a kept profile needs no torch.
    from zeroinfer.profiling.compute import (  # noqa: PLC0415
        measure_memory_copy,
        measure_products,
    )

    num_bytes = sum(path.stat().st_size for path in weight_paths)
    if num_bytes < _MIN_WEIGHT_BYTES:
        _logger.warning(
            "the disk rate is measured on only %s of weights and may be far off",
            format_bytes(num_bytes),
        )
    disk = measure_disk(
        weight_paths,
        budget_s=_FORCED_DISK_S if is_forced else _DISK_S,
        open_reader=partial(open_reader, key["reader"]),
    )
    products = measure_products(
        _PRODUCT_DTYPES,
        budget_s=_FORCED_PRODUCTS_S if is_forced else _PRODUCTS_S,
    )
    return Profile(
        nvme_read_bytes_per_s=disk.best.read_bytes_per_s,
        io_chunk_bytes=disk.best.io_chunk_bytes,
        queue_depth=disk.best.queue_depth,
        dram_copy_bytes_per_s=measure_memory_copy(),
        matmul_flops_per_s=products,
        grid=disk.grid,
        measured_at_unix_s=time.time(),
        filesystem=key["filesystem"],
    )


def _save(path: Path, key: dict[str, Any], profile: Profile) -> None:
    """Write under a temporary name, then rename, so that a reader never sees half a file."""
    text = json.dumps({"key": key, "profile": profile.to_dict()}, indent=1) + "\n"
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise StorageError(
            f"cannot write {path} as user {_user_name()}: {error.strerror}; "
            "free some space or choose another --nvme folder"
        ) from error


def _user_name() -> str:
    """Return the user's name, or number where the system has no name for it."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
