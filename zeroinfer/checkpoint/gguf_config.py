"""config.json of a GGUF file, per architecture, and the sizes its tensors must have.

Mistral files say architecture llama; one that names a sliding window becomes a mistral model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zeroinfer.checkpoint.gguf_reader import GgufFile
from zeroinfer.checkpoint.gguf_rope import positive, rope_scaling, shortest
from zeroinfer.checkpoint.gguf_tensors import has_biases
from zeroinfer.errors import CheckpointError, UnsupportedModelError

__all__ = ["ModelShape", "gguf_shape"]

_ATTENTION_BIASES = ("attn_q", "attn_k", "attn_v", "attn_output")
_MLP_BIASES = ("ffn_gate", "ffn_up", "ffn_down")
_SCALING_KEYS = frozenset({"type", "factor", "original_context_length", "finetuned"})
# Keys that change the mathematics, with the value under which they do not.
_NEUTRAL = {
    "expert_count": 0, "attention.causal": True, "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0, "attention.logit_softcapping": 0.0,
    "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0, "logit_scale": 1.0,
    "residual_scale": 1.0, "embedding_scale": 1.0, "use_parallel_residual": False,
    "attention.sliding_window": 0, "rope.scaling.attn_factor": 1.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What the metadata says of a model."""

    config: dict[str, Any]
    """Content of config.json, without the element type and special token ids."""
    sizes: Mapping[str, int]
    """Dimensions by the names of `gguf_tensors`."""


def gguf_shape(file: GgufFile) -> ModelShape:
    """Read the config of a file.

    Raises:
        UnsupportedModelError: another architecture, or a variant that has no equal here.
        CheckpointError: metadata is missing or contradicts itself.
    """
    num_parts = file.get("split.count", int, default=1)
    if num_parts > 1:
        raise UnsupportedModelError(
            f"{file.path} is one part of {num_parts}, need the whole model; join the parts with "
            "llama-gguf-split --merge"
        )
    architecture = file.get("general.architecture", str)
    if architecture not in _BUILDERS:
        raise UnsupportedModelError(
            f"{file.path} has general.architecture {architecture!r}, need one of "
            f"{', '.join(map(repr, _BUILDERS))}; use the model's Hugging Face folder instead"
        )
    _refuse_variants(file, architecture)
    return _BUILDERS[architecture](file)


def _llama(file: GgufFile) -> ModelShape:
    window = file.get("llama.attention.sliding_window", int, default=0)
    biases = {
        "attention_bias": has_biases(file, _ATTENTION_BIASES),
        "mlp_bias": has_biases(file, _MLP_BIASES),
    }
    if not window:
        return _rotary(file, "llama", {"architectures": ["LlamaForCausalLM"], **biases})
    if any(biases.values()):
        raise UnsupportedModelError(
            f"{file.path} has a sliding window of {window} and biases; no model with both is known"
        )
    named = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return _rotary(file, "llama", {**named, "sliding_window": window})


def _qwen2(file: GgufFile) -> ModelShape:
    named = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
    return _rotary(file, "qwen2", named)


def _qwen3(file: GgufFile) -> ModelShape:
    named = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": has_biases(file, _ATTENTION_BIASES),
        "use_sliding_window": False,
    }
    return _rotary(file, "qwen3", named)


def _rotary(file: GgufFile, architecture: str, named: dict[str, Any]) -> ModelShape:
    """Read what the decoders with rotary positions and gated MLPs share."""
    hidden_size = positive(file, f"{architecture}.embedding_length")
    num_heads = positive(file, f"{architecture}.attention.head_count")
    num_kv_heads = positive(file, f"{architecture}.attention.head_count_kv", default=num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{file.path}: {architecture}.attention.head_count {num_heads} is no multiple of "
            f"head_count_kv {num_kv_heads}; fetch it again"
        )
    head_dim = _head_dim(file, architecture, hidden_size // num_heads)
    eps = file.get(f"{architecture}.attention.layer_norm_rms_epsilon", float)
    base = file.get(f"{architecture}.rope.freq_base", float, default=10000.0)
    config: dict[str, Any] = {
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": positive(file, f"{architecture}.feed_forward_length"),
        "num_hidden_layers": positive(file, f"{architecture}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": positive(file, f"{architecture}.context_length"),
        "rms_norm_eps": shortest(eps),
        "rope_theta": shortest(base),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **named,
    }
    config["rope_scaling"] = rope_scaling(file, config)
    sizes = {
        "vocab": config["vocab_size"], "hidden": hidden_size, "head": head_dim,
        "inner": config["intermediate_size"], "layers": config["num_hidden_layers"],
        "q": num_heads * head_dim, "kv": num_kv_heads * head_dim,
    }  # fmt: skip
    return ModelShape(config=config, sizes=sizes)


def _gpt2(file: GgufFile) -> ModelShape:
    hidden_size = positive(file, "gpt2.embedding_length")
    num_heads = positive(file, "gpt2.attention.head_count")
    if hidden_size % num_heads:
        raise CheckpointError(
            f"{file.path}: gpt2.embedding_length {hidden_size} is no multiple of "
            f"gpt2.attention.head_count {num_heads}; fetch it again"
        )
    eps = file.get("gpt2.attention.layer_norm_epsilon", float)
    config: dict[str, Any] = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_embd": hidden_size,
        "n_inner": positive(file, "gpt2.feed_forward_length", default=4 * hidden_size),
        "n_layer": positive(file, "gpt2.block_count"),
        "n_head": num_heads,
        "n_positions": positive(file, "gpt2.context_length"),
        "layer_norm_epsilon": shortest(eps),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": _repeats_embedding(file),
    }
    sizes = {
        "vocab": config["vocab_size"], "positions": config["n_positions"], "hidden": hidden_size,
        "qkv": 3 * hidden_size, "inner": config["n_inner"], "layers": config["n_layer"],
    }  # fmt: skip
    return ModelShape(config=config, sizes=sizes)


_BUILDERS: dict[str, Callable[[GgufFile], ModelShape]] = {
    "llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "gpt2": _gpt2,
}  # fmt: skip


def _repeats_embedding(file: GgufFile) -> bool:
    """Whether the head is the embedding: left out, or written a second time as older files do."""
    head, table = file.tensors.get("output.weight"), file.tensors.get("token_embd.weight")
    return head is None or (table is not None and file.has_same_data(head, table))


def _vocab_size(file: GgufFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(
            f"{file.path}: tensor token_embd.weight is missing; fetch a whole file"
        )
    return file.tensors["token_embd.weight"].shape[0]


def _refuse_variants(file: GgufFile, architecture: str) -> None:
    windowed = {"attention.sliding_window"} if architecture == "llama" else set()
    for name, neutral in _NEUTRAL.items():
        key = f"{architecture}.{name}"
        if name not in windowed and file.metadata.get(key, neutral) != neutral:
            raise UnsupportedModelError(
                f"{file.path} has {key} {file.metadata[key]}, need {neutral}; "
                "use the model's Hugging Face folder instead"
            )
    prefix = f"{architecture}.rope.scaling."
    known = {prefix + name for name in _SCALING_KEYS} | {prefix + "attn_factor"}
    unknown = {key for key in file.metadata if key.startswith(prefix)} - known
    if unknown:
        raise UnsupportedModelError(
            f"{file.path}: metadata key {min(unknown)} is not supported; "
            "use the model's Hugging Face folder instead"
        )


def _head_dim(file: GgufFile, architecture: str, default: int) -> int:
    head_dim = positive(file, f"{architecture}.attention.key_length", default=default)
    for name in ("attention.value_length", "rope.dimension_count"):
        value = file.get(f"{architecture}.{name}", int, default=head_dim)
        if value != head_dim:
            raise UnsupportedModelError(
                f"{file.path}: {architecture}.{name} is {value}, need the head size {head_dim}; "
                "partial rotary embeddings and uneven heads are not supported"
            )
    if head_dim % 2:
        raise CheckpointError(f"{file.path}: head size is {head_dim}, need an even number")
    return head_dim
