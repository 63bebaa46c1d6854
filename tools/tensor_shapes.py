"""Tensor names and shapes of each family in module order, from its config.json.

Which outer prefix and whether a head of its own is published with a family: tools/geometries.py.
"""

from collections.abc import Iterator
from typing import Any

from zeroinfer.errors import ConfigError

__all__ = [
    "Config",
    "Shapes",
    "bloom_shapes",
    "falcon_shapes",
    "gpt2_shapes",
    "gpt_neox_shapes",
    "gptj_shapes",
    "llama_shapes",
    "opt_shapes",
    "qwen2_shapes",
    "qwen3_shapes",
]

Config = dict[str, Any]
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _first(config: Config, *keys: str) -> int:
    """Return the value of the first key that is set."""
    for key in keys:
        if config.get(key) is not None:
            return int(config[key])
    raise ConfigError(f"config has none of {', '.join(keys)}")


def llama_shapes(config: Config) -> Shapes:
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


def gpt2_shapes(config: Config) -> Shapes:
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


def bloom_shapes(config: Config) -> Shapes:
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


def _linear(name: str, shape: tuple[int, int], has_bias: bool) -> Shapes:
    yield f"{name}.weight", shape
    if has_bias:
        yield f"{name}.bias", shape[:1]


def opt_shapes(config: Config) -> Shapes:
    hidden, inner = _first(config, "hidden_size"), _first(config, "ffn_dim")
    width, prefix = _first(config, "word_embed_proj_dim", "hidden_size"), "model.decoder"
    is_norm_first = config.get("do_layer_norm_before", True)
    has_bias = bool(config.get("enable_bias", True))
    yield f"{prefix}.embed_tokens.weight", (_first(config, "vocab_size"), width)
    # Position 0 lies in row 2.
    num_positions = _first(config, "max_position_embeddings") + 2
    yield f"{prefix}.embed_positions.weight", (num_positions, hidden)
    if width != hidden:
        yield f"{prefix}.project_out.weight", (width, hidden)
        yield f"{prefix}.project_in.weight", (hidden, width)
    if is_norm_first and not config.get("_remove_final_layer_norm"):
        yield from _with_bias(f"{prefix}.final_layer_norm", (hidden,), hidden)
    for layer_idx in range(_first(config, "num_hidden_layers")):
        layer = f"{prefix}.layers.{layer_idx}"
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from _linear(f"{layer}.self_attn.{name}", (hidden, hidden), has_bias)
        yield from _with_bias(f"{layer}.self_attn_layer_norm", (hidden,), hidden)
        yield from _linear(f"{layer}.fc1", (inner, hidden), has_bias)
        yield from _linear(f"{layer}.fc2", (hidden, inner), has_bias)
        yield from _with_bias(f"{layer}.final_layer_norm", (hidden,), hidden)
    if not config.get("tie_word_embeddings", True):
        yield "lm_head.weight", (_first(config, "vocab_size"), width)


def gpt_neox_shapes(config: Config) -> Shapes:
    hidden, inner = _first(config, "hidden_size"), _first(config, "intermediate_size")
    vocab = _first(config, "vocab_size")
    has_bias = bool(config.get("attention_bias", True))
    yield "gpt_neox.embed_in.weight", (vocab, hidden)
    for layer_idx in range(_first(config, "num_hidden_layers")):
        prefix = f"gpt_neox.layers.{layer_idx}"
        yield from _with_bias(f"{prefix}.input_layernorm", (hidden,), hidden)
        yield from _with_bias(f"{prefix}.post_attention_layernorm", (hidden,), hidden)
        attention = f"{prefix}.attention"
        yield from _linear(f"{attention}.query_key_value", (3 * hidden, hidden), has_bias)
        yield from _linear(f"{attention}.dense", (hidden, hidden), has_bias)
        yield from _with_bias(f"{prefix}.mlp.dense_h_to_4h", (inner, hidden), inner)
        yield from _with_bias(f"{prefix}.mlp.dense_4h_to_h", (hidden, inner), hidden)
    yield from _with_bias("gpt_neox.final_layer_norm", (hidden,), hidden)
    if not config.get("tie_word_embeddings"):
        yield "embed_out.weight", (vocab, hidden)


def gptj_shapes(config: Config) -> Shapes:
    hidden, vocab = _first(config, "n_embd", "hidden_size"), _first(config, "vocab_size")
    inner = int(config.get("n_inner") or 4 * hidden)
    yield "transformer.wte.weight", (vocab, hidden)
    for layer_idx in range(_first(config, "n_layer", "num_hidden_layers")):
        prefix = f"transformer.h.{layer_idx}"
        yield from _with_bias(f"{prefix}.ln_1", (hidden,), hidden)
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield f"{prefix}.attn.{name}.weight", (hidden, hidden)
        yield from _with_bias(f"{prefix}.mlp.fc_in", (inner, hidden), inner)
        yield from _with_bias(f"{prefix}.mlp.fc_out", (hidden, inner), hidden)
    yield from _with_bias("transformer.ln_f", (hidden,), hidden)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (vocab, hidden)
    yield "lm_head.bias", (vocab,)


def qwen2_shapes(config: Config) -> Shapes:
    """Llama's, with a bias on queries, keys and values alone."""
    for name, shape in llama_shapes(config):
        yield name, shape
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            yield name.removesuffix("weight") + "bias", shape[:1]


def qwen3_shapes(config: Config) -> Shapes:
    """Llama's, with norms of the query and key heads."""
    head_dim = _first(config, "head_dim")
    for name, shape in llama_shapes(config):
        yield name, shape
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            yield name.replace("_proj.", "_norm."), (head_dim,)


def _falcon_norms(config: Config) -> tuple[str, ...]:
    if not config["parallel_attn"]:
        return "input_layernorm", "post_attention_layernorm"
    if config["new_decoder_architecture"] and config.get("num_ln_in_parallel_attn") != 1:
        return "ln_attn", "ln_mlp"
    return ("input_layernorm",)


def falcon_shapes(config: Config) -> Shapes:
    hidden, vocab = _first(config, "hidden_size"), _first(config, "vocab_size")
    heads, has_bias = _first(config, "num_attention_heads"), bool(config["bias"])
    kv_heads = int(config.get("num_kv_heads") or heads)
    if config["multi_query"] and not config["new_decoder_architecture"]:
        kv_heads = 1
    fused = (heads + 2 * kv_heads) * (hidden // heads)
    inner = int(config.get("ffn_hidden_size") or 4 * hidden)
    yield "transformer.word_embeddings.weight", (vocab, hidden)
    for layer_idx in range(_first(config, "num_hidden_layers")):
        prefix = f"transformer.h.{layer_idx}"
        for name, shape in {
            "self_attention.query_key_value": (fused, hidden),
            "self_attention.dense": (hidden, hidden),
            "mlp.dense_h_to_4h": (inner, hidden),
            "mlp.dense_4h_to_h": (hidden, inner),
        }.items():
            yield from _linear(f"{prefix}.{name}", shape, has_bias)
        for name in _falcon_norms(config):
            yield from _with_bias(f"{prefix}.{name}", (hidden,), hidden)
    yield from _with_bias("transformer.ln_f", (hidden,), hidden)
    if not config.get("tie_word_embeddings", True):
        yield "lm_head.weight", (vocab, hidden)
