"""How much memory this process may use: the machine's and its control groups' limits.

Control files are read under a root folder given by the caller, so that a folder of made-up files
stands for a container. Page cache counts as free, as in the kernel's own MemAvailable: files that
a job has read would otherwise shrink the next job's budget.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from zeroinfer.errors import StorageError
from zeroinfer.memory.usage import process_anonymous_bytes
from zeroinfer.units import MIB

__all__ = ["MemoryLimit", "default_dram_budget", "probe_memory_limit"]

_NO_LIMIT_BYTES = 1 << 60
"""v1 writes the largest page-aligned number for no limit; nothing real comes near this."""

_MARGIN_BYTES = 512 * MIB
_MARGIN_SHARE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """What the machine and the control groups leave."""

    total_bytes: int
    """Memory of the machine."""
    available_bytes: int
    """Memory that can still be taken, page cache counted as free; never negative."""
    limit_bytes: int | None
    """Smallest limit of the control groups this process is in; None without one."""
    source: str
    """What `available_bytes` comes from: ``machine`` or a control group by version and path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Version:
    """Names of one control group version's files."""

    label: str
    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...]


# memory.high does not kill but slows every allocation down, so it is no place to plan for.
_V1 = _Version(
    label="cgroup v1",
    limits=("memory.limit_in_bytes",),
    usage="memory.usage_in_bytes",
    reclaimable=("total_inactive_file", "total_active_file"),
)
_V2 = _Version(
    label="cgroup v2",
    limits=("memory.max", "memory.high"),
    usage="memory.current",
    reclaimable=("inactive_file", "active_file"),
)


def probe_memory_limit(root: Path = Path("/"), pid: int | None = None) -> MemoryLimit:
    """Find the smallest of what the machine and every control group up to the top leave.

    Args:
        root: folder that holds ``proc`` and the mounts of the control groups.
        pid: the process to ask for; this one by default.

    Raises:
        StorageError: ``proc/meminfo`` cannot be read.
    """
    total_bytes, available_bytes = _read_meminfo(root / "proc/meminfo")
    source = "machine"
    limits: list[int] = []
    for label, limit_bytes, left_bytes in _iter_limits(root, str(pid) if pid else "self"):
        limits.append(limit_bytes)
        if left_bytes < available_bytes:
            available_bytes, source = left_bytes, label
    return MemoryLimit(
        total_bytes=total_bytes,
        available_bytes=available_bytes,
        limit_bytes=min(limits, default=None),
        source=source,
    )


def default_dram_budget(
    limit: MemoryLimit | None = None, *, held_bytes: int | None = None
) -> tuple[int, int]:
    """Return the budget of the whole process tree when the user names none, and its margin.

    The budget is what is left, plus what the process already holds (a budget covers the
    interpreter and its libraries), less a margin of the larger of 512 MiB and 5 % for others.

    Args:
        limit: result of `probe_memory_limit`; probed now by default.
        held_bytes: anonymous memory this process holds; measured now by default.

    Returns:
        ``(budget_bytes, margin_bytes)``; the budget is 0 where less than the margin is left.
    """
    limit = limit or probe_memory_limit()
    held_bytes = process_anonymous_bytes() if held_bytes is None else held_bytes
    usable_bytes = limit.available_bytes + held_bytes
    margin_bytes = max(_MARGIN_BYTES, int(usable_bytes * _MARGIN_SHARE))
    return max(0, usable_bytes - margin_bytes), margin_bytes


def _iter_limits(root: Path, pid: str) -> Iterator[tuple[str, int, int]]:
    """Yield label, limit and what is left, for every limited group from the process's up."""
    for version, folders in _iter_hierarchies(root, pid):
        for folder, path in folders:
            limit_bytes = _read_limit(folder, version)
            if limit_bytes is not None:
                left_bytes = max(0, limit_bytes - _read_used(folder, version))
                yield f"{version.label} {path}", limit_bytes, left_bytes


def _iter_hierarchies(root: Path, pid: str) -> Iterator[tuple[_Version, list[tuple[Path, str]]]]:
    """Yield each memory hierarchy with its groups' folders and paths, innermost first."""
    mounts = _read_mounts(root, pid)
    for line in _read_lines(root / "proc" / pid / "cgroup"):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            version = _V2
        elif "memory" in controllers.split(","):
            version = _V1
        else:
            continue
        for mount_version, mount_root, mount_point in mounts:
            if mount_version is version:
                yield version, _group_folders(mount_point, mount_root, path)


def _group_folders(mount_point: Path, mount_root: str, path: str) -> list[tuple[Path, str]]:
    """List a group's folder and its parents' up to the mount, with their paths.

    A container may see its group mounted as the top (path below the mount's root), or through a
    namespace (path relative to the mount), or not know where it is at all: then the mount itself.
    """
    parts = PurePosixPath(path).parts[1:]
    root_parts = PurePosixPath(mount_root).parts[1:]
    if parts[: len(root_parts)] == root_parts:
        parts = parts[len(root_parts) :]
    if ".." in parts or not mount_point.joinpath(*parts).is_dir():
        parts = ()
    return [
        (mount_point.joinpath(*parts[:depth]), "/" + "/".join(parts[:depth]))
        for depth in range(len(parts), -1, -1)
    ]


def _read_mounts(root: Path, pid: str) -> list[tuple[_Version, str, Path]]:
    """List mounts of memory hierarchies: version, group at the mount's top, mount point."""
    mounts = []
    for line in _read_lines(root / "proc" / pid / "mountinfo"):
        fields, separator, tail = line.partition(" - ")
        if not separator:
            continue
        fs_type, *_, options = tail.split(" ")
        _, _, _, mount_root, mount_point, *_ = fields.split(" ")
        folder = root / mount_point.lstrip("/")
        if fs_type == "cgroup2":
            mounts.append((_V2, mount_root, folder))
        elif fs_type == "cgroup" and "memory" in options.split(","):
            mounts.append((_V1, mount_root, folder))
    base = root / "sys/fs/cgroup"
    usual = [(_V1, "/", base / "memory"), (_V2, "/", base), (_V2, "/", base / "unified")]
    return mounts or usual


def _read_limit(folder: Path, version: _Version) -> int | None:
    values = [_read_number(folder / name) for name in version.limits]
    if version is _V1:
        # Covers parents that are outside the mount.
        values.append(_read_stat(folder).get("hierarchical_memory_limit"))
    limits = [value for value in values if value is not None and value < _NO_LIMIT_BYTES]
    return min(limits, default=None)


def _read_used(folder: Path, version: _Version) -> int:
    """Return bytes in use that cannot be reclaimed from the page cache."""
    stat = _read_stat(folder)
    used_bytes = _read_number(folder / version.usage) or 0
    return max(0, used_bytes - sum(stat.get(name, 0) for name in version.reclaimable))


def _read_stat(folder: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read_lines(folder / "memory.stat"))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _read_number(path: Path) -> int | None:
    """Return the number a control file holds; None for ``max``, no file or no number."""
    lines = _read_lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _read_lines(path: Path) -> list[str]:
    """Return a file's lines; none where it is missing or not readable for this user."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8").splitlines()
    return []


def _read_meminfo(path: Path) -> tuple[int, int]:
    """Return total and available memory in bytes."""
    fields = dict(line.split(":", 1) for line in _read_lines(path) if ":" in line)
    try:
        total, available = fields["MemTotal"], fields["MemAvailable"]
    except KeyError as error:
        raise StorageError(
            f"memory of the machine is unknown: {path} has no {error.args[0]}; "
            "mount /proc or set --dram"
        ) from error
    return int(total.split()[0]) * 1024, int(available.split()[0]) * 1024
