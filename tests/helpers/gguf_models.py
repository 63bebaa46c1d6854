"""GGUF files of models that transformers saved: names, row orders and metadata, per architecture.

Written from the format's description, apart from the tables under test.
"""

import json

import gguf
import numpy as np
from gguf.quants import dequantize
from safetensors.torch import load_file

from tests.helpers.gguf_files import QUANTS, permute

_ROTARY_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.layers.": "blk.", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_GPT2_NAMES = {
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm", "transformer.h.": "blk.", "lm_head": "output",
    "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down", "ln_1": "attn_norm", "ln_2": "ffn_norm",
}  # fmt: skip


def write_model_gguf(path, folder, *, repeats_embedding=False, metadata=None):
    """Write the model of a folder (llama, mistral, qwen2, qwen3 or gpt2) as F32.

    Args:
        path: the file.
        folder: saved by transformers, in one file.
        repeats_embedding: write a tied head a second time, as older files do.
        metadata: {key without the architecture: value} set last.
    """
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    architecture = "llama" if family == "mistral" else family
    writer = gguf.GGUFWriter(path, architecture)
    is_gpt2 = family == "gpt2"
    values = _gpt2_metadata(config) if is_gpt2 else _rotary_metadata(config)
    if family == "mistral":
        values["attention.sliding_window"] = config["sliding_window"]
    for key, value in {**values, **(metadata or {})}.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    tensors = {
        name: t.float().numpy() for name, t in load_file(folder / "model.safetensors").items()
    }
    if repeats_embedding:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    for name, array in tensors.items():
        writer.add_tensor(_file_name(name, is_gpt2), _file_order(name, array, config, architecture))
    _finish(writer)


def write_mixed_gguf(path, kinds, *, width=256, heads=4):
    """Write a llama whose every matrix inside the layers is packed in another way.

    The bytes are random but small, so that every scale among them is finite.

    Args:
        path: the file.
        kinds: names of the encodings; layers are added until all are used.
        width: of every matrix; a multiple of the largest group.
        heads: number of heads.

    Returns:
        {Hugging Face name: float32 values} of the packed matrices.
    """
    rng = np.random.default_rng(0)
    parts = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    num_layers = -(-len(kinds) // len(parts))
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "block_count": num_layers, "context_length": 64, "embedding_length": width,
        "feed_forward_length": width, "attention.head_count": heads,
        "attention.head_count_kv": heads,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    vectors = ["model.norm.weight"] + [
        f"model.layers.{idx}.{name}.weight"
        for idx in range(num_layers)
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    for name in vectors:
        writer.add_tensor(_file_name(name, False), np.ones(width, np.float32))
    writer.add_tensor("token_embd.weight", np.ones((8, width), np.float32))
    expected = {}
    for place in range(num_layers * len(parts)):
        kind = QUANTS[kinds[place % len(kinds)]]
        layer, part = divmod(place, len(parts))
        module = "self_attn" if parts[part][0] in "qkvo" else "mlp"
        name = f"model.layers.{layer}.{module}.{parts[part]}.weight"
        group, group_bytes = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 64, (width, width // group * group_bytes), np.uint8)
        stored = permute(raw, heads) if parts[part] in ("q_proj", "k_proj") else raw
        if kind is QUANTS.F32:
            writer.add_tensor(_file_name(name, False), stored.view(np.float32))
        else:
            writer.add_tensor(_file_name(name, False), stored, raw_dtype=kind)
        expected[name] = dequantize(raw, kind)
    _finish(writer)
    return expected


def _finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rotary_metadata(config):
    rope = config.get("rope_parameters") or config
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
    }


def _gpt2_metadata(config):
    return {
        "block_count": config["n_layer"],
        "context_length": config["n_positions"],
        "embedding_length": config["n_embd"],
        "feed_forward_length": config["n_inner"] or 4 * config["n_embd"],
        "attention.head_count": config["n_head"],
        "attention.layer_norm_epsilon": float(config["layer_norm_epsilon"]),
    }


def _file_name(name, is_gpt2):
    for old, new in (_GPT2_NAMES if is_gpt2 else _ROTARY_NAMES).items():
        name = name.replace(old, new)
    return name


def _file_order(name, array, config, architecture):
    if architecture == "gpt2" and array.ndim == 2 and ".c_" in name:
        return np.ascontiguousarray(array.T)
    if architecture == "llama" and "q_proj" in name:
        return permute(array, config["num_attention_heads"])
    if architecture == "llama" and "k_proj" in name:
        return permute(array, config["num_key_value_heads"])
    return array
