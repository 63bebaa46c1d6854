"""Attention over each sequence by itself, so that a row's bits never depend on its batch.

Prompt rows attend in chunks of a fixed grid, generated rows one by one: how the scheduler cuts a
prompt, and whether a token was decoded or rebuilt after an interruption, changes no bit.

Letters: H query heads, G query heads per key/value head, V key/value heads, N rows of a chunk,
L keys, D head_dim.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from zeroinfer.layers.frame import Frame, SequenceKV, SequenceSlice

__all__ = ["AttentionConfig", "alibi_slopes", "attend"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Shape of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_alibi: bool = False
    scale: float | None = None
    """Factor on the scores; None is head_dim ** -0.5."""


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Slopes of the linear position bias, one per head.

    Source: Press et al., Train Short, Test Long; heads beyond a power of two interleave.
    """
    closest = 2 ** math.floor(math.log2(num_heads))

    def geometric(count: int) -> list[float]:
        base = 2.0 ** -(2.0 ** -(math.log2(count) - 3))
        return [base ** (idx + 1) for idx in range(count)]

    slopes = geometric(closest)
    slopes += geometric(2 * closest)[0::2][: num_heads - closest]
    return torch.tensor(slopes, dtype=torch.float32)


def attend(
    config: AttentionConfig, *, query: str, key: str, value: str, dst: str
) -> Callable[[Frame], None]:
    """Return a function that stores the step's keys and values and sets `dst` to the attention.

    Shapes:
        query, dst: (T, H * D). key, value: (T, V * D).
    """

    def run(frame: Frame) -> None:
        out = torch.zeros_like(frame[query])
        q_THD = frame[query].view(-1, config.num_heads, config.head_dim)
        k_TVD = frame[key].view(-1, config.num_kv_heads, config.head_dim)
        v_TVD = frame[value].view(-1, config.num_kv_heads, config.head_dim)
        out_THD = out.view(q_THD.shape)
        for sequence in frame.batch.sequences:
            kv = frame.kv.sequence(frame.layer_idx, sequence.block_table)
            rows = slice(sequence.row_start, sequence.row_start + sequence.num_rows)
            kv.write("key", sequence.num_computed_tokens, k_TVD[rows])
            kv.write("value", sequence.num_computed_tokens, v_TVD[rows])
            _attend_sequence(config, frame, sequence, kv, q_THD[rows], out_THD[rows])
        frame[dst] = out

    return run


def _attend_sequence(
    config: AttentionConfig,
    frame: Frame,
    sequence: SequenceSlice,
    kv: SequenceKV,
    q_NHD: torch.Tensor,
    out_NHD: torch.Tensor,
) -> None:
    dtype = frame.kernel.activation_dtype
    key = kv.read("key", sequence.stop_position, dtype)
    value = kv.read("value", sequence.stop_position, dtype)
    first = sequence.num_computed_tokens
    for start, stop in query_chunks(sequence, frame.prompt_chunk_tokens):
        bias = _bias(config, frame, start, stop)
        rows = slice(start - first, stop - first)
        q_NVGD = q_NHD[rows].view(stop - start, config.num_kv_heads, -1, config.head_dim)
        # Query heads of one key/value head become rows of one product: keys are never repeated.
        q_VGND = q_NVGD.permute(1, 2, 0, 3).reshape(1, config.num_kv_heads, -1, config.head_dim)
        attended = functional.scaled_dot_product_attention(
            q_VGND, key[None, :, :stop], value[None, :, :stop], attn_mask=bias, scale=config.scale
        )
        shape = (config.num_kv_heads, -1, stop - start, config.head_dim)
        out_NHD[rows] = attended.view(shape).permute(2, 0, 1, 3).reshape(q_NHD[rows].shape)


def query_chunks(sequence: SequenceSlice, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the position ranges that attend together: prompt grid chunks, then single tokens."""
    position, stop = sequence.num_computed_tokens, sequence.stop_position
    prompt_stop = min(stop, sequence.num_prompt_tokens)
    while position < prompt_stop:
        chunk_stop = min((position // chunk_tokens + 1) * chunk_tokens, prompt_stop)
        yield position, chunk_stop
        position = chunk_stop
    while position < stop:
        yield position, position + 1
        position += 1


def _bias(config: AttentionConfig, frame: Frame, start: int, stop: int) -> torch.Tensor | None:
    """Causal mask plus ALiBi of one chunk, (1, V or 1, G * N, L).

    Built once per step for the whole grid chunk; sequences that end inside it use a part.
    """
    if stop - start == 1 and not config.has_alibi:
        return None
    memo_key = ("attention_bias", start, stop - start == 1)
    if memo_key not in frame.memo:
        limit = start + 1 if stop - start == 1 else _chunk_limit(frame, start)
        frame.memo[memo_key] = _build_bias(config, start, limit, frame.kernel.activation_dtype)
    bias = frame.memo[memo_key][:, :, :, : stop - start, :stop]
    return bias.reshape(1, bias.shape[1], -1, stop)


def _chunk_limit(frame: Frame, start: int) -> int:
    longest = max(sequence.stop_position for sequence in frame.batch.sequences)
    return min((start // frame.prompt_chunk_tokens + 1) * frame.prompt_chunk_tokens, longest)


def _build_bias(config: AttentionConfig, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Bias of rows [start, stop) on keys [0, stop), (1, V or 1, G, N, L)."""
    group = config.num_heads // config.num_kv_heads
    is_hidden = torch.arange(stop)[None, :] > torch.arange(start, stop)[:, None]
    causal = torch.zeros(is_hidden.shape).masked_fill_(is_hidden, float("-inf"))
    if not config.has_alibi:
        return causal.to(dtype).expand(1, 1, group, *causal.shape)
    slopes = alibi_slopes(config.num_heads)
    bias = slopes[:, None, None] * torch.arange(stop, dtype=torch.float32) + causal
    return bias.to(dtype).view(1, config.num_kv_heads, group, *causal.shape)
