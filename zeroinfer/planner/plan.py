"""The plan: where every byte lives, how a step is fetched, and what it should cost."""

from dataclasses import dataclass
from typing import Any

from zeroinfer.planner.ring import RingLayout
from zeroinfer.planner.units import FetchUnit
from zeroinfer.units import format_bytes

__all__ = ["PLAN_VERSION", "Plan", "Prediction"]

PLAN_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Cost of a full decode step."""

    io_s: float
    compute_s: float

    @property
    def step_s(self) -> float:
        """The slower of the two, since they overlap."""
        return max(self.io_s, self.compute_s)

    @property
    def bound_by(self) -> str:
        """`nvme` or `compute`."""
        return "nvme" if self.io_s > self.compute_s else "compute"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that is decided before the first allocation. Sizes in bytes."""

    units: tuple[FetchUnit, ...]
    footprints: tuple[int, ...]
    """Bytes each unit occupies where it lands, alignment included."""
    resident: frozenset[int]
    """Units that stay in DRAM after their first use."""
    streamed: tuple[int, ...]
    """Units fetched in every step, in the order of use."""
    ring: RingLayout
    prefetch_depth: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_sequence_tokens: int
    """Longest sequence that KV and workspace are planned for."""
    kv_block_size: int
    num_kv_blocks: int
    is_batch_invariant: bool
    dram_budget_bytes: int
    base_bytes: int
    kv_bytes: int
    workspace_bytes: int
    staging_bytes: int
    prediction: Prediction
    notes: tuple[str, ...] = ()
    """Sentences for the user: what was resolved, and what would help most."""

    @property
    def resident_bytes(self) -> int:
        """Weight bytes kept in DRAM, alignment included."""
        return sum(self.footprints[idx] for idx in self.resident)

    @property
    def streamed_bytes(self) -> int:
        """Tensor bytes fetched from disk in every step, gathered rows left out."""
        return sum(self.units[idx].num_bytes for idx in self.streamed)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of matrices that are read by row and kept nowhere."""
        return sum(
            unit.num_bytes
            for unit in self.units
            if unit.is_gathered and unit.unit_idx not in self.resident
        )

    @property
    def total_dram_bytes(self) -> int:
        """All of DRAM that the run will use."""
        return (
            self.base_bytes + self.resident_bytes + self.ring.num_bytes + self.staging_bytes
            + self.kv_bytes + self.workspace_bytes
        )  # fmt: skip

    @property
    def predicted_tokens_per_s(self) -> float:
        """New tokens per second with all places running."""
        return self.max_num_seqs / self.prediction.step_s

    def to_dict(self) -> dict[str, Any]:
        """Return the plan's figures as in the report, schema 1."""
        return {
            "version": PLAN_VERSION,
            "weights": {
                "gpu": 0,
                "dram": self.resident_bytes,
                "nvme": self.streamed_bytes + self.gathered_bytes,
            },
            "kv": {"gpu": 0, "dram": self.kv_bytes, "nvme": 0},
            "landing_bytes": self.ring.num_bytes + self.staging_bytes,
            "workspace_bytes": self.workspace_bytes,
            "base_bytes": self.base_bytes,
            "dram_budget_bytes": self.dram_budget_bytes,
            "total_dram_bytes": self.total_dram_bytes,
            "num_fetch_units": len(self.units),
            "num_streamed_units": len(self.streamed),
            "streamed_bytes_per_step": self.streamed_bytes,
            "prefetch_depth": self.prefetch_depth,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "max_sequence_tokens": self.max_sequence_tokens,
            "kv_block_size": self.kv_block_size,
            "num_kv_blocks": self.num_kv_blocks,
            "predicted_step_s": self.prediction.step_s,
            "predicted_io_s": self.prediction.io_s,
            "predicted_compute_s": self.prediction.compute_s,
            "predicted_tokens_per_s": self.predicted_tokens_per_s,
            "bound_by": self.prediction.bound_by,
            "batch_invariant": self.is_batch_invariant,
            "notes": list(self.notes),
        }

    def render(self) -> str:
        """Return the table that every run prints first."""
        nvme_bytes = self.streamed_bytes + self.gathered_bytes
        rows = [
            ("tier", "weights", "landing", "kv", "workspace", "base", "total", "budget"),
            (
                "dram", *(format_bytes(value) for value in (
                    self.resident_bytes, self.ring.num_bytes + self.staging_bytes, self.kv_bytes,
                    self.workspace_bytes, self.base_bytes, self.total_dram_bytes,
                    self.dram_budget_bytes,
                )),
            ),
            ("nvme", format_bytes(nvme_bytes), "-", "-", "-", "-", format_bytes(nvme_bytes), "-"),
        ]  # fmt: skip
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        cost = self.prediction
        lines.append(
            f"step: {self.max_num_seqs} sequences, {format_bytes(self.streamed_bytes)} from nvme, "
            f"predicted {cost.step_s:.3f} s (nvme {cost.io_s:.3f}, compute {cost.compute_s:.3f}), "
            f"bound by {cost.bound_by}, {self.predicted_tokens_per_s:.2f} tokens/s"
        )
        lines.append(
            f"prefetch depth {self.prefetch_depth}, {len(self.streamed)} of {len(self.units)} "
            f"fetch units streamed, batch invariance {'on' if self.is_batch_invariant else 'off'}, "
            f"up to {self.max_num_batched_tokens} tokens a step"
        )
        return "\n".join([*lines, *self.notes])
