"""From sizes, budgets and rates to a plan; arithmetic only, before anything is allocated."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zeroinfer.errors import CapacityError, ConfigError
from zeroinfer.planner.placement import choose_resident
from zeroinfer.planner.plan import Plan, Prediction
from zeroinfer.planner.profile import Profile
from zeroinfer.planner.ring import RingLayout, lay_out_ring
from zeroinfer.planner.units import FetchUnit
from zeroinfer.units import MIB, align_up, ceil_div, format_bytes

__all__ = ["PlanInputs", "WorkspaceModel", "make_plan"]

_RING_UNITS = 8
"""Units the ring holds where memory allows: enough to bridge a slow read or a slow product."""
_MAX_AUTO_SEQS = 512
_MAX_AUTO_BATCHED_TOKENS = 2048
"""Products gain little beyond this many rows, and activations cost memory."""
_KV_BLOCK_GRAIN = 16
_COMPUTE_PER_PRODUCTS = 1.25
"""A step's compute over its products alone: norms, attention, activations. Measured 1.2 to 1.4."""
_BASE_SPREAD_BYTES = 8 * MIB
"""How far the measured base of two runs may differ."""


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
class PlanInputs:
    """What the plan is computed from. Sizes in bytes; None means automatic."""

    units: tuple[FetchUnit, ...]
    footprints: tuple[int, ...]
    staging_bytes: int
    """For rows gathered from matrices on disk; needed unless everything is resident."""
    budget_bytes: int
    base_bytes: int
    dram_weights_bytes: int | None
    weights: str
    """`auto`, `dram` or `nvme`."""
    kv_bytes_per_token: int
    kv_block_size: int | None
    workspace: WorkspaceModel
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """One candidate: how many sequences and tokens a step may have."""

    num_seqs: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Draft:
    """A shape that fits, and what is placed where."""

    shape: _Shape
    resident: frozenset[int]
    streamed: tuple[int, ...]
    ring_bytes: int
    is_invariant: bool
    prediction: Prediction

    @property
    def tokens_per_s(self) -> float:
        return self.shape.num_seqs / self.prediction.step_s


def make_plan(inputs: PlanInputs) -> Plan:
    """Choose the shape of a step with the most tokens per second that fits the budget.

    Raises:
        CapacityError: nothing fits; the message holds the table of the smallest attempt, the
            smallest budget that would do, and the flag that mends it.
    """
    drafts = [draft for draft in (_try(inputs, shape) for shape in _shapes(inputs)) if draft]
    if not drafts:
        raise _too_small(inputs)
    best = max(draft.tokens_per_s for draft in drafts)
    # Of shapes within 2 % of the best, the one with most sequences finishes a job soonest.
    good = [draft.shape for draft in drafts if draft.tokens_per_s >= 0.98 * best]
    shape = max(good, key=lambda shape: (shape.num_seqs, shape.num_tokens))
    plan = _assemble(inputs, next(draft for draft in drafts if draft.shape == shape))
    return replace(plan, notes=_notes(inputs, plan))


def _shapes(inputs: PlanInputs) -> Iterator[_Shape]:
    for num_seqs in _seq_counts(inputs):
        yield from (
            _Shape(num_seqs=num_seqs, num_tokens=tokens)
            for tokens in _token_budgets(inputs, num_seqs)
        )


def _seq_counts(inputs: PlanInputs) -> list[int]:
    """Candidates for the number of sequences, smallest first."""
    if inputs.max_num_seqs is not None:
        return [inputs.max_num_seqs]
    ceiling = min(inputs.num_requests, _MAX_AUTO_SEQS)
    if inputs.max_num_batched_tokens is not None:
        ceiling = min(ceiling, inputs.max_num_batched_tokens - inputs.prompt_piece_tokens)
    ceiling = max(1, ceiling)
    return sorted({ceiling, *(1 << bit for bit in range(10) if 1 << bit < ceiling)})


def _token_budgets(inputs: PlanInputs, num_seqs: int) -> list[int]:
    chunk = inputs.prompt_piece_tokens
    # A step must always have room for a piece of a prompt beside all decodes, or prompts starve.
    smallest = num_seqs + chunk
    if inputs.max_num_batched_tokens is not None:
        if inputs.max_num_batched_tokens < smallest:
            raise ConfigError(
                f"scheduler.max_num_batched_tokens is too small: got "
                f"{inputs.max_num_batched_tokens}, need at least {smallest} ({num_seqs} sequences "
                f"and a prompt piece of {chunk}); raise it or lower --max-num-seqs"
            )
        return [inputs.max_num_batched_tokens]
    wave = min(num_seqs * inputs.max_prompt_tokens, inputs.total_prompt_tokens)
    largest = max(smallest, min(_MAX_AUTO_BATCHED_TOKENS, wave))
    budgets = [largest]
    while budgets[-1] > smallest:
        budgets.append(max(smallest, budgets[-1] // 2))
    return budgets


def _try(inputs: PlanInputs, shape: _Shape) -> _Draft | None:
    """Place the weights beside a shape; None if it does not fit."""
    fixed = _fixed_bytes(inputs, shape)
    available = inputs.budget_bytes - fixed
    if inputs.dram_weights_bytes is not None:
        available = min(available, inputs.dram_weights_bytes)
    if available < 0:
        return None
    resident, ring_bytes = _place(inputs, available)
    streamed = _streamed(inputs, resident)
    needed = max((inputs.footprints[idx] for idx in streamed), default=0)
    if ring_bytes < needed or (inputs.weights == "dram" and resident != _everything(inputs)):
        return None
    streamed_bytes = sum(inputs.units[idx].num_bytes for idx in streamed)
    is_invariant, prediction = _resolve_invariance(inputs, shape.num_seqs, streamed_bytes)
    return _Draft(
        shape=shape,
        resident=resident,
        streamed=streamed,
        ring_bytes=ring_bytes,
        is_invariant=is_invariant,
        prediction=prediction,
    )


def _everything(inputs: PlanInputs) -> frozenset[int]:
    return frozenset(unit.unit_idx for unit in inputs.units if unit.slices)


def _streamed(inputs: PlanInputs, resident: frozenset[int]) -> tuple[int, ...]:
    return tuple(
        unit.unit_idx
        for unit in inputs.units
        if unit.slices and not unit.is_gathered and unit.unit_idx not in resident
    )


def _place(inputs: PlanInputs, available: int) -> tuple[frozenset[int], int]:
    """Split what weights may use into resident units and ring."""
    if inputs.weights != "nvme" and sum(inputs.footprints) <= available:
        return _everything(inputs), 0
    stages = [unit.unit_idx for unit in inputs.units if unit.slices and not unit.is_gathered]
    footprints = [inputs.footprints[idx] for idx in stages]
    largest = max(footprints, default=0)
    wanted = largest * _wanted_places(inputs, len(stages))
    if inputs.weights == "nvme":
        return frozenset(), min(available, wanted, sum(footprints))
    if sum(footprints) <= available:
        return frozenset(stages), 0
    share = available // 4 if inputs.prefetch_depth is None else available
    ring = max(min(wanted, share), min(2 * largest, wanted, available))
    chosen = choose_resident(footprints, budget_bytes=max(0, available - ring))
    return frozenset(stages[idx] for idx in chosen), ring


def _wanted_places(inputs: PlanInputs, num_units: int) -> int:
    if inputs.prefetch_depth is None:
        return _RING_UNITS
    # Places repeat every step, so only even laps give each unit the same depth.
    laps = max(1, num_units // (inputs.prefetch_depth + 1))
    return ceil_div(num_units, laps)


def _fixed_bytes(inputs: PlanInputs, shape: _Shape) -> int:
    """Everything but weights and ring."""
    return (
        inputs.base_bytes
        + inputs.staging_bytes
        + _kv_bytes(inputs, shape.num_seqs)
        + _workspace_bytes(inputs, shape)
    )


def _block_size(inputs: PlanInputs) -> int:
    return inputs.kv_block_size or min(128, align_up(inputs.sequence_tokens, _KV_BLOCK_GRAIN))


def _num_kv_blocks(inputs: PlanInputs, num_seqs: int) -> int:
    return num_seqs * ceil_div(inputs.sequence_tokens, _block_size(inputs))


def _kv_bytes(inputs: PlanInputs, num_seqs: int) -> int:
    return _num_kv_blocks(inputs, num_seqs) * _block_size(inputs) * inputs.kv_bytes_per_token


def _workspace_bytes(inputs: PlanInputs, shape: _Shape) -> int:
    # Padding is reserved whether or not invariance is on: it is decided after the placement.
    return inputs.workspace.num_bytes(
        num_rows=align_up(shape.num_tokens, inputs.row_tile),
        num_logits_rows=align_up(shape.num_seqs, inputs.row_tile),
    )


def _predict(inputs: PlanInputs, num_seqs: int, streamed_bytes: int, is_padded: bool) -> Prediction:
    rows = align_up(num_seqs, inputs.row_tile) if is_padded else num_seqs
    rate_rows = inputs.row_tile if is_padded else rows
    rate = inputs.profile.matmul_rate(inputs.dtype, inputs.product_mode, rate_rows)
    return Prediction(
        io_s=streamed_bytes / inputs.profile.nvme_read_bytes_per_s,
        compute_s=_COMPUTE_PER_PRODUCTS * inputs.flops_per_row * rows / rate,
    )


def _resolve_invariance(
    inputs: PlanInputs, num_seqs: int, streamed_bytes: int
) -> tuple[bool, Prediction]:
    padded = _predict(inputs, num_seqs, streamed_bytes, is_padded=True)
    plain = _predict(inputs, num_seqs, streamed_bytes, is_padded=False)
    is_on = inputs.batch_invariant == "on" or (
        inputs.batch_invariant == "auto" and padded.bound_by == "nvme"
    )
    return is_on, padded if is_on else plain


def _assemble(inputs: PlanInputs, draft: _Draft) -> Plan:
    shape = draft.shape
    places = [inputs.footprints[idx] for idx in draft.streamed]
    ring = lay_out_ring(places, max_bytes=draft.ring_bytes)
    return Plan(
        units=inputs.units,
        footprints=inputs.footprints,
        resident=draft.resident,
        streamed=draft.streamed,
        ring=ring,
        prefetch_depth=_prefetch_depth(inputs, ring),
        max_num_seqs=shape.num_seqs,
        max_num_batched_tokens=shape.num_tokens,
        max_model_len=inputs.max_model_len,
        max_sequence_tokens=inputs.sequence_tokens,
        kv_block_size=_block_size(inputs),
        num_kv_blocks=_num_kv_blocks(inputs, shape.num_seqs),
        is_batch_invariant=draft.is_invariant,
        dram_budget_bytes=inputs.budget_bytes,
        base_bytes=inputs.base_bytes,
        kv_bytes=_kv_bytes(inputs, shape.num_seqs),
        workspace_bytes=_workspace_bytes(inputs, shape),
        staging_bytes=inputs.staging_bytes,
        prediction=draft.prediction,
    )


def _prefetch_depth(inputs: PlanInputs, ring: RingLayout) -> int:
    """With nothing streamed the depth still paces the first pass, which loads everything."""
    wanted = _RING_UNITS if inputs.prefetch_depth is None else inputs.prefetch_depth
    return min(wanted, ring.max_depth) if ring.offsets else wanted


def _notes(inputs: PlanInputs, plan: Plan) -> tuple[str, ...]:
    """Say what was cut short and what would help most."""
    return (*_depth_notes(inputs, plan), *_binding_notes(inputs, plan))


def _depth_notes(inputs: PlanInputs, plan: Plan) -> tuple[str, ...]:
    if inputs.prefetch_depth is None or plan.prefetch_depth == inputs.prefetch_depth:
        return ()
    return (
        f"--prefetch-depth {inputs.prefetch_depth} is cut to {plan.prefetch_depth}: a landing ring "
        f"of {format_bytes(plan.ring.num_bytes)} has no place for more units ahead; raise --dram "
        "or lower offload.fetch_unit_bytes",
    )


def _binding_notes(inputs: PlanInputs, plan: Plan) -> tuple[str, ...]:
    if not plan.streamed:
        return ("all weights stay in DRAM: after the first step nothing is read from disk",)
    if plan.prediction.bound_by == "nvme":
        per_gib = (1 << 30) / inputs.profile.nvme_read_bytes_per_s
        return (
            f"the disk binds: each GiB of --dram more takes {per_gib:.2f} s off a step, and more "
            "sequences at once cost little",
        )
    return ("products bind: fewer bytes from disk would not help; this CPU is the limit",)


def _too_small(inputs: PlanInputs) -> CapacityError:
    shape = _Shape(
        num_seqs=inputs.max_num_seqs or 1,
        num_tokens=min(_token_budgets(inputs, inputs.max_num_seqs or 1)),
    )
    stages = [inputs.footprints[unit.unit_idx] for unit in inputs.units if not unit.is_gathered]
    landing = sum(inputs.footprints) if inputs.weights == "dram" else max(stages, default=0)
    table = (
        f"base {format_bytes(inputs.base_bytes)}, workspace "
        f"{format_bytes(_workspace_bytes(inputs, shape))}, kv "
        f"{format_bytes(_kv_bytes(inputs, shape.num_seqs))} for {shape.num_seqs} sequence(s) of "
        f"{inputs.sequence_tokens} tokens, staging {format_bytes(inputs.staging_bytes)}, "
        f"weights at least {format_bytes(landing)}"
    )
    needed = _fixed_bytes(inputs, shape) + landing
    if inputs.dram_weights_bytes is not None and inputs.budget_bytes >= needed:
        return CapacityError(
            f"--dram-weights {format_bytes(inputs.dram_weights_bytes)} is too small: need "
            f"{format_bytes(landing)}; set --dram-weights {ceil_div(landing, MIB)}MiB"
            f"{_cheaper(inputs)}"
        )
    return CapacityError(
        f"DRAM budget {format_bytes(inputs.budget_bytes)} is too small: need "
        f"{format_bytes(needed)} ({table}); set --dram {_suggested_mib(needed)}MiB"
        f"{_cheaper(inputs)}"
    )


def _suggested_mib(needed_bytes: int) -> int:
    """The base differs a little from run to run; the next run must not be refused for that."""
    return align_up(needed_bytes + _BASE_SPREAD_BYTES, _BASE_SPREAD_BYTES) // MIB


def _cheaper(inputs: PlanInputs) -> str:
    if inputs.weights == "dram":
        return " or --weights auto"
    if (inputs.max_num_seqs or 1) > 1:
        return " or lower --max-num-seqs"
    return " or lower --max-tokens or offload.fetch_unit_bytes"
