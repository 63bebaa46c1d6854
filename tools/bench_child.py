"""Run measured programs as children: in control groups, watched, with a time limit.

A child's peak memory is sampled from /proc (VmHWM of its whole tree) because the group's own peak
counts page cache. A child that is killed by its limit or runs out of time is a result, not an
error.
"""

import ctypes
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from cgroup import MemoryGroup, ThrottleGroup, join_command

__all__ = ["ChildResult", "run_child"]

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05
_TAIL_CHARS = 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildResult:
    """What one child did."""

    command: tuple[str, ...]
    returncode: int
    wall_s: float
    vm_hwm_bytes: int
    """Largest sum of VmHWM over the child's process tree that was sampled."""
    is_timed_out: bool
    stdout: str
    stderr_tail: str
    num_oom_kills: int = 0
    group_peak_bytes: int | None = None
    group_bytes_read: int | None = None

    @property
    def is_ok(self) -> bool:
        return self.returncode == 0 and not self.is_timed_out

    @property
    def json_lines(self) -> list[dict[str, Any]]:
        """Lines of stdout that are JSON objects."""
        return parse_json_lines(self.stdout)

    @property
    def outcome(self) -> str:
        """One word or two for a table."""
        if self.num_oom_kills:
            return "killed by the limit"
        if self.is_timed_out:
            return "timed out"
        return "finished" if self.returncode == 0 else f"exit {self.returncode}"

    def require_ok(self) -> "ChildResult":
        """Return self, or stop the benchmark with what the child said last."""
        if not self.is_ok:
            command = " ".join(self.command)
            raise SystemExit(f"{self.outcome}: {command}\n{self.stderr_tail or self.stdout[-500:]}")
        return self


def parse_json_lines(text: str) -> list[dict[str, Any]]:
    """Read the complete JSON lines of a child's output and skip the rest of it."""
    events = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return events


@dataclass(slots=True)
class _Watch:
    """Follows a running child."""

    process: "subprocess.Popen[bytes]"
    deadline_s: float
    vm_hwm_bytes: int = 0
    is_timed_out: bool = False
    peaks: dict[int, int] = field(default_factory=dict)

    def poll(self) -> bool:
        """Sample once; False when the child ended."""
        for pid in process_tree(self.process.pid):
            self.peaks[pid] = max(self.peaks.get(pid, 0), vm_hwm(pid))
        self.vm_hwm_bytes = sum(self.peaks.values())
        if self.process.poll() is not None:
            return False
        if time.monotonic() > self.deadline_s:
            self.is_timed_out = True
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return False
        return True

    def forget_peaks(self) -> None:
        """Start the peak anew (after the child reset its own VmHWM)."""
        self.peaks.clear()


OnLine = Callable[[dict[str, Any]], bool]


def run_child(
    command: Sequence[str],
    *,
    memory: MemoryGroup | None = None,
    throttle: ThrottleGroup | None = None,
    timeout_s: float = 3600.0,
    environment: Mapping[str, str] | None = None,
    on_event: OnLine | None = None,
) -> ChildResult:
    """Run a command to its end or its time limit, in the groups given.

    Args:
        on_event: called with each JSON line as it appears. When it returns true, the child's peak
            starts anew and one line is written to the child's stdin: the handshake of programs
            that get their limit after loading.
    """
    groups = [group for group in (memory, throttle) if group is not None]
    start_s = time.monotonic()
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            join_command(groups, command) if groups else list(command),
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        watch = _Watch(process=process, deadline_s=start_s + timeout_s)
        _follow(watch, stdout, on_event)
        wall_s = time.monotonic() - start_s
        return ChildResult(
            command=tuple(command),
            returncode=process.returncode,
            wall_s=wall_s,
            vm_hwm_bytes=watch.vm_hwm_bytes,
            is_timed_out=watch.is_timed_out,
            stdout=_read_all(stdout),
            stderr_tail=_read_all(stderr)[-_TAIL_CHARS:],
            num_oom_kills=memory.num_oom_kills if memory else 0,
            group_peak_bytes=memory.peak_bytes if memory else None,
            group_bytes_read=throttle.bytes_read if throttle else None,
        )


def _end_with_parent() -> None:
    """Have the kernel end the child when the benchmark is killed: it is in another session."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _follow(watch: _Watch, stdout: IO[bytes], on_event: OnLine | None) -> None:
    num_seen = 0
    try:
        while watch.poll():
            time.sleep(_POLL_S)
            if on_event is None:
                continue
            events = parse_json_lines(_read_all(stdout))
            for event in events[num_seen:]:
                if on_event(event):
                    watch.forget_peaks()
                    _answer(watch.process)
            num_seen = len(events)
    finally:
        if watch.process.poll() is None:
            os.killpg(watch.process.pid, signal.SIGKILL)
            watch.process.wait()
        if watch.process.stdin is not None:
            watch.process.stdin.close()


def _answer(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None, "children are started with a pipe"
    process.stdin.write(b"go\n")
    process.stdin.flush()


def _read_all(file: IO[bytes]) -> str:
    # The child writes through the same open file: only pread leaves its position alone.
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


def process_tree(pid: int) -> list[int]:
    """The process and all its descendants that are alive."""
    tree, frontier = [], [pid]
    while frontier:
        current = frontier.pop()
        tree.append(current)
        for children in Path(f"/proc/{current}/task").glob("*/children"):
            try:
                frontier += [int(child) for child in children.read_text().split()]
            except OSError:
                continue
    return tree


def vm_hwm(pid: int) -> int:
    """Peak resident bytes of a process; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
