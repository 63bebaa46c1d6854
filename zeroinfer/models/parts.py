"""What most families spell alike, by prefix: Linear, Conv1D and LayerNorm of Hugging Face, MLPs."""

from dataclasses import replace

from zeroinfer.layers import Activate, Linear, Norm, Op, Param, Role, activation

__all__ = ["activated", "layer_norm", "linear", "mlp"]


def linear(
    prefix: str,
    shape: tuple[int, int],
    role: Role,
    *,
    src: str,
    dst: str,
    has_bias: bool = True,
    is_accumulated: bool = False,
    is_transposed: bool = False,
) -> Linear:
    """Return the product with `prefix`.weight, (N, K), plus `prefix`.bias.

    Transposed, the weight is stored as (K, N): a Conv1D.
    """
    stored = shape[::-1] if is_transposed else shape
    return Linear(
        weight=Param(name=f"{prefix}.weight", shape=stored, role=role),
        bias=Param(name=f"{prefix}.bias", shape=shape[:1], role=role) if has_bias else None,
        src=src,
        dst=dst,
        is_accumulated=is_accumulated,
        is_transposed=is_transposed,
    )


def layer_norm(prefix: str, width: int, *, eps: float, src: str = "hidden", dst: str = "x") -> Norm:
    """Return the layer normalisation with `prefix`.weight and `prefix`.bias."""
    weight, bias = (Param(name=f"{prefix}.{name}", shape=(width,)) for name in ("weight", "bias"))
    return Norm(weight=weight, bias=bias, eps=eps, src=src, dst=dst)


def activated(product: Linear, act: str, *, up: Linear | None = None) -> tuple[Op, ...]:
    """Return ``act(product)``, times a second product if there is one, in place of the first.

    The bias of the first is added in the pass of the activation.
    """
    activate = Activate(
        function=activation(act),
        dst=product.dst,
        num_columns=product.num_columns,
        bias=product.bias,
        up=None if up is None else up.dst,
    )
    return (replace(product, bias=None), *(() if up is None else (up,)), activate)


def mlp(
    prefix: str,
    names: tuple[str, str],
    *,
    hidden: int,
    width: int,
    act: str,
    src: str = "x",
    has_bias: bool = True,
    is_transposed: bool = False,
) -> tuple[Op, ...]:
    """Return ``hidden += second(act(first(src)))``, the products named below `prefix`."""
    first, second = names
    up = linear(
        f"{prefix}.{first}", (width, hidden), Role.COLUMN,
        src=src, dst="wide", has_bias=has_bias, is_transposed=is_transposed,
    )  # fmt: skip
    down = linear(
        f"{prefix}.{second}", (hidden, width), Role.ROW,
        src="wide", dst="hidden", has_bias=has_bias, is_accumulated=True,
        is_transposed=is_transposed,
    )  # fmt: skip
    return (*activated(up, act), down)
