"""The plan: where every byte lives, how a step is fetched, and what it should cost."""

from dataclasses import dataclass
from typing import Any

from zeroinfer.planner.ring import RingLayout
from zeroinfer.planner.units import FetchUnit
from zeroinfer.units import format_bytes

__all__ = ["PLAN_VERSION", "GpuPlan", "Plan", "Prediction"]

PLAN_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Cost of a full decode step."""

    io_s: float
    compute_s: float
    h2d_s: float = 0.0
    """Copies to a device; 0 without one."""

    @property
    def step_s(self) -> float:
        """The slowest of them, since they overlap."""
        return max(self.io_s, self.h2d_s, self.compute_s)

    @property
    def bound_by(self) -> str:
        """`nvme`, `h2d` or `compute`."""
        costs = {"compute": self.compute_s, "h2d": self.h2d_s, "nvme": self.io_s}
        return max(costs, key=lambda name: costs[name])


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPlan:
    """What a compute device adds to a plan. Sizes in bytes."""

    footprints: tuple[int, ...]
    """What each unit occupies on the device, alignment included."""
    dram: frozenset[int]
    """Units at home in DRAM, gathered matrices among them."""
    num_staging_slots: int
    staging_slot_bytes: int
    host_workspace_bytes: int
    """What a step takes in DRAM."""
    budget_bytes: int

    @property
    def staging_bytes(self) -> int:
        """The buffer in DRAM between storage and the device."""
        return self.num_staging_slots * self.staging_slot_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that is decided before the first allocation. Sizes in bytes."""

    units: tuple[FetchUnit, ...]
    footprints: tuple[int, ...]
    """Bytes each unit occupies in DRAM, alignment included."""
    resident: frozenset[int]
    """Units that stay where they are computed on after their first use."""
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
    gpu: GpuPlan | None = None
    """None computes on the CPU; otherwise ring, residents, KV and workspace are on the device."""

    @property
    def resident_bytes(self) -> int:
        """Weight bytes kept in DRAM, alignment included."""
        in_dram = self.resident if self.gpu is None else self.gpu.dram
        return sum(self.footprints[idx] for idx in in_dram)

    @property
    def gpu_resident_bytes(self) -> int:
        """Weight bytes kept on the device, alignment included."""
        return 0 if self.gpu is None else sum(self.gpu.footprints[i] for i in self.resident)

    @property
    def streamed_bytes(self) -> int:
        """Tensor bytes fetched from disk in every step, gathered rows left out."""
        in_dram: frozenset[int] = frozenset() if self.gpu is None else self.gpu.dram
        return sum(self.units[idx].num_bytes for idx in self.streamed if idx not in in_dram)

    @property
    def h2d_bytes(self) -> int:
        """Tensor bytes copied to the device in every step."""
        return 0 if self.gpu is None else sum(self.units[i].num_bytes for i in self.streamed)

    @property
    def landing_bytes(self) -> int:
        """DRAM that weights pass through: the landing ring, or what feeds the device's."""
        landing = self.ring.num_bytes if self.gpu is None else self.gpu.staging_bytes
        return landing + self.staging_bytes

    @property
    def gathered_bytes(self) -> int:
        """Bytes of matrices that are read by row and kept nowhere."""
        in_dram = self.resident if self.gpu is None else self.gpu.dram
        return sum(
            unit.num_bytes
            for unit in self.units
            if unit.is_gathered and unit.unit_idx not in in_dram
        )

    @property
    def dram_kv_bytes(self) -> int:
        """KV in DRAM; with a device it is there."""
        return self.kv_bytes if self.gpu is None else 0

    @property
    def dram_workspace_bytes(self) -> int:
        """What a step takes in DRAM."""
        return self.workspace_bytes if self.gpu is None else self.gpu.host_workspace_bytes

    @property
    def pinned_bytes(self) -> int:
        """DRAM that is locked for copies to a device: weights at home there, and staging."""
        return 0 if self.gpu is None else self.resident_bytes + self.gpu.staging_bytes

    @property
    def total_dram_bytes(self) -> int:
        """All of DRAM that the run will use."""
        return (
            self.base_bytes + self.resident_bytes + self.landing_bytes + self.dram_kv_bytes
            + self.dram_workspace_bytes
        )  # fmt: skip

    @property
    def total_gpu_bytes(self) -> int:
        """All of the device's memory that the run will use."""
        if self.gpu is None:
            return 0
        weights = self.gpu_resident_bytes + self.ring.num_bytes
        return weights + self.kv_bytes + self.workspace_bytes

    @property
    def predicted_tokens_per_s(self) -> float:
        """New tokens per second with all places running."""
        return self.max_num_seqs / self.prediction.step_s

    def to_dict(self) -> dict[str, Any]:
        """Return the plan's figures as in the report, schema 1."""
        return {
            "version": PLAN_VERSION,
            "weights": {
                "gpu": self.gpu_resident_bytes,
                "dram": self.resident_bytes,
                "nvme": self.streamed_bytes + self.gathered_bytes,
            },
            "kv": {
                "gpu": self.kv_bytes - self.dram_kv_bytes,
                "dram": self.dram_kv_bytes,
                "nvme": 0,
            },
            "landing_bytes": self.landing_bytes,
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
            **self._gpu_dict(),
        }

    def render(self) -> str:
        """Return the table that every run prints first."""
        nvme = format_bytes(self.streamed_bytes + self.gathered_bytes)
        rows = [
            ("tier", "weights", "landing", "kv", "workspace", "base", "total", "budget"),
            *self._gpu_rows(),
            (
                "dram", *(format_bytes(value) for value in (
                    self.resident_bytes, self.landing_bytes, self.dram_kv_bytes,
                    self.dram_workspace_bytes, self.base_bytes, self.total_dram_bytes,
                    self.dram_budget_bytes,
                )),
            ),
            ("nvme", nvme, "-", "-", "-", "-", nvme, "-"),
        ]  # fmt: skip
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        cost = self.prediction
        to_gpu = "" if self.gpu is None else f", {format_bytes(self.h2d_bytes)} to the gpu"
        h2d = "" if self.gpu is None else f"h2d {cost.h2d_s:.3f}, "
        lines.append(
            f"step: {self.max_num_seqs} sequences, {format_bytes(self.streamed_bytes)} from nvme"
            f"{to_gpu}, predicted {cost.step_s:.3f} s (nvme {cost.io_s:.3f}, {h2d}compute "
            f"{cost.compute_s:.3f}), bound by {cost.bound_by}, "
            f"{self.predicted_tokens_per_s:.2f} tokens/s"
        )
        lines.append(
            f"prefetch depth {self.prefetch_depth}, {len(self.streamed)} of {len(self.units)} "
            f"fetch units streamed, batch invariance {'on' if self.is_batch_invariant else 'off'}, "
            f"up to {self.max_num_batched_tokens} tokens a step"
        )
        return "\n".join([*lines, *self.notes])

    def _gpu_dict(self) -> dict[str, Any]:
        if self.gpu is None:
            return {}
        return {
            "gpu_budget_bytes": self.gpu.budget_bytes,
            "total_gpu_bytes": self.total_gpu_bytes,
            "gpu_landing_bytes": self.ring.num_bytes,
            "dram_workspace_bytes": self.dram_workspace_bytes,
            "pinned_bytes": self.pinned_bytes,
            "h2d_bytes_per_step": self.h2d_bytes,
            "predicted_h2d_s": self.prediction.h2d_s,
        }

    def _gpu_rows(self) -> list[tuple[str, ...]]:
        if self.gpu is None:
            return []
        weights, landing, kv, workspace, total, budget = map(
            format_bytes,
            (
                self.gpu_resident_bytes, self.ring.num_bytes, self.kv_bytes, self.workspace_bytes,
                self.total_gpu_bytes, self.gpu.budget_bytes,
            ),
        )  # fmt: skip
        return [("gpu", weights, landing, kv, workspace, "-", total, budget)]
