"""The measurements of tools/bench_stream.py, one function each.

Engine runs and yardsticks alternate (A B A B), so that a disk that drifts hits both. Every
measurement returns plain data: its figures with their spread, its checks against the bars of the
performance contract, and the commands.
"""

import itertools
import json
import re
import shlex
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench_common import ratios_of_neighbours, summarize
from bench_engine import Bench, EngineJob, EngineRun
from read_pass import weight_files

from zeroinfer.units import parse_bytes

__all__ = [
    "Settings",
    "measure_large_budget",
    "measure_pairs",
    "measure_resident",
    "measure_start",
    "measure_streamed",
]

_LAYER_ZERO = re.compile(r"(^|\.)(layers|h)\.0\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the command line chose."""

    dram: str = "5.5GiB"
    large_dram: str = "12GiB"
    resident_dram: str = "15GiB"
    weights: str = "auto"
    """Home of the weights in rows 8 and 11 and in pairs."""
    max_tokens: int = 8
    prompt_tokens: int = 32
    num_rounds: int = 2
    num_passes: int = 3
    timed_layers: int | None = None


def check(name: str, value: float | None, *, at_most: float) -> dict[str, Any]:
    """One figure beside its bar; a figure that could not be measured meets none."""
    return {
        "name": name,
        "value": value,
        "bar": f"<= {at_most:g}",
        "is_met": value is not None and value <= at_most,
    }


def check_at_least(name: str, value: float, *, at_least: float) -> dict[str, Any]:
    return {"name": name, "value": value, "bar": f">= {at_least:g}", "is_met": value >= at_least}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Interleaved engine runs and read-only passes over the bytes of a decode step."""

    runs: list[EngineRun]
    reads: list[dict[str, Any]]
    """What the read-only program said after each run; empty when nothing was streamed."""

    @property
    def passes_s(self) -> list[float]:
        return [float(value) for read in self.reads for value in read["pass_s"]]

    @property
    def ratios(self) -> list[float]:
        """Median decode step over median pass, pair by pair."""
        return [
            median(run.decode_s) / median(read["pass_s"])
            for run, read in zip(self.runs, self.reads, strict=False)
        ]

    @property
    def pass_s(self) -> float | None:
        return median(self.passes_s) if self.reads else None

    @property
    def decode_s(self) -> float:
        return median(value for run in self.runs for value in run.decode_s)

    @property
    def read_over_needed(self) -> float | None:
        """The worst of the runs."""
        values = [run.read_over_needed for run in self.runs]
        return max((value for value in values if value is not None), default=None)

    def figures(self) -> dict[str, Any]:
        return {
            "decode_step_s": summarize(value for run in self.runs for value in run.decode_s),
            "read_pass_s": summarize(self.passes_s),
            "step_over_pass": summarize(self.ratios),
            "pass_over_pass": summarize(ratios_of_neighbours(self.passes_s)),
            "decode_bytes": self.runs[-1].decode_bytes,
            "plan": self.runs[-1].report["plan"],
            "profile": self.runs[-1].report["profile"],
            "peak_bytes": [peak_bytes(run) for run in self.runs],
            "steps": [run.report["steps"] for run in self.runs],
            "commands": [
                shlex.join(self.runs[0].child.command),
                *(read["command"] for read in self.reads[:1]),
            ],
        }


def interleave(bench: Bench, job: EngineJob, settings: Settings) -> Pairs:
    """Run A B A B ...: the engine, then passes over as many bytes as its decode step read."""
    runs: list[EngineRun] = []
    reads: list[dict[str, Any]] = []
    for _ in range(settings.num_rounds):
        run = bench.run_engine(job)
        runs.append(run)
        if num_bytes := run.decode_bytes:
            reads.append(bench.read_pass(run, num_passes=settings.num_passes, pass_bytes=num_bytes))
    return Pairs(runs=runs, reads=reads)


def peak_bytes(run: EngineRun) -> int:
    """The larger of the peak the engine reports and the one sampled from outside."""
    return max(int(run.report["memory"]["dram_peak_bytes"]), run.child.vm_hwm_bytes)


def memory_checks(pairs: Pairs) -> list[dict[str, Any]]:
    """Peak against the budget, and whether the limit killed anything."""
    peak = max(peak_bytes(run) for run in pairs.runs) / parse_bytes(pairs.runs[0].job.dram)
    kills = sum(run.child.num_oom_kills for run in pairs.runs)
    return [
        check("peak / budget", peak, at_most=1.0),
        check("killed by the limit", float(kills), at_most=0),
    ]


def measure_streamed(
    bench: Bench, settings: Settings, *, batch: int, with_prefill: bool
) -> Iterator[dict[str, Any]]:
    """Row 8, and row 11 from the same runs: a model that does not fit its budget."""
    job = EngineJob(
        dram=settings.dram,
        batch=batch,
        max_tokens=settings.max_tokens,
        prompt_tokens=settings.prompt_tokens,
        weights=settings.weights,
    )
    pairs = interleave(bench, job, settings)
    ratio = median(pairs.ratios) if pairs.ratios else None
    yield {
        "row": 8,
        "batch": batch,
        "checks": [
            check("decode step / read-only pass", ratio, at_most=1.05),
            check("read / needed", pairs.read_over_needed, at_most=1.01),
            *memory_checks(pairs),
        ],
        "figures": pairs.figures(),
    }
    if with_prefill:
        yield _prefill_row(bench, settings, batch, pairs)


def _prefill_row(bench: Bench, settings: Settings, batch: int, pairs: Pairs) -> dict[str, Any]:
    run = pairs.runs[-1]
    options = ["--rows", str(batch * settings.prompt_tokens), "--head-rows", str(batch)]
    if settings.timed_layers:
        options += ["--timed-layers", str(settings.timed_layers)]
    num_bytes = max(1, run.decode_bytes)
    products = bench.products_pass(run, pass_bytes=num_bytes, options=options)
    prefill_s = [sum(s["wall_s"] for s in each.prefill_steps) for each in pairs.runs]
    prefill_bytes = sum(step["nvme_bytes"] for step in run.prefill_steps)
    read_s = pairs.pass_s * prefill_bytes / num_bytes if pairs.pass_s else 0.0
    products_s = median(products["products_s"])
    return {
        "row": 11,
        "batch": batch,
        "checks": [
            check(
                "prefill / max(read-only pass, products while reading)",
                median(prefill_s) / max(read_s, products_s),
                at_most=1.5,
            )
        ],
        "figures": {
            "prefill_s": summarize(prefill_s),
            "num_prefill_steps": len(run.prefill_steps),
            "read_s": read_s,
            "products_s": products_s,
            "products": products,
            "commands": [shlex.join(run.child.command), products["command"]],
        },
    }


def measure_large_budget(bench: Bench, settings: Settings, *, batch: int) -> dict[str, Any]:
    """Row 10: most of the model resident; bound by the rest of the reads or by computing."""
    job = EngineJob(
        dram=settings.large_dram,
        batch=batch,
        max_tokens=settings.max_tokens,
        prompt_tokens=settings.prompt_tokens,
        batch_invariant="off",
    )
    pairs = interleave(bench, job, settings)
    resident = bench.run_engine(
        EngineJob(
            dram=settings.resident_dram,
            batch=batch,
            max_tokens=settings.max_tokens,
            prompt_tokens=settings.prompt_tokens,
            weights="dram",
            batch_invariant="off",
        )
    )
    compute_s = median(step["compute_s"] for step in resident.decode_steps)
    share = pairs.runs[-1].report["plan"]["weights"]["dram"] / parse_bytes(job.dram)
    bound_s = max(pairs.pass_s or 0.0, compute_s)
    return {
        "row": 10,
        "batch": batch,
        "checks": [
            check_at_least("resident weights / budget", share, at_least=0.85),
            check("decode step / bound", pairs.decode_s / bound_s, at_most=1.1),
            *memory_checks(pairs),
        ],
        "figures": {
            **pairs.figures(),
            "resident_compute_s": compute_s,
            "bound_s": bound_s,
            "bound_by": "nvme" if (pairs.pass_s or 0.0) >= compute_s else "compute",
            "resident_command": shlex.join(resident.child.command),
        },
    }


def measure_resident(bench: Bench, settings: Settings) -> dict[str, Any]:
    """Row 12: a model inside the budget is read once."""
    run = bench.run_engine(
        EngineJob(
            dram=settings.resident_dram,
            batch=1,
            max_tokens=20,
            prompt_tokens=settings.prompt_tokens,
        )
    )
    weight_bytes = run.report["model"]["weight_bytes"]
    after = sum(step["nvme_bytes"] for step in run.report["steps"][1:])
    return {
        "row": 12,
        "batch": 1,
        "checks": [
            check(
                "bytes read / weight bytes",
                run.report["io"]["nvme"]["bytes_read"] / weight_bytes,
                at_most=1.01,
            ),
            check("bytes read after the first step", float(after), at_most=0),
        ],
        "figures": {
            "weight_bytes": weight_bytes,
            "io": run.report["io"],
            "disk_bytes_of_the_group": run.child.group_bytes_read,
            "commands": [shlex.join(run.child.command)],
        },
    }


def measure_start(bench: Bench, settings: Settings, *, num_runs: int = 3) -> dict[str, Any]:
    """Row 13: exec to first layer; the first run warms page cache and profile and is dropped."""
    job = EngineJob(dram=settings.dram, batch=1, max_tokens=1, prompt_tokens=settings.prompt_tokens)
    runs = [bench.run_engine(job) for _ in range(num_runs + 1)][1:]
    rate = runs[-1].report["profile"]["nvme_read_bytes_per_s"]
    fetch_s = layer_bytes(bench.model) / rate
    first_s = [run.report["totals"]["first_layer_s"] for run in runs]
    # From outside, as a bound: everything but the steps, the end of the process included.
    outside_s = [run.child.wall_s - sum(s["wall_s"] for s in run.report["steps"]) for run in runs]
    return {
        "row": 13,
        "batch": 1,
        "checks": [
            check("exec to first layer less its fetch, s", median(first_s) - fetch_s, at_most=3.0)
        ],
        "figures": {
            "first_layer_s": summarize(first_s),
            "layer_fetch_s": fetch_s,
            "wall_without_steps_s": summarize(outside_s),
            "commands": [shlex.join(runs[0].child.command)],
        },
    }


def measure_pairs(
    bench: Bench, settings: Settings, *, batch: int, num_pairs: int
) -> dict[str, Any]:
    """Short interleaved pairs on a disk that is not throttled.

    A pair is one short engine run between two single read-only passes over the bytes of its decode
    step: B A B A ... B. The ratio of a pair is the seconds per byte of the run's steady decode
    steps over those of the passes before and after it, so a steady drift cancels; ratios of
    neighbouring passes are the A/A spread. Prompts have one token: the prefill, which is not
    measured, is short.
    """
    job = EngineJob(
        dram=settings.dram, batch=batch, max_tokens=4, prompt_tokens=1, weights=settings.weights
    )
    warm = bench.run_engine(job)
    if not warm.decode_bytes:
        raise SystemExit(f"nothing is streamed with --dram {job.dram}; give less for pairs")

    def read() -> dict[str, Any]:
        return bench.read_pass(warm, num_passes=1, pass_bytes=warm.decode_bytes)

    reads = [read()]
    runs: list[EngineRun] = []
    for _ in range(num_pairs):
        runs.append(bench.run_engine(job))
        reads.append(read())
    passes_s = [read["pass_s"][0] for read in reads]
    steps_s = [run.decode_s_per_byte * warm.decode_bytes for run in runs]
    ratios = [
        step / fmean(passes)
        for step, passes in zip(steps_s, itertools.pairwise(passes_s), strict=True)
    ]
    return {
        "row": "pairs",
        "batch": batch,
        "checks": [check("decode step / read-only pass", median(ratios), at_most=1.05)],
        "figures": {
            "step_over_pass": summarize(ratios),
            "decode_step_s": summarize(steps_s),
            "read_pass_s": summarize(passes_s),
            "pass_over_pass": summarize(ratios_of_neighbours(passes_s)),
            "decode_bytes": warm.decode_bytes,
            "steps": [run.report["steps"] for run in runs],
            "commands": [shlex.join(warm.child.command), reads[0]["command"]],
        },
    }


def layer_bytes(model: Path) -> int:
    """Bytes of the first layer's tensors, from the safetensors headers."""
    total = 0
    for path in weight_files(model):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if _LAYER_ZERO.search(name):
                start, stop = entry["data_offsets"]
                total += stop - start
    return total
