"""Tokenizer files in Hugging Face's form from the metadata of a GGUF file."""

import json
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from zeroinfer.checkpoint.gguf_bpe import build_bpe, word_split
from zeroinfer.checkpoint.gguf_reader import GgufFile
from zeroinfer.checkpoint.gguf_spm import build_sentencepiece
from zeroinfer.checkpoint.gguf_vocabulary import Vocabulary, read_vocabulary, token_id
from zeroinfer.errors import CheckpointError, UnsupportedModelError

__all__ = ["special_token_ids", "tokenizer_documents"]

_ID_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_END_KEYS = ("eos", "eot", "eom")


def tokenizer_documents(file: GgufFile) -> dict[str, bytes]:
    """Return tokenizer.json and tokenizer_config.json; nothing if the file has no tokenizer.

    Raises:
        UnsupportedModelError: the kind of tokenizer or the splitting of text is unknown.
        CheckpointError: vocabulary, merges or token ids contradict each other.
    """
    kind = file.get("tokenizer.ggml.model", str, default="none")
    if kind in ("none", "no_vocab"):
        return {}
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{file.path} has tokenizer.ggml.model {kind!r}, need 'gpt2' (byte-level BPE) or "
            "'llama' (sentencepiece); use the model's Hugging Face folder instead"
        )
    vocabulary = read_vocabulary(file)
    if kind == "llama":
        tokenizer, begins = build_sentencepiece(file, vocabulary), True
    else:
        split = word_split(file)
        tokenizer, begins = build_bpe(file, vocabulary, split), split.add_bos
    add_bos = file.get("tokenizer.ggml.add_bos_token", bool, default=begins)
    add_eos = file.get("tokenizer.ggml.add_eos_token", bool, default=False)
    _add_template(file, tokenizer, vocabulary, add_bos=add_bos, add_eos=add_eos)
    config = _tokenizer_config(file, vocabulary, add_bos=add_bos, add_eos=add_eos)
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(config, indent=2).encode() + b"\n",
    }


def special_token_ids(file: GgufFile) -> dict[str, int | list[int]]:
    """Return bos, eos and pad ids as generation_config.json wants them.

    Every token that ends a turn or a text is an end: eos_token_id is a list if there are several.
    """
    ids: dict[str, int | list[int]] = {}
    for name in ("bos", "pad"):
        found = token_id(file, _ID_KEYS[name])
        if found is not None:
            ids[f"{name}_token_id"] = found
    named = (token_id(file, role) for role in _END_KEYS)
    ends = list(dict.fromkeys(end for end in named if end is not None))
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return ids


def _add_template(
    file: GgufFile, tokenizer: Tokenizer, vocabulary: Vocabulary, *, add_bos: bool, add_eos: bool
) -> None:
    bos = _token(file, vocabulary, "bos") if add_bos else None
    eos = _token(file, vocabulary, "eos") if add_eos else None
    ends = [t for t in (bos, eos) if t is not None]
    if not ends:
        return
    single = " ".join(part for part in (bos and "BOS", "$A", eos and "EOS") if part)
    names = dict(zip([part for part in single.split() if part != "$A"], ends, strict=True))
    ids = [
        {"id": name, "ids": [vocabulary.tokens.index(t)], "tokens": [t]}
        for name, t in names.items()
    ]
    tokenizer.post_processor = TemplateProcessing(
        single=single, pair=f"{single} {single.replace('$A', '$B')}", special_tokens=ids
    )


def _tokenizer_config(
    file: GgufFile, vocabulary: Vocabulary, *, add_bos: bool, add_eos: bool
) -> dict[str, Any]:
    architecture = file.get("general.architecture", str)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.get(f"{architecture}.context_length", int),
    }
    for name in _ID_KEYS:
        token = _token(file, vocabulary, name)
        if token is not None:
            config[f"{name}_token"] = token
    template = file.get("tokenizer.chat_template", str, default="")
    return {**config, "chat_template": template} if template else config


def _token(file: GgufFile, vocabulary: Vocabulary, name: str) -> str | None:
    found = token_id(file, _ID_KEYS[name])
    if found is None:
        return None
    if not 0 <= found < len(vocabulary.tokens):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.{_ID_KEYS[name]}_token_id is {found}, need an id "
            f"below {len(vocabulary.tokens)}; fetch it again"
        )
    return vocabulary.tokens[found]
