"""Choosing the next token of each row from its own logits and its own seed."""

import torch

from zeroinfer.engine.request import SamplingParams

__all__ = ["sample"]

_SEED_STRIDE = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: neighbouring seeds and positions give unrelated states."""


def sample(
    logits: torch.Tensor, params: SamplingParams, *, position: int, generator: torch.Generator
) -> int:
    """Return a token id.

    The draw depends on (seed, position) alone, so that a resumed row goes on as if it had never
    stopped, whatever runs beside it.

    Args:
        logits: of one row.
        params: how to choose.
        position: number of tokens generated so far.
        generator: scratch; its state is set here.

    Shapes:
        logits: (vocab,), any float dtype, finite.
    """
    if params.temperature == 0:
        return int(logits.argmax())
    wide = logits.float()
    # The largest becomes 0, so that a tiny temperature overflows to -inf, never to inf.
    scaled = (wide - wide.max()).double().div_(params.temperature).float()
    probabilities = _keep_top_p(_keep_top_k(scaled, params.top_k).softmax(-1), params.top_p)
    generator.manual_seed((params.seed * _SEED_STRIDE + position) % (1 << 63))
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _keep_top_k(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    if not 0 < top_k < logits.shape[-1]:
        return logits
    threshold = logits.topk(top_k).values[-1]
    return logits.masked_fill(logits < threshold, float("-inf"))


def _keep_top_p(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero the tail; the likeliest token always stays."""
    if top_p >= 1:
        return probabilities
    ordered, indices = probabilities.sort(descending=True, stable=True)
    is_tail = ordered.cumsum(-1) - ordered >= top_p
    return probabilities.index_fill(-1, indices[is_tail], 0.0)
