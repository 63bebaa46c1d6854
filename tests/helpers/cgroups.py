"""Runs a command inside a memory group of its own; needs root and cgroup v1, as `tools` do."""

import subprocess
from dataclasses import dataclass

from tools.cgroup import MemoryGroup, join_command

__all__ = ["LimitedRun", "run_limited"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitedRun:
    """What a command inside a memory group did."""

    returncode: int
    stdout: str
    stderr: str
    peak_bytes: int
    """Highest usage of the group, page cache included."""
    num_oom_kills: int


def run_limited(command, *, limit_bytes, timeout_s=50.0, **options):
    """Run a command in a fresh memory group; `options` go to `subprocess.run`."""
    with MemoryGroup.create("zeroinfer-test", limit_bytes=limit_bytes) as group:
        done = subprocess.run(
            join_command([group], command),
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            **options,
        )
        return LimitedRun(
            returncode=done.returncode,
            stdout=done.stdout,
            stderr=done.stderr,
            peak_bytes=group.peak_bytes,
            num_oom_kills=group.num_oom_kills,
        )
