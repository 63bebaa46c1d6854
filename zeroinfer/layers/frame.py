"""The tensors of one step: packed rows of all scheduled sequences, and what operators share.

Letters: T packed rows of the step (padded), R rows whose logits are wanted.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from zeroinfer.native import ProductKernel, RowKernels

__all__ = ["Frame", "KVView", "PackedBatch", "SequenceKV", "SequenceSlice"]


class SequenceKV(Protocol):
    """The key/value planes of one sequence in one layer."""

    def write(self, plane: str, start: int, values: torch.Tensor) -> None:
        """Store values (tokens, heads, head_dim) at positions start, start + 1, ..."""
        ...

    def read(self, plane: str, stop: int, dtype: torch.dtype, *, start: int = 0) -> torch.Tensor:
        """Return positions [start, stop) as (heads, stop - start, head_dim) in `dtype`."""
        ...


class KVView(Protocol):
    """Access to the planes of the sequences of a step."""

    def sequence(self, layer_idx: int, block_table: tuple[int, ...]) -> SequenceKV:
        """Return the planes of one sequence in one layer."""
        ...

    def plane(self, layer_idx: int, name: str) -> torch.Tensor:
        """Return all blocks of a plane, (blocks, heads, block size, head_dim)."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSlice:
    """The rows of one sequence in the packed step."""

    row_start: int
    num_rows: int
    num_computed_tokens: int
    """Position of the first row."""
    num_prompt_tokens: int
    """Rows below this position are prompt and attend in grid chunks; later ones attend alone."""
    block_table: tuple[int, ...]

    @property
    def stop_position(self) -> int:
        """Position after the last row."""
        return self.num_computed_tokens + self.num_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """The inputs of one step, packed without padding between sequences.

    Shapes:
        input_ids, positions, rope_lengths: (T,) int64; rows from num_rows on pad the last row
        tile. logits_indices: (R,) rows whose logits are wanted.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    rope_lengths: torch.Tensor
    """What length-dependent rope scaling sees: prompt length for prompt rows, else position + 1."""
    logits_indices: torch.Tensor
    num_rows: int
    sequences: tuple[SequenceSlice, ...]


@dataclass(kw_only=True, slots=True)
class Frame:
    """Named activations of the step in progress, and what its operators share."""

    batch: PackedBatch
    kernel: ProductKernel
    kv: KVView
    prompt_chunk_tokens: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where the activations are."""
    kernels: RowKernels = field(default_factory=lambda: RowKernels.resolve())
    """What norms, rotary, activations and attention are computed with."""
    layer_idx: int = -1
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    memo: dict[object, torch.Tensor] = field(default_factory=dict)
    """What is computed once per step and used by every layer: rotary tables, attention masks."""

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return an activation."""
        return self.tensors[name]

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        """Set an activation."""
        self.tensors[name] = value

    def allocate(self, name: str, num_columns: int, *, like: str) -> torch.Tensor:
        """Return activation `name` with as many rows as `like`, allocating it if it is new."""
        if name not in self.tensors:
            rows = self.tensors[like].shape[0]
            self.tensors[name] = torch.empty(
                (rows, num_columns), dtype=self.kernel.activation_dtype, device=self.device
            )
        return self.tensors[name]

    def place(self, values: torch.Tensor) -> torch.Tensor:
        """Return what the host made for activations in their dtype and where they are."""
        return values.to(device=self.device, dtype=self.kernel.activation_dtype)

    def drop_temporaries(self, kept: frozenset[str]) -> None:
        """Forget all activations but `kept`; called at the end of a stage."""
        for name in [name for name in self.tensors if name not in kept]:
            del self.tensors[name]
