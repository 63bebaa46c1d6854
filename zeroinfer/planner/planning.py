"""From sizes, budgets and rates to a plan; arithmetic only, before anything is allocated."""

from collections.abc import Iterator
from dataclasses import replace

from zeroinfer.errors import ConfigError
from zeroinfer.planner.cost import resolve_invariance
from zeroinfer.planner.gpu_planning import draft_on_gpu, slot_bytes
from zeroinfer.planner.inputs import Draft, PlanInputs, Shape
from zeroinfer.planner.placement import RING_UNITS, split_memory
from zeroinfer.planner.plan import GpuPlan, Plan
from zeroinfer.planner.refusal import refuse
from zeroinfer.planner.ring import RingLayout, lay_out_ring
from zeroinfer.units import format_bytes

__all__ = ["make_plan"]

_MAX_AUTO_SEQS = 512
_MAX_AUTO_BATCHED_TOKENS = 2048
"""Products gain little beyond this many rows, and activations cost memory."""


def make_plan(inputs: PlanInputs) -> Plan:
    """Choose the shape of a step with the most tokens per second that fits the budget.

    Raises:
        CapacityError: nothing fits; the message holds the table of the smallest attempt, the
            smallest budget that would do, and the flag that mends it.
    """
    drafts = [draft for draft in (_draft(inputs, shape) for shape in _shapes(inputs)) if draft]
    if not drafts:
        raise refuse(inputs, _smallest_shape(inputs))
    best = max(draft.tokens_per_s for draft in drafts)
    # Of shapes within 2 % of the best, the one with most sequences finishes a job soonest.
    good = [draft.shape for draft in drafts if draft.tokens_per_s >= 0.98 * best]
    shape = max(good, key=lambda shape: (shape.num_seqs, shape.num_tokens))
    plan = _assemble(inputs, next(draft for draft in drafts if draft.shape == shape))
    return replace(plan, notes=_notes(inputs, plan))


def _draft(inputs: PlanInputs, shape: Shape) -> Draft | None:
    if inputs.gpu is not None:
        return draft_on_gpu(inputs, inputs.gpu, shape)
    return _draft_on_cpu(inputs, shape)


def _shapes(inputs: PlanInputs) -> Iterator[Shape]:
    for num_seqs in _seq_counts(inputs):
        yield from (
            Shape(num_seqs=num_seqs, num_tokens=tokens)
            for tokens in _token_budgets(inputs, num_seqs)
        )


def _smallest_shape(inputs: PlanInputs) -> Shape:
    num_seqs = inputs.max_num_seqs or 1
    return Shape(num_seqs=num_seqs, num_tokens=min(_token_budgets(inputs, num_seqs)))


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


def _draft_on_cpu(inputs: PlanInputs, shape: Shape) -> Draft | None:
    """Place the weights beside a shape; None if it does not fit."""
    available = inputs.budget_bytes - inputs.fixed_dram_bytes(shape)
    if inputs.dram_weights_bytes is not None:
        available = min(available, inputs.dram_weights_bytes)
    if available < 0:
        return None
    resident, ring_bytes = _place(inputs, available)
    streamed = tuple(idx for idx in inputs.fetched if idx not in resident)
    needed = max((inputs.footprints[idx] for idx in streamed), default=0)
    if ring_bytes < needed or (inputs.weights == "dram" and resident != _everything(inputs)):
        return None
    streamed_bytes = sum(inputs.units[idx].num_bytes for idx in streamed)
    is_invariant, prediction = resolve_invariance(inputs, shape.num_seqs, nvme_bytes=streamed_bytes)
    return Draft(
        shape=shape,
        resident=resident,
        streamed=streamed,
        ring_bytes=ring_bytes,
        is_invariant=is_invariant,
        prediction=prediction,
    )


def _everything(inputs: PlanInputs) -> frozenset[int]:
    return frozenset(unit.unit_idx for unit in inputs.units if unit.slices)


def _place(inputs: PlanInputs, available: int) -> tuple[frozenset[int], int]:
    """Split what weights may use into resident units and ring."""
    if inputs.weights != "nvme" and sum(inputs.footprints) <= available:
        return _everything(inputs), 0
    fetched = inputs.fetched
    kept, ring_bytes = split_memory(
        [inputs.footprints[idx] for idx in fetched],
        available=available,
        is_kept=inputs.weights != "nvme",
        prefetch_depth=inputs.prefetch_depth,
    )
    return frozenset(fetched[position] for position in kept), ring_bytes


def _assemble(inputs: PlanInputs, draft: Draft) -> Plan:
    shape, gpu = draft.shape, _gpu_plan(inputs, draft)
    footprints = inputs.footprints if gpu is None else gpu.footprints
    ring = lay_out_ring([footprints[idx] for idx in draft.streamed], max_bytes=draft.ring_bytes)
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
        kv_block_size=inputs.block_size,
        num_kv_blocks=inputs.num_kv_blocks(shape.num_seqs),
        is_batch_invariant=draft.is_invariant,
        dram_budget_bytes=inputs.budget_bytes,
        base_bytes=inputs.base_bytes,
        kv_bytes=inputs.kv_bytes(shape.num_seqs),
        workspace_bytes=inputs.workspace_bytes(shape),
        staging_bytes=inputs.staging_bytes,
        prediction=draft.prediction,
        gpu=gpu,
    )


def _gpu_plan(inputs: PlanInputs, draft: Draft) -> GpuPlan | None:
    if inputs.gpu is None:
        return None
    return GpuPlan(
        footprints=inputs.gpu.footprints,
        dram=draft.dram,
        num_staging_slots=draft.num_staging_slots,
        staging_slot_bytes=slot_bytes(inputs),
        host_workspace_bytes=inputs.workspace_bytes(draft.shape, inputs.gpu.host_workspace),
        budget_bytes=inputs.gpu.budget_bytes,
    )


def _prefetch_depth(inputs: PlanInputs, ring: RingLayout) -> int:
    """With nothing streamed the depth still paces the first pass, which loads everything."""
    wanted = RING_UNITS if inputs.prefetch_depth is None else inputs.prefetch_depth
    return min(wanted, ring.max_depth) if ring.offsets else wanted


def _notes(inputs: PlanInputs, plan: Plan) -> tuple[str, ...]:
    """Say what was cut short, what is locked, and what would help most."""
    return (*_depth_notes(inputs, plan), *_pin_notes(plan), *_binding_notes(inputs, plan))


def _depth_notes(inputs: PlanInputs, plan: Plan) -> tuple[str, ...]:
    if inputs.prefetch_depth is None or plan.prefetch_depth == inputs.prefetch_depth:
        return ()
    flag = "--dram" if plan.gpu is None else "--gpu-memory"
    return (
        f"--prefetch-depth {inputs.prefetch_depth} is cut to {plan.prefetch_depth}: a landing ring "
        f"of {format_bytes(plan.ring.num_bytes)} has no place for more units ahead; raise {flag} "
        "or lower offload.fetch_unit_bytes",
    )


def _pin_notes(plan: Plan) -> tuple[str, ...]:
    if plan.gpu is None:
        return ()
    return (
        f"{format_bytes(plan.pinned_bytes)} of DRAM is locked for copies to the gpu: weights "
        f"{format_bytes(plan.resident_bytes)}, staging {format_bytes(plan.gpu.staging_bytes)}",
    )


def _binding_notes(inputs: PlanInputs, plan: Plan) -> tuple[str, ...]:
    place = "in DRAM" if plan.gpu is None else "on the gpu"
    if not plan.streamed:
        return (f"all weights stay {place}: after the first step nothing is read from disk",)
    if plan.prediction.bound_by == "nvme":
        per_gib = (1 << 30) / inputs.profile.nvme_read_bytes_per_s
        return (
            f"the disk binds: each GiB of --dram more takes {per_gib:.2f} s off a step, and more "
            "sequences at once cost little",
        )
    if plan.prediction.bound_by == "h2d" and inputs.profile.h2d_bytes_per_s:
        per_gib = (1 << 30) / inputs.profile.h2d_bytes_per_s
        return (
            f"the link to the gpu binds: each GiB of --gpu-memory more takes {per_gib:.3f} s off a "
            "step, and more sequences at once cost little",
        )
    limit = "CPU" if plan.gpu is None else "gpu"
    return (f"products bind: fewer bytes from disk would not help; this {limit} is the limit",)
