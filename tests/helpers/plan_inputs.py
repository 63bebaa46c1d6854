"""A made-up model and machine for the planner: plain numbers, no files."""

from dataclasses import replace

from zeroinfer.planner import (
    GpuInputs,
    OpData,
    ParamData,
    PlanInputs,
    Profile,
    StageData,
    WorkspaceModel,
    build_units,
)
from zeroinfer.planner.inputs import Shape
from zeroinfer.units import MIB, align_up

__all__ = ["footprints_of", "layer_stages", "make_inputs", "with_gpu"]

KIB = 1024


def layer_stages(num_layers=8, *, rows=1024, row_bytes=2 * KIB, vocab=4096, tile_rows=256):
    """Return stages of an embedding, layers of four equal matrices, and a head."""
    table = ParamData(name="embed", num_rows=vocab, row_bytes=row_bytes)
    stages = [StageData(name="embed", ops=(OpData(gathered=(table,)),))]
    for layer in range(num_layers):
        norm = ParamData(name=f"layers.{layer}.norm", num_rows=rows, row_bytes=2)
        matrices = [
            ParamData(name=f"layers.{layer}.w{idx}", num_rows=rows, row_bytes=row_bytes)
            for idx in range(4)
        ]
        ops = [OpData(params=(norm,)), OpData()]
        ops += [
            OpData(params=(matrix,), tile_rows=tile_rows, flops_per_row=matrix.num_bytes)
            for matrix in matrices
        ]
        stages.append(StageData(name=f"layers.{layer}", ops=tuple(ops)))
    head = ParamData(name="head", num_rows=vocab, row_bytes=row_bytes)
    head_op = OpData(params=(head,), tile_rows=tile_rows, flops_per_row=head.num_bytes)
    return [*stages, StageData(name="head", ops=(head_op,))]


def footprints_of(units):
    """Return sizes as if every unit were one aligned run."""
    return tuple(align_up(unit.num_bytes, 4096) + 4096 if unit.slices else 0 for unit in units)


def make_inputs(*, target_bytes=4 * MIB, stages=None, **changes):
    """Return inputs of a small job; `changes` replace fields."""
    units = build_units(stages or layer_stages(), target_bytes=target_bytes)
    fields = {
        "units": units,
        "footprints": footprints_of(units),
        "staging_bytes": MIB,
        "budget_bytes": 256 * MIB,
        "base_bytes": 30 * MIB,
        "dram_weights_bytes": None,
        "weights": "auto",
        "kv_bytes_per_token": 8 * KIB,
        "kv_block_size": None,
        "workspace": WorkspaceModel(row_bytes=20 * KIB, logits_row_bytes=8 * KIB, fixed_bytes=MIB),
        "num_requests": 64,
        "max_prompt_tokens": 100,
        "total_prompt_tokens": 100_000,
        "max_new_tokens": 28,
        "max_model_len": 2048,
        "max_num_seqs": None,
        "max_num_batched_tokens": None,
        "prompt_chunk_tokens": 256,
        "prefetch_depth": None,
        "batch_invariant": "auto",
        "row_tile": 64,
        "dtype": "bf16",
        "product_mode": "upcast",
        "profile": Profile.assumed(),
        "gpu": None,
    }
    unknown = set(changes) - set(fields)
    assert not unknown, f"no such inputs: {unknown}"
    return PlanInputs(**{**fields, **changes})


def with_gpu(inputs, *, weight_bytes, footprints=None, h2d_bytes_per_s=10e9, budget_bytes=None):
    """Add a device that has `weight_bytes` beside KV and workspace of the smallest step."""
    smallest = Shape(
        num_seqs=inputs.max_num_seqs or 1,
        num_tokens=(inputs.max_num_seqs or 1) + inputs.prompt_piece_tokens,
    )
    own_bytes = inputs.fixed_gpu_bytes(smallest)
    gpu = GpuInputs(
        budget_bytes=own_bytes + weight_bytes if budget_bytes is None else budget_bytes,
        footprints=footprints or tuple(align_up(unit.num_bytes, 256) for unit in inputs.units),
        host_workspace=WorkspaceModel(row_bytes=KIB, logits_row_bytes=KIB, fixed_bytes=MIB),
    )
    profile = replace(inputs.profile, h2d_bytes_per_s=h2d_bytes_per_s)
    return replace(inputs, gpu=gpu, profile=profile)
