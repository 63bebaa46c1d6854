"""Run zeroinfer and its yardsticks as measured children, with the same bytes and settings.

zeroinfer is driven through its command line only; its report says what it read and how long each
step took. The yardsticks take chunk size, depth and bytes from that report.
"""

import argparse
import json
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench_child import ChildResult, run_child
from bench_common import REPOSITORY
from cgroup import MemoryGroup, ThrottleGroup

from zeroinfer.units import MIB, parse_bytes

__all__ = [
    "Bench",
    "EngineJob",
    "EngineRun",
    "add_bench_arguments",
    "drop_page_cache",
    "write_prompts",
]

LIMIT_MARGIN_BYTES = 64 * MIB
"""What the memory group grants beyond --dram."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineJob:
    """One run of ``zeroinfer generate``."""

    dram: str
    batch: int
    max_tokens: int
    prompt_tokens: int = 32
    weights: str = "auto"
    batch_invariant: str = "auto"
    num_waves: int = 1
    """Prompts for so many batches, one after the other."""
    settings: tuple[str, ...] = ()
    """Further settings, key=value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRun:
    """The report of one run, and what was seen from outside."""

    job: EngineJob
    child: ChildResult
    report: dict[str, Any]

    @property
    def prefill_steps(self) -> list[dict[str, Any]]:
        """Steps up to the one that computed the last prompt token."""
        remaining = self.job.batch * self.job.prompt_tokens
        steps = []
        for step in self.report["steps"]:
            if remaining <= 0:
                break
            remaining -= step["num_tokens"]
            steps.append(step)
        return steps

    @property
    def decode_steps(self) -> list[dict[str, Any]]:
        """Steady decode steps: without the last, which has no next step to fetch ahead for."""
        steps: list[dict[str, Any]] = self.report["steps"][len(self.prefill_steps) :]
        return steps[:-1] if len(steps) > 1 else steps

    @property
    def decode_s(self) -> list[float]:
        return [float(step["wall_s"]) for step in self.decode_steps]

    @property
    def decode_bytes(self) -> int:
        """Bytes a decode step streamed."""
        return int(median(step["nvme_bytes"] for step in self.decode_steps))

    @property
    def decode_s_per_byte(self) -> float:
        """Seconds per byte over the steady decode steps together.

        Bytes count in the step in which they arrive, so single steps of a short run read more or
        less than they use.
        """
        num_bytes = sum(step["nvme_bytes"] for step in self.decode_steps)
        return sum(self.decode_s) / float(num_bytes)

    @property
    def read_over_needed(self) -> float | None:
        io = self.report["io"]["nvme"]
        return float(io["bytes_read"] / io["bytes_needed"]) if io["bytes_needed"] else None


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of every benchmark that runs zeroinfer on a model."""
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument(
        "--nvme",
        type=Path,
        help="folder for profiles and temporary files (MODEL_DIR/../bench-nvme)",
    )
    parser.add_argument("--traces", type=Path, help="folder for a trace of each engine run")
    parser.add_argument("--no-limits", action="store_true", help="no control groups")
    parser.add_argument(
        "--program", type=shlex.split, help="how to start zeroinfer (this python's -m zeroinfer)"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Where and under which limits programs run."""

    model: Path
    nvme: Path
    """Folder for zeroinfer's --nvme; throttled and free runs keep their profiles apart."""
    throttle_bytes_per_s: int | None
    is_limited: bool
    timeout_s: float
    program: tuple[str, ...]
    traces: Path | None
    """Folder that keeps the trace of each engine run."""

    @classmethod
    def create(cls, args: argparse.Namespace, throttle_bytes_per_s: int | None) -> "Bench":
        """Read what `add_bench_arguments` and --timeout gave."""
        model = args.model.resolve()
        return cls(
            model=model,
            nvme=(args.nvme or model.parent / "bench-nvme").resolve(),
            throttle_bytes_per_s=throttle_bytes_per_s,
            is_limited=not args.no_limits,
            timeout_s=args.timeout,
            program=tuple(args.program or (sys.executable, "-m", "zeroinfer")),
            traces=args.traces,
        )

    @contextmanager
    def groups(
        self, limit_bytes: int | None
    ) -> Iterator[tuple[MemoryGroup | None, ThrottleGroup | None]]:
        """The groups of one child; none when limits are switched off."""
        with ExitStack() as stack:
            if not self.is_limited:
                yield None, None
                return
            memory = stack.enter_context(
                MemoryGroup.create("zeroinfer-bench", limit_bytes=limit_bytes)
            )
            rate = self.throttle_bytes_per_s
            throttle = stack.enter_context(
                ThrottleGroup.create("zeroinfer-bench", path=self.model, read_bytes_per_s=rate)
            )
            yield memory, throttle

    @property
    def folders(self) -> dict[str, Path]:
        """Names of the folders in result files."""
        return {"MODEL_DIR": self.model, "NVME_DIR": self.nvme}

    @property
    def work(self) -> Path:
        rate = self.throttle_bytes_per_s
        folder = self.nvme / (f"throttled-{rate}" if rate else "free")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def prepare(self) -> None:
        """Measure the profile under the throttle of this bench, unless it is kept already."""
        command = [*self.program, "profile", "--nvme", str(self.work), "--model", str(self.model)]
        with self.groups(None) as (memory, throttle):
            run_child(
                command, memory=memory, throttle=throttle, timeout_s=self.timeout_s
            ).require_ok()

    def run_engine(self, job: EngineJob) -> EngineRun:
        """Run one job; stops the benchmark if it fails."""
        run = self.try_engine(job)
        run.child.require_ok()
        return run

    def try_engine(self, job: EngineJob) -> EngineRun:
        """Run one job; the report is empty if it did not finish."""
        with tempfile.TemporaryDirectory(dir=self.work, prefix="job-") as folder:
            scratch = Path(folder)
            num_rows = job.batch * job.num_waves
            write_prompts(scratch / "prompts.jsonl", self.model, num_rows, job.prompt_tokens)
            command = [*self.program, *engine_arguments(job, self.model, self.work, scratch)]
            command += self._trace_arguments(job)
            limit = parse_bytes(job.dram) + LIMIT_MARGIN_BYTES
            with self.groups(limit) as (memory, throttle):
                child = run_child(
                    command, memory=memory, throttle=throttle, timeout_s=self.timeout_s
                )
            report_path = scratch / "report.json"
            is_written = child.is_ok and report_path.exists()
            report = json.loads(report_path.read_text()) if is_written else {"steps": []}
        return EngineRun(job=job, child=child, report=report)

    def _trace_arguments(self, job: EngineJob) -> list[str]:
        if self.traces is None:
            return []
        self.traces.mkdir(parents=True, exist_ok=True)
        stem = f"{self.work.name}-{job.dram}-batch{job.batch}"
        idx = len(list(self.traces.glob(f"{stem}-*")))
        return ["--trace", str(self.traces / f"{stem}-{idx}.trace.json")]

    def read_pass(self, run: EngineRun, *, num_passes: int, pass_bytes: int) -> dict[str, Any]:
        """Read-only passes in the way `run` read: `pass_s` and `command`."""
        options = ["--passes", str(num_passes)]
        return self._yardstick("read_pass.py", run, pass_bytes, options)

    def products_pass(
        self, run: EngineRun, *, pass_bytes: int, options: list[str]
    ) -> dict[str, Any]:
        """Products alone, in the row tiles of `run`, while the reader streams."""
        is_invariant = run.report["plan"]["batch_invariant"]
        options = ["--batch-invariant", "on" if is_invariant else "off", *options]
        return self._yardstick("products_pass.py", run, pass_bytes, options)

    def _yardstick(
        self, program: str, run: EngineRun, pass_bytes: int, options: list[str]
    ) -> dict[str, Any]:
        profile = run.report["profile"]
        command = [
            sys.executable, str(REPOSITORY / "tools" / program), str(self.model),
            "--pass-bytes", str(pass_bytes),
            "--io-chunk-bytes", str(profile["io_chunk_bytes"]),
            "--queue-depth", str(profile["queue_depth"]),
            *options,
        ]  # fmt: skip
        with self.groups(None) as (memory, throttle):
            child = run_child(command, memory=memory, throttle=throttle, timeout_s=self.timeout_s)
        result = child.require_ok().json_lines[-1]
        return {**result, "command": shlex.join(command)}


def engine_arguments(job: EngineJob, model: Path, nvme: Path, scratch: Path) -> list[str]:
    """The command line of a job; files of the run go to `scratch`."""
    return [
        "generate", "--nvme", str(nvme), "--model", str(model),
        "--input", str(scratch / "prompts.jsonl"), "--output", str(scratch / "out.jsonl"),
        "--overwrite", "--dram", job.dram, "--weights", job.weights,
        "--max-num-seqs", str(job.batch), "--max-tokens", str(job.max_tokens), "--ignore-eos",
        "--batch-invariant", job.batch_invariant,
        "--report", str(scratch / "report.json"),
        *(word for setting in job.settings for word in ("--set", setting)),
    ]  # fmt: skip


def write_prompts(path: Path, model: Path, num_rows: int, num_tokens: int) -> None:
    """Write rows of random token ids, different in each row and the same in each run."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    source = random.Random(0)
    rows = (
        {"prompt_token_ids": [source.randrange(vocab_size) for _ in range(num_tokens)]}
        for _ in range(num_rows)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def drop_page_cache(folder: Path) -> None:
    """Drop the cached pages of a folder's files: pages paid for elsewhere would be free reads."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
