"""BLOOM: ALiBi positions, layer norms, qkv fused head by head, tanh-GELU MLP, tied head."""

from collections.abc import Mapping
from typing import Any

from zeroinfer.layers import (
    Apply,
    AttentionConfig,
    Embed,
    Frame,
    Norm,
    Op,
    Param,
    Role,
    alibi_slopes,
    attend,
    split_qkv,
)
from zeroinfer.models.base import Model, Stage, head_stage, key_value_planes
from zeroinfer.models.hf_config import divide_heads, get_eps, get_int, refuse_unless
from zeroinfer.models.parts import layer_norm, linear, mlp

__all__ = ["build"]

_ALIBI_MAX_MODEL_LEN = 1 << 20
"""ALiBi has no table of positions; memory ends a sequence long before this."""


def build(config: Mapping[str, Any]) -> Model:
    """Build the stages from config.json.

    Raises:
        CheckpointError: a key is missing.
        UnsupportedModelError: a value is not implemented.
    """
    refuse_unless(config, "slow_but_exact", False)
    refuse_unless(config, "tie_word_embeddings", True)
    num_layers = get_int(config, "n_layer", "num_hidden_layers")
    hidden, num_heads = _hidden(config), get_int(config, "n_head", "num_attention_heads")
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=divide_heads(hidden, num_heads),
        alibi_slopes=alibi_slopes(num_heads),
    )
    layers = [
        stage
        for idx in range(num_layers)
        for stage in (_attention_stage(config, idx, attention), _mlp_stage(config, idx))
    ]
    return Model(
        model_type="bloom",
        num_layers=num_layers,
        hidden_size=hidden,
        vocab_size=get_int(config, "vocab_size"),
        max_model_len=get_int(config, "seq_length", default=_ALIBI_MAX_MODEL_LEN),
        stages=(
            _embed_stage(config),
            *layers,
            head_stage(_norm(config, "transformer.ln_f"), _table(config)),
        ),
        kv_planes=key_value_planes(attention),
        num_bias_heads=num_heads,
        prefixes=("", "transformer."),
        tied_names=("lm_head.weight",),
    )


def _hidden(config: Mapping[str, Any]) -> int:
    return get_int(config, "hidden_size", "n_embed")


def _table(config: Mapping[str, Any]) -> Param:
    shape = (get_int(config, "vocab_size"), _hidden(config))
    return Param(name="transformer.word_embeddings.weight", shape=shape, role=Role.VOCAB)


def _norm(config: Mapping[str, Any], prefix: str, *, dst: str = "x") -> Norm:
    eps = get_eps(config, "layer_norm_epsilon", default=1e-5)
    return layer_norm(prefix, _hidden(config), eps=eps, dst=dst)


def _residual(config: Mapping[str, Any]) -> tuple[Op, ...]:
    """With apply_residual_connection_post_layernorm the norm's output carries on, not its input."""
    if not config.get("apply_residual_connection_post_layernorm", False):
        return ()

    def carry(frame: Frame) -> None:
        frame["hidden"] = frame["x"].clone()

    return (Apply(fn=carry, num_output_columns=_hidden(config)),)


def _embed_stage(config: Mapping[str, Any]) -> Stage:
    norm = _norm(config, "transformer.word_embeddings_layernorm", dst="hidden")
    return Stage(name="embed", layer_idx=-1, ops=(Embed(weight=_table(config), dst="hidden"), norm))


def _attention_stage(config: Mapping[str, Any], idx: int, attention: AttentionConfig) -> Stage:
    prefix, hidden = f"transformer.h.{idx}", _hidden(config)

    return Stage(
        name=f"h.{idx}.self_attention",
        layer_idx=idx,
        ops=(
            _norm(config, f"{prefix}.input_layernorm"),
            linear(
                f"{prefix}.self_attention.query_key_value", (3 * hidden, hidden), Role.COLUMN,
                src="x", dst="qkv",
            ),
            Apply(
                fn=split_qkv(attention, src="qkv", query="q", key="k", value="v"),
                num_output_columns=3 * hidden,
            ),
            Apply(
                fn=attend(attention, query="q", key="k", value="v", dst="attended"),
                num_output_columns=hidden,
            ),
            *_residual(config),
            linear(
                f"{prefix}.self_attention.dense", (hidden, hidden), Role.ROW,
                src="attended", dst="hidden", is_accumulated=True,
            ),
        ),
    )  # fmt: skip


def _mlp_stage(config: Mapping[str, Any], idx: int) -> Stage:
    prefix, hidden = f"transformer.h.{idx}", _hidden(config)
    products = mlp(
        f"{prefix}.mlp",
        ("dense_h_to_4h", "dense_4h_to_h"),
        hidden=hidden,
        width=4 * hidden,
        act="gelu_new",
    )
    norm = _norm(config, f"{prefix}.post_attention_layernorm")
    return Stage(name=f"h.{idx}.mlp", layer_idx=idx, ops=(norm, *_residual(config), *products))
