"""Qwen3: llama with normalised query and key heads, and a sliding window on some layers."""

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
    decoder = RotaryDecoder.read({"head_dim": 128, **config}, windows=layer_windows(config))
    has_bias = bool(config.get("attention_bias", False))

    def layer(idx: int) -> tuple[Stage, ...]:
        attention = decoder.attention_stage(
            idx, has_qkv_bias=has_bias, has_output_bias=has_bias, has_head_norms=True
        )
        return attention, decoder.gated_mlp_stage(idx)

    return decoder.model("qwen3", layer)
