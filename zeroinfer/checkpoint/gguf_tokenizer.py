"""Tokenizer files in Hugging Face's form from the metadata of a GGUF file.

Byte-level BPE only. GGUF names the splitting of text into words (``tokenizer.ggml.pre``) but does
not hold it; the table here does, for the names it knows, and others are refused: a wrong split
gives other token ids without any sign of it.
"""

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from zeroinfer.checkpoint.gguf_reader import GgufFile
from zeroinfer.errors import CheckpointError, UnsupportedModelError
from zeroinfer.log import get_logger

__all__ = ["special_token_ids", "tokenizer_documents"]

_logger = get_logger(__name__)
_CONTROL, _USER_DEFINED = 3, 4
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_ID_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_END_KEYS = ("eos", "eot", "eom")


@dataclass(frozen=True, kw_only=True, slots=True)
class _WordSplit:
    """How text is cut before merging, by ``tokenizer.ggml.pre``."""

    patterns: tuple[str, ...] = ()
    """Applied in order; empty means GPT-2's own pattern."""
    individual_digits: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    normalize_nfc: bool = False


_SPLITS = {
    "gpt-2": _WordSplit(),
    "smollm": _WordSplit(individual_digits=True),
    "llama-bpe": _WordSplit(patterns=(_CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST,),
                            ignore_merges=True, add_bos=True),
    "qwen2": _WordSplit(patterns=(_CONTRACTIONS + _WORDS + r"|\p{N}" + _REST,),
                        normalize_nfc=True),
    "default": _WordSplit(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9]{3}")),
}  # fmt: skip


def tokenizer_documents(file: GgufFile) -> dict[str, bytes]:
    """Return tokenizer.json and tokenizer_config.json; nothing if the file has no tokenizer.

    Raises:
        UnsupportedModelError: the kind of tokenizer or the splitting of text is unknown.
        CheckpointError: vocabulary, merges or token ids contradict each other.
    """
    kind = file.get("tokenizer.ggml.model", str, default="none")
    if kind in ("none", "no_vocab"):
        return {}
    if kind != "gpt2":
        raise UnsupportedModelError(
            f"{file.path} has tokenizer.ggml.model {kind!r}, need 'gpt2' (byte-level BPE); "
            "use the model's Hugging Face folder instead"
        )
    split = _word_split(file)
    tokens = file.get("tokenizer.ggml.tokens", list)
    tokenizer = _tokenizer(file, tokens, split)
    add_bos = file.get("tokenizer.ggml.add_bos_token", bool, default=split.add_bos)
    add_eos = file.get("tokenizer.ggml.add_eos_token", bool, default=False)
    _add_template(file, tokenizer, tokens, add_bos=add_bos, add_eos=add_eos)
    config = _tokenizer_config(file, tokens, add_bos=add_bos, add_eos=add_eos)
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
        token_id = _token_id(file, _ID_KEYS[name])
        if token_id is not None:
            ids[f"{name}_token_id"] = token_id
    found = (_token_id(file, key) for key in _END_KEYS)
    ends = list(dict.fromkeys(token_id for token_id in found if token_id is not None))
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return ids


def _word_split(file: GgufFile) -> _WordSplit:
    if "tokenizer.ggml.pre" not in file.metadata:
        _logger.warning("%s does not say how text is split; taking 'default'", file.path)
    name = file.get("tokenizer.ggml.pre", str, default="default")
    if name not in _SPLITS:
        raise UnsupportedModelError(
            f"{file.path} has tokenizer.ggml.pre {name!r}, need one of "
            f"{', '.join(sorted(_SPLITS))}; use the model's Hugging Face folder instead"
        )
    return _SPLITS[name]


def _tokenizer(file: GgufFile, tokens: list[str], split: _WordSplit) -> Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.tokens holds {len(tokens) - len(vocab)} tokens twice; "
            "fetch it again"
        )
    merges = [_merge(file, text) for text in file.get("tokenizer.ggml.merges", list)]
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=split.ignore_merges)
    # The tokenizers package raises plain Exception for a merge outside the vocabulary.
    except Exception as error:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.merges: {error}; fetch it again"
        ) from error
    tokenizer = Tokenizer(model)
    if split.normalize_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(_added_tokens(file, tokens))
    return tokenizer


def _merge(file: GgufFile, text: str) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    if not left or not right:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.merges holds {text!r}, need two parts")
    return left, right


def _pre_tokenizer(split: _WordSplit) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.individual_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in split.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.patterns))
    return pre_tokenizers.Sequence(steps)


def _added_tokens(file: GgufFile, tokens: list[str]) -> list[AddedToken]:
    kinds = file.get("tokenizer.ggml.token_type", list, default=[1] * len(tokens))
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.token_type has {len(kinds)} entries, need {len(tokens)}; "
            "fetch it again"
        )
    return [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _add_template(
    file: GgufFile, tokenizer: Tokenizer, tokens: list[str], *, add_bos: bool, add_eos: bool
) -> None:
    bos = _token(file, tokens, "bos") if add_bos else None
    eos = _token(file, tokens, "eos") if add_eos else None
    ends = [t for t in (bos, eos) if t is not None]
    if not ends:
        return
    single = " ".join(part for part in (bos and "BOS", "$A", eos and "EOS") if part)
    names = dict(zip([part for part in single.split() if part != "$A"], ends, strict=True))
    ids = [{"id": n, "ids": [tokens.index(t)], "tokens": [t]} for n, t in names.items()]
    tokenizer.post_processor = TemplateProcessing(
        single=single, pair=f"{single} {single.replace('$A', '$B')}", special_tokens=ids
    )


def _tokenizer_config(
    file: GgufFile, tokens: list[str], *, add_bos: bool, add_eos: bool
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.get("llama.context_length", int),
    }
    for name in _ID_KEYS:
        token = _token(file, tokens, name)
        if token is not None:
            config[f"{name}_token"] = token
    template = file.get("tokenizer.chat_template", str, default="")
    return {**config, "chat_template": template} if template else config


def _token(file: GgufFile, tokens: list[str], name: str) -> str | None:
    token_id = _token_id(file, _ID_KEYS[name])
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.{_ID_KEYS[name]}_token_id is {token_id}, need an id "
            f"below {len(tokens)}; fetch it again"
        )
    return str(tokens[token_id])


def _token_id(file: GgufFile, key: str) -> int | None:
    name = f"tokenizer.ggml.{key}_token_id"
    return file.get(name, int) if name in file.metadata else None
