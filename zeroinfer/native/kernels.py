"""What a step computes beside its products: norms, rotary positions, activations, attention.

Compiled (csrc/cpu) where the extension is built and the CPU has AVX2; else, and for tensors on a
GPU, plain torch. Both compute in fp32 and round results to the activations' dtype; their last bits
differ. A compiled kernel handles each row or head in one thread and one order, so that its bits
depend neither on the batch nor on threads.

The torch path of attention is not here but in zeroinfer.layers: it is more than one operator.

Letters: T packed rows, N columns, H query heads, V key/value heads, D head_dim, C rotated pairs,
S sequences, L positions.
"""

import enum
from dataclasses import dataclass

import torch
from torch.nn import functional

from zeroinfer.errors import BackendUnavailableError
from zeroinfer.native.extension import extension, extension_error, has_fused_kernels

__all__ = ["Activation", "Rotation", "RowKernels", "half_to_bf16"]


class Activation(enum.IntEnum):
    """A pointwise function; the values are those of zeroinfer/kernels.h."""

    RELU = 0
    SILU = 1
    GELU = 2
    GELU_TANH = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation:
    """How the rows of a step rotate: the first 2 * C columns of every head, the others stay.

    Column c pairs with column c + C, or 2 * c with 2 * c + 1 when interleaved.

    Shapes:
        cos, sin: (T, C).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    is_interleaved: bool = False


def half_to_bf16(values: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Turn fp16 into bf16, where it lies if there is no `out`, and return the bf16 tensor.

    bf16 has the wider range: nothing overflows, and three bits are rounded to nearest even.

    Shapes:
        values, out: contiguous, fp16 and bf16.
    """
    target = values.view(torch.bfloat16) if out is None else out
    if extension is not None and values.device.type == "cpu":
        extension.half_to_bf16(
            source=values.view(-1), target=target.view(-1), num_threads=torch.get_num_threads()
        )
    else:
        target.copy_(values.to(torch.bfloat16))
    return target


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKernels:
    """The operators of packed rows, compiled or torch's."""

    is_fused: bool
    """Whether compiled kernels are used for fp32 and bf16 tensors on the CPU."""

    @classmethod
    def resolve(cls, mode: str = "auto") -> "RowKernels":
        """Choose for this installation and CPU.

        Args:
            mode: `auto`, `on` or `off`.

        Raises:
            BackendUnavailableError: `on`, and the compiled kernels are not here.
        """
        if mode == "on" and not has_fused_kernels():
            reason = extension_error or "this CPU lacks AVX2, FMA or F16C"
            raise BackendUnavailableError(
                f"compute.fused_kernels is on, but there are none: {reason}; set it to auto"
            )
        return cls(is_fused=mode != "off" and has_fused_kernels())

    def can_fuse(self, x: torch.Tensor) -> bool:
        """Whether the compiled kernels take this activation."""
        is_known = x.dtype == torch.float32 or x.dtype == torch.bfloat16
        return self.is_fused and is_known and x.device.type == "cpu"

    def can_attend(self, q_THD: torch.Tensor) -> bool:
        """Whether `write_kv` and `attend` take these queries."""
        if extension is None or not self.can_fuse(q_THD):
            return False
        return q_THD.shape[-1] <= int(extension.attention_max_head_dim)

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        eps: float,
        is_rms: bool,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the RMS or layer norm of every row; with a residual, after ``x += residual``.

        A residual is for sums that no product ends: products add to the residual stream as they
        store, which is no pass of its own.

        Shapes:
            x, residual: (T, N). weight, bias: (N,), one dtype, bf16, fp16 or fp32.
        """
        if extension is not None and self.can_fuse(x):
            out = torch.empty_like(x)
            extension.norm(
                x=x,
                out=out,
                weight=weight,
                bias=bias,
                residual=residual,
                eps=eps,
                is_rms=is_rms,
                num_threads=torch.get_num_threads(),
            )
            return out
        if residual is not None:
            x += residual
        return _torch_norm(x, weight, bias, eps=eps, is_rms=is_rms)

    def rotate(self, heads_THD: torch.Tensor, rotation: Rotation) -> None:
        """Rotate every head in place.

        Shapes:
            heads_THD: heads of any strides, columns contiguous.
        """
        if extension is not None and self.can_fuse(heads_THD):
            extension.rotary(
                x=heads_THD,
                cos=rotation.cos,
                sin=rotation.sin,
                is_interleaved=rotation.is_interleaved,
                num_threads=torch.get_num_threads(),
            )
        else:
            _torch_rotate(heads_THD, rotation)

    def activate(
        self,
        activation: Activation,
        x: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        up: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``activation(x + bias) * up``; bias and up may be left out, `x` is used up.

        Shapes:
            x, up: (T, N). bias: (N,), bf16, fp16 or fp32.
        """
        if extension is not None and self.can_fuse(x):
            extension.activate(
                activation=int(activation),
                x=x,
                bias=bias,
                up=up,
                out=x,
                num_threads=torch.get_num_threads(),
            )
            return x
        out = _torch_activate(activation, x if bias is None else x.add_(bias))
        return out if up is None else out.mul_(up)

    def write_kv(
        self,
        values_TVD: torch.Tensor,
        slots_T: torch.Tensor,
        plane: torch.Tensor,
        *,
        rotation: Rotation | None = None,
    ) -> None:
        """Store keys or values in the KV cache, in its dtype; compiled alone (`can_attend`).

        With a rotation the cache gets the bits of `rotate` and a store; `values_TVD` stay.

        Shapes:
            slots_T: int64, block number * block size + offset of each row; below 0 is left out.
            plane: (blocks, V, block size, D).
        """
        assert extension is not None, "write_kv needs the extension; ask can_attend first"
        extension.kv_write(
            values=values_TVD,
            slots=slots_T,
            plane=plane,
            cos=None if rotation is None else rotation.cos,
            sin=None if rotation is None else rotation.sin,
            is_interleaved=rotation is not None and rotation.is_interleaved,
            num_threads=torch.get_num_threads(),
        )

    def attend(
        self,
        q_THD: torch.Tensor,
        out_THD: torch.Tensor,
        *,
        planes: tuple[torch.Tensor, torch.Tensor],
        sequences: torch.Tensor,
        tables: torch.Tensor,
        scale: float,
        window: int | None = None,
        bias_HL: torch.Tensor | None = None,
    ) -> None:
        """Attend to the keys and values stored in blocks; compiled alone (`can_attend`).

        A row at position p sees positions up to p, or the newest `window` of them. Rows of no
        sequence are left as they are in `out_THD`.

        Shapes:
            planes: keys and values, (blocks, V, block size, D) each. sequences: (S, 3) int64:
            first row, number of rows, position of the first. tables: (S, W) int64, the blocks of
            each sequence in order. bias_HL: fp32, added to the scores by head and key position.
        """
        assert extension is not None, "attend needs the extension; ask can_attend first"
        extension.attention(
            query=q_THD,
            out=out_THD,
            key=planes[0],
            value=planes[1],
            sequences=sequences,
            tables=tables,
            bias=bias_HL,
            scale=scale,
            window=window or 0,
            num_threads=torch.get_num_threads(),
        )


def _torch_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    eps: float,
    is_rms: bool,
) -> torch.Tensor:
    weight = weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    if not is_rms:
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    out = (wide * scale).to(x.dtype).mul_(weight)
    return out if bias is None else out.add_(bias)


def _torch_rotate(heads_THD: torch.Tensor, rotation: Rotation) -> None:
    cos, sin = rotation.cos[:, None], rotation.sin[:, None]
    rotated = heads_THD[..., : 2 * cos.shape[-1]]
    if rotation.is_interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    turned = first * cos - second * sin
    second.mul_(cos).add_(first * sin)
    first.copy_(turned)


def _torch_activate(activation: Activation, x: torch.Tensor) -> torch.Tensor:
    if activation is Activation.RELU:
        return functional.relu(x, inplace=True)
    if activation is Activation.SILU:
        return functional.silu(x, inplace=True)
    approximate = "tanh" if activation is Activation.GELU_TANH else "none"
    return functional.gelu(x, approximate=approximate)
