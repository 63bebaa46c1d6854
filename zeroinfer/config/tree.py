"""The tree of settings: what the user wants, checked and frozen.

A value the user left on ``auto`` stays ``auto`` here; what it became stands in the plan. The text
under each field is the only source of its help: command line and reference are written from it.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from zeroinfer.config.settings import Choice, Flag, Folders, Integer, Size, Text
from zeroinfer.units import MIB, format_bytes

__all__ = [
    "ComputeConfig",
    "EngineConfig",
    "IoConfig",
    "KvConfig",
    "ModelConfig",
    "OffloadConfig",
    "SchedulerConfig",
]

_DIRECT_BLOCK_BYTES = 4096
_MOST_THREADS = 1024
"""More than any CPU or disk gains from, few enough that a kernel grants them."""


class _Section(BaseModel):
    """Behaviour common to the root and its sections."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(_Section):
    """Which model, and in which element type it is computed."""

    path: Annotated[str, Text()] = ""
    """Folder with a checkpoint, a GGUF file, or a hub id; empty takes the embedded default."""
    dtype: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"], Choice(("auto", "bf16", "fp16", "fp32"))
    ] = "auto"
    """Element type that weights are rounded to; auto is the one config.json names, else the one of
    most bytes. Where the CPU has no fast products of it, weights are widened to fp32 as they are
    used, which the plan says."""


class OffloadConfig(_Section):
    """Where weights live and how far ahead of their use they are fetched."""

    weights: Annotated[
        Literal["auto", "gpu", "dram", "nvme"], Choice(("auto", "gpu", "dram", "nvme"))
    ] = "auto"
    """Home of the weights: auto fills the budgets and streams the rest, gpu keeps all on the device
    or refuses, dram keeps all in memory or refuses, nvme keeps none."""
    dram: Annotated[int | None, Size(is_optional=True)] = None
    """Hard limit of the whole process tree, libraries included; left out, what the control group
    or the machine has free, less a printed margin."""
    dram_weights: Annotated[int | None, Size(is_optional=True)] = None
    """Limit of resident weights and landing ring together, within offload.dram."""
    gpu_memory: Annotated[int | None, Size(is_optional=True)] = None
    """Limit of device memory, beside what the driver itself takes; left out, what the device has
    free, less a printed margin."""
    prefetch_depth: Annotated[Literal["auto"] | int, Integer(minimum=0)] = "auto"
    """How many fetch units may be in flight or landed ahead of the one in use; auto is as far as
    the landing ring allows, 0 fetches, computes and releases without overlap."""
    fetch_unit_bytes: Annotated[int, Size()] = 32 * MIB
    """Largest part of a matrix that is fetched as one unit, give or take a quarter; larger matrices
    come in pieces of output rows. One that cannot be cut is one unit whatever its size."""
    debug_poison: Annotated[bool, Flag()] = False
    """Overwrite released ring space with NaN, so that whatever still reads it shows; for tests."""

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.dram is not None and (self.dram_weights or 0) > self.dram:
            raise ValueError(
                f"dram_weights is above dram: got {format_bytes(self.dram_weights or 0)}, need at "
                f"most {format_bytes(self.dram)}; lower dram_weights or raise dram"
            )
        return self


class KvConfig(_Section):
    """Where keys and values of running sequences live."""

    tier: Annotated[
        Literal["auto", "gpu", "dram"],
        Choice(
            ("auto", "gpu", "dram"),
            {"nvme": "this version keeps keys and values in memory; use auto, gpu or dram"},
        ),
    ] = "auto"
    """Tier of keys and values; auto is that of the compute device."""
    block_size: Annotated[Literal["auto"] | int, Integer(minimum=1)] = "auto"
    """Tokens in one kv_block; auto is the longest sequence of the job, at most 128."""


class SchedulerConfig(_Section):
    """How many sequences and tokens take part in a step."""

    max_num_seqs: Annotated[Literal["auto"] | int, Integer(minimum=1)] = "auto"
    """Most sequences that run at once; auto is the number, up to that of the rows, with the most
    predicted tokens a second within the budget."""
    max_num_batched_tokens: Annotated[Literal["auto"] | int, Integer(minimum=1)] = "auto"
    """Most tokens of one step, prompts and answers together; auto is what the prompts of the job
    fill, at most 2048, less where memory is short."""
    max_model_len: Annotated[Literal["auto"] | int, Integer(minimum=1)] = "auto"
    """Most tokens of one sequence, prompt and answer; auto is the model's own limit or what the
    job can need, whichever is less."""
    prompt_chunk_tokens: Annotated[int, Integer(minimum=1, has_auto=False)] = 256
    """Tokens in one piece of a prompt; part of the compute grid, so that another value may change
    the last bits of the results."""
    admit: Annotated[
        Literal["fifo"],
        Choice(("fifo",), {"longest": "this version admits in the order of the input; use fifo"}),
    ] = "fifo"
    """Which waiting request takes a freed place: fifo is the order of the input."""


class IoConfig(_Section):
    """Folders of our own files, and how storage is read."""

    nvme: Annotated[tuple[Path, ...], Folders()] = ()
    """Folders for stores, profiles and temporary files; weights are read where they are."""
    reader: Annotated[
        Literal["auto", "threads", "io_uring"], Choice(("auto", "threads", "io_uring"))
    ] = "auto"
    """Storage reader: threads is a pool of sleeping direct reads, io_uring one thread and the queue
    of the kernel; auto is io_uring where the system has it, else threads."""
    io_chunk_bytes: Annotated[
        Literal["auto"] | int,
        Size(
            minimum_bytes=_DIRECT_BLOCK_BYTES, multiple_of_bytes=_DIRECT_BLOCK_BYTES, has_auto=True
        ),
    ] = "auto"
    """Bytes of one read; auto is the value measured for the file system."""
    queue_depth: Annotated[Literal["auto"] | int, Integer(minimum=1, maximum=_MOST_THREADS)] = (
        "auto"
    )
    """Reads in flight at once; auto is the value measured for the file system."""


class ComputeConfig(_Section):
    """How products are computed."""

    device: Annotated[Literal["auto", "cpu", "cuda"], Choice(("auto", "cpu", "cuda"))] = "auto"
    """What computes; auto is the first CUDA device, if torch finds one, else the CPU."""
    batch_invariant: Annotated[Literal["auto", "on", "off"], Choice(("auto", "on", "off"))] = "auto"
    """Make a row's bits independent of the rows beside it, by fixed row tiles; auto is on where
    that costs no time because fetching takes longer."""
    num_threads: Annotated[Literal["auto"] | int, Integer(minimum=1, maximum=_MOST_THREADS)] = (
        "auto"
    )
    """Threads of the products; auto is torch's own choice. Another value may change the last bits
    of the results."""
    fused_kernels: Annotated[Literal["auto", "on", "off"], Choice(("auto", "on", "off"))] = "auto"
    """Compiled kernels for norms, rotary positions, activations and attention on the CPU; auto uses
    them where they were built and the CPU has AVX2, on refuses to run without them or with a GPU,
    off is plain torch. Another value may change the last bits of the results."""


class EngineConfig(_Section):
    """Everything a user can set."""

    model: ModelConfig = ModelConfig()
    """Which model, and in which element type it is computed."""
    offload: OffloadConfig = OffloadConfig()
    """Where weights live and how far ahead of their use they are fetched."""
    kv: KvConfig = KvConfig()
    """Where keys and values of running sequences live."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """How many sequences and tokens take part in a step."""
    io: IoConfig = IoConfig()
    """Folders of our own files, and how storage is read."""
    compute: ComputeConfig = ComputeConfig()
    """How products are computed."""
