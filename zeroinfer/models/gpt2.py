"""GPT-2: learned positions, layer norms, fused qkv stored transposed (Conv1D), GELU MLP."""

from collections.abc import Mapping
from typing import Any

from zeroinfer.layers import (
    Apply,
    AttentionConfig,
    Embed,
    Frame,
    Norm,
    Param,
    Role,
    attend,
)
from zeroinfer.models.base import Model, Stage, head_stage, key_value_planes
from zeroinfer.models.hf_config import divide_heads, get_eps, get_int, get_value, refuse_unless
from zeroinfer.models.parts import layer_norm, linear, mlp

__all__ = ["build"]


def build(config: Mapping[str, Any]) -> Model:
    """Build the stages from config.json.

    Raises:
        CheckpointError: a key is missing.
        UnsupportedModelError: a value is not implemented.
    """
    refuse_unless(config, "scale_attn_by_inverse_layer_idx", False)
    refuse_unless(config, "add_cross_attention", False)
    is_tied = bool(config.get("tie_word_embeddings", True))
    table = _table(config, "transformer.wte.weight")
    head = table if is_tied else _table(config, "lm_head.weight")
    num_layers = get_int(config, "n_layer", "num_hidden_layers")
    hidden, num_heads = _hidden(config), get_int(config, "n_head", "num_attention_heads")
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=divide_heads(hidden, num_heads),
        scale=None if config.get("scale_attn_weights", True) else 1.0,
    )
    layers = [
        stage
        for idx in range(num_layers)
        for stage in (_attention_stage(config, idx, attention), _mlp_stage(config, idx))
    ]
    return Model(
        model_type="gpt2",
        num_layers=num_layers,
        hidden_size=hidden,
        vocab_size=get_int(config, "vocab_size"),
        max_model_len=_num_positions(config),
        stages=(
            _embed_stage(config, table),
            *layers,
            head_stage(_norm(config, "transformer.ln_f"), head),
        ),
        kv_planes=key_value_planes(attention),
        prefixes=("", "transformer."),
        ignored=r"\.attn\.(bias|masked_bias)$",
        tied_names=("lm_head.weight",) if is_tied else (),
    )


def _hidden(config: Mapping[str, Any]) -> int:
    return get_int(config, "n_embd", "hidden_size")


def _num_positions(config: Mapping[str, Any]) -> int:
    return get_int(config, "n_positions", "max_position_embeddings", default=1024)


def _table(config: Mapping[str, Any], name: str) -> Param:
    shape = (get_int(config, "vocab_size"), _hidden(config))
    return Param(name=name, shape=shape, role=Role.VOCAB)


def _norm(config: Mapping[str, Any], prefix: str) -> Norm:
    eps = get_eps(config, "layer_norm_epsilon", default=1e-5)
    return layer_norm(prefix, _hidden(config), eps=eps)


def _embed_stage(config: Mapping[str, Any], table: Param) -> Stage:
    positions = Param(
        name="transformer.wpe.weight", shape=(_num_positions(config), _hidden(config))
    )
    return Stage(
        name="embed",
        layer_idx=-1,
        ops=(
            Embed(weight=table, dst="hidden"),
            Embed(weight=positions, dst="hidden", is_positional=True, is_accumulated=True),
        ),
    )


def _split_qkv(frame: Frame) -> None:
    for name, part in zip("qkv", frame["qkv"].chunk(3, dim=-1), strict=True):
        frame[name] = part.contiguous()


def _attention_stage(config: Mapping[str, Any], idx: int, attention: AttentionConfig) -> Stage:
    prefix, hidden = f"transformer.h.{idx}", _hidden(config)
    return Stage(
        name=f"h.{idx}.attn",
        layer_idx=idx,
        ops=(
            _norm(config, f"{prefix}.ln_1"),
            linear(
                f"{prefix}.attn.c_attn", (3 * hidden, hidden), Role.COLUMN,
                src="x", dst="qkv", is_transposed=True,
            ),
            Apply(fn=_split_qkv, num_output_columns=3 * hidden),
            Apply(
                fn=attend(attention, query="q", key="k", value="v", dst="attended"),
                num_output_columns=hidden,
            ),
            linear(
                f"{prefix}.attn.c_proj", (hidden, hidden), Role.ROW,
                src="attended", dst="hidden", is_accumulated=True, is_transposed=True,
            ),
        ),
    )  # fmt: skip


def _mlp_stage(config: Mapping[str, Any], idx: int) -> Stage:
    prefix, hidden = f"transformer.h.{idx}", _hidden(config)
    products = mlp(
        f"{prefix}.mlp",
        ("c_fc", "c_proj"),
        hidden=hidden,
        width=get_int(config, "n_inner", default=4 * hidden),
        act=str(get_value(config, "activation_function", default="gelu_new")),
        is_transposed=True,
    )
    return Stage(
        name=f"h.{idx}.mlp", layer_idx=idx, ops=(_norm(config, f"{prefix}.ln_2"), *products)
    )
