"""What a measured profile is valid for: machine, file systems of the weights, I/O limits.

Read from /proc and /sys, whose root is a parameter so that tests can make up a machine.
"""

import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["describe_filesystems", "describe_machine", "read_io_limits"]

_V1_FILES = ("blkio.throttle.read_bps_device", "blkio.throttle.read_iops_device")
_V2_FILE = "io.max"


def describe_machine(root: Path = Path("/")) -> str:
    """Return processor model and the number of CPUs this process may use."""
    model = platform.machine()
    for line in _read_lines(root / "proc/cpuinfo"):
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {len(os.sched_getaffinity(0))} CPUs"


def describe_filesystems(paths: Sequence[Path], root: Path = Path("/")) -> str:
    """Return type, source and mount point of each file system that holds one of the paths."""
    mounts = dict(_mounts(root / "proc/self/mountinfo"))
    names = set()
    for path in paths:
        device = path.stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        names.add(mounts.get(number, f"device {number}"))
    return "; ".join(sorted(names))


def read_io_limits(root: Path = Path("/")) -> str:
    """Return the read limits of this process's control groups; empty when there are none.

    A group's limit also holds for the groups below it, so all ancestors are looked at.
    """
    limits = []
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        is_v2 = controllers == ""
        if not is_v2 and "blkio" not in controllers.split(","):
            continue
        for file in _limit_files(root / "sys/fs/cgroup", group, is_v2=is_v2):
            limits += [f"{file.name} {limit}" for limit in _read_lines(file) if limit.strip()]
    return "; ".join(sorted(set(limits)))


def _limit_files(mount: Path, group: str, *, is_v2: bool) -> Iterator[Path]:
    """Yield the limit files of a group and its ancestors, in every usual place of the mount."""
    parts = [part for part in group.split("/") if part not in ("", "..")]
    bases = (mount, mount / "unified") if is_v2 else (mount / "blkio", mount / "blkio,io")
    for base in bases:
        for depth in range(len(parts) + 1):
            folder = base.joinpath(*parts[:depth])
            yield from (folder / name for name in ((_V2_FILE,) if is_v2 else _V1_FILES))


def _mounts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield device number and description of each mount; see proc(5) for the fields."""
    for line in _read_lines(path):
        fields, _, tail = line.partition(" - ")
        kind, device = tail.split()[:2]
        yield fields.split()[2], f"{kind} {device}"


def _read_lines(path: Path) -> list[str]:
    """Return the lines of a control file; none where it is missing or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
