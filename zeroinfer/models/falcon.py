"""Falcon in its three forms: 7B, the new decoder of 40B and 11B, and RW with ALiBi.

They differ in key/value heads (one, a few, as many as queries), in positions (rotary, ALiBi), and
in the residual: attention and MLP side by side behind one norm or two, or one after the other.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zeroinfer.errors import CheckpointError
from zeroinfer.layers import (
    Apply,
    AttentionConfig,
    Embed,
    Norm,
    Param,
    Role,
    alibi_slopes,
    attend,
    split_qkv,
)
from zeroinfer.models.base import Model, Stage, head_stage, key_value_planes
from zeroinfer.models.hf_config import (
    divide_heads,
    get_eps,
    get_int,
    get_value,
    refuse_unless,
    rope_config,
)
from zeroinfer.models.parts import layer_norm, linear, mlp

__all__ = ["build"]


def build(config: Mapping[str, Any]) -> Model:
    """Build the stages from config.json.

    Raises:
        CheckpointError: a key is missing or contradicts another.
        UnsupportedModelError: a value is not implemented.
    """
    config = {"max_position_embeddings": 2048, "tie_word_embeddings": True, **config}
    _refuse_unknown_forms(config)
    attention = _attention_config(config)
    rope = attention.rope
    num_layers = get_int(config, "num_hidden_layers", "n_layer")
    table = Param(name="transformer.word_embeddings.weight", shape=_shape(config), role=Role.VOCAB)
    own_head = Param(name="lm_head.weight", shape=table.shape, role=Role.VOCAB)
    is_tied = bool(config["tie_word_embeddings"])
    layers = [
        stage
        for idx in range(num_layers)
        for stage in (_attention_stage(config, idx, attention), _mlp_stage(config, idx))
    ]
    return Model(
        model_type="falcon",
        num_layers=num_layers,
        hidden_size=_hidden(config),
        vocab_size=table.shape[0],
        max_model_len=rope.max_model_len if rope else get_int(config, "max_position_embeddings"),
        stages=(
            Stage(name="embed", layer_idx=-1, ops=(Embed(weight=table, dst="hidden"),)),
            *layers,
            head_stage(_norm(config, "transformer.ln_f"), table if is_tied else own_head),
        ),
        kv_planes=key_value_planes(attention),
        num_bias_heads=attention.num_heads if attention.alibi_slopes else 1,
        prefixes=("", "transformer."),
        ignored=r"\.inv_freq$",
        tied_names=(own_head.name,) if is_tied else (),
    )


def _refuse_unknown_forms(config: Mapping[str, Any]) -> None:
    """Each form has its own values of the keys that arrange norms and residual."""
    is_new = _is_new(config)
    refuse_unless(config, "apply_residual_connection_post_layernorm", False)
    refuse_unless(config, "parallel_attn", *((True,) if is_new else (True, False)))
    refuse_unless(config, "num_ln_in_parallel_attn", *((None, 1, 2) if is_new else (None, 1)))


def _is_new(config: Mapping[str, Any]) -> bool:
    return bool(config.get("new_decoder_architecture", False))


def _is_parallel(config: Mapping[str, Any]) -> bool:
    return bool(config.get("parallel_attn", True))


def _hidden(config: Mapping[str, Any]) -> int:
    return get_int(config, "hidden_size", "n_embed")


def _shape(config: Mapping[str, Any]) -> tuple[int, int]:
    return get_int(config, "vocab_size"), _hidden(config)


def _attention_config(config: Mapping[str, Any]) -> AttentionConfig:
    num_heads = get_int(config, "num_attention_heads", "n_head")
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, num_heads),
        head_dim=divide_heads(_hidden(config), num_heads),
    )
    if not config.get("alibi", False):
        return replace(attention, rope=rope_config(config, head_dim=attention.head_dim))
    # Scores and bias are scaled together; BLOOM scales the scores alone.
    return replace(
        attention,
        alibi_slopes=alibi_slopes(num_heads),
        alibi_scale=attention.head_dim**-0.5,
        is_alibi_bf16=True,
    )


def _num_kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    if not _is_new(config) and config.get("multi_query", True):
        return 1
    num_kv_heads = get_int(config, "num_kv_heads", "n_head_kv", default=num_heads)
    if num_heads % num_kv_heads or (num_kv_heads != num_heads and not _is_new(config)):
        raise CheckpointError(
            f"config.json: num_kv_heads {num_kv_heads} does not go with num_attention_heads "
            f"{num_heads} and new_decoder_architecture {_is_new(config)}"
        )
    return num_kv_heads


def _norm(config: Mapping[str, Any], prefix: str, *, dst: str = "x") -> Norm:
    eps = get_eps(config, "layer_norm_epsilon", default=1e-5)
    return layer_norm(prefix, _hidden(config), eps=eps, dst=dst)


def _has_bias(config: Mapping[str, Any]) -> bool:
    return bool(config.get("bias", False))


def _has_two_norms(config: Mapping[str, Any]) -> bool:
    """Whether the parallel halves of a layer have a norm each; else the MLP reads `x` as well."""
    num_norms = get_int(config, "num_ln_in_parallel_attn", default=2 if _is_new(config) else 1)
    return num_norms == 2


def _first_norms(config: Mapping[str, Any], prefix: str) -> tuple[Norm, ...]:
    """Norms that run before the attention adds to the hidden state."""
    if not _has_two_norms(config):
        return (_norm(config, f"{prefix}.input_layernorm"),)
    mlp_norm = _norm(config, f"{prefix}.ln_mlp", dst="mlp_input")
    return _norm(config, f"{prefix}.ln_attn"), mlp_norm


def _attention_stage(config: Mapping[str, Any], idx: int, attention: AttentionConfig) -> Stage:
    prefix, hidden = f"transformer.h.{idx}", _hidden(config)
    fused = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    has_bias = _has_bias(config)
    return Stage(
        name=f"h.{idx}.self_attention",
        layer_idx=idx,
        kept=frozenset({"hidden", _mlp_source(config)} if _is_parallel(config) else {"hidden"}),
        ops=(
            *_first_norms(config, prefix),
            linear(
                f"{prefix}.self_attention.query_key_value", (fused, hidden), Role.COLUMN,
                src="x", dst="qkv", has_bias=has_bias,
            ),
            Apply(
                fn=split_qkv(attention, src="qkv", query="q", key="k", value="v"),
                num_output_columns=fused,
            ),
            Apply(
                fn=attend(attention, query="q", key="k", value="v", dst="attended"),
                num_output_columns=hidden,
            ),
            linear(
                f"{prefix}.self_attention.dense", (hidden, hidden), Role.ROW,
                src="attended", dst="hidden", has_bias=has_bias, is_accumulated=True,
            ),
        ),
    )  # fmt: skip


def _mlp_source(config: Mapping[str, Any]) -> str:
    return "mlp_input" if _has_two_norms(config) else "x"


def _mlp_stage(config: Mapping[str, Any], idx: int) -> Stage:
    prefix, hidden = f"transformer.h.{idx}", _hidden(config)
    products = mlp(
        f"{prefix}.mlp",
        ("dense_h_to_4h", "dense_4h_to_h"),
        hidden=hidden,
        width=get_int(config, "ffn_hidden_size", default=4 * hidden),
        act=str(get_value(config, "activation", default="gelu")),
        src=_mlp_source(config),
        has_bias=_has_bias(config),
    )
    own_norm = _norm(config, f"{prefix}.post_attention_layernorm")
    norms = () if _is_parallel(config) else (own_norm,)
    return Stage(name=f"h.{idx}.mlp", layer_idx=idx, ops=(*norms, *products))
