"""GPT-NeoX: partial rotary positions, qkv fused head by head, attention and MLP side by side.

With `use_parallel_residual` both halves of a layer read what came into it, each through its own
norm; else the MLP reads the sum with the attention.
"""

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
    split_qkv,
)
from zeroinfer.models.base import Model, Stage, head_stage, key_value_planes
from zeroinfer.models.hf_config import divide_heads, get_eps, get_int, get_value, rope_config
from zeroinfer.models.parts import layer_norm, linear, mlp

__all__ = ["build"]

_DEFAULT_ROTARY_FACTOR = 0.25
_OLD_ROPE_KEYS = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}


def build(config: Mapping[str, Any]) -> Model:
    """Build the stages from config.json.

    Raises:
        CheckpointError: a key is missing or contradicts another.
        UnsupportedModelError: a value is not implemented.
    """
    num_layers, hidden = get_int(config, "num_hidden_layers"), get_int(config, "hidden_size")
    num_heads = get_int(config, "num_attention_heads")
    head_dim = divide_heads(hidden, num_heads)
    rope = _rope(config, head_dim)
    attention = AttentionConfig(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, rope=rope
    )
    layers = [
        stage
        for idx in range(num_layers)
        for stage in (_attention_stage(config, idx, attention), _mlp_stage(config, idx))
    ]
    table = _table(config, "gpt_neox.embed_in.weight")
    is_tied = bool(config.get("tie_word_embeddings", False))
    head = table if is_tied else _table(config, "embed_out.weight")
    return Model(
        model_type="gpt_neox",
        num_layers=num_layers,
        hidden_size=hidden,
        vocab_size=get_int(config, "vocab_size"),
        max_model_len=rope.max_model_len,
        stages=(
            Stage(name="embed", layer_idx=-1, ops=(Embed(weight=table, dst="hidden"),)),
            *layers,
            head_stage(_norm(config, "gpt_neox.final_layer_norm"), head),
        ),
        kv_planes=key_value_planes(attention),
        prefixes=("", "gpt_neox."),
        other_names={"embed_out.weight": "lm_head.weight"},
        ignored=r"(\.attention\.(bias|masked_bias)|rotary_emb\.(inv_freq|cos_cached|sin_cached))$",
        tied_names=("embed_out.weight",) if is_tied else (),
    )


def _rope(config: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """Read rotary parameters; older releases had names of their own for base and share."""
    old = {
        name: config[old_name]
        for old_name, name in _OLD_ROPE_KEYS.items()
        if config.get(old_name) is not None
    }
    return rope_config({**config, **old}, head_dim=head_dim, rotary_factor=_DEFAULT_ROTARY_FACTOR)


def _table(config: Mapping[str, Any], name: str) -> Param:
    shape = (get_int(config, "vocab_size"), get_int(config, "hidden_size"))
    return Param(name=name, shape=shape, role=Role.VOCAB)


def _norm(config: Mapping[str, Any], prefix: str, *, dst: str = "x") -> Norm:
    eps = get_eps(config, "layer_norm_eps", default=1e-5)
    return layer_norm(prefix, get_int(config, "hidden_size"), eps=eps, dst=dst)


def _is_parallel(config: Mapping[str, Any]) -> bool:
    return bool(config.get("use_parallel_residual", True))


def _mlp_norm(config: Mapping[str, Any], idx: int) -> Norm:
    """Norm of what the MLP reads; with parallel halves it must run before the attention adds."""
    return _norm(config, f"gpt_neox.layers.{idx}.post_attention_layernorm", dst="mlp_input")


def _attention_stage(config: Mapping[str, Any], idx: int, attention: AttentionConfig) -> Stage:
    prefix, hidden = f"gpt_neox.layers.{idx}", get_int(config, "hidden_size")
    has_bias, is_parallel = bool(config.get("attention_bias", True)), _is_parallel(config)
    return Stage(
        name=f"layers.{idx}.attention",
        layer_idx=idx,
        ops=(
            _norm(config, f"{prefix}.input_layernorm"),
            *((_mlp_norm(config, idx),) if is_parallel else ()),
            linear(
                f"{prefix}.attention.query_key_value", (3 * hidden, hidden), Role.COLUMN,
                src="x", dst="qkv", has_bias=has_bias,
            ),
            Apply(
                fn=split_qkv(attention, src="qkv", query="q", key="k", value="v"),
                num_output_columns=3 * hidden,
            ),
            Apply(
                fn=attend(attention, query="q", key="k", value="v", dst="attended"),
                num_output_columns=hidden,
            ),
            linear(
                f"{prefix}.attention.dense", (hidden, hidden), Role.ROW,
                src="attended", dst="hidden", has_bias=has_bias, is_accumulated=True,
            ),
        ),
        kept=frozenset({"hidden", "mlp_input"} if is_parallel else {"hidden"}),
    )  # fmt: skip


def _mlp_stage(config: Mapping[str, Any], idx: int) -> Stage:
    products = mlp(
        f"gpt_neox.layers.{idx}.mlp",
        ("dense_h_to_4h", "dense_4h_to_h"),
        hidden=get_int(config, "hidden_size"),
        width=get_int(config, "intermediate_size"),
        act=str(get_value(config, "hidden_act", default="gelu")),
        src="mlp_input",
    )
    norms = () if _is_parallel(config) else (_mlp_norm(config, idx),)
    return Stage(name=f"layers.{idx}.mlp", layer_idx=idx, ops=(*norms, *products))
