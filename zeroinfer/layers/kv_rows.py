"""Where the rows of a step lie in the KV cache, as the tables that kernels read.

Built once per step and kept in its memo: every layer stores and reads at the same places. All are
int64 on the CPU. Letters: T packed rows, S sequences, W kv_blocks of the longest.
"""

from collections.abc import Callable

import torch

from zeroinfer.layers.frame import Frame, SequenceSlice

__all__ = ["block_tables", "generated_rows", "prompt_rows", "sequence_rows", "slot_mapping"]


def prompt_rows(sequence: SequenceSlice) -> int:
    """How many of a sequence's rows, the first ones, are prompt."""
    return min(max(sequence.num_prompt_tokens - sequence.num_computed_tokens, 0), sequence.num_rows)


def slot_mapping(frame: Frame, block_size: int) -> torch.Tensor:
    """Place of every row in a plane, (T,): kv_block * block_size + offset; -1 for padding."""

    def build() -> torch.Tensor:
        slots = torch.full((frame.batch.input_ids.shape[0],), -1)
        for sequence in frame.batch.sequences:
            positions = torch.arange(sequence.num_computed_tokens, sequence.stop_position)
            blocks = torch.tensor(sequence.block_table)[positions // block_size]
            rows = slice(sequence.row_start, sequence.row_start + sequence.num_rows)
            slots[rows] = blocks * block_size + positions % block_size
        return slots

    return _once(frame, "slot_mapping", build)


def block_tables(frame: Frame) -> torch.Tensor:
    """Blocks of every sequence, (S, W); short tables are filled up with block 0, never read."""

    def build() -> torch.Tensor:
        tables = [sequence.block_table for sequence in frame.batch.sequences]
        width = max(map(len, tables), default=0)
        return torch.tensor([table + (0,) * (width - len(table)) for table in tables])

    return _once(frame, "block_tables", build)


def sequence_rows(frame: Frame) -> torch.Tensor:
    """First row, number of rows and position of the first row of every sequence, (S, 3)."""
    sequences = frame.batch.sequences
    return _once(
        frame,
        "sequence_rows",
        lambda: torch.tensor([(s.row_start, s.num_rows, s.num_computed_tokens) for s in sequences]),
    )


def generated_rows(frame: Frame) -> torch.Tensor:
    """The same without the rows of prompts."""

    def build() -> torch.Tensor:
        first = torch.tensor([prompt_rows(sequence) for sequence in frame.batch.sequences])
        return sequence_rows(frame) + torch.stack([first, -first, first], dim=1)

    return _once(frame, "generated_rows", build)


def _once(frame: Frame, name: str, build: Callable[[], torch.Tensor]) -> torch.Tensor:
    if name not in frame.memo:
        frame.memo[name] = build()
    return frame.memo[name]
