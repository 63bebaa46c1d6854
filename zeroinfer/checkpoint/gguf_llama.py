"""The llama architecture of GGUF in Hugging Face's words: config, tensor names, row order.

Rows of q and k are stored in another order than Hugging Face's: within a head the file holds the
pairs (0, d/2), (1, d/2 + 1), ... side by side, for a rotary embedding that turns neighbours.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from zeroinfer.checkpoint.gguf_reader import GgufFile, GgufTensor
from zeroinfer.errors import CheckpointError, UnsupportedModelError

__all__ = ["MappedTensor", "llama_config", "map_llama_tensors", "unpermute_rows"]

ROPE_FACTORS_NAME = "rope_freqs.weight"
_SCALING_KEYS = frozenset({"type", "factor", "original_context_length", "finetuned"})
_PERMUTED = frozenset({"attn_q", "attn_k"})
# GGUF name -> (Hugging Face name, sizes of the weight by config key), in order of use.
_LAYER_TABLE = {
    "attn_norm": ("input_layernorm", ("hidden",)),
    "attn_q": ("self_attn.q_proj", ("q", "hidden")),
    "attn_k": ("self_attn.k_proj", ("kv", "hidden")),
    "attn_v": ("self_attn.v_proj", ("kv", "hidden")),
    "attn_output": ("self_attn.o_proj", ("hidden", "q")),
    "ffn_norm": ("post_attention_layernorm", ("hidden",)),
    "ffn_gate": ("mlp.gate_proj", ("inner", "hidden")),
    "ffn_up": ("mlp.up_proj", ("inner", "hidden")),
    "ffn_down": ("mlp.down_proj", ("hidden", "inner")),
}
_ATTENTION_BIASES = ("attn_q", "attn_k", "attn_v", "attn_output")
_MLP_BIASES = ("ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedTensor:
    """A tensor of the file under its Hugging Face name."""

    name: str
    tensor: GgufTensor
    head_dim: int | None
    """Rows of a head if they are permuted (q and k), else None."""


def llama_config(file: GgufFile) -> dict[str, Any]:
    """Return the content of config.json, without the element type and special token ids.

    Raises:
        UnsupportedModelError: another architecture, or a llama variant that has no equal here.
        CheckpointError: metadata is missing or contradicts itself.
    """
    architecture = file.get("general.architecture", str)
    if architecture != "llama":
        raise UnsupportedModelError(
            f"{file.path} has general.architecture {architecture!r}, need 'llama'; "
            "use the model's Hugging Face folder instead"
        )
    _refuse_variants(file)
    hidden_size = _positive(file, "llama.embedding_length")
    num_heads = _positive(file, "llama.attention.head_count")
    num_kv_heads = _positive(file, "llama.attention.head_count_kv", default=num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{file.path}: llama.attention.head_count {num_heads} is no multiple of "
            f"head_count_kv {num_kv_heads}; fetch it again"
        )
    head_dim = _head_dim(file, hidden_size // num_heads)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": _positive(file, "llama.feed_forward_length"),
        "num_hidden_layers": _positive(file, "llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": _positive(file, "llama.context_length"),
        "rms_norm_eps": _shortest(file.get("llama.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(file.get("llama.rope.freq_base", float, default=10000.0)),
        "vocab_size": _require(file, "token_embd.weight").shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": _has_biases(file, _ATTENTION_BIASES),
        "mlp_bias": _has_biases(file, _MLP_BIASES),
    }
    config["rope_scaling"] = _rope_scaling(file, config)
    return config


def map_llama_tensors(file: GgufFile, config: dict[str, Any]) -> tuple[MappedTensor, ...]:
    """Return every tensor under its Hugging Face name, in order of use, shapes checked.

    Raises:
        CheckpointError: a tensor is missing or has another shape than the config says.
        UnsupportedModelError: the file holds a tensor that has no place in the architecture.
    """
    mapped = tuple(_mapped(file, config))
    unknown = set(file.tensors) - {m.tensor.name for m in mapped} - {ROPE_FACTORS_NAME}
    if unknown:
        raise UnsupportedModelError(
            f"{file.path} holds tensors unknown to the llama architecture: "
            f"{', '.join(sorted(unknown)[:3])} ({len(unknown)} in all); "
            "use the model's Hugging Face folder instead"
        )
    return mapped


def unpermute_rows(rows: npt.NDArray[Any], *, head_dim: int) -> npt.NDArray[Any]:
    """Return rows of whole heads in Hugging Face's order: first all firsts of the pairs.

    Shapes: rows (num_heads * head_dim, ...), as is the result.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _refuse_variants(file: GgufFile) -> None:
    if file.get("llama.expert_count", int, default=0) > 0:
        raise UnsupportedModelError(
            f"{file.path} has llama.expert_count {file.metadata['llama.expert_count']}, need 0: "
            "mixtures of experts are not converted; use the model's Hugging Face folder"
        )
    prefix = "llama.rope.scaling."
    unknown = {k for k in file.metadata if k.startswith(prefix)} - {
        prefix + k for k in _SCALING_KEYS
    }
    if unknown:
        raise UnsupportedModelError(
            f"{file.path}: metadata key {min(unknown)} is not supported; "
            "use the model's Hugging Face folder instead"
        )


def _positive(file: GgufFile, key: str, *, default: int | None = None) -> int:
    value = file.get(key, int, default=default)
    if value <= 0:
        raise CheckpointError(f"{file.path}: metadata key {key} is {value}, need at least 1")
    return value


def _head_dim(file: GgufFile, default: int) -> int:
    head_dim = _positive(file, "llama.attention.key_length", default=default)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        value = file.get(key, int, default=head_dim)
        if value != head_dim:
            raise UnsupportedModelError(
                f"{file.path}: {key} is {value}, need the head size {head_dim}; partial rotary "
                "embeddings and uneven heads are not supported"
            )
    if head_dim % 2:
        raise CheckpointError(f"{file.path}: head size is {head_dim}, need an even number")
    return head_dim


def _require(file: GgufFile, name: str) -> GgufTensor:
    if name not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor {name} is missing; fetch a whole file")
    return file.tensors[name]


def _has_biases(file: GgufFile, parts: tuple[str, ...]) -> bool:
    present = [part for part in parts if f"blk.0.{part}.bias" in file.tensors]
    if present and len(present) != len(parts):
        raise UnsupportedModelError(
            f"{file.path}: biases on {', '.join(present)} alone; the llama config knows only "
            f"all of {', '.join(parts)} or none"
        )
    return bool(present)


def _mapped(file: GgufFile, config: dict[str, Any]) -> Iterator[MappedTensor]:
    head_dim = config["head_dim"]
    sizes = {"hidden": config["hidden_size"], "inner": config["intermediate_size"],
             "q": config["num_attention_heads"] * head_dim,
             "kv": config["num_key_value_heads"] * head_dim}  # fmt: skip
    matrix = (config["vocab_size"], config["hidden_size"])
    yield _checked(file, "token_embd.weight", "model.embed_tokens.weight", matrix)
    biased = _biased_parts(config)
    for layer_idx in range(config["num_hidden_layers"]):
        for part, (target, keys) in _LAYER_TABLE.items():
            shape = tuple(sizes[key] for key in keys)
            source, target = f"blk.{layer_idx}.{part}", f"model.layers.{layer_idx}.{target}"
            rows = head_dim if part in _PERMUTED else None
            yield _checked(file, f"{source}.weight", f"{target}.weight", shape, head_dim=rows)
            if part in biased:
                yield _checked(file, f"{source}.bias", f"{target}.bias", shape[:1], head_dim=rows)
    yield _checked(file, "output_norm.weight", "model.norm.weight", matrix[1:])
    if not config["tie_word_embeddings"]:
        yield _checked(file, "output.weight", "lm_head.weight", matrix)


def _biased_parts(config: dict[str, Any]) -> frozenset[str]:
    attention = _ATTENTION_BIASES if config["attention_bias"] else ()
    return frozenset(attention + (_MLP_BIASES if config["mlp_bias"] else ()))


def _checked(
    file: GgufFile, source: str, target: str, shape: tuple[int, ...], *, head_dim: int | None = None
) -> MappedTensor:
    tensor = _require(file, source)
    if tensor.shape != shape:
        raise CheckpointError(
            f"{file.path}: tensor {source} has shape {list(tensor.shape)}, need {list(shape)} "
            "by the metadata; fetch it again"
        )
    return MappedTensor(name=target, tensor=tensor, head_dim=head_dim)


def _rope_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any] | None:
    if ROPE_FACTORS_NAME in file.tensors:
        return _llama3_scaling(file, config)
    kind = file.get("llama.rope.scaling.type", str, default="none")
    if "llama.rope.scale_linear" in file.metadata:
        factor = file.get("llama.rope.scale_linear", float)
        return {"rope_type": "linear", "factor": _shortest(factor)} if factor != 1 else None
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path}: llama.rope.scaling.type is {kind!r}, need none, linear or yarn"
        )
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": _shortest(file.get("llama.rope.scaling.factor", float)),
    }
    if kind == "yarn":
        key = "llama.rope.scaling.original_context_length"
        scaling["original_max_position_embeddings"] = _positive(file, key)
    return scaling


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any] | None:
    """Find the llama3 parameters from the frequency divisors that the file holds instead.

    Between its two limits the scheme is linear in the frequency, s = a * f - b, where a divisor is
    1 / ((1 - s) / factor + s). The parameters follow but for a common scale, which low_freq_factor
    = 1 fixes (its value in every released model); they are accepted only if they give the file's
    divisors back.
    """
    half_dim = config["head_dim"] // 2
    pieces = list(file.read_rows(_checked(file, ROPE_FACTORS_NAME, "", (half_dim,)).tensor))
    divisors = np.concatenate(pieces).astype(np.float64)
    if (divisors == 1).all():
        return None
    frequencies = config["rope_theta"] ** (-np.arange(half_dim) / half_dim) / (2 * np.pi)
    factor = float(divisors.max())
    between = (divisors > 1) & (divisors < factor)
    if between.sum() >= 2:
        smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
        slope, intercept = np.polyfit(frequencies[between], smooth[between], 1)
        expected = np.clip(slope * frequencies + intercept, 0, 1)
        rebuilt = 1 / ((1 - expected) / factor + expected)
        if intercept < 0 and np.allclose(rebuilt, divisors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": _shortest(factor),
                "low_freq_factor": 1.0,
                "high_freq_factor": round(1 - 1 / float(intercept), 3),
                "original_max_position_embeddings": round(float(-slope / intercept)),
            }
    raise UnsupportedModelError(
        f"{file.path}: the frequency divisors in {ROPE_FACTORS_NAME} follow no known rope scaling; "
        "use the model's Hugging Face folder instead"
    )


def _shortest(value: float) -> float:
    """Undo the widening of a float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))
