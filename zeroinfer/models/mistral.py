"""Mistral: llama with a sliding window."""

from collections.abc import Mapping
from typing import Any

from zeroinfer.models.base import Model, Stage
from zeroinfer.models.hf_config import get_int, refuse_unless, sliding_window
from zeroinfer.models.rotary_decoder import RotaryDecoder

__all__ = ["build"]


def build(config: Mapping[str, Any]) -> Model:
    """Build the stages from config.json.

    Raises:
        CheckpointError: a key is missing or contradicts another.
        UnsupportedModelError: a value is not implemented.
    """
    refuse_unless(config, "layer_types", None)
    window = sliding_window(config, default=4096)
    decoder = RotaryDecoder.read(config, windows=[window] * get_int(config, "num_hidden_layers"))

    def layer(idx: int) -> tuple[Stage, ...]:
        return decoder.attention_stage(idx), decoder.gated_mlp_stage(idx)

    return decoder.model("mistral", layer)
