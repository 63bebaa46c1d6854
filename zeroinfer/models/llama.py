"""Llama: RMS norms, rotary positions, grouped-query attention, gated MLP."""

from collections.abc import Mapping
from typing import Any

from zeroinfer.errors import CheckpointError
from zeroinfer.layers import (
    Apply,
    AttentionConfig,
    Embed,
    Linear,
    Norm,
    Param,
    Role,
    RopeConfig,
    apply_rotary,
    attend,
    gated,
)
from zeroinfer.models.base import Model, Stage, head_stage, key_value_planes
from zeroinfer.models.hf_config import get_eps, get_int, get_value, refuse_unless, rope_config

__all__ = ["build"]


def build(config: Mapping[str, Any]) -> Model:
    """Build the stages from config.json.

    Raises:
        CheckpointError: a key is missing or contradicts another.
        UnsupportedModelError: a value is not implemented.
    """
    refuse_unless(config, "pretraining_tp", 1, None)
    hidden, num_layers = get_int(config, "hidden_size"), get_int(config, "num_hidden_layers")
    num_heads = get_int(config, "num_attention_heads")
    num_kv_heads = get_int(config, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {num_heads} is no multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    head_dim = get_int(config, "head_dim", default=hidden // num_heads)
    attention = AttentionConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    rope = rope_config(config, head_dim=head_dim)
    layers = [
        stage
        for idx in range(num_layers)
        for stage in (_attention_stage(config, idx, attention, rope), _mlp_stage(config, idx))
    ]
    return Model(
        model_type="llama",
        num_layers=num_layers,
        hidden_size=hidden,
        vocab_size=get_int(config, "vocab_size"),
        max_model_len=_max_model_len(config, rope),
        stages=(_embed_stage(config), *layers, _head_stage(config)),
        kv_planes=key_value_planes(attention),
        prefixes=("", "model."),
        ignored=r"rotary_emb\.inv_freq$",
        tied_names=("lm_head.weight",) if _is_tied(config) else (),
    )


def _is_tied(config: Mapping[str, Any]) -> bool:
    return bool(config.get("tie_word_embeddings", False))


def _max_model_len(config: Mapping[str, Any], rope: RopeConfig) -> int:
    """Scaled kinds whose factor multiplies the trained length may go on to it."""
    length = get_int(config, "max_position_embeddings")
    if rope.rope_type in ("dynamic", "linear") and rope.factor:
        return int(length * max(1.0, rope.factor))
    return length


def _table(config: Mapping[str, Any]) -> Param:
    shape = (get_int(config, "vocab_size"), get_int(config, "hidden_size"))
    return Param(name="model.embed_tokens.weight", shape=shape, role=Role.VOCAB)


def _norm(config: Mapping[str, Any], name: str) -> Norm:
    weight = Param(name=name, shape=(get_int(config, "hidden_size"),))
    eps = get_eps(config, "rms_norm_eps", default=1e-6)
    return Norm(weight=weight, eps=eps, src="hidden", dst="x", is_rms=True)


def _embed_stage(config: Mapping[str, Any]) -> Stage:
    return Stage(name="embed", layer_idx=-1, ops=(Embed(weight=_table(config), dst="hidden"),))


def _linear(
    prefix: str, shape: tuple[int, int], role: Role, has_bias: bool, **where: Any
) -> Linear:
    bias = Param(name=f"{prefix}.bias", shape=shape[:1], role=role) if has_bias else None
    weight = Param(name=f"{prefix}.weight", shape=shape, role=role)
    return Linear(weight=weight, bias=bias, **where)


def _attention_stage(
    config: Mapping[str, Any], idx: int, attention: AttentionConfig, rope: RopeConfig
) -> Stage:
    prefix = f"model.layers.{idx}"
    hidden, has_bias = get_int(config, "hidden_size"), bool(config.get("attention_bias", False))
    widths = {
        "q": attention.num_heads * attention.head_dim,
        "k": attention.num_kv_heads * attention.head_dim,
        "v": attention.num_kv_heads * attention.head_dim,
    }
    projections = [
        _linear(
            f"{prefix}.self_attn.{name}_proj", (width, hidden), Role.COLUMN, has_bias,
            src="x", dst=name,
        )
        for name, width in widths.items()
    ]  # fmt: skip
    attended = attend(attention, query="q", key="k", value="v", dst="attended")
    return Stage(
        name=f"layers.{idx}.self_attn",
        layer_idx=idx,
        ops=(
            _norm(config, f"{prefix}.input_layernorm.weight"),
            *projections,
            Apply(fn=apply_rotary(rope, "q", "k")),
            Apply(fn=attended, num_output_columns=widths["q"]),
            _linear(
                f"{prefix}.self_attn.o_proj", (hidden, widths["q"]), Role.ROW, has_bias,
                src="attended", dst="hidden", is_accumulated=True,
            ),
        ),
    )  # fmt: skip


def _mlp_stage(config: Mapping[str, Any], idx: int) -> Stage:
    prefix = f"model.layers.{idx}"
    hidden, width = get_int(config, "hidden_size"), get_int(config, "intermediate_size")
    has_bias = bool(config.get("mlp_bias", False))
    wide = [
        _linear(
            f"{prefix}.mlp.{name}_proj", (width, hidden), Role.COLUMN, has_bias, src="x", dst=name
        )
        for name in ("gate", "up")
    ]
    act = str(get_value(config, "hidden_act", default="silu"))
    return Stage(
        name=f"layers.{idx}.mlp",
        layer_idx=idx,
        ops=(
            _norm(config, f"{prefix}.post_attention_layernorm.weight"),
            *wide,
            Apply(fn=gated(act, gate="gate", up="up", dst="gate")),
            _linear(
                f"{prefix}.mlp.down_proj", (hidden, width), Role.ROW, has_bias,
                src="gate", dst="hidden", is_accumulated=True,
            ),
        ),
    )  # fmt: skip


def _head_stage(config: Mapping[str, Any]) -> Stage:
    table = _table(config)
    own_head = Param(name="lm_head.weight", shape=table.shape, role=Role.VOCAB)
    norm = _norm(config, "model.norm.weight")
    return head_stage(norm, table if _is_tied(config) else own_head)
