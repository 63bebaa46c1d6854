"""OPT: learned positions from row 2 on, layer norms before or after a part, ReLU MLP.

The 350m form embeds in a width of its own, projected in and out, normalises after each sum, and
has no final norm.
"""

from collections.abc import Mapping
from typing import Any

from zeroinfer.layers import (
    Apply,
    AttentionConfig,
    Embed,
    Linear,
    Norm,
    Op,
    Param,
    Role,
    SelectLogits,
    attend,
)
from zeroinfer.models.base import Model, Stage, key_value_planes
from zeroinfer.models.hf_config import divide_heads, get_int, get_value, refuse_unless
from zeroinfer.models.parts import layer_norm, linear, mlp

__all__ = ["build"]

_POSITION_OFFSET = 2
_EPS = 1e-5


def build(config: Mapping[str, Any]) -> Model:
    """Build the stages from config.json.

    Raises:
        CheckpointError: a key is missing or contradicts another.
        UnsupportedModelError: a value is not implemented.
    """
    refuse_unless(config, "layer_norm_elementwise_affine", True)
    num_layers, hidden = get_int(config, "num_hidden_layers"), get_int(config, "hidden_size")
    num_heads = get_int(config, "num_attention_heads")
    attention = AttentionConfig(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=divide_heads(hidden, num_heads)
    )
    layers = [
        stage
        for idx in range(num_layers)
        for stage in (_attention_stage(config, idx, attention), _mlp_stage(config, idx))
    ]
    return Model(
        model_type="opt",
        num_layers=num_layers,
        hidden_size=hidden,
        vocab_size=get_int(config, "vocab_size"),
        max_model_len=get_int(config, "max_position_embeddings"),
        stages=(_embed_stage(config), *layers, _head_stage(config)),
        kv_planes=key_value_planes(attention),
        prefixes=("", "decoder.", "model.decoder."),
        ignored=r"(^|\.)version$",
        tied_names=("lm_head.weight",) if _is_tied(config) else (),
    )


def _is_tied(config: Mapping[str, Any]) -> bool:
    return bool(config.get("tie_word_embeddings", True))


def _is_norm_first(config: Mapping[str, Any]) -> bool:
    return bool(config.get("do_layer_norm_before", True))


def _table(config: Mapping[str, Any]) -> Param:
    width = get_int(config, "word_embed_proj_dim", default=get_int(config, "hidden_size"))
    shape = (get_int(config, "vocab_size"), width)
    return Param(name="model.decoder.embed_tokens.weight", shape=shape, role=Role.VOCAB)


def _norm(config: Mapping[str, Any], name: str, *, dst: str) -> Norm:
    return layer_norm(f"model.decoder.{name}", get_int(config, "hidden_size"), eps=_EPS, dst=dst)


def _projection(name: str, shape: tuple[int, int], *, src: str, dst: str) -> tuple[Op, ...]:
    """Return the product between the widths of embedding and layers; none if they are the same."""
    if shape[0] == shape[1]:
        return ()
    role = Role.REPLICATED
    return (linear(f"model.decoder.{name}", shape, role, src=src, dst=dst, has_bias=False),)


def _embed_stage(config: Mapping[str, Any]) -> Stage:
    table, hidden = _table(config), get_int(config, "hidden_size")
    num_positions = get_int(config, "max_position_embeddings") + _POSITION_OFFSET
    positions = Param(name="model.decoder.embed_positions.weight", shape=(num_positions, hidden))
    project_in = _projection("project_in", (hidden, table.shape[1]), src="embedded", dst="hidden")
    return Stage(
        name="embed",
        layer_idx=-1,
        ops=(
            Embed(weight=table, dst="embedded" if project_in else "hidden"),
            *project_in,
            Embed(
                weight=positions,
                dst="hidden",
                is_positional=True,
                position_offset=_POSITION_OFFSET,
                is_accumulated=True,
            ),
        ),
    )


def _with_norm(config: Mapping[str, Any], name: str, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Put the norm where this form has it: before the part, which reads `x`, or after its sum."""
    if _is_norm_first(config):
        return (_norm(config, name, dst="x"), *ops)
    return (*ops, _norm(config, name, dst="hidden"))


def _source(config: Mapping[str, Any]) -> str:
    """Return what a part reads: the norm before it, or the hidden state itself."""
    return "x" if _is_norm_first(config) else "hidden"


def _has_bias(config: Mapping[str, Any]) -> bool:
    return bool(config.get("enable_bias", True))


def _attention_stage(config: Mapping[str, Any], idx: int, attention: AttentionConfig) -> Stage:
    prefix, hidden = f"layers.{idx}", get_int(config, "hidden_size")
    has_bias = _has_bias(config)
    projections = [
        linear(
            f"model.decoder.{prefix}.self_attn.{name}_proj", (hidden, hidden), Role.COLUMN,
            src=_source(config), dst=name, has_bias=has_bias,
        )
        for name in "qkv"
    ]  # fmt: skip
    ops: tuple[Op, ...] = (
        *projections,
        Apply(
            fn=attend(attention, query="q", key="k", value="v", dst="attended"),
            num_output_columns=hidden,
        ),
        linear(
            f"model.decoder.{prefix}.self_attn.out_proj", (hidden, hidden), Role.ROW,
            src="attended", dst="hidden", has_bias=has_bias, is_accumulated=True,
        ),
    )  # fmt: skip
    return Stage(
        name=f"layers.{idx}.self_attn",
        layer_idx=idx,
        ops=_with_norm(config, f"{prefix}.self_attn_layer_norm", ops),
    )


def _mlp_stage(config: Mapping[str, Any], idx: int) -> Stage:
    prefix = f"layers.{idx}"
    ops = mlp(
        f"model.decoder.{prefix}",
        ("fc1", "fc2"),
        hidden=get_int(config, "hidden_size"),
        width=get_int(config, "ffn_dim"),
        act=str(get_value(config, "activation_function", default="relu")),
        src=_source(config),
        has_bias=_has_bias(config),
    )
    return Stage(
        name=f"layers.{idx}.mlp",
        layer_idx=idx,
        ops=_with_norm(config, f"{prefix}.final_layer_norm", ops),
    )


def _head_stage(config: Mapping[str, Any]) -> Stage:
    """Return the last stage: the wanted rows, the norm and the projection if any, the logits."""
    table, hidden = _table(config), get_int(config, "hidden_size")
    own_head = Param(name="lm_head.weight", shape=table.shape, role=Role.VOCAB)
    has_norm = _is_norm_first(config) and not config.get("_remove_final_layer_norm", False)
    norm = (_norm(config, "final_layer_norm", dst="hidden"),) if has_norm else ()
    project_out = _projection("project_out", (table.shape[1], hidden), src="hidden", dst="narrow")
    return Stage(
        name="head",
        layer_idx=-1,
        ops=(
            SelectLogits(src="hidden", dst="hidden", num_output_columns=hidden),
            *norm,
            *project_out,
            Linear(
                weight=table if _is_tied(config) else own_head,
                src="narrow" if project_out else "hidden",
                dst="logits",
            ),
        ),
        kept=frozenset({"logits"}),
    )
