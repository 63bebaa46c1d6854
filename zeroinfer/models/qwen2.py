"""Qwen2: llama with biased queries, keys and values, and a sliding window on some layers."""

from collections.abc import Mapping
from typing import Any

from zeroinfer.models.base import Model, Stage
from zeroinfer.models.hf_config import layer_windows
from zeroinfer.models.rotary_decoder import RotaryDecoder

__all__ = ["build"]


def build(config: Mapping[str, Any]) -> Model:
    """Build the stages from config.json.

    Raises:
        CheckpointError: a key is missing or contradicts another.
        UnsupportedModelError: a value is not implemented.
    """
    decoder = RotaryDecoder.read(config, windows=layer_windows(config))

    def layer(idx: int) -> tuple[Stage, ...]:
        return decoder.attention_stage(idx, has_qkv_bias=True), decoder.gated_mlp_stage(idx)

    return decoder.model("qwen2", layer)
