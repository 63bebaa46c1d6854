"""Tensors of GGUF files under Hugging Face's names, per architecture.

Two things are stored in another order than Hugging Face's. In llama files the rows of q and k hold
the pairs (0, d/2), (1, d/2 + 1), ... of a head side by side, for a rotary embedding that turns
neighbours; the other architectures keep Hugging Face's order. gpt2 files hold matrices transposed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from zeroinfer.checkpoint.gguf_reader import GgufFile, GgufTensor
from zeroinfer.errors import CheckpointError, UnsupportedModelError

__all__ = [
    "ROPE_FACTORS_NAME",
    "MappedTensor",
    "checked_tensor",
    "has_biases",
    "map_tensors",
    "unpermute_rows",
]

ROPE_FACTORS_NAME = "rope_freqs.weight"
"""Frequency divisors; they become part of the config."""
_ALWAYS = "always"


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedTensor:
    """A tensor of the file under its Hugging Face name."""

    name: str
    tensor: GgufTensor
    head_dim: int | None = None
    """Rows of a head if they are permuted, else None."""
    is_transposed: bool = False
    """Whether Hugging Face keeps the matrix the other way round."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Hugging Face's shape."""
        return self.tensor.shape[::-1] if self.is_transposed else self.tensor.shape


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A module: Hugging Face's name and the sizes of its weight, as the file stores it."""

    target: str
    sizes: tuple[str, ...]
    bias: str = ""
    """Config key that says whether there is a bias; `_ALWAYS`, or empty for never."""
    is_permuted: bool = False
    is_transposed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Architecture:
    """Modules by GGUF name, in order of use; names in `layer` are those inside a layer."""

    prefix: str
    layers: str
    first: Mapping[str, _Part]
    layer: Mapping[str, _Part]
    last: Mapping[str, _Part]


def _rotary_layer(
    *, input_bias: str, output_bias: str, mlp_bias: str, is_permuted: bool, has_head_norms: bool
) -> dict[str, _Part]:
    head_norms = {
        "attn_q_norm": _Part(target="self_attn.q_norm", sizes=("head",)),
        "attn_k_norm": _Part(target="self_attn.k_norm", sizes=("head",)),
    }
    return {
        "attn_norm": _Part(target="input_layernorm", sizes=("hidden",)),
        "attn_q": _Part(target="self_attn.q_proj", sizes=("q", "hidden"), bias=input_bias,
                        is_permuted=is_permuted),
        "attn_k": _Part(target="self_attn.k_proj", sizes=("kv", "hidden"), bias=input_bias,
                        is_permuted=is_permuted),
        "attn_v": _Part(target="self_attn.v_proj", sizes=("kv", "hidden"), bias=input_bias),
        **(head_norms if has_head_norms else {}),
        "attn_output": _Part(target="self_attn.o_proj", sizes=("hidden", "q"), bias=output_bias),
        "ffn_norm": _Part(target="post_attention_layernorm", sizes=("hidden",)),
        "ffn_gate": _Part(target="mlp.gate_proj", sizes=("inner", "hidden"), bias=mlp_bias),
        "ffn_up": _Part(target="mlp.up_proj", sizes=("inner", "hidden"), bias=mlp_bias),
        "ffn_down": _Part(target="mlp.down_proj", sizes=("hidden", "inner"), bias=mlp_bias),
    }  # fmt: skip


def _rotary(**options: Any) -> _Architecture:
    return _Architecture(
        prefix="model.",
        layers="layers",
        first={"token_embd": _Part(target="embed_tokens", sizes=("vocab", "hidden"))},
        layer=_rotary_layer(**options),
        last={"output_norm": _Part(target="norm", sizes=("hidden",))},
    )


def _transposed(target: str, *sizes: str) -> _Part:
    return _Part(target=target, sizes=sizes, bias=_ALWAYS, is_transposed=True)


_ARCHITECTURES = {
    "llama": _rotary(input_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias",
                     is_permuted=True, has_head_norms=False),
    "qwen2": _rotary(input_bias=_ALWAYS, output_bias="", mlp_bias="",
                     is_permuted=False, has_head_norms=False),
    "qwen3": _rotary(input_bias="attention_bias", output_bias="attention_bias", mlp_bias="",
                     is_permuted=False, has_head_norms=True),
    "gpt2": _Architecture(
        prefix="transformer.",
        layers="h",
        first={"token_embd": _Part(target="wte", sizes=("vocab", "hidden")),
               "position_embd": _Part(target="wpe", sizes=("positions", "hidden"))},
        layer={
            "attn_norm": _Part(target="ln_1", sizes=("hidden",), bias=_ALWAYS),
            "attn_qkv": _transposed("attn.c_attn", "qkv", "hidden"),
            "attn_output": _transposed("attn.c_proj", "hidden", "hidden"),
            "ffn_norm": _Part(target="ln_2", sizes=("hidden",), bias=_ALWAYS),
            "ffn_up": _transposed("mlp.c_fc", "inner", "hidden"),
            "ffn_down": _transposed("mlp.c_proj", "hidden", "inner"),
        },
        last={"output_norm": _Part(target="ln_f", sizes=("hidden",), bias=_ALWAYS)},
    ),
}  # fmt: skip


def map_tensors(
    file: GgufFile, config: Mapping[str, Any], *, sizes: Mapping[str, int]
) -> tuple[MappedTensor, ...]:
    """Return every tensor under its Hugging Face name, in order of use, shapes checked.

    Args:
        file: a file of a known architecture.
        config: content of config.json; says which modules have biases and whether the head is tied.
        sizes: of the dimensions, by the names used in the tables here.

    Raises:
        CheckpointError: a tensor is missing or has another shape than the config says.
        UnsupportedModelError: the file holds a tensor that has no place in the architecture.
    """
    architecture = file.get("general.architecture", str)
    mapped = tuple(_mapped(file, _ARCHITECTURES[architecture], config, sizes))
    known = {m.tensor.name for m in mapped} | {ROPE_FACTORS_NAME}
    if config["tie_word_embeddings"]:
        # Some files repeat the embedding; the config says tied only if it is the same.
        known.add("output.weight")
    unknown = set(file.tensors) - known
    if unknown:
        raise UnsupportedModelError(
            f"{file.path} holds tensors unknown to the {architecture} architecture: "
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


def has_biases(file: GgufFile, parts: tuple[str, ...]) -> bool:
    """Whether these modules of the first layer have biases.

    Raises:
        UnsupportedModelError: some have and some have not.
    """
    present = [part for part in parts if f"blk.0.{part}.bias" in file.tensors]
    if present and len(present) != len(parts):
        raise UnsupportedModelError(
            f"{file.path}: biases on {', '.join(present)} alone; the model's config knows only "
            f"all of {', '.join(parts)} or none"
        )
    return bool(present)


def checked_tensor(file: GgufFile, name: str, shape: tuple[int, ...]) -> GgufTensor:
    """Return a tensor that must be there with this shape.

    Raises:
        CheckpointError: it is not.
    """
    if name not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor {name} is missing; fetch a whole file")
    tensor = file.tensors[name]
    if tensor.shape != shape:
        raise CheckpointError(
            f"{file.path}: tensor {name} has shape {list(tensor.shape)}, need {list(shape)} "
            "by the metadata; fetch it again"
        )
    return tensor


def _mapped(
    file: GgufFile,
    architecture: _Architecture,
    config: Mapping[str, Any],
    sizes: Mapping[str, int],
) -> Iterator[MappedTensor]:
    prefix = architecture.prefix
    for name, part in architecture.first.items():
        yield from _tensors(file, name, prefix, part, config, sizes)
    for idx in range(sizes["layers"]):
        for name, part in architecture.layer.items():
            where = f"{prefix}{architecture.layers}.{idx}."
            yield from _tensors(file, f"blk.{idx}.{name}", where, part, config, sizes)
    for name, part in architecture.last.items():
        yield from _tensors(file, name, prefix, part, config, sizes)
    if not config["tie_word_embeddings"]:
        head = _Part(target="lm_head", sizes=("vocab", "hidden"))
        yield from _tensors(file, "output", "", head, config, sizes)


def _tensors(
    file: GgufFile,
    source: str,
    prefix: str,
    part: _Part,
    config: Mapping[str, Any],
    sizes: Mapping[str, int],
) -> Iterator[MappedTensor]:
    """Yield the weight of a module and its bias, if it has one."""
    shape = tuple(sizes[size] for size in part.sizes)
    head_dim = sizes["head"] if part.is_permuted else None
    yield MappedTensor(
        name=f"{prefix}{part.target}.weight",
        tensor=checked_tensor(file, f"{source}.weight", shape),
        head_dim=head_dim,
        is_transposed=part.is_transposed,
    )
    if part.bias == _ALWAYS or config.get(part.bias):
        yield MappedTensor(
            name=f"{prefix}{part.target}.bias",
            tensor=checked_tensor(file, f"{source}.bias", shape[:1]),
            head_dim=head_dim,
        )
