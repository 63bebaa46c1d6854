"""Version 1 control groups for measurements: a memory limit and a read throttle.

Groups are made under the controllers' root folders, a child joins them before it executes the
measured program, and they are removed afterwards. Needs root and the v1 controllers; the refusal
says which is missing. Page cache counts towards a memory group; only the peak of the process
itself (VmHWM) says what a program needed.
"""

import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "CGROUP_ROOT",
    "CgroupError",
    "MemoryGroup",
    "ThrottleGroup",
    "disk_of",
    "join_command",
]

CGROUP_ROOT = Path("/sys/fs/cgroup")
_REMOVE_TIMEOUT_S = 10.0


class CgroupError(RuntimeError):
    """A control group cannot be made or used here."""


def _create(controller: str, name: str, root: Path) -> Path:
    base = root / controller
    if not (base / "cgroup.procs").exists():
        raise CgroupError(
            f"cgroup v1 controller {controller} not found: no {base}/cgroup.procs; mount it or run "
            "without a limit"
        )
    folder = base / f"{name}-{os.getpid()}-{secrets.token_hex(3)}"
    try:
        folder.mkdir()
    except OSError as error:
        raise CgroupError(f"cannot make {folder}: {error.strerror}; run as root") from error
    return folder


def _members(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "cgroup.procs").read_text().split()]


def _remove(folder: Path) -> None:
    """End what is left in the group (all of it was started in it) and remove the folder."""
    deadline_s = time.monotonic() + _REMOVE_TIMEOUT_S
    while folder.exists():
        for pid in _members(folder):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryGroup:
    """A memory group; `set_limit` may come after processes joined."""

    folder: Path

    @classmethod
    @contextmanager
    def create(
        cls, name: str, *, limit_bytes: int | None, root: Path = CGROUP_ROOT
    ) -> Iterator["MemoryGroup"]:
        """Make the group, with a limit unless None; ends its processes and removes it on exit."""
        group = cls(folder=_create("memory", name, root))
        try:
            if limit_bytes is not None:
                group.set_limit(limit_bytes)
            yield group
        finally:
            _remove(group.folder)

    def set_limit(self, limit_bytes: int) -> None:
        """Limit the group; the kernel reclaims page cache to get there.

        Raises:
            CgroupError: the processes already hold more than can be reclaimed.
        """
        try:
            (self.folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
        except OSError as error:
            raise CgroupError(
                f"memory limit {limit_bytes} refused, {self.usage_bytes} in use: {error.strerror}"
            ) from error

    @property
    def usage_bytes(self) -> int:
        return int((self.folder / "memory.usage_in_bytes").read_text())

    @property
    def peak_bytes(self) -> int:
        """Highest usage, page cache included."""
        return int((self.folder / "memory.max_usage_in_bytes").read_text())

    @property
    def num_limit_hits(self) -> int:
        """How often the limit was reached (and page cache reclaimed, or worse)."""
        return int((self.folder / "memory.failcnt").read_text())

    @property
    def num_oom_kills(self) -> int:
        for line in (self.folder / "memory.oom_control").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ThrottleGroup:
    """A blkio group that limits reads of one disk."""

    folder: Path
    device: str
    """major:minor of the whole disk."""

    @classmethod
    @contextmanager
    def create(
        cls,
        name: str,
        *,
        path: Path,
        read_bytes_per_s: int | None,
        root: Path = CGROUP_ROOT,
    ) -> Iterator["ThrottleGroup"]:
        """Make a group that counts, and with a rate limits, reads of the disk `path` lies on."""
        device = disk_of(path)
        group = cls(folder=_create("blkio", name, root), device=device)
        try:
            if read_bytes_per_s is not None:
                limit = group.folder / "blkio.throttle.read_bps_device"
                limit.write_text(f"{device} {read_bytes_per_s}")
            yield group
        finally:
            _remove(group.folder)

    @property
    def bytes_read(self) -> int:
        """Bytes the group's processes read from the disk so far."""
        counters = (self.folder / "blkio.throttle.io_service_bytes").read_text()
        for line in counters.splitlines():
            fields = line.split()
            if len(fields) == 3 and fields[0] == self.device and fields[1] == "Read":
                return int(fields[2])
        return 0


def disk_of(path: Path) -> str:
    """Return major:minor of the whole disk under `path`; throttles do not work on partitions."""
    number = path.resolve().stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    entry = Path("/sys/dev/block") / device
    if not entry.exists():
        raise CgroupError(
            f"{path} lies on device {device}, no block device (overlay, network, tmpfs); "
            "put the model on a local disk or run without a throttle"
        )
    if (entry / "partition").exists():
        return (entry.resolve().parent / "dev").read_text().strip()
    return device


def join_command(
    groups: Sequence[MemoryGroup | ThrottleGroup], command: Sequence[str]
) -> list[str]:
    """Wrap a command so that its process joins the groups, then becomes the command."""
    joins = "".join(f"echo $$ > '{group.folder}/cgroup.procs' && " for group in groups)
    return ["/bin/sh", "-c", f'{joins}exec "$@"', "sh", *command]
