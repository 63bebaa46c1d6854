"""Activation functions, in place where the input is used up."""

from collections.abc import Callable

import torch
from torch.nn import functional

from zeroinfer.errors import UnsupportedModelError
from zeroinfer.layers.frame import Frame

__all__ = ["activation", "gated", "pointwise"]


def _gelu_new(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: functional.silu(x, inplace=True),
    "swish": lambda x: functional.silu(x, inplace=True),
    "gelu": functional.gelu,
    "gelu_new": _gelu_new,
    "gelu_fast": _gelu_new,
    "gelu_pytorch_tanh": _gelu_new,
    "relu": lambda x: functional.relu(x, inplace=True),
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Look up an activation by its name in a model's config.

    Raises:
        UnsupportedModelError: the name is unknown.
    """
    if name not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise UnsupportedModelError(
            f"activation {name!r} of config.json is unknown; known: {known}"
        )
    return _ACTIVATIONS[name]


def gated(name: str, *, gate: str, up: str, dst: str) -> Callable[[Frame], None]:
    """Return a function that sets ``dst = act(gate) * up``; it uses `gate` up."""
    act = activation(name)

    def run(frame: Frame) -> None:
        frame[dst] = act(frame[gate]).mul_(frame[up])

    return run


def pointwise(name: str, *, src: str, dst: str) -> Callable[[Frame], None]:
    """Return a function that sets ``dst = act(src)``; it may use `src` up."""
    act = activation(name)

    def run(frame: Frame) -> None:
        frame[dst] = act(frame[src])

    return run
