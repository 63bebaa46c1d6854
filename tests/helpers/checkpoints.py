"""Makers of tiny models saved by transformers, their odd relatives, and the oracle that runs them.

Random weights, loud enough (matrices times 8, vectors plus noise) that greedy texts differ between
prompts and biases count. Matrices of tied families get a further factor inside the layers: without
it the tied head outshouts them and a text repeats its last prompt token. Folders without any model
behind them: tests.helpers.raw_checkpoints.
"""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

_LLAMA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_TINY = {
    "llama": _LLAMA,
    "gpt2": {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
        "bos_token_id": None, "eos_token_id": None,
    },
    "bloom": {
        "hidden_size": 32, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": None,
    },
    "opt": {
        "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 128, "word_embed_proj_dim": 32,
        "bos_token_id": None, "eos_token_id": None,
    },
    "gpt_neox": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 256,
        "bos_token_id": None, "eos_token_id": None,
    },
    "gptj": {
        "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 8,
        "bos_token_id": None, "eos_token_id": None,
    },
    "mistral": {**_LLAMA, "sliding_window": 8},
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, "head_dim": 16},
    "falcon": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "bos_token_id": None, "eos_token_id": None,
    },
}  # fmt: skip


_LAYER_SCALE = {
    "llama": 1, "gpt2": 4, "bloom": 4, "opt": 4, "gpt_neox": 1, "gptj": 1, "mistral": 1,
    "qwen2": 1, "qwen3": 1, "falcon": 4,
}  # fmt: skip

_OLD_ROPE_NAMES = {
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
}
"""Families that had their own names for what older releases wrote beside rope_scaling."""


def tiny_config(family, *, vocab_size=97, **overrides):
    """Return transformers' config of a tiny model; sizes as in `tiny_model`."""
    sizes = {**_TINY.get(family, _LLAMA), "vocab_size": vocab_size, **overrides}
    return transformers.AutoConfig.for_model(family, **sizes)


def tiny_model(family, *, dtype="float32", seed=0, vocab_size=97, layer_scale=None, **overrides):
    """Build a tiny transformers model of a family with loud random weights.

    Sizes are those of `_TINY`, llama's for a family without an entry, and `overrides`.
    """
    config = tiny_config(family, vocab_size=vocab_size, **overrides)
    layer_scale = layer_scale or _LAYER_SCALE.get(family, 1)
    # The global generator must stay as other tests left it.
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                is_in_layer = ".layers." in name or ".h." in name
                parameter.mul_(8 * layer_scale if is_in_layer else 8)
            else:
                parameter.add_(0.05 * torch.randn(parameter.shape))
    return model.to(getattr(torch, dtype))


def save_tiny(folder, family, *, max_shard_size=None, **kwargs):
    """Save `tiny_model(family, **kwargs)` ; in shards if a size such as 20KB is given."""
    model = tiny_model(family, **kwargs)
    options = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.save_pretrained(folder, **options)
    return Path(folder)


def tiny_llama(folder, **kwargs):
    """M-LLAMA: hidden 32, 4 heads, 2 kv heads, 2 layers, vocabulary 97."""
    return save_tiny(folder, "llama", **kwargs)


def tiny_gpt2(folder, **kwargs):
    """M-GPT2: hidden 32, 4 heads, 128 positions, tied head."""
    return save_tiny(folder, "gpt2", **kwargs)


def tiny_bloom(folder, *, num_heads=4, **kwargs):
    """M-BLOOM4 (hidden 32), or 8 x num_heads if 4 heads are not wanted; M-BLOOM3 is 3 (48)."""
    hidden_size = {3: 48, 4: 32}.get(num_heads, 8 * num_heads)
    return save_tiny(folder, "bloom", **{"hidden_size": hidden_size, "n_head": num_heads, **kwargs})


def tiny_bloom4(folder, **kwargs):
    """M-BLOOM4: hidden 32, 4 heads."""
    return tiny_bloom(folder, num_heads=4, **kwargs)


def tiny_bloom3(folder, **kwargs):
    """M-BLOOM3: hidden 48, 3 heads."""
    return tiny_bloom(folder, num_heads=3, **kwargs)


def tiny_opt(folder, **kwargs):
    """M-OPT: hidden 32, 4 heads, 128 positions, tied head."""
    return save_tiny(folder, "opt", **kwargs)


def tiny_opt350(folder, **kwargs):
    """M-OPT350: embeds in 16 columns, normalises after each sum, no final norm."""
    form = {"word_embed_proj_dim": 16, "do_layer_norm_before": False}
    return tiny_opt(folder, **{**form, **kwargs})


def tiny_gpt_neox(folder, **kwargs):
    """M-NEOX: hidden 64, 4 heads of 16 columns, 4 of which rotate; halves of a layer parallel."""
    return save_tiny(folder, "gpt_neox", **kwargs)


def tiny_gptj(folder, **kwargs):
    """M-GPTJ: hidden 64, 4 heads of 16 columns, 8 of which rotate; head with a bias."""
    return save_tiny(folder, "gptj", **kwargs)


def tiny_mistral(folder, **kwargs):
    """M-MISTRAL: sizes of M-LLAMA, a window of 8."""
    return save_tiny(folder, "mistral", **kwargs)


def tiny_qwen2(folder, **kwargs):
    """M-QWEN2: sizes of M-LLAMA, biased queries, keys and values."""
    return save_tiny(folder, "qwen2", **kwargs)


def tiny_qwen3(folder, **kwargs):
    """M-QWEN3: sizes of M-LLAMA but heads of 16 columns, normalised queries and keys."""
    return save_tiny(folder, "qwen3", **kwargs)


def tiny_falcon(folder, **kwargs):
    """M-FALCON-MQ: hidden 32, 4 heads, one key/value head, one norm for both parallel halves."""
    return save_tiny(folder, "falcon", **kwargs)


def tiny_falcon_new(folder, **kwargs):
    """M-FALCON-NEW: 2 key/value heads, a norm for each half."""
    form = {"new_decoder_architecture": True, "num_kv_heads": 2}
    return tiny_falcon(folder, **{**form, **kwargs})


def tiny_falcon_alibi(folder, **kwargs):
    """M-FALCON-ALIBI: as many key/value heads as queries, halves in sequence, biases."""
    form = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
    return tiny_falcon(folder, **{**form, **kwargs})


def sharded_llama(folder, **kwargs):
    """C-SHARD: M-LLAMA in seven shards, each decoder layer spread over three."""
    return tiny_llama(folder, max_shard_size="20KB", **kwargs)


def spell_config_old(folder, *, kind_key="type"):
    """Rewrite config.json as older releases wrote it (F2).

    rope_parameters -> rope_theta (rotary_emb_base and rotary_pct in gpt_neox) + rope_scaling (kind
    under `kind_key`: type or rope_type), dtype -> torch_dtype, and bloom's hidden_size and n_head
    -> n_embed and num_attention_heads.
    """
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    rope = config.pop("rope_parameters", None)
    if rope is not None:
        old_names = _OLD_ROPE_NAMES.get(config["model_type"], {})
        for key in ("rope_theta", "partial_rotary_factor"):
            if key in rope:
                config[old_names.get(key, key)] = rope.pop(key)
        kind = rope.pop("rope_type", "default")
        config["rope_scaling"] = None if kind == "default" else {kind_key: kind, **rope}
    if config.get("model_type") == "bloom":
        config["n_embed"] = config.pop("hidden_size")
        config["num_attention_heads"] = config.pop("n_head")
    path.write_text(json.dumps(config, indent=2))


def rewrite_tensors(folder, change):
    """Replace the tensors of a one-file folder by `change({name: tensor})`."""
    path = Path(folder) / "model.safetensors"
    # Clones, so that no tensor maps the file that is being replaced.
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(change(tensors), path, metadata={"format": "pt"})


def strip_prefix(folder, prefix):
    """Drop an outer prefix such as ``transformer.`` from every tensor name that has it."""
    rewrite_tensors(folder, lambda ts: {n.removeprefix(prefix): t for n, t in ts.items()})


def write_bin(folder, model, *, num_shards=1):
    """C-BIN: the state dict by torch.save, with an index if in several files; config beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    state = model.state_dict()
    if num_shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return folder
    weight_map = {}
    for shard_idx in range(num_shards):
        name = f"pytorch_model-{shard_idx + 1:05d}-of-{num_shards:05d}.bin"
        part = {n: state[n] for n in list(state)[shard_idx::num_shards]}
        torch.save(part, folder / name)
        weight_map.update(dict.fromkeys(part, name))
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def load_oracle(folder, *, dtype="float32"):
    """O-ROW: transformers' model of a folder, on the CPU."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype)
    ).eval()


def oracle_logits(model, token_ids):
    """Logits (len(token_ids), vocabulary) of one unpadded row."""
    with torch.inference_mode():
        return model(torch.tensor([list(token_ids)])).logits[0]


def oracle_greedy_ids(model, token_ids, num_new_tokens):
    """Greedy continuation of one unpadded row, without stopping at an end token."""
    input_ids = torch.tensor([list(token_ids)])
    with torch.inference_mode():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=num_new_tokens,
            min_new_tokens=num_new_tokens,
            pad_token_id=0,
        )
    return output[0, input_ids.shape[1] :].tolist()
