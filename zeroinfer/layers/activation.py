"""Activation functions of hidden layers by the names of Hugging Face configs."""

from zeroinfer.errors import UnsupportedModelError
from zeroinfer.native import Activation

__all__ = ["activation"]

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
