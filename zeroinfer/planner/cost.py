"""What a decode step costs: the slowest of storage, link and products, since they overlap."""

from zeroinfer.planner.inputs import PlanInputs
from zeroinfer.planner.plan import Prediction
from zeroinfer.units import align_up

__all__ = ["resolve_invariance"]

_COMPUTE_PER_PRODUCTS = 1.25
"""A step's compute over its products alone: norms, attention, activations. Less with compiled
kernels, more with plain torch; tools/bench_compute.py measures it."""


def resolve_invariance(
    inputs: PlanInputs, num_seqs: int, *, nvme_bytes: int, h2d_bytes: int = 0
) -> tuple[bool, Prediction]:
    """Decide on batch invariance and predict a full decode step with it.

    Args:
        inputs: rates, rows and the user's choice.
        num_seqs: rows of the step.
        nvme_bytes: read from storage in it.
        h2d_bytes: copied to a device in it.
    """
    padded, plain = (
        _predict(inputs, num_seqs, nvme_bytes, h2d_bytes, is_padded) for is_padded in (True, False)
    )
    is_free = inputs.row_tile == 1 or padded.bound_by != "compute"
    is_on = inputs.batch_invariant == "on" or (inputs.batch_invariant == "auto" and is_free)
    return is_on, padded if is_on else plain


def _predict(
    inputs: PlanInputs, num_seqs: int, nvme_bytes: int, h2d_bytes: int, is_padded: bool
) -> Prediction:
    rows = align_up(num_seqs, inputs.row_tile) if is_padded else num_seqs
    # A tile of one row is no tile: such products take all rows at once.
    rate_rows = inputs.row_tile if is_padded and inputs.row_tile > 1 else rows
    profile = inputs.profile
    rate = profile.matmul_rate(inputs.dtype, inputs.product_mode, rate_rows)
    return Prediction(
        io_s=nvme_bytes / profile.nvme_read_bytes_per_s,
        h2d_s=h2d_bytes / profile.h2d_bytes_per_s if profile.h2d_bytes_per_s else 0.0,
        compute_s=_COMPUTE_PER_PRODUCTS * inputs.flops_per_row * rows / rate,
    )
