"""What a plan is computed from, and one candidate for it; plain data."""

from dataclasses import dataclass

from zeroinfer.planner.plan import Prediction
from zeroinfer.planner.profile import Profile
from zeroinfer.planner.units import FetchUnit
from zeroinfer.units import align_up, ceil_div

__all__ = ["Draft", "GpuInputs", "PlanInputs", "Shape", "WorkspaceModel"]

_KV_BLOCK_GRAIN = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How many sequences and tokens a step may have."""

    num_seqs: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkspaceModel:
    """Bytes of activations and temporaries of a step."""

    row_bytes: int
    """Per packed row."""
    logits_row_bytes: int
    """Per row whose logits are computed."""
    fixed_bytes: int
    """Widened weight tile, attention of one sequence, slack of the allocator."""

    def num_bytes(self, *, num_rows: int, num_logits_rows: int) -> int:
        """Bytes of a step with these rows."""
        rows = num_rows * self.row_bytes + num_logits_rows * self.logits_row_bytes
        return rows + self.fixed_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuInputs:
    """What a compute device adds. Sizes in bytes."""

    budget_bytes: int
    """Device memory that may be used."""
    footprints: tuple[int, ...]
    """What each unit takes on the device, alignment of every tensor included."""
    host_workspace: WorkspaceModel
    """What a step still takes in DRAM: gathered rows, logits, tables made by the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInputs:
    """What the plan is computed from. Sizes in bytes; None means automatic."""

    units: tuple[FetchUnit, ...]
    footprints: tuple[int, ...]
    """What each unit takes in DRAM, alignment of its reads included."""
    staging_bytes: int
    """For rows gathered from matrices on disk; needed unless everything is resident."""
    budget_bytes: int
    base_bytes: int
    dram_weights_bytes: int | None
    weights: str
    """`auto`, `dram` or `nvme`; `gpu` too with a device."""
    kv_bytes_per_token: int
    kv_block_size: int | None
    workspace: WorkspaceModel
    """Activations of a step, where they are computed."""
    num_requests: int
    max_prompt_tokens: int
    total_prompt_tokens: int
    max_new_tokens: int
    max_model_len: int
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    prompt_chunk_tokens: int
    prefetch_depth: int | None
    batch_invariant: str
    """`auto`, `on` or `off`."""
    row_tile: int
    dtype: str
    product_mode: str
    profile: Profile
    gpu: GpuInputs | None = None
    """None computes on the CPU."""

    @property
    def sequence_tokens(self) -> int:
        """Tokens of the longest sequence of the job."""
        return min(self.max_model_len, self.max_prompt_tokens + self.max_new_tokens)

    @property
    def prompt_piece_tokens(self) -> int:
        """Tokens of the largest piece of a prompt that must fit into one step."""
        return min(self.prompt_chunk_tokens, max(1, self.max_prompt_tokens))

    @property
    def flops_per_row(self) -> int:
        """Multiply-adds of one row through all stages, times two."""
        return sum(unit.flops_per_row for unit in self.units)

    @property
    def fetched(self) -> tuple[int, ...]:
        """Units that a step uses whole, in order; those of gathered matrices left out."""
        return tuple(u.unit_idx for u in self.units if u.slices and not u.is_gathered)

    @property
    def gathered(self) -> tuple[int, ...]:
        """Units of matrices of which single rows are used."""
        return tuple(unit.unit_idx for unit in self.units if unit.is_gathered)

    @property
    def block_size(self) -> int:
        """Tokens of a kv_block."""
        return self.kv_block_size or min(128, align_up(self.sequence_tokens, _KV_BLOCK_GRAIN))

    def num_kv_blocks(self, num_seqs: int) -> int:
        """Blocks that hold this many of the longest sequences."""
        return num_seqs * ceil_div(self.sequence_tokens, self.block_size)

    def kv_bytes(self, num_seqs: int) -> int:
        """Bytes of these blocks."""
        return self.num_kv_blocks(num_seqs) * self.block_size * self.kv_bytes_per_token

    def workspace_bytes(self, shape: Shape, model: WorkspaceModel | None = None) -> int:
        """Bytes of a step's activations, by the model of where they are computed.

        Padding is reserved whether or not invariance is on: it is decided after the placement.
        """
        return (model or self.workspace).num_bytes(
            num_rows=align_up(shape.num_tokens, self.row_tile),
            num_logits_rows=align_up(shape.num_seqs, self.row_tile),
        )

    def fixed_dram_bytes(self, shape: Shape) -> int:
        """DRAM of everything but weights and what they land in."""
        libraries = self.base_bytes + self.staging_bytes
        if self.gpu is not None:
            return libraries + self.workspace_bytes(shape, self.gpu.host_workspace)
        return libraries + self.kv_bytes(shape.num_seqs) + self.workspace_bytes(shape)

    def fixed_gpu_bytes(self, shape: Shape) -> int:
        """Device memory of everything but weights and ring."""
        return self.kv_bytes(shape.num_seqs) + self.workspace_bytes(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A shape that fits, and what is placed where."""

    shape: Shape
    resident: frozenset[int]
    """Units that stay where they are computed on."""
    streamed: tuple[int, ...]
    ring_bytes: int
    is_invariant: bool
    prediction: Prediction
    dram: frozenset[int] = frozenset()
    """With a device: units whose home is DRAM."""
    num_staging_slots: int = 0
    """With a device: places between storage and it."""

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second with all places running."""
        return self.shape.num_seqs / self.prediction.step_s
