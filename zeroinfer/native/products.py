"""Matrix products on a fixed grid, with weights used in the layout and dtype of the checkpoint.

The grid belongs to the model: a weight of K columns is multiplied in tiles of `weight_tile_rows`
output rows, always, so that a matrix streamed in pieces gives the bits of the whole one. With
batch invariance, activations are multiplied in tiles of `row_tile` rows as well (the caller pads).

Two modes. `native` multiplies in the weight's dtype; `upcast` widens one weight tile at a time to
fp32 in a scratch that stays in cache, and multiplies in fp32: on a CPU without bf16 units that is
3-5 times faster from 16 rows on, and activations gain precision for nothing.
"""

from dataclasses import dataclass, field

import torch

from zeroinfer.dtypes import DType
from zeroinfer.units import MIB, align_down, align_up

__all__ = ["ProductKernel", "has_fast_bf16", "torch_dtype"]

_UPCAST_TILE_BYTES = 8 * MIB
"""fp32 bytes of a widened tile: 512 rows at K = 4096 measured fastest of 256, 512, 1024 (Zen 3)."""
_NATIVE_TILE_BYTES = 16 * MIB
_TILE_ROW_GRAIN = 64

_TORCH_DTYPES = {
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.F32: torch.float32,
    DType.F64: torch.float64,
}


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's name of a float type that weights may be stored in."""
    return _TORCH_DTYPES[dtype]


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX-512 BF16 or AMX)."""
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(probe()) if probe is not None else False


class _Scratch:
    """Memory of one widened tile, kept: a heap that gives and takes it each time breaks apart."""

    def __init__(self) -> None:
        self._flat = torch.empty(0)

    def like(self, tile: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor of the tile's shape, valid until the next call."""
        if self._flat.numel() < tile.numel() or self._flat.dtype != dtype:
            self._flat = torch.empty(tile.numel(), dtype=dtype)
        return self._flat[: tile.numel()].view(tile.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductKernel:
    """Multiplies activations with weights of one model dtype.

    All fields but the last depend on dtype, thread count and CPU alone.
    """

    mode: str
    """`native` or `upcast`."""
    weight_dtype: torch.dtype
    """The model's dtype; tensors stored in another one are rounded to it as they are used."""
    activation_dtype: torch.dtype
    """Dtype of activations between operators."""
    row_tile: int
    """Rows of an activation tile when batch invariance is on."""
    is_batch_invariant: bool = False
    _scratch: _Scratch = field(default_factory=_Scratch, repr=False, compare=False)

    @classmethod
    def resolve(
        cls,
        weight_dtype: torch.dtype,
        *,
        is_batch_invariant: bool = False,
        num_threads: int | None = None,
        mode: str = "auto",
    ) -> "ProductKernel":
        """Choose mode and tiles for this CPU.

        fp16 is always widened: it has no fast product on CPUs, and fp32 sums cannot overflow.
        """
        threads = num_threads or torch.get_num_threads()
        if mode == "auto":
            is_native = weight_dtype == torch.float32 or (
                weight_dtype == torch.bfloat16 and has_fast_bf16()
            )
            mode = "native" if is_native else "upcast"
        # Vector loops handle 16 fp32 at a time and the rest one by one, with other bits: with this
        # multiple no thread's share of a tile has a rest, wherever a row lies.
        base_rows = 256 if mode == "native" and weight_dtype != torch.float32 else 64
        return cls(
            mode=mode,
            weight_dtype=weight_dtype,
            activation_dtype=weight_dtype if mode == "native" else torch.float32,
            row_tile=align_up(base_rows, 16 * threads),
            is_batch_invariant=is_batch_invariant,
        )

    @staticmethod
    def weight_tile_rows(num_columns: int, *, mode: str) -> int:
        """Output rows of one weight tile; a function of K and mode alone."""
        budget = _UPCAST_TILE_BYTES // 4 if mode == "upcast" else _NATIVE_TILE_BYTES // 2
        return max(_TILE_ROW_GRAIN, align_down(budget // max(1, num_columns), _TILE_ROW_GRAIN))

    def tile_rows(self, num_columns: int) -> int:
        """Output rows of this kernel's weight tile for K columns."""
        return self.weight_tile_rows(num_columns, mode=self.mode)

    def padded_rows(self, num_rows: int) -> int:
        """Rows that activations must be padded to before a product."""
        return align_up(num_rows, self.row_tile) if self.is_batch_invariant else num_rows

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        *,
        is_accumulated: bool = False,
    ) -> None:
        """Compute ``out = x @ weight.T``, or add to it.

        Shapes:
            x: (M, K) in activation_dtype, M padded when batch-invariant. weight: (N, K), any
            float dtype, any alignment. out: (M, N), activation_dtype, rows may be strided.
        """
        tile = self.tile_rows(weight.shape[1])
        for start in range(0, weight.shape[0], tile):
            columns = slice(start, min(start + tile, weight.shape[0]))
            self._multiply(x, weight[columns], out[:, columns], is_accumulated)

    def linear_transposed(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        *,
        is_accumulated: bool = False,
    ) -> None:
        """Compute ``out = x @ weight`` for a weight stored as (K, N), as GPT-2 does."""
        tile = self.tile_rows(weight.shape[0])
        for start in range(0, weight.shape[1], tile):
            columns = slice(start, min(start + tile, weight.shape[1]))
            operand = self._operand(weight[:, columns])
            self._multiply_tile(x, operand, out[:, columns], is_accumulated)

    def vector(self, values: torch.Tensor) -> torch.Tensor:
        """Bring a norm weight or bias into activation dtype, rounded to the model's dtype first."""
        return values.to(self.weight_dtype).to(self.activation_dtype)

    def _multiply(
        self, x: torch.Tensor, tile: torch.Tensor, out: torch.Tensor, is_accumulated: bool
    ) -> None:
        is_single = x.shape[0] == 1 and self.mode == "upcast"
        if is_single and tile.dtype == self.weight_dtype == torch.bfloat16:
            # One row reads the weight once: bound by memory, where bf16 is half the bytes.
            product = torch.nn.functional.linear(x.to(tile.dtype), tile)
            out.add_(product) if is_accumulated else out.copy_(product)
            return
        self._multiply_tile(x, self._operand(tile).T, out, is_accumulated)

    def _multiply_tile(
        self, x: torch.Tensor, operand: torch.Tensor, out: torch.Tensor, is_accumulated: bool
    ) -> None:
        """Multiply with a (K, N) operand in row tiles, straight into `out`."""
        step = self.row_tile if self.is_batch_invariant else max(1, x.shape[0])
        for start in range(0, x.shape[0], step):
            rows, target = x[start : start + step], out[start : start + step]
            if is_accumulated:
                torch.addmm(target, rows, operand, out=target)
            else:
                torch.mm(rows, operand, out=target)

    def _operand(self, tile: torch.Tensor) -> torch.Tensor:
        """Return a tile in activation dtype, rounded to the model's; widened into the scratch."""
        rounded = tile.to(self.weight_dtype)
        if rounded.dtype == self.activation_dtype:
            return rounded
        return self._scratch.like(rounded, self.activation_dtype).copy_(rounded)
