"""StarCoder2: llama with layer norms, biases, an MLP without a gate, and a tied head."""

from collections.abc import Mapping
from typing import Any

from zeroinfer.models.base import Model, Stage
from zeroinfer.models.hf_config import get_int, get_value, refuse_unless, sliding_window
from zeroinfer.models.parts import mlp
from zeroinfer.models.rotary_decoder import RotaryDecoder

__all__ = ["build"]

_DEFAULTS = {"norm_epsilon": 1e-5, "num_key_value_heads": 2, "tie_word_embeddings": True}


def build(config: Mapping[str, Any]) -> Model:
    """Build the stages from config.json.

    Raises:
        CheckpointError: a key is missing or contradicts another.
        UnsupportedModelError: a value is not implemented.
    """
    refuse_unless(config, "norm_type", "layer_norm")
    refuse_unless(config, "mlp_type", "default")
    decoder = RotaryDecoder.read(
        {**_DEFAULTS, **config},
        windows=[sliding_window(config)] * get_int(config, "num_hidden_layers"),
        eps_key="norm_epsilon",
        is_rms=False,
    )
    has_bias = bool(config.get("use_bias", True))

    def layer(idx: int) -> tuple[Stage, ...]:
        attention = decoder.attention_stage(idx, has_qkv_bias=has_bias, has_output_bias=has_bias)
        return attention, _mlp_stage(decoder, idx, has_bias=has_bias)

    return decoder.model("starcoder2", layer)


def _mlp_stage(decoder: RotaryDecoder, idx: int, *, has_bias: bool) -> Stage:
    products = mlp(
        f"model.layers.{idx}.mlp",
        ("c_fc", "c_proj"),
        hidden=decoder.hidden_size,
        width=get_int(decoder.config, "intermediate_size"),
        act=str(get_value(decoder.config, "hidden_act", default="gelu_pytorch_tanh")),
        has_bias=has_bias,
    )
    return decoder.mlp_stage(idx, *products)
