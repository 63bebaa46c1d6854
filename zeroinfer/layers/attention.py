"""Attention over each sequence by itself, so that a row's bits never depend on its batch.

Two ways. Fused: one call of a compiled kernel for all rows of a step, which reads keys and values
from their blocks and takes each row by itself. Plain: torch, sequence by sequence; prompt rows
attend in chunks of a fixed grid, generated rows one by one. Either way, how the scheduler cuts a
prompt, and whether a token was decoded or rebuilt after an interruption, changes no bit.

Letters: H query heads, V key/value heads, G query heads per key/value head, N rows of a chunk,
L keys, D head_dim.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from zeroinfer.layers.frame import Frame, SequenceSlice
from zeroinfer.layers.kv_rows import (
    block_tables,
    generated_rows,
    prompt_rows,
    sequence_rows,
    slot_mapping,
)
from zeroinfer.layers.rotary import RopeConfig, step_rotation
from zeroinfer.native import Rotation

__all__ = ["AttentionConfig", "alibi_slopes", "attend"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Shape, window and positions of one attention layer; plain data."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None = None
    """Rotary positions of queries and keys; None without."""
    scale: float | None = None
    """Factor on the scores; None is head_dim ** -0.5."""
    window: int | None = None
    """How many keys a query sees, its own the newest; None is all. Older ones stay stored."""
    alibi_slopes: tuple[float, ...] = ()
    """Slope of each head's linear position bias; empty without ALiBi."""
    alibi_scale: float = 1.0
    """Factor on the finished bias."""
    is_alibi_bf16: bool = False
    """Whether slopes, positions and their products are rounded to bf16 before they are scaled."""

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    def first_key(self, position: int) -> int:
        """Oldest position that the query at `position` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Slopes of the linear position bias, one per head.

    Source: Press et al., Train Short, Test Long; heads beyond a power of two interleave.
    """
    closest = 2 ** math.floor(math.log2(num_heads))

    def geometric(count: int) -> list[float]:
        base = 2.0 ** -(2.0 ** -(math.log2(count) - 3))
        return [base ** (idx + 1) for idx in range(count)]

    return tuple(geometric(closest) + geometric(2 * closest)[0::2][: num_heads - closest])


def attend(
    config: AttentionConfig, *, query: str, key: str, value: str, dst: str
) -> Callable[[Frame], None]:
    """Return a function that stores the step's keys and values and sets `dst` to the attention.

    With rotary positions queries rotate in place and keys on their way into the cache: `query` and
    `key` are used up.

    Shapes:
        query, dst: (T, H * D). key, value: (T, V * D).
    """

    def run(frame: Frame) -> None:
        out = torch.empty_like(frame[query])
        out[frame.batch.num_rows :] = 0
        q_THD = frame[query].view(-1, config.num_heads, config.head_dim)
        k_TVD = frame[key].view(-1, config.num_kv_heads, config.head_dim)
        v_TVD = frame[value].view(-1, config.num_kv_heads, config.head_dim)
        rotation = None if config.rope is None else step_rotation(config.rope, frame)
        if rotation is not None:
            frame.kernels.rotate(q_THD, rotation)
        is_fused = frame.kernels.can_attend(q_THD)
        (_store_fused if is_fused else _store_plain)(frame, k_TVD, v_TVD, rotation)
        (_attend_fused if is_fused else _attend_plain)(config, frame, q_THD, out.view(q_THD.shape))
        frame[dst] = out

    return run


def _store_fused(
    frame: Frame, k_TVD: torch.Tensor, v_TVD: torch.Tensor, rotation: Rotation | None
) -> None:
    planes = _planes(frame)
    slots_T = slot_mapping(frame, planes[0].shape[2])
    frame.kernels.write_kv(k_TVD, slots_T, planes[0], rotation=rotation)
    frame.kernels.write_kv(v_TVD, slots_T, planes[1])


def _store_plain(
    frame: Frame, k_TVD: torch.Tensor, v_TVD: torch.Tensor, rotation: Rotation | None
) -> None:
    if rotation is not None:
        frame.kernels.rotate(k_TVD, rotation)
    for sequence in frame.batch.sequences:
        kv = frame.kv.sequence(frame.layer_idx, sequence.block_table)
        rows = slice(sequence.row_start, sequence.row_start + sequence.num_rows)
        kv.write("key", sequence.num_computed_tokens, k_TVD[rows])
        kv.write("value", sequence.num_computed_tokens, v_TVD[rows])


def _attend_fused(
    config: AttentionConfig, frame: Frame, q_THD: torch.Tensor, out_THD: torch.Tensor
) -> None:
    """Attend in one call for all sequences, straight from the blocks.

    The kernel takes a row's keys one after the other, in tiles of fixed positions: no cut of a
    prompt changes a bit, on the grid or off it. With bf16 activations prompts stay with torch,
    which multiplies them in bf16.
    """
    is_whole = q_THD.dtype == torch.float32
    if not is_whole:
        for sequence in frame.batch.sequences:
            prompt = replace(sequence, num_rows=prompt_rows(sequence))
            _attend_sequence(config, frame, prompt, q_THD, out_THD)
    frame.kernels.attend(
        q_THD,
        out_THD,
        planes=_planes(frame),
        sequences=sequence_rows(frame) if is_whole else generated_rows(frame),
        tables=block_tables(frame),
        scale=config.head_dim**-0.5 if config.scale is None else config.scale,
        window=config.window,
        bias_HL=_alibi(config, frame).float() if config.alibi_slopes else None,
    )


def _planes(frame: Frame) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = (frame.kv.plane(frame.layer_idx, name) for name in ("key", "value"))
    return key, value


def _attend_plain(
    config: AttentionConfig, frame: Frame, q_THD: torch.Tensor, out_THD: torch.Tensor
) -> None:
    """Attend sequence by sequence with torch; the oracle of the fused way."""
    for sequence in frame.batch.sequences:
        _attend_sequence(config, frame, sequence, q_THD, out_THD)


def _attend_sequence(
    config: AttentionConfig,
    frame: Frame,
    sequence: SequenceSlice,
    q_THD: torch.Tensor,
    out_THD: torch.Tensor,
) -> None:
    """Attend with the rows of one sequence, whose keys and values are stored."""
    if sequence.num_rows == 0:
        return
    first, dtype = sequence.num_computed_tokens, frame.kernel.activation_dtype
    oldest = config.first_key(first)
    kv = frame.kv.sequence(frame.layer_idx, sequence.block_table)
    k_VLD = kv.read("key", sequence.stop_position, dtype, start=oldest)
    v_VLD = kv.read("value", sequence.stop_position, dtype, start=oldest)
    for start, stop in query_chunks(sequence, frame.prompt_chunk_tokens):
        row = sequence.row_start + start - first
        rows = slice(row, row + stop - start)
        keys = slice(config.first_key(start) - oldest, stop - oldest)
        attend_rows = _attend_one if stop - start == 1 else _attend_chunk
        out_THD[rows] = attend_rows(
            config, frame, start, q_THD[rows], k_VLD[:, keys], v_VLD[:, keys]
        )


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


def _attend_one(
    config: AttentionConfig,
    frame: Frame,
    position: int,
    q_1HD: torch.Tensor,
    k_VLD: torch.Tensor,
    v_VLD: torch.Tensor,
) -> torch.Tensor:
    """Attend with the query at `position`; nothing it is given is hidden from it.

    Query heads of one key/value head become rows of one product: its keys are read once.
    """
    grouped = (1, config.num_kv_heads, config.group_size, -1)
    bias = None
    if config.alibi_slopes:
        keys = slice(config.first_key(position), position + 1)
        bias = _alibi(config, frame)[:, keys].view(grouped)
    attended = functional.scaled_dot_product_attention(
        q_1HD.view(grouped), k_VLD[None], v_VLD[None], attn_mask=bias, scale=config.scale
    )
    return attended.reshape(q_1HD.shape)


def _attend_chunk(
    config: AttentionConfig,
    frame: Frame,
    start: int,
    q_NHD: torch.Tensor,
    k_VLD: torch.Tensor,
    v_VLD: torch.Tensor,
) -> torch.Tensor:
    """Attend with the queries from position `start` on.

    The group is the batch of the product: keys and mask serve all of it and are never repeated.
    """
    num_rows, num_keys, group = q_NHD.shape[0], k_VLD.shape[1], config.group_size
    q_GVND = q_NHD.view(num_rows, config.num_kv_heads, group, -1).permute(2, 1, 0, 3)
    attended_GVND = functional.scaled_dot_product_attention(
        q_GVND,
        k_VLD.expand(group, *k_VLD.shape),
        v_VLD.expand(group, *v_VLD.shape),
        attn_mask=_chunk_bias(config, frame, start)[:, :, :num_rows, :num_keys],
        scale=config.scale,
    )
    return attended_GVND.permute(2, 1, 0, 3).reshape(q_NHD.shape)


def _chunk_bias(config: AttentionConfig, frame: Frame, start: int) -> torch.Tensor:
    """Mask plus ALiBi of a grid chunk on the keys it sees, (G or 1, V or 1, N, L).

    Built once per step and shared by layers of one kind; a sequence that ends inside the chunk
    uses a part.
    """
    memo_key = ("attention_bias", config, start)
    if memo_key not in frame.memo:
        grid = frame.prompt_chunk_tokens
        stop = min((start // grid + 1) * grid, _longest(frame))
        bias = frame.place(_mask(config, start, stop))[None, None]
        if config.alibi_slopes:
            alibi_VGL = _alibi(config, frame)[:, config.first_key(start) : stop].view(
                config.num_kv_heads, config.group_size, -1
            )
            bias = alibi_VGL.transpose(0, 1)[:, :, None] + bias
        frame.memo[memo_key] = bias
    return frame.memo[memo_key]


def _mask(config: AttentionConfig, start: int, stop: int) -> torch.Tensor:
    """Zero where a query of [start, stop) sees a key of [first_key(start), stop), else -inf."""
    queries = torch.arange(start, stop)[:, None]
    keys = torch.arange(config.first_key(start), stop)
    is_hidden = keys > queries
    if config.window is not None:
        is_hidden |= keys <= queries - config.window
    return torch.zeros(is_hidden.shape).masked_fill_(is_hidden, float("-inf"))


def _alibi(config: AttentionConfig, frame: Frame) -> torch.Tensor:
    """Bias of every head on every key of the step's longest sequence, (H, L).

    It grows with the key's position; what the distance to the query would add is the same for all
    keys of a row, and softmax forgets it.
    """
    memo_key = ("alibi", config.alibi_slopes, config.alibi_scale, config.is_alibi_bf16)
    if memo_key not in frame.memo:
        slopes, positions = torch.tensor(config.alibi_slopes), torch.arange(_longest(frame))
        if config.is_alibi_bf16:
            slopes = slopes.bfloat16()
        bias = (slopes[:, None] * positions).float() * config.alibi_scale
        frame.memo[memo_key] = frame.place(bias)
    return frame.memo[memo_key]


def _longest(frame: Frame) -> int:
    return max(sequence.stop_position for sequence in frame.batch.sequences)
