"""Model folders with small exact tokenizers, and a scripted model whose greedy text is known.

S-TOK and S-MODEL of the acceptance cases; every builder writes into a folder and returns it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

PAD_ID, BOS_ID, EOS_ID, FIRST_BYTE_ID, EOT_ID = 0, 1, 2, 3, 259
SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
SCRIPT = ">ab\N{GRINNING FACE}cd\N{LATIN SMALL LETTER E WITH ACUTE}!"
SCRIPT_PROMPT = "Q"
BEGIN_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


def byte_alphabet() -> list[str]:
    """Return the printable stand-in of every byte value, as byte-level vocabularies spell it."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = {byte: 256 + i for i, byte in enumerate(b for b in range(256) if b not in plain)}
    return [chr(shifted.get(byte, byte)) for byte in range(256)]


def s_tok(*, begin: bool = False, merges: Sequence[tuple[bytes, bytes]] = ()) -> Tokenizer:
    """Build the byte-level tokenizer: 'hi' is [74, 75]; merges get the ids from 260 on."""
    alphabet = byte_alphabet()

    def spell(text: bytes) -> str:
        return "".join(alphabet[byte] for byte in text)

    vocab = {"<pad>": PAD_ID, "<s>": BOS_ID, "</s>": EOS_ID, "<eot>": EOT_ID}
    vocab |= {token: FIRST_BYTE_ID + byte for byte, token in enumerate(alphabet)}
    for i, (left, right) in enumerate(merges):
        vocab[spell(left + right)] = EOT_ID + 1 + i
    pairs = [(spell(left), spell(right)) for left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>", "<eot>"])
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS_ID)]
        )
    return tokenizer


def metaspace_tok() -> Tokenizer:
    """Build a sentencepiece-like tokenizer: leading space dropped, bytes for unknown letters."""
    words = ["\u2581hello", "\u2581world", "\u2581", *"helowrd.", "\u2581the"]
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    vocab += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    vocab += [(word, -float(10 - len(word))) for word in words]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def gpt2_like_tok() -> Tokenizer:
    """Build a byte-level tokenizer with GPT-2's word splitting and merges across characters."""
    tokenizer = s_tok(
        merges=[
            (b"h", b"e"),
            (b"l", b"l"),
            (b" ", b"w"),
            (b"\xf0", b"\x9f"),
            (b"\xf0\x9f", b"\x98"),
            (b"\x80", b"\xc3"),
            (b"!", b"!"),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\w+|\s+|[^\s\w]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def write_tokenizer(
    folder: Path,
    *,
    tokenizer: Tokenizer | None = None,
    begin: bool = False,
    chat_template: object = None,
    special_tokens: Mapping[str, object] = SPECIAL_TOKENS,
) -> Path:
    """Write tokenizer.json and tokenizer_config.json; S-TOK unless another one is given."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or s_tok(begin=begin)).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special_tokens}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def script_ids(text: str = SCRIPT) -> list[int]:
    """Return the ids that S-MODEL emits for its script, the end token included."""
    return [FIRST_BYTE_ID + byte for byte in text.encode()] + [EOT_ID]


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
    import torch
    from safetensors.torch import save_file

    write_tokenizer(folder, **tokenizer_options)
    hidden = 264
    config = _llama_config(hidden, num_layers) | {"eos_token_id": eos_token_id, "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation_eos is not None:
        value = list(generation_eos) if not isinstance(generation_eos, int) else generation_eos
        document = {"bos_token_id": BOS_ID, "eos_token_id": value}
        (folder / "generation_config.json").write_text(json.dumps(document), encoding="utf-8")
    ids = list(chain) if chain is not None else _script_chain()
    if len(set(ids)) != len(ids):
        raise ValueError(f"chain repeats an id: got {ids}, need each at most once")
    tensors = _scripted_tensors(hidden, num_layers, ids)
    save_file(
        {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def _script_chain() -> list[int]:
    return [FIRST_BYTE_ID + ord(SCRIPT_PROMPT), *script_ids()]


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
    import torch

    head = torch.zeros(hidden, hidden)
    for current, following in zip(chain, chain[1:], strict=False):
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
