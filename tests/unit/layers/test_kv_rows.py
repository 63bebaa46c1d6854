"""Places of packed rows in the KV cache, written out."""

import pytest
import torch

from zeroinfer.layers import Frame, PackedBatch, SequenceSlice
from zeroinfer.layers.kv_rows import (
    block_tables,
    generated_rows,
    prompt_rows,
    sequence_rows,
    slot_mapping,
)
from zeroinfer.native import ProductKernel


def _slice(row_start, num_rows, first, *, num_prompt, table):
    return SequenceSlice(
        row_start=row_start, num_rows=num_rows, num_computed_tokens=first,
        num_prompt_tokens=num_prompt, block_table=table,
    )  # fmt: skip


@pytest.fixture
def frame():
    """Three sequences in blocks of four tokens: a prompt's end, a decode, a rebuilt row."""
    sequences = (
        _slice(0, 3, 2, num_prompt=5, table=(7, 1)),
        _slice(3, 1, 9, num_prompt=6, table=(0, 2, 5)),
        _slice(4, 5, 1, num_prompt=3, table=(3, 6)),
    )
    rows = torch.zeros(12, dtype=torch.int64)
    batch = PackedBatch(
        input_ids=rows, positions=rows, rope_lengths=rows, logits_indices=rows[:1], num_rows=9,
        sequences=sequences,
    )  # fmt: skip
    kernel = ProductKernel.resolve(torch.float32, num_threads=1)
    return Frame(batch=batch, kernel=kernel, kv=None, prompt_chunk_tokens=4)


def test_slots_are_block_and_offset_and_padding_has_none(frame):
    slots = slot_mapping(frame, 4).tolist()
    assert slots == [30, 31, 4, 21, 13, 14, 15, 24, 25, -1, -1, -1]


def test_tables_are_as_wide_as_the_longest(frame):
    assert block_tables(frame).tolist() == [[7, 1, 0], [0, 2, 5], [3, 6, 0]]


def test_rows_of_sequences_whole_and_without_their_prompts(frame):
    assert sequence_rows(frame).tolist() == [[0, 3, 2], [3, 1, 9], [4, 5, 1]]
    assert generated_rows(frame).tolist() == [[3, 0, 5], [3, 1, 9], [6, 3, 3]]
    assert [prompt_rows(sequence) for sequence in frame.batch.sequences] == [3, 0, 2]


def test_tables_are_built_once_a_step(frame):
    assert slot_mapping(frame, 4) is slot_mapping(frame, 4)
    assert generated_rows(frame) is generated_rows(frame)
