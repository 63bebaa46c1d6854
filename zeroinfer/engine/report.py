"""What a run did, measured: the report of schema 1."""

from collections import deque
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from zeroinfer import __version__
from zeroinfer.counters import IoCounters
from zeroinfer.engine.request import StepStats
from zeroinfer.memory import LinkCounters, process_tree_peak_bytes
from zeroinfer.planner import Plan, Profile

__all__ = ["RunTotals", "build_report"]

SCHEMA_VERSION = 1
_KEPT_STEPS = 100
_CORRECTING_STEPS = 3


@dataclass(slots=True)
class RunTotals:
    """Sums over the steps of a run."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_rebuilt_tokens: int = 0
    num_requests: int = 0
    num_failed: int = 0
    num_computed_rows: int = 0
    """Rows through the layers, prompts, decodes and rebuilt ones."""
    sum_running_seqs: int = 0
    num_steps_queued: int = 0
    sum_running_seqs_queued: int = 0
    step_s: float = 0.0
    first_steps: list[StepStats] = field(default_factory=list)
    last_steps: deque[StepStats] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))

    def add_step(self, stats: StepStats, *, is_queued: bool) -> None:
        """Count a finished step; `is_queued` says that a request was waiting at its start."""
        self.num_steps += 1
        self.step_s += stats.wall_s
        self.num_computed_rows += stats.num_tokens
        self.sum_running_seqs += stats.num_seqs
        if is_queued:
            self.num_steps_queued += 1
            self.sum_running_seqs_queued += stats.num_seqs
        if len(self.first_steps) < _KEPT_STEPS:
            self.first_steps.append(stats)
        else:
            self.last_steps.append(stats)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What does not change during a run."""

    model: dict[str, Any]
    plan: Plan
    profile: Profile
    flops_per_row: int
    product_flops_per_s: float
    """The profile's rate at the rows of a full step."""


def build_report(
    facts: RunFacts,
    totals: RunTotals,
    *,
    io: IoCounters,
    bytes_needed: int,
    times: dict[str, float],
    link: LinkCounters,
    gpu_peak_bytes: int,
) -> dict[str, Any]:
    """Return the report.

    Args:
        facts: model, plan, profile.
        totals: sums over the steps.
        io: the reader's counters.
        bytes_needed: tensor bytes asked for.
        times: wall_s; load_s from opening and first_layer_s from the start of the process, both
            to the first computed layer 0; compute_s, fetch_wait_s.
        link: what was copied to a device.
        gpu_peak_bytes: most device memory in use at once; 0 without a device.
    """
    plan, steps = facts.plan, max(1, totals.num_steps)
    mean_seqs = totals.sum_running_seqs / steps
    mean_queued = totals.sum_running_seqs_queued / max(1, totals.num_steps_queued)
    other_s = totals.step_s - times["compute_s"] - times["fetch_wait_s"]
    return {
        "schema": SCHEMA_VERSION,
        "zeroinfer": __version__,
        "model": facts.model,
        "plan": {**plan.to_dict(), "corrected_step_s": _corrected_step_s(plan, totals)},
        "profile": _profile_dict(facts),
        "totals": {
            "wall_s": times["wall_s"],
            "load_s": times["load_s"],
            "first_layer_s": times["first_layer_s"],
            "num_steps": totals.num_steps,
            "num_prompt_tokens": totals.num_prompt_tokens,
            "num_generated_tokens": totals.num_generated_tokens,
            "num_rebuilt_tokens": totals.num_rebuilt_tokens,
            "num_computed_rows": totals.num_computed_rows,
            "num_requests": totals.num_requests,
            "num_failed": totals.num_failed,
            "mean_running_seqs": mean_seqs,
            "slot_occupancy": mean_seqs / plan.max_num_seqs,
            "num_steps_queued": totals.num_steps_queued,
            "slot_occupancy_queued": mean_queued / plan.max_num_seqs,
        },
        "io": {
            "nvme": {
                "bytes_read": io.bytes_read,
                "bytes_needed": bytes_needed,
                "num_reads": io.num_reads,
                "busy_s": io.busy_s,
                "mean_read_bytes": io.bytes_read / max(1, io.num_reads),
            },
            "h2d": {"bytes": link.bytes_copied, "busy_s": link.busy_s},
        },
        "time": {
            "compute_s": times["compute_s"],
            "fetch_wait_s": times["fetch_wait_s"],
            "other_s": max(0.0, other_s),
        },
        "memory": {
            "dram_budget_bytes": plan.dram_budget_bytes,
            "dram_peak_bytes": process_tree_peak_bytes(),
            "gpu_budget_bytes": 0 if plan.gpu is None else plan.gpu.budget_bytes,
            "gpu_peak_bytes": gpu_peak_bytes,
        },
        "steps": [asdict(step) for step in (*totals.first_steps, *totals.last_steps)],
        "roofline": _roofline(facts, totals, io, link, times["wall_s"]),
    }


def _corrected_step_s(plan: Plan, totals: RunTotals) -> float:
    """Predict a full decode step anew from the first decode steps; the plan's figure until then.

    What binds a streamed step hardly depends on how many rows run, so their median is taken.
    """
    first_decodes = [step for step in totals.first_steps[1:] if step.num_tokens == step.num_seqs]
    walls = [step.wall_s for step in first_decodes[:_CORRECTING_STEPS]]
    return median(walls) if walls else plan.prediction.step_s


def _profile_dict(facts: RunFacts) -> dict[str, Any]:
    profile = facts.profile
    return {
        "nvme_read_bytes_per_s": profile.nvme_read_bytes_per_s,
        "io_chunk_bytes": profile.io_chunk_bytes,
        "queue_depth": profile.queue_depth,
        "dram_copy_bytes_per_s": profile.dram_copy_bytes_per_s,
        "h2d_bytes_per_s": profile.h2d_bytes_per_s,
        "matmul_flops_per_s": facts.product_flops_per_s,
        "source": profile.source,
    }


def _roofline(
    facts: RunFacts, totals: RunTotals, io: IoCounters, link: LinkCounters, wall_s: float
) -> dict[str, float | str]:
    profile = facts.profile
    limits = {
        "compute": facts.flops_per_row * totals.num_computed_rows / facts.product_flops_per_s,
        "nvme": io.bytes_read / profile.nvme_read_bytes_per_s,
    }
    if facts.plan.gpu is not None and profile.h2d_bytes_per_s:
        limits["h2d"] = link.bytes_copied / profile.h2d_bytes_per_s
    bound_by = max(limits, key=lambda name: limits[name])
    return {
        "io_s": limits["nvme"],
        "compute_s": limits["compute"],
        "efficiency": limits[bound_by] / wall_s if wall_s else 0.0,
        "bound_by": bound_by,
        **({"h2d_s": limits["h2d"]} if "h2d" in limits else {}),
    }
