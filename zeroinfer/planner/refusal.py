"""What is said when nothing fits: the table of the smallest attempt and the flag that mends it."""

from zeroinfer.errors import CapacityError
from zeroinfer.planner.inputs import GpuInputs, PlanInputs, Shape
from zeroinfer.units import MIB, align_up, ceil_div, format_bytes

__all__ = ["MIN_STAGING_SLOTS", "refuse"]

MIN_STAGING_SLOTS = 2
"""Places between storage and a device: one is read into while the other is copied from."""
_BASE_SPREAD_BYTES = 8 * MIB
"""How far the measured base of two runs may differ."""


def refuse(inputs: PlanInputs, shape: Shape) -> CapacityError:
    """Return the error of a job whose smallest shape does not fit."""
    if inputs.gpu is not None and (error := _refuse_gpu(inputs, inputs.gpu, shape)):
        return error
    landing, fixed = _least_landing(inputs), inputs.fixed_dram_bytes(shape)
    limit = inputs.dram_weights_bytes
    if limit is not None and limit < landing and inputs.budget_bytes >= fixed + landing:
        return CapacityError(
            f"--dram-weights {format_bytes(limit)} is too small: need "
            f"{format_bytes(landing)}; set --dram-weights {ceil_div(landing, MIB)}MiB"
            f"{_cheaper(inputs)}"
        )
    return CapacityError(
        f"DRAM budget {format_bytes(inputs.budget_bytes)} is too small: need "
        f"{format_bytes(fixed + landing)} ({_dram_table(inputs, shape)}, weights at least "
        f"{format_bytes(landing)}); set --dram {_suggested_mib(fixed + landing)}MiB"
        f"{_cheaper(inputs)}"
    )


def _refuse_gpu(inputs: PlanInputs, gpu: GpuInputs, shape: Shape) -> CapacityError | None:
    """Return the error if it is the device that is too small."""
    sizes = [gpu.footprints[idx] for idx in inputs.fetched]
    weights = sum(sizes) if inputs.weights == "gpu" else max(sizes, default=0)
    needed = inputs.fixed_gpu_bytes(shape) + weights
    if needed <= gpu.budget_bytes:
        return None
    return CapacityError(
        f"GPU budget {format_bytes(gpu.budget_bytes)} is too small: need {format_bytes(needed)} "
        f"(workspace {format_bytes(inputs.workspace_bytes(shape))}, {_kv_text(inputs, shape)}, "
        f"weights at least {format_bytes(weights)}); set --gpu-memory {ceil_div(needed, MIB)}MiB"
        f"{_cheaper(inputs)}"
    )


def _least_landing(inputs: PlanInputs) -> int:
    """DRAM of weights and what they land in, at least."""
    fetched = [inputs.footprints[idx] for idx in inputs.fetched]
    if inputs.weights == "dram":
        return sum(fetched) + sum(inputs.footprints[idx] for idx in inputs.gathered)
    places = 1 if inputs.gpu is None else MIN_STAGING_SLOTS
    return places * max(fetched, default=0)


def _dram_table(inputs: PlanInputs, shape: Shape) -> str:
    base = f"base {format_bytes(inputs.base_bytes)}"
    staging = f"staging {format_bytes(inputs.staging_bytes)}"
    if inputs.gpu is not None:
        workspace = inputs.workspace_bytes(shape, inputs.gpu.host_workspace)
        return f"{base}, workspace {format_bytes(workspace)}, {staging}"
    workspace = inputs.workspace_bytes(shape)
    return f"{base}, workspace {format_bytes(workspace)}, {_kv_text(inputs, shape)}, {staging}"


def _kv_text(inputs: PlanInputs, shape: Shape) -> str:
    return (
        f"kv {format_bytes(inputs.kv_bytes(shape.num_seqs))} for {shape.num_seqs} sequence(s) of "
        f"{inputs.sequence_tokens} tokens"
    )


def _suggested_mib(needed_bytes: int) -> int:
    """The base differs a little from run to run; the next run must not be refused for that."""
    return align_up(needed_bytes + _BASE_SPREAD_BYTES, _BASE_SPREAD_BYTES) // MIB


def _cheaper(inputs: PlanInputs) -> str:
    if inputs.weights in ("dram", "gpu"):
        return " or --weights auto"
    if (inputs.max_num_seqs or 1) > 1:
        return " or lower --max-num-seqs"
    return " or lower --max-tokens or offload.fetch_unit_bytes"
