"""Byte-level BPE tokenizers of GGUF files.

GGUF names the splitting of text into words (``tokenizer.ggml.pre``) but does not hold it; the table
here does, for the names it knows, and others are refused: a wrong split gives other token ids
without any sign of it.
"""

from dataclasses import dataclass, replace

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from zeroinfer.checkpoint.gguf_reader import GgufFile
from zeroinfer.checkpoint.gguf_vocabulary import TokenKind, Vocabulary
from zeroinfer.errors import CheckpointError, UnsupportedModelError
from zeroinfer.log import get_logger

__all__ = ["WordSplit", "build_bpe", "word_split"]

_logger = get_logger(__name__)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


@dataclass(frozen=True, kw_only=True, slots=True)
class WordSplit:
    """How text is cut before merging."""

    patterns: tuple[str, ...] = ()
    """Applied in order; empty means GPT-2's own pattern."""
    individual_digits: bool = False
    ignore_merges: bool = False
    """A word that is a token stays whole, whatever the merges say."""
    add_bos: bool = False
    """Whether a begin token is added where the file does not say."""
    normalize_nfc: bool = False


_GPT2 = WordSplit()
_DIGITS = WordSplit(individual_digits=True)
_THREE_DIGITS = WordSplit(patterns=(_CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST,))
_LLAMA3 = replace(_THREE_DIGITS, ignore_merges=True, add_bos=True)
_QWEN2 = WordSplit(patterns=(_CONTRACTIONS + _WORDS + r"|\p{N}" + _REST,), normalize_nfc=True)
_SPLITS = {
    "default": WordSplit(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9]{3}")),
    "gpt-2": _GPT2, "phi-2": _GPT2, "mpt": _GPT2, "olmo": _GPT2, "jais": _GPT2, "gigachat": _GPT2,
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "command-r": _DIGITS,
    "codeshell": _DIGITS, "exaone": _DIGITS, "minerva-7b": _DIGITS,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": _THREE_DIGITS, "smaug-bpe": _THREE_DIGITS,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "megrez": _QWEN2,
    "tekken": WordSplit(
        patterns=(_CASED_WORDS + r"|\p{N}" + _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1),),
        ignore_merges=True, add_bos=True),
    "deepseek-coder": WordSplit(
        patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    "falcon": WordSplit(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, "[0-9]{3}")),
}  # fmt: skip


def word_split(file: GgufFile) -> WordSplit:
    """Look up the splitting that a file names.

    Raises:
        UnsupportedModelError: the name is unknown.
    """
    if "tokenizer.ggml.pre" not in file.metadata:
        _logger.warning("%s does not say how text is split; taking 'default'", file.path)
    name = file.get("tokenizer.ggml.pre", str, default="default")
    if name not in _SPLITS:
        raise UnsupportedModelError(
            f"{file.path} has tokenizer.ggml.pre {name!r}, need one of "
            f"{', '.join(sorted(_SPLITS))}; use the model's Hugging Face folder instead"
        )
    return _SPLITS[name]


def build_bpe(file: GgufFile, vocabulary: Vocabulary, split: WordSplit) -> Tokenizer:
    """Build the tokenizer, without what is added around a text.

    Raises:
        CheckpointError: the merges do not fit the vocabulary.
    """
    merges = [_merge(file, text) for text in file.get_list("tokenizer.ggml.merges", str)]
    try:
        model = models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=split.ignore_merges)
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
    tokenizer.add_tokens(vocabulary.added_tokens(TokenKind.CONTROL))
    return tokenizer


def _merge(file: GgufFile, text: str) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    if not left or not right:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.merges holds {text!r}, need two parts")
    return left, right


def _pre_tokenizer(split: WordSplit) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.individual_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in split.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.patterns))
    return pre_tokenizers.Sequence(steps)
