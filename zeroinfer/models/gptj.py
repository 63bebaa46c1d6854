"""GPT-J: partial rotary positions on neighbours; attention and MLP side by side on one norm."""

from collections.abc import Mapping
from typing import Any

from zeroinfer.layers import (
    Apply,
    AttentionConfig,
    Embed,
    Norm,
    Param,
    Role,
    RopeConfig,
    attend,
)
from zeroinfer.models.base import Model, Stage, head_stage, key_value_planes
from zeroinfer.models.hf_config import divide_heads, get_eps, get_int, get_value, refuse_unless
from zeroinfer.models.parts import layer_norm, linear, mlp

__all__ = ["build"]

_ROPE_THETA = 10000.0


def build(config: Mapping[str, Any]) -> Model:
    """Build the stages from config.json.

    Raises:
        CheckpointError: a key is missing or contradicts another.
        UnsupportedModelError: a value is not implemented.
    """
    refuse_unless(config, "rotary", True)
    refuse_unless(config, "scale_attn_weights", True)
    num_layers = get_int(config, "n_layer", "num_hidden_layers")
    hidden, num_heads = _hidden(config), get_int(config, "n_head", "num_attention_heads")
    head_dim = divide_heads(hidden, num_heads)
    rope = RopeConfig(
        head_dim=head_dim,
        rope_theta=_ROPE_THETA,
        max_position_embeddings=get_int(config, "n_positions", "max_position_embeddings"),
        rotary_dim=get_int(config, "rotary_dim"),
        is_interleaved=True,
    )
    attention = AttentionConfig(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, rope=rope
    )
    layers = [
        stage
        for idx in range(num_layers)
        for stage in (_attention_stage(config, idx, attention), _mlp_stage(config, idx))
    ]
    table = _table(config, "transformer.wte.weight")
    is_tied = bool(config.get("tie_word_embeddings", False))
    return Model(
        model_type="gptj",
        num_layers=num_layers,
        hidden_size=hidden,
        vocab_size=get_int(config, "vocab_size"),
        max_model_len=rope.max_model_len,
        stages=(
            Stage(name="embed", layer_idx=-1, ops=(Embed(weight=table, dst="hidden"),)),
            *layers,
            head_stage(
                _norm(config, "transformer.ln_f"),
                table if is_tied else _table(config, "lm_head.weight"),
                bias=Param(name="lm_head.bias", shape=table.shape[:1], role=Role.VOCAB),
            ),
        ),
        kv_planes=key_value_planes(attention),
        prefixes=("", "transformer."),
        ignored=r"(\.attn\.(bias|masked_bias)|\.embed_positions)$",
        tied_names=("lm_head.weight",) if is_tied else (),
    )


def _hidden(config: Mapping[str, Any]) -> int:
    return get_int(config, "n_embd", "hidden_size")


def _table(config: Mapping[str, Any], name: str) -> Param:
    return Param(name=name, shape=(get_int(config, "vocab_size"), _hidden(config)), role=Role.VOCAB)


def _norm(config: Mapping[str, Any], prefix: str) -> Norm:
    eps = get_eps(config, "layer_norm_epsilon", default=1e-5)
    return layer_norm(prefix, _hidden(config), eps=eps)


def _attention_stage(config: Mapping[str, Any], idx: int, attention: AttentionConfig) -> Stage:
    """Return the attention of a layer; the MLP after it reads the same norm, which is kept."""
    prefix, hidden = f"transformer.h.{idx}", _hidden(config)
    projections = [
        linear(
            f"{prefix}.attn.{name}_proj", (hidden, hidden), Role.COLUMN,
            src="x", dst=name, has_bias=False,
        )
        for name in "qkv"
    ]  # fmt: skip
    return Stage(
        name=f"h.{idx}.attn",
        layer_idx=idx,
        ops=(
            _norm(config, f"{prefix}.ln_1"),
            *projections,
            Apply(
                fn=attend(attention, query="q", key="k", value="v", dst="attended"),
                num_output_columns=hidden,
            ),
            linear(
                f"{prefix}.attn.out_proj", (hidden, hidden), Role.ROW,
                src="attended", dst="hidden", has_bias=False, is_accumulated=True,
            ),
        ),
        kept=frozenset({"hidden", "x"}),
    )  # fmt: skip


def _mlp_stage(config: Mapping[str, Any], idx: int) -> Stage:
    hidden = _hidden(config)
    ops = mlp(
        f"transformer.h.{idx}.mlp",
        ("fc_in", "fc_out"),
        hidden=hidden,
        width=get_int(config, "n_inner", default=4 * hidden),
        act=str(get_value(config, "activation_function", default="gelu_new")),
    )
    return Stage(name=f"h.{idx}.mlp", layer_idx=idx, ops=ops)
