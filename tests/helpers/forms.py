"""One model's values in every form that its files may have: names, element types, layouts, stores.

All values are whole 64ths below 2, which fp16, bf16, fp32 and fp64 hold exactly, so that whatever
form a model is read from, nothing may differ by a bit. The models are made from the shapes that the
families ask for, without transformers.
"""

import functools
import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from tests.helpers.checkpoints import spell_config_old
from tests.helpers.gguf_models import write_model_gguf
from tools.shards import Shard, split_layers, split_shards
from zeroinfer.checkpoint import convert_folder, convert_gguf
from zeroinfer.dtypes import DType, TensorSpec
from zeroinfer.engine import order_of_use
from zeroinfer.models import build_model

__all__ = ["DTYPES", "FAMILIES", "FILES", "GGUF_FAMILIES", "NAMES", "VOCAB_SIZE", "Form",
           "is_possible", "save_form", "table_name"]  # fmt: skip

VOCAB_SIZE = 300
_LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROTARY = {
    **_LAYERS, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_parameters": _ROPE,
}  # fmt: skip
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": None,
        "layer_norm_epsilon": 1e-5}  # fmt: skip
_OPT = {**_LAYERS, "ffn_dim": 64, "max_position_embeddings": 64}
_CONFIGS = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": _LAYERS,
    "falcon-new": {**_LAYERS, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-alibi": {
        **_LAYERS, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
    },
    "gpt2": _GPT,
    "gpt_neox": {
        **_LAYERS, "intermediate_size": 64, "max_position_embeddings": 64,
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
    },
    "gptj": {**_GPT, "rotary_dim": 4},
    "llama": _ROTARY,
    "mistral": {**_ROTARY, "sliding_window": 8},
    "opt": {**_OPT, "word_embed_proj_dim": 32},
    "opt-350m": {**_OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "qwen2": _ROTARY,
    "qwen3": {**_ROTARY, "head_dim": 16},
    "starcoder2": {**_ROTARY, "norm_epsilon": 1e-5},
}  # fmt: skip
FAMILIES = tuple(_CONFIGS)
GGUF_FAMILIES = frozenset({"gpt2", "llama", "mistral", "qwen2", "qwen3"})

NAMES = ("canonical", "bare", "other")
"""As the families write them; as a decoder saved by itself does; a third spelling, of some."""
_OUTER = {"gpt_neox": "gpt_neox.", "opt": "model."} | dict.fromkeys(
    ("bloom", "falcon", "gpt2", "gptj"), "transformer."
)
_ROTARY_OUTER = "model."

DTYPES = ("fp32", "bf16", "fp16", "mixed")
_TORCH = {
    DType.F32: torch.float32, DType.BF16: torch.bfloat16,
    DType.F16: torch.float16, DType.F64: torch.float64,
}  # fmt: skip
_MIXED = (DType.BF16, DType.F16, DType.F32, DType.F64)

FILES = ("single", "odd", "shards", "layers", "store", "striped", "pickles", "gguf")
"""One file; one whose tensors lie at odd addresses; shards that cut layers; a file of each layer
behind a padded header; and stores: copied, over three folders, made of .bin files, of GGUF."""
_SHARD_BYTES = 16 * 1024
_ODD_BYTES = 3


@dataclass(frozen=True, kw_only=True)
class Form:
    """What is saved, and how."""

    family: str
    head: str = "tied"
    """`tied`, `twice` (tied and yet written) or `untied`."""
    names: str = "canonical"
    dtype: str = "fp32"
    files: str = "single"

    @property
    def model_type(self) -> str:
        """The family without its variant."""
        return self.family.partition("-")[0]

    @property
    def config(self) -> dict:
        """Content of config.json, in the newer spelling."""
        sizes = {**_CONFIGS[self.family], "vocab_size": VOCAB_SIZE}
        return {
            **sizes, "model_type": self.model_type, "tie_word_embeddings": self.head != "untied",
        }  # fmt: skip


def is_possible(*, family=None, head=None, names=None, dtype=None, files=None, **_) -> bool:
    """Whether there is such a form; what is not given may still become anything."""
    if family == "bloom" and head == "untied":
        return False
    if names == "other" and family not in (None, "gpt_neox", "opt", "opt-350m"):
        return False
    if files != "gguf":
        return True
    return (
        (family is None or family in GGUF_FAMILIES)
        and head != "twice" and dtype != "mixed" and names in (None, "canonical")
    )  # fmt: skip


def table_name(family: str) -> str:
    """Return the parameter name of the matrix of tokens."""
    embed = build_model(Form(family=family).config).stages[0].ops[0]
    return embed.gathered[0].name


def save_form(form: Form, root: Path) -> Path:
    """Save a model under an empty folder and return the folder to stream it from."""
    if form.files == "gguf":
        plain = save_form(replace(form, files="single", dtype="fp32"), root / "plain")
        write_model_gguf(root / "m.gguf", plain)
        return convert_gguf(root / "m.gguf", root, dtype=form.dtype)
    folder = root / "hf"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(form.config))
    if form.names == "bare":
        spell_config_old(folder)
    # A store made of fp32 rounds; one of mixed types keeps them.
    is_rounded = form.files == "store" and form.dtype != "mixed"
    tensors = _tensors(form, dtype="fp32" if is_rounded else form.dtype)
    _WRITERS[form.files](folder, tensors)
    if form.files not in ("store", "striped", "pickles"):
        return folder
    nvme = [root / f"nvme-{idx}" for idx in range(3 if form.files == "striped" else 1)]
    for each in nvme:
        each.mkdir()
    dtype = form.dtype if is_rounded else "auto"
    return convert_folder(folder, nvme[0], dtype=dtype, stripes=nvme[1:], order=order_of_use)


@functools.cache
def _values(family: str, is_untied: bool) -> dict[str, np.ndarray]:
    """Values of every parameter; a norm's weights are about 1."""
    model = build_model(Form(family=family, head="untied" if is_untied else "tied").config)
    generator = np.random.default_rng(7)
    values = {}
    for name, param in model.params.items():
        numbers = generator.integers(-31, 32, param.shape).astype(np.float32) / 64
        is_scale = len(param.shape) == 1 and name.endswith(".weight")
        values[name] = numbers + 1 if is_scale else numbers
    return values


def _tensors(form: Form, *, dtype: str) -> dict[str, torch.Tensor]:
    """Return the tensors by the names they have in the file."""
    values = {**_values(form.family, form.head == "untied")}
    if form.head == "twice":
        name = build_model(form.config).tied_names[0]
        values[name] = values[table_name(form.family)]
    kinds = itertools.cycle(_MIXED if dtype == "mixed" else (DType.from_name(dtype),))
    return {
        _spelled(name, form): torch.from_numpy(array).to(_TORCH[next(kinds)])
        for name, array in values.items()
    }


def _spelled(name: str, form: Form) -> str:
    outer = _OUTER.get(form.model_type, _ROTARY_OUTER)
    if form.names == "canonical":
        return name
    if form.names == "bare":
        return name.removeprefix(outer)
    if form.model_type == "gpt_neox":
        return name.replace("embed_out", "lm_head")
    return name.removeprefix("model.decoder.")


def _specs(tensors) -> list[TensorSpec]:
    kinds = {each: dtype for dtype, each in _TORCH.items()}
    return [
        TensorSpec(name=name, shape=tuple(tensor.shape), dtype=kinds[tensor.dtype])
        for name, tensor in tensors.items()
    ]


def _write_shards(folder: Path, tensors, shards: list[Shard], *, odd_bytes: int = 0) -> None:
    for shard in shards:
        text = shard.header()[8:] + b" " * odd_bytes
        data = b"".join(tensors[s.name].view(torch.uint8).numpy().tobytes() for s in shard.specs)
        (folder / shard.name).write_bytes(len(text).to_bytes(8, "little") + text + data)
    if len(shards) > 1:
        files = {spec.name: shard.name for shard in shards for spec in shard.specs}
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": files}))


def _write_one(folder: Path, tensors, *, alignment: int = 8, odd_bytes: int = 0) -> None:
    shard = Shard(name="model.safetensors", specs=_specs(tensors), alignment=alignment)
    _write_shards(folder, tensors, [shard], odd_bytes=odd_bytes)


def _write_pickles(folder: Path, tensors) -> None:
    for idx in range(2):
        part = {name: tensors[name] for name in list(tensors)[idx::2]}
        torch.save(part, folder / f"pytorch_model-{idx + 1:05}-of-00002.bin")


_WRITERS = {
    "single": _write_one,
    "odd": functools.partial(_write_one, alignment=4096, odd_bytes=_ODD_BYTES),
    "shards": lambda to, tensors: _write_shards(
        to, tensors, split_shards(_specs(tensors), _SHARD_BYTES)
    ),
    "layers": lambda to, tensors: _write_shards(to, tensors, split_layers(_specs(tensors))),
    "store": _write_one,
    "striped": _write_one,
    "pickles": _write_pickles,
}
