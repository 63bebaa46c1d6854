"""Small exact tokenizers, S-TOK of the acceptance cases among them, in memory and in folders."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

PAD_ID, BOS_ID, EOS_ID, EOT_ID = 0, 1, 2, 259
_FIRST_BYTE_ID = 3
SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
BEGIN_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


def byte_alphabet() -> list[str]:
    """Return the printable stand-in of every byte value, as byte-level vocabularies spell it."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = {byte: 256 + i for i, byte in enumerate(b for b in range(256) if b not in plain)}
    return [chr(shifted.get(byte, byte)) for byte in range(256)]


def byte_ids(text: str) -> list[int]:
    """Return the ids of a text in S-TOK without merges: those of its UTF-8 bytes.

    Byte tokens are in the order of their stand-ins, so that 'hi' is [74, 75].
    """
    alphabet = byte_alphabet()
    rank = {token: _FIRST_BYTE_ID + i for i, token in enumerate(sorted(alphabet))}
    return [rank[alphabet[byte]] for byte in text.encode()]


def s_tok(*, begin: bool = False, merges: Sequence[tuple[bytes, bytes]] = ()) -> Tokenizer:
    """Build the byte-level tokenizer: 'hi' is [74, 75]; merges get the ids from 260 on."""
    alphabet = byte_alphabet()

    def spell(text: bytes) -> str:
        return "".join(alphabet[byte] for byte in text)

    vocab = {"<pad>": PAD_ID, "<s>": BOS_ID, "</s>": EOS_ID, "<eot>": EOT_ID}
    vocab |= {token: _FIRST_BYTE_ID + rank for rank, token in enumerate(sorted(alphabet))}
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
