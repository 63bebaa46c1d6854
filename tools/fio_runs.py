"""Runs of fio, the yardstick of storage readers."""

import json
import random
import shutil
import statistics
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from zeroinfer.planner import DiskCell
from zeroinfer.units import MIB, align_down

__all__ = ["Fio", "ReadRun"]

_CHUNKS = (MIB // 8, MIB // 2, MIB, 2 * MIB, 4 * MIB, 16 * MIB)
_DEPTHS = (1, 2, 4, 8, 32)
_NUM_FINALISTS = 5
_MAX_TRIAL_BYTES = 256 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRun:
    """One timed read of a range."""

    num_bytes: int
    wall_s: float
    cpu_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.wall_s

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.num_bytes / 1e9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fio:
    """fio with one engine; times and CPU use are its own figures, so its start costs nothing."""

    engine: str
    version: str
    has_huge_pages: bool = False
    """Whether it reads into huge pages, which the system must have set aside."""

    @classmethod
    def find(cls, path: Path, *, has_huge_pages: bool = False) -> "Fio":
        """Take io_uring where the kernel allows it, else libaio; `path` is read on trial."""
        program = shutil.which("fio")
        if program is None:
            raise SystemExit("fio is not installed; install the package fio and run again")
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        refusals = []
        for engine in ("io_uring", "libaio"):
            fio = cls(engine=engine, version=version.stdout.strip(), has_huge_pages=has_huge_pages)
            try:
                fio.read(path, 0, MIB, io_chunk_bytes=MIB // 2, queue_depth=1)
            except SystemExit as error:
                refusals.append(str(error))
                continue
            return fio
        raise SystemExit(f"fio cannot read {path}: {'; '.join(refusals)}")

    def read(
        self, path: Path, offset: int, num_bytes: int, *, io_chunk_bytes: int, queue_depth: int
    ) -> ReadRun:
        """Read a range in order with O_DIRECT."""
        command = [
            "fio", "--name=read", f"--filename={path}", "--rw=read", "--direct=1", "--readonly",
            "--thread", f"--ioengine={self.engine}", f"--bs={io_chunk_bytes}",
            f"--iodepth={queue_depth}", f"--offset={offset}", f"--size={num_bytes}",
            "--output-format=json", *(["--mem=mmaphuge"] if self.has_huge_pages else []),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"fio failed ({done.returncode}): {done.stderr.strip()[:300]}")
        # Notes may stand before the document.
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        runtime_s = job["read"]["runtime"] / 1e3
        return ReadRun(
            num_bytes=job["read"]["io_bytes"],
            wall_s=max(runtime_s, 1e-3),
            cpu_s=(job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3,
        )

    def measure_grid(self, path: Path, size_bytes: int, *, num_passes: int) -> list[DiskCell]:
        """Measure chunk x depth, then the best cells again; sorted, fastest first.

        Passes are interleaved and the best five cells get twice as many, since the disk drifts.
        """
        trials = [_Trial(chunk, depth) for chunk in _CHUNKS for depth in _DEPTHS]
        source = random.Random(0)
        for chosen, passes in ((trials, num_passes), (None, 2 * num_passes)):
            if chosen is None:
                trials.sort(key=lambda trial: -trial.cell.read_bytes_per_s)
                chosen = trials[:_NUM_FINALISTS]
            for _ in range(passes):
                for trial in source.sample(chosen, len(chosen)):
                    trial.measure(self, path, size_bytes, source)
        finalists = sorted(trials[:_NUM_FINALISTS], key=lambda t: -t.cell.read_bytes_per_s)
        return [trial.cell for trial in finalists + trials[_NUM_FINALISTS:]]


@dataclass(slots=True)
class _Trial:
    io_chunk_bytes: int
    queue_depth: int
    rates: list[float] = field(default_factory=list)

    @property
    def cell(self) -> DiskCell:
        return DiskCell(self.io_chunk_bytes, self.queue_depth, statistics.median(self.rates))

    def measure(self, fio: Fio, path: Path, size_bytes: int, source: random.Random) -> None:
        num_bytes = align_down(min(_MAX_TRIAL_BYTES, size_bytes), self.io_chunk_bytes)
        if num_bytes == 0:
            raise SystemExit(f"{path} is smaller than a chunk of {self.io_chunk_bytes} bytes")
        start = align_down(source.randint(0, size_bytes - num_bytes), MIB)
        run = fio.read(
            path, start, num_bytes,
            io_chunk_bytes=self.io_chunk_bytes, queue_depth=self.queue_depth,
        )  # fmt: skip
        self.rates.append(run.bytes_per_s)
