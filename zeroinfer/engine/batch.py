"""Packing scheduled tokens into the tensors of a step."""

import torch

from zeroinfer.engine.scheduler import Scheduled
from zeroinfer.layers import PackedBatch, SequenceSlice
from zeroinfer.native import ProductKernel

__all__ = ["pack"]


def pack(scheduled: list[Scheduled], kernel: ProductKernel) -> PackedBatch:
    """Lay the tokens of all sequences end to end, padded only to the kernel's row tile.

    Padding rows hold token 0 at position 0; they attend to nothing and nobody reads them.
    """
    input_ids: list[int] = []
    positions: list[int] = []
    rope_lengths: list[int] = []
    slices: list[SequenceSlice] = []
    logits_rows: list[int] = []
    for item in scheduled:
        sequence, count = item.sequence, item.num_scheduled_tokens
        first, num_prompt = sequence.num_computed_tokens, sequence.num_prompt_tokens
        slices.append(
            SequenceSlice(
                row_start=len(input_ids),
                num_rows=count,
                num_computed_tokens=first,
                num_prompt_tokens=num_prompt,
                block_table=sequence.block_table,
            )
        )
        input_ids += sequence.token_ids[first : first + count]
        positions += range(first, first + count)
        rope_lengths += [max(num_prompt, position + 1) for position in range(first, first + count)]
        if item.has_logits:
            logits_rows.append(len(input_ids) - 1)
    num_rows = len(input_ids)
    padding = [0] * (kernel.padded_rows(num_rows) - num_rows)
    return PackedBatch(
        input_ids=torch.tensor(input_ids + padding),
        positions=torch.tensor(positions + padding),
        rope_lengths=torch.tensor(rope_lengths + [1] * len(padding)),
        logits_indices=torch.tensor(logits_rows, dtype=torch.int64),
        num_rows=num_rows,
        sequences=tuple(slices),
    )
