"""Writers of small llama GGUF files, with the values a conversion of them must give.

q and k are permuted here with the formula of llama.cpp's converter (one reshape and one swap per
head), written apart from the inverse that is under test.
"""

from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel

QUANTS = gguf.GGMLQuantizationType

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, VOCAB = 64, 96, 4, 2, 2, 280


def byte_vocabulary():
    """Control tokens, the 256 byte tokens, and what a few merges make: (tokens, types, merges)."""
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = ["h e", "l l", "he ll", "hell o", "1 2", "\u0120 w", "\u0120w o"]
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = control + sorted(ByteLevel.alphabet()) + merged
    return tokens, [3] * len(control) + [1] * (len(tokens) - len(control)), merges


def llama_shapes(*, tied=True, biases=False, layers=LAYERS, head_dim=HIDDEN // HEADS):
    """Hugging Face names and shapes of the little model."""
    q, kv = HEADS * head_dim, KV_HEADS * head_dim
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    projections = {
        "self_attn.q_proj": (q, HIDDEN), "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN), "self_attn.o_proj": (HIDDEN, q),
        "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    for idx in range(layers):
        prefix = f"model.layers.{idx}."
        shapes[f"{prefix}input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (HIDDEN,)
        for name, shape in projections.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if biases:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return shapes


def gguf_name(hf_name):
    """The file's name of a tensor."""
    parts = {
        "model.layers.": "blk.", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    }  # fmt: skip
    for old, new in parts.items():
        hf_name = hf_name.replace(old, new)
    return hf_name


def permute(rows, num_heads):
    """Order of q and k rows in a llama GGUF file."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_llama_gguf(
    path: Path, *, quant="F32", tied=True, biases=False, layers=LAYERS, head_dim=HIDDEN // HEADS,
    tokenizer=None, metadata=None, tensors=None, drop=(), seed=0,
):  # fmt: skip
    """Write a file; return {Hugging Face name: float32 values as the file holds them}.

    Args:
        path: the file.
        quant: how matrices are packed; vectors are F32.
        tied: leave output.weight out.
        biases: give every projection a bias.
        layers: number of layers.
        head_dim: size of a head; other than hidden / heads is written as key and value length.
        tokenizer: the value of tokenizer.ggml.pre; None writes no tokenizer.
        metadata: {key: value} set last; a value of None leaves the key out.
        tensors: {file name: array} added as they are.
        drop: file names of tensors left out.
        seed: of the values.
    """
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in _metadata(layers, head_dim, tokenizer, metadata or {}).items():
        _add(writer, key, value)
    rng = np.random.default_rng(seed)
    expected = {}
    shapes = llama_shapes(tied=tied, biases=biases, layers=layers, head_dim=head_dim)
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, np.float32)
        expected[name] = _add_tensor(writer, name, values, quant, skip=gguf_name(name) in drop)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _metadata(layers, head_dim, tokenizer, changes):
    values = {
        "llama.block_count": layers, "llama.context_length": 128,
        "llama.embedding_length": HIDDEN, "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": head_dim,
    }  # fmt: skip
    if head_dim != HIDDEN // HEADS:
        values |= {"llama.attention.key_length": head_dim, "llama.attention.value_length": head_dim}
    if tokenizer is not None:
        tokens, types, merges = byte_vocabulary()
        values |= {
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": tokenizer,
            "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": merges, "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 0,
        }  # fmt: skip
    values |= changes
    return {key: value for key, value in values.items() if value is not None}


def _add(writer, key, value):
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        # The writer has put general.architecture in already.
        writer.kv_data[0].pop(key, None)
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(writer, name, values, quant, *, skip):
    kind = QUANTS[quant] if values.ndim > 1 else QUANTS.F32
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    stored = values if heads is None else permute(values, heads)
    packed = quantize(stored, kind)
    if not skip:
        writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
    # Groups lie inside rows, so packing and moving rows commute.
    return dequantize(quantize(values, kind), kind)
