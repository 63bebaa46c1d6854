"""Placing weights over a device, DRAM and storage; arithmetic only.

The device comes first: KV and activations live there, weights take what is left. What it cannot
keep streams through its landing ring in every step, from DRAM as far as that reaches, from storage
the rest. A unit that is not at home in DRAM passes through a staging place there.
"""

from zeroinfer.planner.cost import resolve_invariance
from zeroinfer.planner.inputs import Draft, GpuInputs, PlanInputs, Shape
from zeroinfer.planner.placement import choose_resident, split_memory
from zeroinfer.planner.refusal import MIN_STAGING_SLOTS

__all__ = ["draft_on_gpu", "slot_bytes"]

_STAGING_SLOTS = 4
"""Places between storage and device where memory allows: reads go on while copies drain."""


def draft_on_gpu(inputs: PlanInputs, gpu: GpuInputs, shape: Shape) -> Draft | None:
    """Place the weights beside a shape; None if it does not fit."""
    fetched = inputs.fetched
    on_device = gpu.budget_bytes - inputs.fixed_gpu_bytes(shape)
    in_dram = inputs.budget_bytes - inputs.fixed_dram_bytes(shape)
    if inputs.dram_weights_bytes is not None:
        in_dram = min(in_dram, inputs.dram_weights_bytes)
    if on_device < 0 or in_dram < 0:
        return None
    kept, ring_bytes = split_memory(
        [gpu.footprints[idx] for idx in fetched],
        available=on_device,
        is_kept=inputs.weights in ("auto", "gpu"),
        prefetch_depth=inputs.prefetch_depth,
    )
    resident = frozenset(fetched[position] for position in kept)
    streamed = tuple(idx for idx in fetched if idx not in resident)
    if ring_bytes < max((gpu.footprints[idx] for idx in streamed), default=0):
        return None
    if streamed and inputs.weights == "gpu":
        return None
    placed = _place_in_dram(inputs, streamed, in_dram, is_staged=bool(resident))
    if placed is None:
        return None
    dram, num_slots = placed
    num_bytes = {idx: inputs.units[idx].num_bytes for idx in streamed}
    is_invariant, prediction = resolve_invariance(
        inputs,
        shape.num_seqs,
        nvme_bytes=sum(size for idx, size in num_bytes.items() if idx not in dram),
        h2d_bytes=sum(num_bytes.values()),
    )
    return Draft(
        shape=shape,
        resident=resident,
        streamed=streamed,
        ring_bytes=ring_bytes,
        is_invariant=is_invariant,
        prediction=prediction,
        dram=dram,
        num_staging_slots=num_slots,
    )


def slot_bytes(inputs: PlanInputs) -> int:
    """Bytes of one staging place: those of the largest unit as it is read."""
    return max((inputs.footprints[idx] for idx in inputs.fetched), default=0)


def _place_in_dram(
    inputs: PlanInputs, streamed: tuple[int, ...], available: int, *, is_staged: bool
) -> tuple[frozenset[int], int] | None:
    """Return the units at home in DRAM and the number of staging places; None if none fits."""
    everything = frozenset((*streamed, *inputs.gathered))
    total = sum(inputs.footprints[idx] for idx in everything)
    if inputs.weights == "dram":
        return (everything, 0) if total <= available else None
    if inputs.weights != "nvme" and not is_staged and total <= available:
        return everything, 0
    slot = slot_bytes(inputs)
    num_slots = max(MIN_STAGING_SLOTS, min(_STAGING_SLOTS, available // (4 * max(1, slot))))
    rest = available - num_slots * slot
    if rest < 0:
        return None
    if inputs.weights == "nvme":
        return frozenset(), num_slots
    if total <= rest:
        return everything, num_slots
    sizes = [inputs.footprints[idx] for idx in streamed]
    chosen = choose_resident(sizes, budget_bytes=rest)
    return frozenset(streamed[position] for position in chosen), num_slots
