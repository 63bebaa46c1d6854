"""The operator protocol, and the operators that are neither attention nor rotary.

A stage of a model is a list of operators over named activations. An operator knows its parameters
by name and never where they live. Letters: T rows, K and N columns.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from zeroinfer.layers.frame import Frame
from zeroinfer.layers.params import LandedWeights, Param, Rows
from zeroinfer.native import Activation

__all__ = ["Activate", "Apply", "Embed", "Linear", "Norm", "Op", "SelectLogits"]


class Op(Protocol):
    """One operation of a stage."""

    @property
    def params(self) -> tuple[Param, ...]:
        """Parameters fetched before the operator runs."""
        ...

    @property
    def gathered(self) -> tuple[Param, ...]:
        """Matrices of which only single rows are used."""
        ...

    @property
    def num_output_columns(self) -> int:
        """Columns of the new activation per row; 0 if none is allocated."""
        ...

    @property
    def is_splittable(self) -> bool:
        """Whether it may run on pieces of output rows, on the weight grid."""
        ...

    @property
    def flops_per_row(self) -> int:
        """Floating-point operations of its products per row."""
        ...

    def run(self, frame: Frame, weights: LandedWeights, rows: Rows | None) -> None:
        """Compute on the frame; `rows` is set for a piece of a splittable operator."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A product with one weight matrix, plus bias; optionally added to what `dst` holds."""

    weight: Param
    src: str
    dst: str
    bias: Param | None = None
    is_accumulated: bool = False
    is_transposed: bool = False
    """The weight is stored as (K, N), as GPT-2's Conv1D does; such a matrix is never split."""
    gathered: tuple[Param, ...] = field(default=(), init=False)

    @property
    def params(self) -> tuple[Param, ...]:
        """Weight and bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def num_columns(self) -> int:
        """N of the whole matrix."""
        return self.weight.shape[1 if self.is_transposed else 0]

    @property
    def num_output_columns(self) -> int:
        """N, or 0 when adding to an existing activation."""
        return 0 if self.is_accumulated else self.num_columns

    @property
    def is_splittable(self) -> bool:
        """By output rows, unless stored transposed."""
        return not self.is_transposed

    @property
    def flops_per_row(self) -> int:
        """A multiplication and an addition per weight."""
        return 2 * self.weight.num_elements

    def run(self, frame: Frame, weights: LandedWeights, rows: Rows | None) -> None:
        """Multiply; a piece fills its own columns of `dst`."""
        out = frame.allocate(self.dst, self.num_columns, like=self.src)
        if rows is not None:
            out = out[:, rows.start : rows.stop]
        multiply = frame.kernel.linear_transposed if self.is_transposed else frame.kernel.linear
        multiply(
            frame[self.src], weights[self.weight.name], out, is_accumulated=self.is_accumulated
        )
        if self.bias is not None:
            out += frame.kernel.vector(weights[self.bias.name])


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """RMS or layer normalisation, computed in fp32."""

    weight: Param
    eps: float
    src: str
    dst: str
    bias: Param | None = None
    is_rms: bool = False
    num_heads: int = 1
    """Parts of a row that share the weight and are normalised each by itself."""
    gathered: tuple[Param, ...] = field(default=(), init=False)
    is_splittable: bool = field(default=False, init=False)
    flops_per_row: int = field(default=0, init=False)

    @property
    def params(self) -> tuple[Param, ...]:
        """Weight and bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def num_output_columns(self) -> int:
        """Width of a row."""
        return self.num_heads * self.weight.shape[0]

    def run(self, frame: Frame, weights: LandedWeights, rows: Rows | None) -> None:
        """Normalise every row, or every head of it."""
        assert rows is None, f"norm {self.weight.name} cannot run on a piece: {rows}"
        x = frame[self.src]
        normed = frame.kernels.norm(
            x.view(-1, self.weight.shape[0]),
            weights[self.weight.name].to(frame.kernel.weight_dtype),
            bias=_vector(self.bias, frame, weights),
            eps=self.eps,
            is_rms=self.is_rms,
        )
        frame[self.dst] = normed.view(x.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Activate:
    """``dst = function(dst + bias) * up`` in one pass; bias and up may be left out.

    A bias before an activation belongs here: its product would add it in a pass of its own.
    """

    function: Activation
    dst: str
    num_columns: int
    bias: Param | None = None
    up: str | None = None
    gathered: tuple[Param, ...] = field(default=(), init=False)
    is_splittable: bool = field(default=False, init=False)
    flops_per_row: int = field(default=0, init=False)

    @property
    def params(self) -> tuple[Param, ...]:
        """The bias."""
        return () if self.bias is None else (self.bias,)

    @property
    def num_output_columns(self) -> int:
        """N for a GELU, which torch does not compute in place."""
        return 0 if self.function in (Activation.RELU, Activation.SILU) else self.num_columns

    def run(self, frame: Frame, weights: LandedWeights, rows: Rows | None) -> None:
        """Activate every element."""
        assert rows is None, f"activation of {self.dst} cannot run on a piece: {rows}"
        frame[self.dst] = frame.kernels.activate(
            self.function,
            frame[self.dst],
            bias=_vector(self.bias, frame, weights),
            up=None if self.up is None else frame[self.up],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Embed:
    """Rows of a table by token id or by position, set as or added to `dst`."""

    weight: Param
    dst: str
    is_positional: bool = False
    position_offset: int = 0
    """Rows of a table of positions before that of position 0."""
    is_accumulated: bool = False
    params: tuple[Param, ...] = field(default=(), init=False)
    is_splittable: bool = field(default=False, init=False)
    flops_per_row: int = field(default=0, init=False)

    @property
    def gathered(self) -> tuple[Param, ...]:
        """The table."""
        return (self.weight,)

    @property
    def num_output_columns(self) -> int:
        """Hidden size."""
        return self.weight.shape[1]

    def run(self, frame: Frame, weights: LandedWeights, rows: Rows | None) -> None:
        """Gather one row per packed token."""
        assert rows is None, f"embedding {self.weight.name} cannot run on a piece: {rows}"
        batch = frame.batch
        ids = batch.positions + self.position_offset if self.is_positional else batch.input_ids
        values = frame.kernel.vector(weights.gather(self.weight.name, ids))
        if self.is_accumulated:
            frame[self.dst] += values
        else:
            frame[self.dst] = values


@dataclass(frozen=True, kw_only=True, slots=True)
class Apply:
    """A function without parameters over activations: attention, splits, copies."""

    fn: Callable[[Frame], None]
    num_output_columns: int = 0
    params: tuple[Param, ...] = field(default=(), init=False)
    gathered: tuple[Param, ...] = field(default=(), init=False)
    is_splittable: bool = field(default=False, init=False)
    flops_per_row: int = field(default=0, init=False)

    def run(self, frame: Frame, weights: LandedWeights, rows: Rows | None) -> None:
        """Call the function."""
        self.fn(frame)


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectLogits:
    """Keep the rows whose logits are wanted, padded to the row tile."""

    src: str
    dst: str
    num_output_columns: int
    params: tuple[Param, ...] = field(default=(), init=False)
    gathered: tuple[Param, ...] = field(default=(), init=False)
    is_splittable: bool = field(default=False, init=False)
    flops_per_row: int = field(default=0, init=False)

    def run(self, frame: Frame, weights: LandedWeights, rows: Rows | None) -> None:
        """Copy the wanted rows."""
        source = frame[self.src]
        indices = frame.batch.logits_indices.to(source.device)
        num_padded = frame.kernel.padded_rows(indices.shape[0])
        selected = torch.zeros(
            (num_padded, source.shape[1]), dtype=source.dtype, device=source.device
        )
        torch.index_select(source, 0, indices, out=selected[: indices.shape[0]])
        frame[self.dst] = selected


def _vector(param: Param | None, frame: Frame, weights: LandedWeights) -> torch.Tensor | None:
    """Return a landed bias in the model's dtype, as kernels take it."""
    return None if param is None else weights[param.name].to(frame.kernel.weight_dtype)
