"""S-MODEL of the acceptance cases: a llama whose greedy text is known without trained weights."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.helpers.tokenizers import BOS_ID, EOS_ID, EOT_ID, PAD_ID, byte_ids, write_tokenizer

SCRIPT_PROMPT = "Q"
SCRIPT = ">ab\N{GRINNING FACE}cd\N{LATIN SMALL LETTER E WITH ACUTE}!"


def script_ids() -> list[int]:
    """Return the ids that S-MODEL emits after its prompt, the end token included."""
    return [*byte_ids(SCRIPT), EOT_ID]


def write_scripted_model(
    folder: Path,
    *,
    num_layers: int = 2,
    eos_token_id: int = EOS_ID,
    generation_eos: int | list[int] | None = (EOS_ID, EOT_ID),
    chain: Sequence[int] | None = None,
    dtype: str = "float32",
    **tokenizer_options: object,
) -> Path:
    """Write S-MODEL: a llama whose layers add nothing, so that the head alone names the next id.

    Args:
        folder: made if missing.
        num_layers: decoder layers, all of them without effect.
        eos_token_id: end id of config.json.
        generation_eos: end ids of generation_config.json; None writes no such file.
        chain: ids that follow each other, each at most once; the script after 'Q' by default.
        dtype: a torch dtype's name.
        tokenizer_options: for `write_tokenizer`.
    """
    write_tokenizer(folder, **tokenizer_options)
    hidden = 264
    config = _llama_config(hidden, num_layers) | {"eos_token_id": eos_token_id, "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation_eos is not None:
        value = list(generation_eos) if not isinstance(generation_eos, int) else generation_eos
        document = {"bos_token_id": BOS_ID, "eos_token_id": value}
        (folder / "generation_config.json").write_text(json.dumps(document), encoding="utf-8")
    ids = list(chain) if chain is not None else [*byte_ids(SCRIPT_PROMPT), *script_ids()]
    if len(set(ids)) != len(ids):
        raise ValueError(f"chain repeats an id: got {ids}, need each at most once")
    tensors = _scripted_tensors(hidden, num_layers, ids)
    save_file(
        {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def _llama_config(hidden: int, num_layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": hidden,
        "hidden_size": hidden,
        "intermediate_size": 16,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS_ID,
        "pad_token_id": PAD_ID,
    }


def _scripted_tensors(hidden: int, num_layers: int, chain: Sequence[int]) -> dict:
    head = torch.zeros(hidden, hidden)
    for current, following in itertools.pairwise(chain):
        head[following, current] = 1
    tensors = {
        "model.embed_tokens.weight": torch.eye(hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": head,
    }
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 2, hidden),
        "self_attn.v_proj": (hidden // 2, hidden),
        "mlp.gate_proj": (16, hidden),
        "mlp.up_proj": (16, hidden),
    }
    for layer_idx in range(num_layers):
        prefix = f"model.layers.{layer_idx}"
        for name, shape in shapes.items():
            weight = torch.randn(shape, generator=generator) * 0.05
            tensors[f"{prefix}.{name}.weight"] = weight
        tensors[f"{prefix}.self_attn.o_proj.weight"] = torch.zeros(hidden, hidden)
        tensors[f"{prefix}.mlp.down_proj.weight"] = torch.zeros(hidden, 16)
        tensors[f"{prefix}.input_layernorm.weight"] = torch.ones(hidden)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(hidden)
    return tensors
