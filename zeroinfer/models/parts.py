"""Operators as most families spell them: Hugging Face's Linear and LayerNorm, by prefix."""

from zeroinfer.layers import Linear, Norm, Param, Role

__all__ = ["layer_norm", "linear"]


def linear(
    prefix: str,
    shape: tuple[int, int],
    role: Role,
    *,
    src: str,
    dst: str,
    has_bias: bool = True,
    is_accumulated: bool = False,
) -> Linear:
    """Return the product with `prefix`.weight, (N, K), plus `prefix`.bias."""
    return Linear(
        weight=Param(name=f"{prefix}.weight", shape=shape, role=role),
        bias=Param(name=f"{prefix}.bias", shape=shape[:1], role=role) if has_bias else None,
        src=src,
        dst=dst,
        is_accumulated=is_accumulated,
    )


def layer_norm(prefix: str, width: int, *, eps: float, src: str = "hidden", dst: str = "x") -> Norm:
    """Return the layer normalisation with `prefix`.weight and `prefix`.bias."""
    weight, bias = (Param(name=f"{prefix}.{name}", shape=(width,)) for name in ("weight", "bias"))
    return Norm(weight=weight, bias=bias, eps=eps, src=src, dst=dst)
