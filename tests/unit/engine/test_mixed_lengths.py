"""Rows of mixed lengths in one batch answer as each does alone; `Source:` names the report."""

import itertools
from functools import partial

import pytest
import torch

from tests.helpers.checkpoints import (
    load_oracle,
    oracle_greedy_ids,
    tiny_gpt_neox,
    tiny_gptj,
    tiny_opt,
    tiny_opt350,
)
from tests.helpers.engines import drive, greedy_requests, open_engine, run_rows
from zeroinfer.engine import engine
from zeroinfer.engine.step_loop import StepLoop

STREAMED = {"offload.weights": "nvme"}
NUM_NEW_TOKENS = 24
LONG, SHORT, MIDDLE = (
    [token * 7 % 97 for token in range(first, first + length)]
    for first, length in ((5, 12), (40, 3), (71, 7))
)
ROTARY = pytest.mark.parametrize(
    "make",
    [tiny_gptj, tiny_gpt_neox, partial(tiny_gpt_neox, use_parallel_residual=False)],
    ids=["gptj", "gpt_neox", "gpt_neox-sequential"],
)


def _oracle_ids(folder, rows):
    torch.set_num_threads(1)
    model = load_oracle(folder)
    return [oracle_greedy_ids(model, row, NUM_NEW_TOKENS) for row in rows]


@ROTARY
def test_every_order_of_the_rows(tmp_path, make):
    """Source: deepspeedai/DeepSpeed#1797, huggingface/transformers#22161."""
    make(tmp_path)
    rows = [LONG, SHORT, MIDDLE]
    expected = _oracle_ids(tmp_path, rows)
    assert len({tuple(ids) for ids in expected}) == len(rows)
    with open_engine(tmp_path, greedy_requests(rows), STREAMED) as opened:
        for order in itertools.permutations(range(len(rows))):
            run = drive(opened, greedy_requests([rows[idx] for idx in order]))
            assert run.ids == [expected[idx] for idx in order]


@ROTARY
def test_a_short_row_beside_longer_ones(tmp_path, make):
    """Source: deepspeedai/DeepSpeed#1797. As if padded by 0 to 40 tokens, were there padding."""
    make(tmp_path)
    (expected,) = _oracle_ids(tmp_path, [SHORT])
    mates = [[token % 97 for token in range(len(SHORT) + width)] for width in (0, 1, 9, 40)]
    with open_engine(tmp_path, greedy_requests(mates), STREAMED) as opened:
        for mate in mates:
            assert drive(opened, greedy_requests([mate, SHORT])).ids[1] == expected


def test_first_decode_step_uses_each_row_s_own_position(tmp_path, monkeypatch):
    """Source: huggingface/transformers#22161. Position 3 follows a prompt of 3, not 12."""
    tiny_gpt_neox(tmp_path)
    pack, batches = engine.pack, []

    def record(*arguments):
        batches.append(pack(*arguments))
        return batches[-1]

    monkeypatch.setattr(engine, "pack", record)
    run_rows(tmp_path, [LONG, SHORT], STREAMED, max_tokens=2)
    prompts, decodes = batches
    assert prompts.positions.tolist() == [*range(12), *range(3)]
    assert decodes.positions.tolist() == [12, 3]


@pytest.mark.parametrize("make", [tiny_opt, tiny_opt350])
@pytest.mark.parametrize("batch_invariant", ["off", "on"])
def test_fp16_opt_stays_finite(tmp_path, make, batch_invariant, monkeypatch):
    """Source: huggingface/transformers#17433. No NaN in any layer, ids of the row alone."""
    make(tmp_path, dtype="float16")
    settings = {**STREAMED, "compute.batch_invariant": batch_invariant}
    alone = [run_rows(tmp_path, [row], settings).ids[0] for row in (LONG, SHORT)]
    checksums, run_stages = [], StepLoop.run

    def record(self, frame, *, has_next):
        logits = run_stages(self, frame, has_next=has_next)
        checksums.extend(checksum[: frame.batch.num_rows] for checksum in self.checksums)
        return logits

    monkeypatch.setattr(StepLoop, "run", record)
    together = run_rows(tmp_path, [LONG, SHORT], settings)
    assert together.ids == alone
    assert len(checksums) == NUM_NEW_TOKENS * (1 + 2 * 2)
    assert torch.isfinite(torch.cat(checksums)).all()
    assert torch.isfinite(torch.cat(together.logits)).all()
