"""Names, shapes and configs of synthetic checkpoints, as the hub has them.

A config is written in the spelling most published checkpoints have (`torch_dtype`, `rope_theta`,
bloom's `n_embed`). GPT-2 and BLOOM are published without the outer `transformer.` prefix and
without the tied head; Llama with `model.` and, unless tied, with its head.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zeroinfer.dtypes import DType, TensorSpec
from zeroinfer.errors import ConfigError

__all__ = ["FAMILIES", "GEOMETRIES", "Geometry", "resolve_config", "tensor_specs"]

Config = dict[str, Any]
Shapes = Iterator[tuple[str, tuple[int, ...]]]


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
        if num_layers < 1:
            raise ConfigError(f"--num-layers: got {num_layers}, need 1 or more")
        keys = FAMILIES[family].num_layers_keys
        given = [key for key in keys if key in sizes] or keys[:1]
        config.update(dict.fromkeys(given, num_layers))
    return config


def tensor_specs(config: Config, dtype: DType) -> list[TensorSpec]:
    """List a checkpoint's tensors in module order.

    Raises:
        ConfigError: the config lacks a size or holds one that is none.
    """
    shapes = list(FAMILIES[config["model_type"]].shapes(config))
    for name, shape in shapes:
        if not all(isinstance(size, int) and size > 0 for size in shape):
            raise ConfigError(f"{name} has shape {shape}: every size must be 1 or more")
    return [TensorSpec(name=name, shape=shape, dtype=dtype) for name, shape in shapes]


def _first(config: Config, *keys: str) -> int:
    """Return the value of the first key that is set."""
    for key in keys:
        if config.get(key) is not None:
            return int(config[key])
    raise ConfigError(f"config has none of {', '.join(keys)}")


def _llama_shapes(config: Config) -> Shapes:
    hidden = _first(config, "hidden_size")
    inner = _first(config, "intermediate_size")
    heads = _first(config, "num_attention_heads")
    head_dim = int(config.get("head_dim") or hidden // heads)
    q_width = heads * head_dim
    kv_width = int(config.get("num_key_value_heads") or heads) * head_dim
    attention = {"q": (q_width, hidden), "k": (kv_width, hidden), "v": (kv_width, hidden),
                 "o": (hidden, q_width)}  # fmt: skip
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    vocab = _first(config, "vocab_size")
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer_idx in range(_first(config, "num_hidden_layers")):
        prefix = f"model.layers.{layer_idx}"
        for part, products, has_bias in (
            ("self_attn", attention, config.get("attention_bias")),
            ("mlp", mlp, config.get("mlp_bias")),
        ):
            for name, shape in products.items():
                yield f"{prefix}.{part}.{name}_proj.weight", shape
                if has_bias:
                    yield f"{prefix}.{part}.{name}_proj.bias", shape[:1]
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (vocab, hidden)


def _with_bias(name: str, shape: tuple[int, ...], bias_width: int) -> Shapes:
    yield f"{name}.weight", shape
    yield f"{name}.bias", (bias_width,)


def _gpt2_shapes(config: Config) -> Shapes:
    hidden = _first(config, "n_embd", "hidden_size")
    inner = int(config.get("n_inner") or 4 * hidden)
    yield "wte.weight", (_first(config, "vocab_size"), hidden)
    yield "wpe.weight", (_first(config, "n_positions", "max_position_embeddings"), hidden)
    for layer_idx in range(_first(config, "n_layer", "num_hidden_layers")):
        prefix = f"h.{layer_idx}"
        # Conv1D keeps (in, out), transposed against a linear layer.
        for name, (n_in, n_out) in {
            "attn.c_attn": (hidden, 3 * hidden),
            "attn.c_proj": (hidden, hidden),
            "mlp.c_fc": (hidden, inner),
            "mlp.c_proj": (inner, hidden),
        }.items():
            yield from _with_bias(f"{prefix}.{name}", (n_in, n_out), n_out)
        yield from _with_bias(f"{prefix}.ln_1", (hidden,), hidden)
        yield from _with_bias(f"{prefix}.ln_2", (hidden,), hidden)
    yield from _with_bias("ln_f", (hidden,), hidden)


def _bloom_shapes(config: Config) -> Shapes:
    hidden = _first(config, "hidden_size", "n_embed")
    yield "word_embeddings.weight", (_first(config, "vocab_size"), hidden)
    yield from _with_bias("word_embeddings_layernorm", (hidden,), hidden)
    for layer_idx in range(_first(config, "n_layer", "num_hidden_layers")):
        prefix = f"h.{layer_idx}"
        yield from _with_bias(f"{prefix}.input_layernorm", (hidden,), hidden)
        for name, (n_out, n_in) in {
            "self_attention.query_key_value": (3 * hidden, hidden),
            "self_attention.dense": (hidden, hidden),
            "mlp.dense_h_to_4h": (4 * hidden, hidden),
            "mlp.dense_4h_to_h": (hidden, 4 * hidden),
        }.items():
            yield from _with_bias(f"{prefix}.{name}", (n_out, n_in), n_out)
        yield from _with_bias(f"{prefix}.post_attention_layernorm", (hidden,), hidden)
    yield from _with_bias("ln_f", (hidden,), hidden)


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
        shapes=_llama_shapes,
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
        shapes=_gpt2_shapes,
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
        shapes=_bloom_shapes,
    ),
}


def _llama(
    vocab: int, hidden: int, inner: int, layers: int, heads: tuple[int, int], **other: Any
) -> Geometry:
    """Name a Llama by its sizes; `heads` are query heads and key-value heads."""
    sizes = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
    }
    return Geometry(family="llama", sizes=sizes | other)


def _gpt2(hidden: int, layers: int, heads: int, **other: Any) -> Geometry:
    return Geometry(
        family="gpt2", sizes={"n_embd": hidden, "n_layer": layers, "n_head": heads} | other
    )


def _bloom(hidden: int, layers: int, heads: int, **other: Any) -> Geometry:
    sizes = {"n_embed": hidden, "n_layer": layers, "num_attention_heads": heads}
    return Geometry(family="bloom", sizes=sizes | other)


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
}  # fmt: skip
