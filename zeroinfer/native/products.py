"""Matrix products on a fixed grid, with weights used in the layout and dtype of the checkpoint.

The grid belongs to the model: a matrix may be cut at every `tile_rows` output rows, a function of
its input columns and the mode alone, and streamed in such pieces it gives the bits of the whole.
With batch invariance, the caller pads activations to row tiles, and torch multiplies tile by tile.

Three modes. `native` multiplies in the model's dtype: bf16 on CPUs with bf16 units, fp32, and all
dtypes on a GPU. `fused` is our own kernel (csrc/cpu/linear.cpp): weights are widened in cache and
multiplied in fp32, and a row's bits depend on no other row, so that batch invariance costs no
padding. `upcast` is what torch alone can do for bf16 and fp16: it widens one weight tile at a time
into a scratch and multiplies that in fp32; only a single row takes bf16 tiles as they are.

Where a weight lies in memory changes no bit, with one exception: torch rounds the product of a
single fp32 row otherwise if the weight does not begin at a multiple of 16 bytes (MKL 2024.2). On
the CPU address and file offset agree in these bits, so that no placement shows it; a copy of the
file whose tensors lie otherwise can.
"""

from dataclasses import dataclass, field

import torch

from zeroinfer.dtypes import DType
from zeroinfer.native.extension import extension, has_fused_kernels
from zeroinfer.native.kernels import half_to_bf16
from zeroinfer.units import MIB, align_down, align_up

__all__ = ["ProductKernel", "has_fast_bf16", "has_fused_products", "torch_dtype"]

_UPCAST_TILE_BYTES = 8 * MIB
"""fp32 bytes of a widened tile: 512 rows at K = 4096 measured fastest of 256, 512, 1024 (Zen 3)."""
_NATIVE_TILE_BYTES = 16 * MIB
_TILE_ROW_GRAIN = 64
_MANY_ROWS = 1 << 20
"""More rows than the fused kernel's scratch grows with."""

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
    return _has_feature("avx512_bf16")


def has_fused_products() -> bool:
    """Whether our own kernel is the fastest fp32 product here.

    It is written for AVX2; where AVX-512 is, torch's fp32 products use twice as wide vectors.
    """
    return has_fused_kernels() and not _has_feature("avx512")


def _has_feature(name: str) -> bool:
    probe = getattr(torch.cpu, f"_is_{name}_supported", None)
    return bool(probe()) if probe is not None else False


class _Scratch:
    """Memory a product works in, kept: a heap that gives and takes it each time breaks apart."""

    def __init__(self) -> None:
        self._flat = torch.empty(0)

    def like(self, tile: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor of the tile's shape, valid until the next call."""
        return self.flat(tile.numel(), dtype).view(tile.shape)

    def flat(self, num_elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return so many elements, valid until the next call."""
        if self._flat.numel() < num_elements or self._flat.dtype != dtype:
            self._flat = torch.empty(num_elements, dtype=dtype)
        return self._flat[:num_elements]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductKernel:
    """Multiplies activations with weights of one model dtype.

    Mode, dtypes and tiles follow from the model's dtype, device, number of threads and what
    else computes the rows, never from the batch or from where weights are.
    """

    mode: str
    """`native`, `fused` or `upcast`."""
    weight_dtype: torch.dtype
    """The model's dtype; tensors stored in another one are rounded to it as they are used."""
    activation_dtype: torch.dtype
    """Dtype of activations between operators."""
    row_tile: int
    """Rows of an activation tile when batch invariance is on."""
    is_batch_invariant: bool = False
    """Whether rows are multiplied in row tiles; the plan decides it once."""
    _scratch: _Scratch = field(default_factory=_Scratch, repr=False, compare=False)

    @classmethod
    def resolve(
        cls,
        weight_dtype: torch.dtype,
        *,
        is_batch_invariant: bool = False,
        num_threads: int | None = None,
        mode: str = "auto",
        are_rows_apart: bool = False,
    ) -> "ProductKernel":
        """Choose tiles for this CPU, and with `auto` the fastest mode.

        With `are_rows_apart` whatever is computed between products gives a row the same bits in
        any batch; then fused products need no padding for batch invariance.

        `auto` widens fp16: it has no fast product on CPUs, and fp32 sums cannot overflow.
        """
        threads = num_threads or torch.get_num_threads()
        if mode == "auto":
            mode = _fastest_mode(weight_dtype)
        # Vector loops handle 16 fp32 at a time and the rest one by one, with other bits: with this
        # multiple no thread's share of a tile has a rest, wherever a row lies.
        base_rows = 256 if mode == "native" and weight_dtype != torch.float32 else 64
        is_untiled = mode == "fused" and are_rows_apart
        return cls(
            mode=mode,
            weight_dtype=weight_dtype,
            activation_dtype=weight_dtype if mode == "native" else torch.float32,
            row_tile=1 if is_untiled else align_up(base_rows, 16 * threads),
            is_batch_invariant=is_batch_invariant,
        )

    @staticmethod
    def weight_tile_rows(num_columns: int, *, mode: str) -> int:
        """Output rows of one weight tile; a function of K and mode alone."""
        if mode == "fused":
            return _TILE_ROW_GRAIN
        budget = _UPCAST_TILE_BYTES // 4 if mode == "upcast" else _NATIVE_TILE_BYTES // 2
        return max(_TILE_ROW_GRAIN, align_down(budget // max(1, num_columns), _TILE_ROW_GRAIN))

    def tile_rows(self, num_columns: int) -> int:
        """Output rows of this kernel's weight tile for K columns."""
        return self.weight_tile_rows(num_columns, mode=self.mode)

    def scratch_elements(self, shape: tuple[int, ...]) -> int:
        """fp32 elements that a product with an (N, K) matrix needs beside its operands."""
        num_outputs, num_columns = shape
        tile = min(num_outputs, self.tile_rows(num_columns)) * num_columns
        if self.mode != "fused":
            return 2 * tile
        assert extension is not None, "fused products need the extension"
        return tile + int(extension.linear_scratch_bytes(_MANY_ROWS, num_columns)) // 4

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
        if self.mode == "fused":
            self._multiply_fused(x, weight, out, is_accumulated)
            return
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
        if self.mode == "fused":
            self._multiply_fused(x, weight.T, out, is_accumulated)
            return
        tile = self.tile_rows(weight.shape[0])
        for start in range(0, weight.shape[1], tile):
            columns = slice(start, min(start + tile, weight.shape[1]))
            operand = self._operand(weight[:, columns])
            self._multiply_tile(x, operand, out[:, columns], is_accumulated)

    def vector(self, values: torch.Tensor) -> torch.Tensor:
        """Bring biases or embedding rows into activation dtype, rounded to the model's first."""
        return values.to(self.weight_dtype).to(self.activation_dtype)

    def _multiply_fused(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, is_accumulated: bool
    ) -> None:
        """Multiply with an (N, K) weight of any strides; in pieces if it must be rounded first."""
        assert extension is not None, "fused products need the extension"
        is_as_is = weight.dtype == self.weight_dtype
        step = weight.shape[0] if is_as_is else self.tile_rows(weight.shape[1])
        scratch = self._scratch.flat(extension.linear_scratch_bytes(*x.shape) // 4)
        for start in range(0, weight.shape[0], step):
            columns = slice(start, start + step)
            extension.linear(
                x=x,
                weight=weight[columns].to(self.weight_dtype),
                out=out[:, columns],
                scratch=scratch,
                num_threads=torch.get_num_threads(),
                is_accumulated=is_accumulated,
            )

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
        if self._is_half_for_bf16(tile):
            return half_to_bf16(tile, out=self._scratch.like(tile, torch.bfloat16))
        rounded = tile.to(self.weight_dtype)
        if rounded.dtype == self.activation_dtype:
            return rounded
        return self._scratch.like(rounded, self.activation_dtype).copy_(rounded)

    def _is_half_for_bf16(self, tile: torch.Tensor) -> bool:
        """Whether fp16 is multiplied in bf16; on a CPU torch converts it several times slower."""
        is_bf16 = self.weight_dtype == self.activation_dtype == torch.bfloat16
        is_half = tile.dtype == torch.float16 and tile.device.type == "cpu"
        return is_bf16 and is_half and tile.is_contiguous()


def _fastest_mode(weight_dtype: torch.dtype) -> str:
    if weight_dtype == torch.bfloat16 and has_fast_bf16():
        return "native"
    if has_fused_products():
        return "fused"
    return "native" if weight_dtype == torch.float32 else "upcast"
