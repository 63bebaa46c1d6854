"""Llama: RMS norms, rotary positions, grouped-query attention, gated MLP."""

from collections.abc import Mapping
from typing import Any

from zeroinfer.models.base import Model, Stage
from zeroinfer.models.hf_config import refuse_unless
from zeroinfer.models.rotary_decoder import RotaryDecoder

__all__ = ["build"]


def build(config: Mapping[str, Any]) -> Model:
    """Build the stages from config.json.

    Raises:
        CheckpointError: a key is missing or contradicts another.
        UnsupportedModelError: a value is not implemented.
    """
    refuse_unless(config, "pretraining_tp", 1, None)
    decoder = RotaryDecoder.read(config)
    has_bias, has_mlp_bias = (bool(config.get(f"{part}_bias")) for part in ("attention", "mlp"))

    def layer(idx: int) -> tuple[Stage, ...]:
        return (
            decoder.attention_stage(idx, has_qkv_bias=has_bias, has_output_bias=has_bias),
            decoder.gated_mlp_stage(idx, has_bias=has_mlp_bias),
        )

    return decoder.model("llama", layer)
