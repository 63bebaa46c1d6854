"""model_type -> the module that builds it; a new family adds one line."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from zeroinfer.errors import CheckpointError, UnsupportedModelError
from zeroinfer.models.base import Model

__all__ = ["MODEL_TYPES", "build_model"]

MODEL_TYPES = {
    "bloom": "zeroinfer.models.bloom",
    "falcon": "zeroinfer.models.falcon",
    "gpt2": "zeroinfer.models.gpt2",
    "gpt_neox": "zeroinfer.models.gpt_neox",
    "gptj": "zeroinfer.models.gptj",
    "llama": "zeroinfer.models.llama",
    "mistral": "zeroinfer.models.mistral",
    "opt": "zeroinfer.models.opt",
    "qwen2": "zeroinfer.models.qwen2",
    "qwen3": "zeroinfer.models.qwen3",
    "starcoder2": "zeroinfer.models.starcoder2",
}
_LAYER_COUNT_KEYS = ("num_hidden_layers", "n_layer", "num_layers")
_MAX_NUM_LAYERS = 10_000


def build_model(config: Mapping[str, Any]) -> Model:
    """Build the model that config.json describes.

    Raises:
        UnsupportedModelError: model_type is unknown, or the config asks for something the family
            does not implement.
        CheckpointError: a key is missing or malformed.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"config.json: model_type {model_type!r} is not supported; "
            f"supported: {', '.join(sorted(MODEL_TYPES))}"
        )
    refuse_quantized(config)
    _check_layer_count(config)
    model: Model = import_module(MODEL_TYPES[model_type]).build(config)
    return model


def refuse_quantized(config: Mapping[str, Any]) -> None:
    """Refuse checkpoints whose tensors are packed codes.

    Raises:
        UnsupportedModelError: the config names a quantisation method.
    """
    quantization = config.get("quantization_config")
    if quantization:
        is_object = isinstance(quantization, Mapping)
        method = quantization.get("quant_method", quantization) if is_object else quantization
        raise UnsupportedModelError(
            f"config.json: quantization_config {method!r} is not supported; "
            "use the model's unquantised checkpoint"
        )


def _check_layer_count(config: Mapping[str, Any]) -> None:
    """Refuse a count that no checkpoint has, before stages are built for all of them."""
    for key in _LAYER_COUNT_KEYS:
        count = config.get(key)
        if isinstance(count, int) and count > _MAX_NUM_LAYERS:
            raise CheckpointError(f"config.json: {key} is {count}, need at most {_MAX_NUM_LAYERS}")
