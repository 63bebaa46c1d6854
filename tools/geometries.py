"""Names, shapes and configs of synthetic checkpoints, as the hub has them.

A config is written in the spelling most published checkpoints have (`torch_dtype`, `rope_theta`,
bloom's `n_embed`, GPT-NeoX's `rotary_pct`). GPT-2 and BLOOM are published without the outer
`transformer.` prefix and without the tied head, OPT with `model.decoder.` and without it; Llama,
its relatives, Falcon, GPT-NeoX and GPT-J with their prefix and, unless tied, with their head.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tensor_shapes import (
    Config,
    Shapes,
    bloom_shapes,
    falcon_shapes,
    gpt2_shapes,
    gpt_neox_shapes,
    gptj_shapes,
    llama_shapes,
    opt_shapes,
    qwen2_shapes,
    qwen3_shapes,
)

from zeroinfer.dtypes import DType, TensorSpec
from zeroinfer.errors import ConfigError

__all__ = ["FAMILIES", "GEOMETRIES", "Geometry", "resolve_config", "tensor_specs"]

MAX_NUM_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """A named model size."""

    family: str
    sizes: Mapping[str, Any]
    """Config keys that differ from the family's defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What the checkpoints of one architecture have in common."""

    defaults: Mapping[str, Any]
    num_layers_keys: tuple[str, ...]
    """Spellings of the layer count; the first one is written."""
    shapes: Callable[[Config], Shapes]
    """Lists names and shapes in module order."""


def resolve_config(family: str, sizes: Mapping[str, Any], num_layers: int | None) -> Config:
    """Join a family's defaults, the sizes of a geometry and another layer count.

    Raises:
        ConfigError: the config belongs to another family, or the layer count is not positive.
    """
    model_type = sizes.get("model_type", family)
    if model_type != family:
        raise ConfigError(f"config has model_type {model_type!r}, --family is {family!r}")
    config = {**FAMILIES[family].defaults, **sizes}
    if num_layers is not None:
        if not 1 <= num_layers <= MAX_NUM_LAYERS:
            raise ConfigError(f"--num-layers: got {num_layers}, need 1 to {MAX_NUM_LAYERS}")
        keys = FAMILIES[family].num_layers_keys
        given = [key for key in keys if key in sizes] or keys[:1]
        config.update(dict.fromkeys(given, num_layers))
    return config


def tensor_specs(config: Config, dtype: DType) -> list[TensorSpec]:
    """List a checkpoint's tensors in module order.

    Raises:
        ConfigError: the config lacks a size or holds one that is none.
    """
    try:
        shapes = list(FAMILIES[config["model_type"]].shapes(config))
    except ConfigError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ConfigError(f"config holds a size that is none: {error}") from error
    for name, shape in shapes:
        if not all(isinstance(size, int) and size > 0 for size in shape):
            raise ConfigError(f"{name} has shape {shape}: every size must be 1 or more")
    return [TensorSpec(name=name, shape=shape, dtype=dtype) for name, shape in shapes]


FAMILIES = {
    "llama": Family(
        defaults={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "use_cache": True,
        },
        num_layers_keys=("num_hidden_layers",),
        shapes=llama_shapes,
    ),
    "gpt2": Family(
        defaults={
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "attn_pdrop": 0.1,
            "bos_token_id": 50256,
            "embd_pdrop": 0.1,
            "eos_token_id": 50256,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-5,
            "n_ctx": 1024,
            "n_positions": 1024,
            "resid_pdrop": 0.1,
            "vocab_size": 50257,
        },
        num_layers_keys=("n_layer", "num_hidden_layers"),
        shapes=gpt2_shapes,
    ),
    "bloom": Family(
        defaults={
            "architectures": ["BloomForCausalLM"],
            "model_type": "bloom",
            "apply_residual_connection_post_layernorm": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_dropout": 0.0,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-5,
            "pad_token_id": 3,
            "pretraining_tp": 1,
            "seq_length": 2048,
            "unk_token_id": 0,
            "use_cache": True,
            "vocab_size": 250880,
        },
        num_layers_keys=("n_layer", "num_hidden_layers"),
        shapes=bloom_shapes,
    ),
    "opt": Family(
        defaults={
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            "activation_dropout": 0.0,
            "activation_function": "relu",
            "attention_dropout": 0.0,
            "bos_token_id": 2,
            "do_layer_norm_before": True,
            "dropout": 0.1,
            "eos_token_id": 2,
            "init_std": 0.02,
            "layerdrop": 0.0,
            "max_position_embeddings": 2048,
            "pad_token_id": 1,
            "use_cache": True,
            "vocab_size": 50272,
        },
        num_layers_keys=("num_hidden_layers",),
        shapes=opt_shapes,
    ),
    "gpt_neox": Family(
        defaults={
            "architectures": ["GPTNeoXForCausalLM"],
            "model_type": "gpt_neox",
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_act": "gelu_fast",
            "initializer_range": 0.02,
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": 50432,
        },
        num_layers_keys=("num_hidden_layers",),
        shapes=gpt_neox_shapes,
    ),
    "gptj": Family(
        defaults={
            "architectures": ["GPTJForCausalLM"],
            "model_type": "gptj",
            "activation_function": "gelu_new",
            "attn_pdrop": 0.0,
            "bos_token_id": 50256,
            "embd_pdrop": 0.0,
            "eos_token_id": 50256,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-5,
            "n_inner": None,
            "n_positions": 2048,
            "resid_pdrop": 0.0,
            "rotary": True,
            "rotary_dim": 64,
            "scale_attn_weights": True,
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": 50400,
        },
        num_layers_keys=("n_layer", "num_hidden_layers"),
        shapes=gptj_shapes,
    ),
    "mistral": Family(
        defaults={
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "use_cache": True,
        },
        num_layers_keys=("num_hidden_layers",),
        shapes=llama_shapes,
    ),
    "qwen2": Family(
        defaults={
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": 131072,
            "max_window_layers": 28,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": False,
        },
        num_layers_keys=("num_hidden_layers",),
        shapes=qwen2_shapes,
    ),
    "qwen3": Family(
        defaults={
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": 128,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": False,
        },
        num_layers_keys=("num_hidden_layers",),
        shapes=qwen3_shapes,
    ),
    "falcon": Family(
        defaults={
            "architectures": ["FalconForCausalLM"],
            "model_type": "falcon",
            "alibi": False,
            "apply_residual_connection_post_layernorm": False,
            "attention_dropout": 0.0,
            "bias": False,
            "bos_token_id": 11,
            "eos_token_id": 11,
            "hidden_dropout": 0.0,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-5,
            "multi_query": True,
            "new_decoder_architecture": False,
            "parallel_attn": True,
            "use_cache": True,
            "vocab_size": 65024,
        },
        num_layers_keys=("num_hidden_layers",),
        shapes=falcon_shapes,
    ),
}


def _llama(
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int],
    *,
    family: str = "llama",
    **other: Any,
) -> Geometry:
    """Name a Llama or one of its relatives; `heads` are query heads and key-value heads."""
    sizes = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
    }
    return Geometry(family=family, sizes=sizes | other)


def _gpt2(hidden: int, layers: int, heads: int, **other: Any) -> Geometry:
    return Geometry(
        family="gpt2", sizes={"n_embd": hidden, "n_layer": layers, "n_head": heads} | other
    )


def _bloom(hidden: int, layers: int, heads: int, **other: Any) -> Geometry:
    sizes = {"n_embed": hidden, "n_layer": layers, "num_attention_heads": heads}
    return Geometry(family="bloom", sizes=sizes | other)


def _opt(hidden: int, layers: int, heads: int, **other: Any) -> Geometry:
    sizes = {
        "hidden_size": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "word_embed_proj_dim": hidden,
    }
    return Geometry(family="opt", sizes=sizes | other)


def _gpt_neox(hidden: int, layers: int, heads: int, **other: Any) -> Geometry:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return Geometry(family="gpt_neox", sizes=sizes | other)


def _gptj(hidden: int, layers: int, heads: int, **other: Any) -> Geometry:
    return Geometry(
        family="gptj", sizes={"n_embd": hidden, "n_layer": layers, "n_head": heads} | other
    )


def _falcon(hidden: int, layers: int, heads: int, **other: Any) -> Geometry:
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return Geometry(family="falcon", sizes=sizes | other)


GEOMETRIES = {
    "llama-tiny": _llama(97, 32, 64, 2, (4, 2), max_position_embeddings=256),
    "llama-7b": _llama(32000, 4096, 11008, 32, (32, 32)),
    "llama-13b": _llama(32000, 5120, 13824, 40, (40, 40)),
    "llama-70b": _llama(32000, 8192, 28672, 80, (64, 8)),
    "smollm2-135m": _llama(
        49152, 576, 1536, 30, (9, 3), tie_word_embeddings=True, rope_theta=100000.0,
        max_position_embeddings=8192,
    ),
    "g-600": _llama(2000, 1024, 2816, 24, (16, 8)),
    "gpt2-tiny": _gpt2(
        32, 2, 4, vocab_size=97, n_positions=128, n_ctx=128, bos_token_id=96, eos_token_id=96
    ),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "bloom-tiny": _bloom(32, 2, 4, vocab_size=97),
    "bloom-560m": _bloom(1024, 24, 16),
    "bloom-7b1": _bloom(4096, 30, 32),
    "bloom-176b": _bloom(14336, 70, 112),
    "opt-tiny": _opt(32, 2, 4, vocab_size=97, max_position_embeddings=128),
    "opt-350m": _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-30b": _opt(7168, 48, 56),
    "opt-175b": _opt(12288, 96, 96),
    "gpt-neox-tiny": _gpt_neox(64, 2, 4, vocab_size=97, max_position_embeddings=256),
    "gpt-neox-20b": _gpt_neox(6144, 44, 64),
    "gpt-j-tiny": _gptj(
        64, 2, 4, vocab_size=97, n_positions=256, rotary_dim=8, bos_token_id=96, eos_token_id=96
    ),
    "gpt-j-6b": _gptj(4096, 28, 16),
    "mistral-7b": _llama(32000, 4096, 14336, 32, (32, 8), family="mistral"),
    "qwen2-7b": _llama(152064, 3584, 18944, 28, (28, 4), family="qwen2"),
    "qwen2-72b": _llama(152064, 8192, 29568, 80, (64, 8), family="qwen2"),
    "qwen3-8b": _llama(151936, 4096, 12288, 36, (32, 8), family="qwen3"),
    "qwen3-32b": _llama(151936, 5120, 25600, 64, (64, 8), family="qwen3"),
    "falcon-7b": _falcon(4544, 32, 71),
    "falcon-40b": _falcon(8192, 60, 128, new_decoder_architecture=True, num_kv_heads=8),
    "falcon-rw-1b": _falcon(
        2048, 24, 32, alibi=True, multi_query=False, parallel_attn=False, bias=True,
        vocab_size=50304, bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip
