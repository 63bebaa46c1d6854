"""From a checkpoint and a config to a plan: the model, its fetch units and what they weigh."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from zeroinfer.config import EngineConfig
from zeroinfer.diskformat import Checkpoint, TensorExtent
from zeroinfer.dtypes import DType
from zeroinfer.engine.devices import CUDA_MODE, check_settings, gpu_budget, with_device_rates
from zeroinfer.engine.request import Workload
from zeroinfer.errors import ConfigError, UnsupportedModelError
from zeroinfer.kvcache import KVCache
from zeroinfer.memory import (
    CpuDevice,
    TransferEngine,
    default_dram_budget,
    limit_malloc_growth,
    measure_base_bytes,
)
from zeroinfer.models import Model, Stage, bind, build_model, config_dtype
from zeroinfer.native import ProductKernel, RowKernels, resolve_reader, torch_dtype
from zeroinfer.offload import UnitSource, staging_bytes, unit_sources
from zeroinfer.planner import (
    FetchUnit,
    GpuInputs,
    OpData,
    ParamData,
    Plan,
    PlanInputs,
    Profile,
    StageData,
    WorkspaceModel,
    build_units,
    make_plan,
)
from zeroinfer.profiling import load_or_measure
from zeroinfer.units import MIB, format_bytes

__all__ = ["Prepared", "compute_plan", "prepare"]

_SLACK_BYTES = 96 * MIB
"""Library pages touched later, thread stacks, gaps in the heap: measured below 80 MiB."""
_MMAP_THRESHOLD_BYTES = MIB
"""Activations are mapped alone: a heap that holds them breaks apart, by up to 180 MiB in some runs
and none in others, and a hard budget cannot live with that. Faults cost 2 % of a long prompt."""
_WORKSPACE_ITEMSIZE = 4
"""Norms and logits are fp32 whatever the activations are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A model bound to its checkpoint, cut into fetch units; what a plan is computed from."""

    model: Model
    dtype: DType
    kernel: ProductKernel
    kernels: RowKernels
    tensors: Mapping[str, TensorExtent]
    """Parameter name -> extent."""
    units: tuple[FetchUnit, ...]
    sources: tuple[UnitSource, ...]
    profile: Profile
    device: TransferEngine

    @property
    def product_mode(self) -> str:
        """Name of the products among the profile's rates."""
        return CUDA_MODE if self.device.name == CUDA_MODE else self.kernel.mode

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of keys and values: on a GPU that of activations; else bf16, or fp32 for fp32 models."""
        if self.device.name == CUDA_MODE:
            return self.kernel.activation_dtype
        return torch.float32 if self.dtype is DType.F32 else torch.bfloat16

    @property
    def is_attention_fused(self) -> bool:
        """Whether all rows, those of prompts too, attend in the kernel, from the blocks."""
        head_dim = max(plane.head_dim for plane in self.model.kv_planes)
        dtype, where = self.kernel.activation_dtype, self.device.torch_device
        query = torch.empty((1, 1, head_dim), dtype=dtype, device=where)
        return dtype == torch.float32 and self.kernels.can_attend(query)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters as stored; a tied matrix counts once."""
        return sum(extent.spec.nbytes for extent in self.tensors.values())

    @property
    def gathered_row_bytes(self) -> list[int]:
        """Bytes of one row of each gathered matrix."""
        return [
            self.tensors[param.name].spec.nbytes // param.shape[0]
            for stage in self.model.stages
            for op in stage.ops
            for param in op.gathered
        ]


def prepare(
    config: EngineConfig,
    checkpoint: Checkpoint,
    *,
    device: TransferEngine | None = None,
    profile: Profile | None = None,
) -> Prepared:
    """Bind the model to the checkpoint and cut it; reads headers and rates only.

    Sets torch's thread count where the user gave one, and the C library's heap thresholds: both
    hold for the whole process.

    Args:
        config: what the user set.
        checkpoint: the model's files.
        device: what computes; None is the CPU.
        profile: rates to count on, such as those of another machine; None measures.

    Raises:
        ConfigError: a setting needs another device.
        BackendUnavailableError: a setting asks for compiled kernels that are not here.
        UnsupportedModelError: the model cannot be run.
        CheckpointError: config and weights do not belong together.
        StorageError: the --nvme folder cannot be written.
    """
    device = device or CpuDevice()
    check_settings(config, device)
    limit_malloc_growth(mmap_threshold_bytes=_MMAP_THRESHOLD_BYTES)
    if config.compute.num_threads != "auto":
        torch.set_num_threads(config.compute.num_threads)
    model = build_model(checkpoint.config)
    shapes = {name: extent.spec.shape for name, extent in checkpoint.tensors.items()}
    names = bind(model, shapes).names
    tensors = {param: checkpoint.tensors[name] for param, name in names.items()}
    dtype = _resolve_dtype(config, checkpoint, tensors)
    mode = "native" if device.name == CUDA_MODE else "auto"
    kernels = RowKernels.resolve(config.compute.fused_kernels)
    kernel = ProductKernel.resolve(torch_dtype(dtype), mode=mode, are_rows_apart=kernels.is_fused)
    if profile is None:
        own = _profile(config, checkpoint)
        profile = with_device_rates(own, device, kernel, dtype.short_name)
    stages = [_stage_data(stage, tensors, kernel) for stage in model.stages]
    units = build_units(stages, target_bytes=config.offload.fetch_unit_bytes)
    return Prepared(
        model=model,
        dtype=dtype,
        kernel=kernel,
        kernels=kernels,
        tensors=tensors,
        units=units,
        sources=unit_sources(units, tensors),
        profile=profile,
        device=device,
    )


def compute_plan(
    config: EngineConfig,
    prepared: Prepared,
    workload: Workload,
    *,
    base_bytes: int | None = None,
) -> Plan:
    """Compute the plan within the budget; allocates nothing.

    Args:
        config: what the user set.
        prepared: the model, cut into units, and the rates.
        workload: sizes of the job.
        base_bytes: what libraries take in another process; None measures this one.

    Raises:
        CapacityError: nothing fits.
        ConfigError: a setting contradicts the job.
    """
    _warm_up(prepared.kernel, prepared.device.torch_device)
    offload, scheduler, model = config.offload, config.scheduler, prepared.model
    max_model_len = _max_model_len(config, model)
    budget_bytes, notes = _budget(config)
    gpu, gpu_notes = _gpu_inputs(config, prepared, workload)
    inputs = PlanInputs(
        units=prepared.units,
        footprints=tuple(source.footprint for source in prepared.sources),
        staging_bytes=staging_bytes(prepared.gathered_row_bytes),
        budget_bytes=budget_bytes,
        base_bytes=measure_base_bytes() if base_bytes is None else base_bytes,
        dram_weights_bytes=offload.dram_weights,
        weights=offload.weights,
        kv_bytes_per_token=KVCache.bytes_per_token(
            model.kv_planes, num_layers=model.num_layers, itemsize=prepared.kv_dtype.itemsize
        ),
        kv_block_size=_given(config.kv.block_size),
        workspace=_workspace(
            prepared,
            chunk_tokens=config.scheduler.prompt_chunk_tokens,
            sequence_tokens=min(
                max_model_len, workload.max_prompt_tokens + workload.max_new_tokens
            ),
        ),
        num_requests=workload.num_requests,
        max_prompt_tokens=min(workload.max_prompt_tokens, max_model_len),
        total_prompt_tokens=workload.total_prompt_tokens,
        max_new_tokens=workload.max_new_tokens,
        max_model_len=max_model_len,
        max_num_seqs=_given(scheduler.max_num_seqs),
        max_num_batched_tokens=_given(scheduler.max_num_batched_tokens),
        prompt_chunk_tokens=scheduler.prompt_chunk_tokens,
        prefetch_depth=_given(offload.prefetch_depth),
        batch_invariant=config.compute.batch_invariant,
        row_tile=prepared.kernel.row_tile,
        dtype=prepared.dtype.short_name,
        product_mode=prepared.product_mode,
        profile=prepared.profile,
        gpu=gpu,
    )
    plan = make_plan(inputs)
    rate_note = _rate_note(prepared.profile, config.io.reader)
    own_notes = (*notes, *gpu_notes, rate_note, *_dtype_notes(prepared))
    return replace(plan, notes=(*own_notes, *plan.notes))


def _gpu_inputs(
    config: EngineConfig, prepared: Prepared, workload: Workload
) -> tuple[GpuInputs | None, tuple[str, ...]]:
    """Return what the plan needs of a device, and notes; None where the CPU computes."""
    model, free_bytes = prepared.model, prepared.device.free_bytes
    if free_bytes is None:
        return None, ()
    budget_bytes, notes = gpu_budget(config, free_bytes)
    chunk = min(config.scheduler.prompt_chunk_tokens, workload.max_prompt_tokens)
    sequence = workload.max_prompt_tokens + workload.max_new_tokens
    inputs = GpuInputs(
        budget_bytes=budget_bytes,
        footprints=tuple(source.device_footprint for source in prepared.sources),
        # Gathered rows and logits, each twice; masks and position tables are made here and copied.
        host_workspace=WorkspaceModel(
            row_bytes=_WORKSPACE_ITEMSIZE * 2 * model.hidden_size,
            logits_row_bytes=_WORKSPACE_ITEMSIZE * 2 * model.vocab_size,
            fixed_bytes=_WORKSPACE_ITEMSIZE * 2 * model.num_bias_heads * chunk * sequence
            + _SLACK_BYTES,
        ),
    )
    return inputs, notes


def _given(value: int | str) -> int | None:
    """Return a number the user set, or None for auto."""
    return value if isinstance(value, int) else None


def _budget(config: EngineConfig) -> tuple[int, tuple[str, ...]]:
    if config.offload.dram is not None:
        return config.offload.dram, ()
    budget_bytes, margin_bytes = default_dram_budget()
    note = (
        f"--dram not given: {format_bytes(budget_bytes)}, what this machine or control group "
        f"leaves less a margin of {format_bytes(margin_bytes)}"
    )
    return budget_bytes, (note,)


def _rate_note(profile: Profile, reader: str) -> str:
    """Say which disk the prediction counts on, and whether anybody measured it."""
    where = f" on {profile.filesystem}" if profile.filesystem else ""
    hint = "; run: zeroinfer profile" if profile.source == "assumed" else ""
    return (
        f"nvme rate {profile.nvme_read_bytes_per_s / 1e9:.2f} GB/s{where} ({profile.source}), "
        f"{profile.queue_depth} reads of {format_bytes(profile.io_chunk_bytes)} in flight "
        f"by {resolve_reader(reader)}{hint}"
    )


def _dtype_notes(prepared: Prepared) -> tuple[str, ...]:
    if prepared.kernel.mode == "native" or prepared.dtype is DType.F32:
        return ()
    return (
        f"{prepared.dtype.short_name} weights are widened to fp32 as they are used: this CPU "
        "multiplies fp32 faster; activations are fp32, keys and values bf16",
    )


def _max_model_len(config: EngineConfig, model: Model) -> int:
    wanted = config.scheduler.max_model_len
    if wanted == "auto":
        return model.max_model_len
    if wanted > model.max_model_len:
        raise ConfigError(
            f"scheduler.max_model_len is too large: got {wanted}, the model's positions end at "
            f"{model.max_model_len}; lower it"
        )
    return wanted


def _resolve_dtype(
    config: EngineConfig, checkpoint: Checkpoint, tensors: Mapping[str, TensorExtent]
) -> DType:
    """Return the dtype asked for, else the one config.json names, else the one of most bytes."""
    sizes: dict[DType, int] = {}
    for extent in tensors.values():
        spec = extent.spec
        if not spec.dtype.is_floating_point:
            raise UnsupportedModelError(
                f"tensor {spec.name} has dtype {spec.dtype.value}, need a float type; "
                "quantised checkpoints are not supported"
            )
        sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.nbytes
    if config.model.dtype != "auto":
        return DType.from_name(config.model.dtype)
    dtype = config_dtype(checkpoint.config) or max(sizes, key=lambda key: sizes[key])
    return DType.F32 if dtype is DType.F64 else dtype


def _stage_data(
    stage: Stage, tensors: Mapping[str, TensorExtent], kernel: ProductKernel
) -> StageData:
    ops = tuple(
        OpData(
            params=tuple(_param_data(tensors[param.name], param.name) for param in op.params),
            gathered=tuple(_param_data(tensors[param.name], param.name) for param in op.gathered),
            tile_rows=kernel.tile_rows(op.params[0].shape[1]) if op.is_splittable else 0,
            flops_per_row=op.flops_per_row,
        )
        for op in stage.ops
    )
    return StageData(name=stage.name, ops=ops)


def _param_data(extent: TensorExtent, name: str) -> ParamData:
    num_rows = extent.spec.shape[0] if extent.spec.shape else 1
    return ParamData(name=name, num_rows=num_rows, row_bytes=extent.spec.nbytes // num_rows)


def _workspace(prepared: Prepared, *, chunk_tokens: int, sequence_tokens: int) -> WorkspaceModel:
    """Bound the activations of a step by the widest stage and the longest sequence of the job."""
    model, kernel = prepared.model, prepared.kernel
    widest = max(
        sum(op.num_output_columns for op in stage.ops)
        for stage in model.stages
        if "hidden" in stage.kept
    )
    matrices = [param.shape for param in model.params.values() if len(param.shape) == 2]
    tiles = {shape: min(shape[0], kernel.tile_rows(shape[1])) for shape in matrices}
    # Beside the stage's own activations: hidden, a norm's temporaries, one tile of a product.
    columns = widest + 4 * model.hidden_size + max(tiles.values())
    fixed = max(kernel.scratch_elements(shape) for shape in matrices) + 8 * model.vocab_size
    if prepared.is_attention_fused:
        fixed += model.num_bias_heads * sequence_tokens
    else:
        # Every row keeps its attention bias until the step ends; keys and values are gathered.
        columns += model.num_bias_heads * sequence_tokens
        kv_columns = sum(plane.num_elements for plane in model.kv_planes)
        heads = max(plane.num_heads for plane in model.kv_planes)
        fixed += (2 * kv_columns + heads * min(chunk_tokens, sequence_tokens)) * sequence_tokens
    return WorkspaceModel(
        row_bytes=_WORKSPACE_ITEMSIZE * columns,
        logits_row_bytes=_WORKSPACE_ITEMSIZE * 2 * model.vocab_size,
        fixed_bytes=_WORKSPACE_ITEMSIZE * fixed + _SLACK_BYTES,
    )


def _profile(config: EngineConfig, checkpoint: Checkpoint) -> Profile:
    profile = (
        load_or_measure(config.io.nvme[0], checkpoint.files, reader=config.io.reader)
        if config.io.nvme
        else Profile.assumed()
    )
    return replace(
        profile,
        io_chunk_bytes=_given(config.io.io_chunk_bytes) or profile.io_chunk_bytes,
        queue_depth=_given(config.io.queue_depth) or profile.queue_depth,
    )


def _warm_up(kernel: ProductKernel, torch_device: torch.device) -> None:
    """Start worker threads and load the libraries' code, so that the base is measured whole."""
    dtype = kernel.activation_dtype
    x = torch.ones((kernel.row_tile, 64), dtype=dtype, device=torch_device)
    weight = torch.ones((256, 64), dtype=kernel.weight_dtype, device=torch_device)
    out = torch.empty((kernel.row_tile, 256), dtype=dtype, device=torch_device)
    kernel.linear(x, weight, out)
    heads = x.view(1, 4, -1, 16)
    torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
