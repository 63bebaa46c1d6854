"""What a running job shows: texts, progress, the summary at the end, report files."""

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zeroinfer.cli.console import Output, StatusLine, format_seconds, stream_errors
from zeroinfer.errors import StorageError
from zeroinfer.jobs import JobProgress, JobResult, Recovered
from zeroinfer.units import format_bytes

__all__ = [
    "ProgressView",
    "TextSink",
    "check_writable",
    "render_summary",
    "resume_command",
    "write_at_once",
    "write_json_file",
]


class TextSink:
    """Prints the texts of built-in prompts for people."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self._prompts = prompts

    @property
    def recovered(self) -> Recovered:
        """Nothing: there is no earlier run."""
        return Recovered()

    def write_step(self, records: Sequence[tuple[int, str]], token_ids: Mapping[int, int]) -> None:
        """Print each finished row under its prompt."""
        del token_ids
        if not records:
            return
        # Here, so that no first layer waits for it.
        from rich.console import Console
        from rich.markup import escape

        console = Console(highlight=False)
        with stream_errors(sys.stdout):
            for row_idx, line in records:
                prompt = escape(self._prompts[row_idx])
                console.print(f"\n[bold]{prompt}[/bold]", soft_wrap=True)
                console.print(escape(_readable(json.loads(line))), soft_wrap=True)

    def close(self, *, is_complete: bool) -> None:
        """Nothing to close."""
        del is_complete


def _readable(record: Mapping[str, Any]) -> str:
    if "error" in record:
        return f"error: {record['error']['message']}"
    text: str | None = record.get("text")
    return " ".join(map(str, record["token_ids"])) if text is None else text.strip()


class ProgressView:
    """Shows where the job stands after each step."""

    def __init__(self, output: Output, *, link_bytes_per_s: float) -> None:
        self._output = output
        self._link_gb_s = link_bytes_per_s / 1e9
        self._status = StatusLine()
        self._last: JobProgress | None = None

    def show(self, progress: JobProgress) -> None:
        """Print the state if it is time."""
        self._last = progress
        if not self._output.is_json:
            self._status.show(lambda: self._render(progress))
        else:
            self._output.event("progress", self._to_dict(progress))

    def close(self) -> None:
        """Print the last state and end a live line."""
        if self._last is not None and not self._output.is_json:
            last = self._last
            self._status.show(lambda: self._render(last), is_last=True)
        self._status.close()

    def _share(self, progress: JobProgress) -> float | None:
        return progress.nvme_gb_s / self._link_gb_s if self._link_gb_s else None

    def _render(self, progress: JobProgress) -> str:
        share = self._share(progress)
        link = f"{progress.nvme_gb_s:.2f} GB/s" + (f" ({share:.0%} of link)" if share else "")
        errors = f", {progress.num_errors} errors" if progress.num_errors else ""
        return (
            f"{progress.num_done}/{progress.num_rows} rows{errors} | "
            f"{progress.num_running} running | {progress.tokens_per_s:.1f} tokens/s | {link} | "
            f"step {format_seconds(progress.step_s)} | ETA {format_seconds(progress.eta_s)}"
        )

    def _to_dict(self, progress: JobProgress) -> dict[str, Any]:
        return {
            "num_done": progress.num_done,
            "num_rows": progress.num_rows,
            "num_running": progress.num_running,
            "num_errors": progress.num_errors,
            "num_generated_tokens": progress.num_generated_tokens,
            "tokens_per_s": progress.tokens_per_s,
            "nvme_gb_s": progress.nvme_gb_s,
            "link_share": self._share(progress),
            "step_s": progress.step_s,
            "eta_s": progress.eta_s,
        }


def render_summary(result: JobResult, report: Mapping[str, Any]) -> str:
    """Return the lines that end a run: rows, speed, bytes, memory."""
    speed = result.num_generated_tokens / max(result.wall_s, 1e-9)
    lines = [
        f"{result.num_done} of {result.num_rows} rows done, {result.num_errors} with errors; "
        f"{result.num_generated_tokens} new tokens in {format_seconds(result.wall_s)} "
        f"({speed:.1f} tokens/s)"
    ]
    nvme = report.get("io", {}).get("nvme", {})
    if nvme.get("bytes_read"):
        busy_s = max(nvme.get("busy_s", 0.0), 1e-9)
        lines.append(
            f"read {format_bytes(nvme['bytes_read'])} from nvme at "
            f"{nvme['bytes_read'] / busy_s / 1e9:.2f} GB/s while reading"
        )
    time = report.get("time", {})
    if time:
        lines.append(
            f"time: compute {format_seconds(time.get('compute_s', 0.0))}, waiting for weights "
            f"{format_seconds(time.get('fetch_wait_s', 0.0))}, other "
            f"{format_seconds(time.get('other_s', 0.0))}"
        )
    memory = report.get("memory", {})
    if memory.get("dram_peak_bytes"):
        lines.append(
            f"peak memory {format_bytes(memory['dram_peak_bytes'])} of "
            f"{format_bytes(memory['dram_budget_bytes'])}"
        )
    roofline = report.get("roofline", {})
    if roofline.get("bound_by"):
        efficiency = roofline.get("efficiency")
        share = f", at {efficiency:.0%} of its roofline" if efficiency is not None else ""
        lines.append(f"bound by {roofline['bound_by']}{share}")
    return "\n".join(lines)


def resume_command(original: Sequence[str] | None = None) -> str:
    """Return the command that goes on with an interrupted run of this process.

    Args:
        original: interpreter, its arguments and the program's; None takes this process's.
    """
    words = list(sys.orig_argv if original is None else original)
    return shlex.join(
        [word for word in words if word not in ("--overwrite", "--resume")] + ["--resume"]
    )


def check_writable(role: str, path: Path) -> None:
    """Refuse a file that could not be written at the end of a job, by trying.

    Args:
        role: what the file is for, for the message.
        path: existing or not; it is left as it is.

    Raises:
        StorageError: it is a folder, or its folder takes no file.
    """
    try:
        _try_writing(role, path)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"{role} {path} cannot be written: {error.strerror}; choose another folder"
        ) from error


def _try_writing(role: str, path: Path) -> None:
    real_path = Path(os.path.realpath(path))
    if real_path.is_dir():
        raise StorageError(f"{role} {path} is a folder; name a file")
    if not real_path.parent.is_dir():
        raise StorageError(f"{role} {path}: folder {real_path.parent} does not exist; create it")
    if real_path.exists() and not real_path.is_file():
        return
    probe = _temporary(real_path)
    probe.touch()
    probe.unlink()


def write_json_file(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file at once; see `write_at_once`."""
    text = json.dumps(data, indent=2) + "\n"
    write_at_once(path, lambda target: target.write_text(text, encoding="utf-8"))


def write_at_once(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that no reader sees half of it; a device or pipe is written as it is.

    Args:
        path: symbolic links are followed.
        write: writes the file that it is given.

    Raises:
        StorageError: the file cannot be written; one that was there stays as it was.
    """
    path = Path(os.path.realpath(path))
    is_special = path.exists() and not path.is_file()
    temporary = path if is_special else _temporary(path)
    try:
        write(temporary)
        if not is_special:
            temporary.replace(path)
    except OSError as error:
        if not is_special:
            temporary.unlink(missing_ok=True)
        raise StorageError(
            f"{path} cannot be written: {error.strerror}; free some room or choose another file"
        ) from error


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
