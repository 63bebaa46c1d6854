"""Attention of packed sequences against one softmax per head, written out."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from zeroinfer.kvcache import KVCache, KVPlane
from zeroinfer.layers import (
    AttentionConfig,
    Frame,
    PackedBatch,
    RopeConfig,
    SequenceSlice,
    alibi_slopes,
    attend,
)
from zeroinfer.layers.attention import query_chunks
from zeroinfer.native import ProductKernel, RowKernels

HEAD_DIM = 8
CHUNK = 4


def _rope(**params):
    return RopeConfig(head_dim=HEAD_DIM, rope_theta=100.0, max_position_embeddings=64, **params)


CONFIGS = {
    "multi-head": {"num_heads": 4, "num_kv_heads": 4},
    "grouped": {"num_heads": 4, "num_kv_heads": 2},
    "multi-query": {"num_heads": 4, "num_kv_heads": 1},
    "scaled": {"num_heads": 4, "num_kv_heads": 4, "scale": 1.0},
    "alibi": {"num_heads": 4, "num_kv_heads": 4, "alibi_slopes": alibi_slopes(4)},
    "alibi-3": {"num_heads": 3, "num_kv_heads": 3, "alibi_slopes": alibi_slopes(3)},
    "alibi-grouped": {"num_heads": 6, "num_kv_heads": 2, "alibi_slopes": alibi_slopes(6)},
    "alibi-bf16": {
        "num_heads": 6, "num_kv_heads": 6, "alibi_slopes": alibi_slopes(6),
        "alibi_scale": HEAD_DIM**-0.5, "is_alibi_bf16": True,
    },
    "rotary": {"num_heads": 4, "num_kv_heads": 2, "rope": _rope()},
    "rotary-neighbours": {
        "num_heads": 4, "num_kv_heads": 1, "rope": _rope(rotary_dim=6, is_interleaved=True),
    },
    "window-1": {"num_heads": 4, "num_kv_heads": 4, "window": 1},
    "window-3": {"num_heads": 4, "num_kv_heads": 4, "window": 3},
    "window-4-grouped": {"num_heads": 4, "num_kv_heads": 2, "window": 4},
    "window-9-multi-query": {"num_heads": 4, "num_kv_heads": 1, "window": 9},
    "window-alibi": {
        "num_heads": 6, "num_kv_heads": 3, "window": 5, "alibi_slopes": alibi_slopes(6),
    },
}  # fmt: skip


@pytest.fixture(params=["fused", "plain"], autouse=True)
def way(request, monkeypatch):
    """Attend with the compiled kernels and with torch alone."""
    kernels = RowKernels(is_fused=request.param == "fused")
    monkeypatch.setattr(RowKernels, "resolve", staticmethod(lambda: kernels))


def _config(name):
    return AttentionConfig(head_dim=HEAD_DIM, **CONFIGS[name])


def _alibi(config, head, num_keys):
    slope, positions = torch.tensor(config.alibi_slopes[head]), torch.arange(float(num_keys))
    if config.is_alibi_bf16:
        return (slope.bfloat16().float() * positions).bfloat16().float() * config.alibi_scale
    return slope * positions * config.alibi_scale


def _rotated(rope, heads):
    """Heads at positions 0, 1, ... by definition, one pair of columns at a time."""
    if rope is None:
        return heads
    out, half = heads.clone(), rope.dim // 2
    for pair in range(half):
        angles = torch.arange(len(heads)) * rope.rope_theta ** (-2 * pair / rope.dim)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = (2 * pair, 2 * pair + 1) if rope.is_interleaved else (pair, pair + half)
        out[..., first] = heads[..., first] * cos - heads[..., second] * sin
        out[..., second] = heads[..., second] * cos + heads[..., first] * sin
    return out


class _World:
    """A KV cache and the rows of a few sequences, computed in any pieces."""

    def __init__(self, config, lengths, *, num_prompt_tokens=None, block_size=3, seed=0):
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        kv_width, width = config.num_kv_heads * HEAD_DIM, config.num_heads * HEAD_DIM
        self.q, self.k, self.v = (
            [torch.randn((n, w), generator=generator) for n in lengths]
            for w in (width, kv_width, kv_width)
        )
        self.num_prompt_tokens = num_prompt_tokens or lengths
        planes = [
            KVPlane(name=name, num_heads=config.num_kv_heads, head_dim=HEAD_DIM)
            for name in ("key", "value")
        ]
        per_sequence = math.ceil(max(lengths) / block_size)
        self.kv = KVCache.create(
            planes, num_layers=1, num_blocks=per_sequence * len(lengths), block_size=block_size,
            dtype=torch.float32,
        )  # fmt: skip
        self.tables = [
            tuple(range(per_sequence * idx, per_sequence * (idx + 1)))[::-1]
            for idx in range(len(lengths))
        ]

    def frame(self, pieces):
        """Return a frame with rows [start, stop) of the sequences named."""
        slices, row = [], 0
        for idx, start, stop in pieces:
            slices.append(
                SequenceSlice(
                    row_start=row, num_rows=stop - start, num_computed_tokens=start,
                    num_prompt_tokens=self.num_prompt_tokens[idx], block_table=self.tables[idx],
                )
            )  # fmt: skip
            row += stop - start
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in pieces])
        batch = PackedBatch(
            input_ids=torch.zeros(row), positions=positions, rope_lengths=positions + 1,
            logits_indices=torch.tensor([0]), num_rows=row, sequences=tuple(slices),
        )  # fmt: skip
        frame = Frame(
            batch=batch, kernel=ProductKernel.resolve(torch.float32, num_threads=1), kv=self.kv,
            prompt_chunk_tokens=CHUNK, layer_idx=0,
        )  # fmt: skip
        for name, rows in (("q", self.q), ("k", self.k), ("v", self.v)):
            frame[name] = torch.cat([rows[idx][start:stop] for idx, start, stop in pieces])
        return frame

    def compute(self, pieces, *, frame=None):
        """Attend rows [start, stop) of the sequences named; returns one tensor each."""
        frame = frame or self.frame(pieces)
        attend(self.config, query="q", key="k", value="v", dst="out")(frame)
        return list(frame["out"].split([stop - start for _, start, stop in pieces]))

    def reference(self, idx):
        """The same by definition, one query and head at a time."""
        config, length = self.config, len(self.q[idx])
        group = config.num_heads // config.num_kv_heads
        q = self.q[idx].view(length, config.num_heads, HEAD_DIM)
        k, v = (t[idx].view(length, config.num_kv_heads, HEAD_DIM) for t in (self.k, self.v))
        q, k = (_rotated(config.rope, heads) for heads in (q, k))
        scale = config.scale or HEAD_DIM**-0.5
        out = torch.zeros(length, config.num_heads, HEAD_DIM)
        for position in range(length):
            oldest = 0 if config.window is None else max(0, position - config.window + 1)
            seen = slice(oldest, position + 1)
            for head in range(config.num_heads):
                scores = k[seen, head // group] @ q[position, head] * scale
                if config.alibi_slopes:
                    scores = scores + _alibi(config, head, position + 1)[seen]
                out[position, head] = scores.softmax(-1) @ v[seen, head // group]
        return out.view(length, -1)


@pytest.mark.parametrize("name", CONFIGS)
def test_whole_prompts_of_mixed_lengths(name):
    world = _World(_config(name), [9, 1, 4, 6])
    outs = world.compute([(idx, 0, n) for idx, n in enumerate([9, 1, 4, 6])])
    for idx, out in enumerate(outs):
        torch.testing.assert_close(out, world.reference(idx), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_decodes_beside_prompts(name):
    world = _World(_config(name), [7, 5], num_prompt_tokens=[4, 5])
    first = world.compute([(0, 0, 4)])[0]
    mixed = world.compute([(0, 4, 5), (1, 0, 5)])
    rest = [world.compute([(0, position, position + 1)])[0] for position in (5, 6)]
    whole = torch.cat([first, mixed[0], *rest])
    torch.testing.assert_close(whole, world.reference(0), atol=1e-5, rtol=0)
    torch.testing.assert_close(mixed[1], world.reference(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("cuts", [[0, 4, 10], [0, 8, 10], [0, 4, 8, 10]])
def test_cuts_on_the_grid_change_no_bit(name, cuts):
    whole = _World(_config(name), [10]).compute([(0, 0, 10)])[0]
    world = _World(_config(name), [10])
    pieces = [world.compute([(0, a, b)])[0] for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("name", CONFIGS)
def test_rebuilding_many_generated_tokens_gives_the_bits_of_decoding(name):
    lengths, num_prompt = [11], [5]
    rebuilt = _World(_config(name), lengths, num_prompt_tokens=num_prompt).compute([(0, 0, 11)])
    world = _World(_config(name), lengths, num_prompt_tokens=num_prompt)
    decoded = [world.compute([(0, 0, 5)])[0]]
    decoded += [world.compute([(0, position, position + 1)])[0] for position in range(5, 11)]
    assert torch.equal(rebuilt[0], torch.cat(decoded))


@pytest.mark.parametrize("name", CONFIGS)
def test_mates_change_no_bit(name):
    """The mask is shared over a step; a longer mate must not widen a shorter row's sums."""
    alone = _World(_config(name), [9, 6]).compute([(1, 0, 6)])[0]
    beside = _World(_config(name), [9, 6]).compute([(0, 0, 9), (1, 0, 6)])[1]
    assert torch.equal(alone, beside)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_kv_blocks_change_no_bit(name, block_size):
    def whole(size):
        world = _World(_config(name), [11], num_prompt_tokens=[7], block_size=size)
        return world.compute([(0, 0, 11)])[0]

    assert torch.equal(whole(block_size), whole(3))


@pytest.mark.parametrize("window", [1, 3, 4, 6])
def test_what_left_the_window_may_be_anything(window):
    """Not even NaN among older keys and values reaches a row, prompt or decoded."""
    config = replace(_config("grouped"), window=window)
    want = _World(config, [11], num_prompt_tokens=[9]).compute([(0, 0, 11)])[0]
    world = _World(config, [11], num_prompt_tokens=[9])
    world.compute([(0, 0, 8)])
    kv = world.kv.sequence(0, world.tables[0])
    for plane in ("key", "value"):
        unseen = max(0, 8 - window + 1)
        kv.write(plane, 0, torch.full((unseen, config.num_kv_heads, HEAD_DIM), float("nan")))
    got = [world.compute([(0, position, position + 1)])[0] for position in range(8, 11)]
    assert torch.equal(torch.cat(got), want[8:])


def test_layers_with_and_without_a_window_share_a_step():
    """Each kind of layer keeps a mask of its own, where masks are needed."""
    worlds = [_World(_config(name), [9]) for name in ("window-3", "multi-head", "alibi")]
    frame = worlds[0].frame([(0, 0, 9)])
    for world in worlds:
        out = world.compute([(0, 0, 9)], frame=frame)[0]
        torch.testing.assert_close(out, world.reference(0), atol=1e-5, rtol=0)
    masks = [key for key in frame.memo if key[0] == "attention_bias"]
    assert len(masks) == (0 if frame.kernels.can_attend(torch.ones(1, 1, HEAD_DIM)) else 3 * 2)


@pytest.mark.parametrize(
    ("window", "position", "expected"),
    [(None, 100, 0), (8, 0, 0), (8, 7, 0), (8, 8, 1), (8, 20, 13), (1, 5, 5)],
)
def test_first_key(window, position, expected):
    assert replace(_config("multi-head"), window=window).first_key(position) == expected


@pytest.mark.parametrize(
    ("first", "num_rows", "num_prompt", "expected"),
    [
        (0, 10, 10, [(0, 4), (4, 8), (8, 10)]),
        (4, 6, 10, [(4, 8), (8, 10)]),
        (2, 4, 10, [(2, 4), (4, 6)]),
        (10, 1, 10, [(10, 11)]),
        (0, 8, 6, [(0, 4), (4, 6), (6, 7), (7, 8)]),
    ],
)
def test_query_chunks(first, num_rows, num_prompt, expected):
    piece = SequenceSlice(
        row_start=0, num_rows=num_rows, num_computed_tokens=first, num_prompt_tokens=num_prompt,
        block_table=(),
    )  # fmt: skip
    assert list(query_chunks(piece, CHUNK)) == expected


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 6, 8, 12, 16, 112])
def test_alibi_slopes_are_those_of_transformers(num_heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor  # noqa: PLC0415 - heavy

    alibi = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)
    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads)), alibi[:, 0, 1])


@pytest.mark.parametrize("name", ["multi-head", "alibi-grouped", "window-3", "rotary"])
def test_bf16_activations(name):
    """Prompts and generated tokens, rebuilt and decoded, whichever of them a kernel computes."""
    world = _World(_config(name), [10, 6], num_prompt_tokens=[4, 6])
    frame = world.frame([(0, 0, 10), (1, 0, 6)])
    frame.kernel = ProductKernel.resolve(torch.bfloat16, mode="native", num_threads=1)
    for tensor in "qkv":
        frame[tensor] = frame[tensor].bfloat16()
    outs = world.compute([(0, 0, 10), (1, 0, 6)], frame=frame)
    for idx, out in enumerate(outs):
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), world.reference(idx), atol=0.05, rtol=0.02)


@pytest.mark.parametrize("name", ["rotary", "rotary-neighbours"])
def test_what_is_stored_is_rotated(name):
    """The cache holds rotated keys, and values as they are, whoever wrote them."""
    config = _config(name)
    world = _World(config, [7])
    world.compute([(0, 0, 4)])
    world.compute([(0, 4, 7)])
    kv = world.kv.sequence(0, world.tables[0])
    keys, values = (t[0].view(7, config.num_kv_heads, HEAD_DIM) for t in (world.k, world.v))
    stored = [kv.read(plane, 7, torch.float32).transpose(0, 1) for plane in ("key", "value")]
    torch.testing.assert_close(stored[0], _rotated(config.rope, keys), atol=1e-5, rtol=0)
    assert torch.equal(stored[1], values)
