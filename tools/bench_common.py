"""What the benchmark programs share: machine facts, statistics, tables and result files.

A figure is never quoted alone: it comes with its spread, the command that made it and the machine
it was measured on.
"""

import itertools
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = [
    "REPOSITORY",
    "end_cleanly_on_sigterm",
    "format_table",
    "machine_facts",
    "ratios_of_neighbours",
    "summarize",
    "write_results",
]

REPOSITORY = Path(__file__).resolve().parent.parent
SCHEMA = 1
_SCRATCH = re.compile(r"NVME_DIR/(free|throttled-\d+)/(job|accelerate|deepspeed)-\w+")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def end_cleanly_on_sigterm() -> None:
    """Turn SIGTERM into an exit that runs clean-up: children ended, control groups removed."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


def summarize(values: Iterable[float]) -> dict[str, Any]:
    """Median and spread of repeated measurements; all values are kept in their order."""
    numbers = [float(value) for value in values]
    if not numbers:
        return {"num": 0, "median": None, "min": None, "max": None, "values": []}
    return {
        "num": len(numbers),
        "median": statistics.median(numbers),
        "min": min(numbers),
        "max": max(numbers),
        "values": numbers,
    }


def ratios_of_neighbours(values: Sequence[float]) -> list[float]:
    """Each value over the one before it: the A/A spread of a series of equal measurements."""
    return [later / earlier for earlier, later in itertools.pairwise(values)]


def machine_facts(path: Path) -> dict[str, Any]:
    """CPU, memory, kernel, disk under `path`, versions and commit: what a figure depends on."""
    cpu = _cpu_info()
    return {
        "cpu": cpu.get("model name", platform.processor()),
        "num_cpus": os.cpu_count(),
        "cpu_flags": [flag for flag in _CPU_FLAGS if flag in cpu.get("flags", "").split()],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "device": _device_name(path),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "zeroinfer_commit": _commit(),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write_results(
    out: Path,
    title: str,
    path: Path,
    results: Mapping[str, Any],
    *,
    folders: Mapping[str, Path] | None = None,
) -> None:
    """Write results as JSON beside the machine's facts and the command line that made them.

    Args:
        path: Lies on the disk that was measured.
        folders: Written by these names instead of their paths, which mean nothing elsewhere.
    """
    document = {
        "schema": SCHEMA,
        "title": title,
        "command": ["python", *sys.argv],
        "machine": machine_facts(path),
        **results,
    }
    text = json.dumps(document, indent=1)
    for name, folder in (folders or {}).items():
        text = text.replace(str(folder), name)
    text = text.replace(sys.executable, "python").replace(f"{REPOSITORY}/", "")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f"{out.name}.part")
    temporary.write_text(_SCRATCH.sub("JOB_DIR", text) + "\n", encoding="utf-8")
    temporary.replace(out)


def format_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Lay out rows under their headings; floats get three significant digits."""
    cells = [list(columns), *([_format_cell(cell) for cell in row] for row in rows)]
    widths = [max(len(row[idx]) for row in cells) for idx in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
             for row in cells]  # fmt: skip
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _format_cell(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.3f}" if abs(cell) < 100 else f"{cell:.1f}"
    return str(cell)


def _cpu_info() -> dict[str, str]:
    info: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if not line.strip():
            break
        info[key.strip()] = value.strip()
    return info


def _device_name(path: Path) -> str:
    number = path.resolve().stat().st_dev
    entry = Path("/sys/dev/block") / f"{os.major(number)}:{os.minor(number)}"
    return entry.resolve().name if entry.exists() else f"{os.major(number)}:{os.minor(number)}"


def _commit() -> str:
    def git(*words: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return ""
        return done.stdout.strip()

    suffix = "-dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
    return f"{git('rev-parse', '--short', 'HEAD') or 'unknown'}{suffix}"
