"""Activation functions of hidden layers, in place where the input is used up."""

from collections.abc import Callable

from zeroinfer.errors import UnsupportedModelError
from zeroinfer.layers.frame import Frame
from zeroinfer.native import Activation

__all__ = ["activation", "gated", "pointwise"]

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}


def activation(name: str) -> Activation:
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
        frame[dst] = frame.kernels.activate(act, frame[gate], up=frame[up])

    return run


def pointwise(name: str, *, src: str, dst: str) -> Callable[[Frame], None]:
    """Return a function that sets ``dst = act(src)``; it uses `src` up."""
    act = activation(name)

    def run(frame: Frame) -> None:
        frame[dst] = frame.kernels.activate(act, frame[src])

    return run
