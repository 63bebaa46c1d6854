"""Parts of a fused projection against its columns counted one by one."""

import pytest
import torch

from zeroinfer.layers import AttentionConfig, Frame, PackedBatch, split_qkv
from zeroinfer.native import ProductKernel

NUM_ROWS, HEAD_DIM = 3, 2


def _split(config, fused):
    rows = torch.zeros(NUM_ROWS, dtype=torch.int64)
    batch = PackedBatch(
        input_ids=rows, positions=rows, rope_lengths=rows, logits_indices=rows[:1],
        num_rows=NUM_ROWS, sequences=(),
    )  # fmt: skip
    kernel = ProductKernel.resolve(torch.float32, num_threads=1)
    frame = Frame(batch=batch, kernel=kernel, kv=None, prompt_chunk_tokens=4)
    frame["fused"] = fused
    split_qkv(config, src="fused", query="q", key="k", value="v")(frame)
    return frame


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (4, 1), (1, 1)])
def test_columns_of_each_key_value_head_lie_together(num_heads, num_kv_heads):
    config = AttentionConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=HEAD_DIM)
    width = (num_heads + 2 * num_kv_heads) * HEAD_DIM
    fused = torch.arange(NUM_ROWS * width, dtype=torch.float32).view(NUM_ROWS, width)
    want = {"q": [], "k": [], "v": []}
    owners = [*"q" * (num_heads // num_kv_heads), "k", "v"] * num_kv_heads
    for owner, head in zip(owners, fused.split(HEAD_DIM, dim=1), strict=True):
        want[owner].append(head)
    frame = _split(config, fused.clone())
    for name, heads in want.items():
        assert torch.equal(frame[name], torch.cat(heads, dim=1))
        assert frame[name].is_contiguous()


def test_parts_may_be_changed_in_place():
    config = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=HEAD_DIM)
    frame = _split(config, torch.ones(NUM_ROWS, 4 * HEAD_DIM))
    frame["q"].zero_()
    assert frame["k"].eq(1).all()
    assert frame["v"].eq(1).all()
