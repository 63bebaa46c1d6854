"""Sentencepiece tokenizers of GGUF files (``tokenizer.ggml.model`` = llama).

Sentencepiece joins the two neighbours whose union has the best score, again and again. The
tokenizers library wants a ranked list of merges instead: every way to make a piece of two others,
the piece with the best score first. What no piece covers is written as bytes.
"""

import math
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers

from zeroinfer.checkpoint.gguf_reader import GgufFile
from zeroinfer.checkpoint.gguf_vocabulary import SPACE_MARK, TokenKind, Vocabulary, token_id
from zeroinfer.errors import CheckpointError

__all__ = ["build_sentencepiece"]

_NUM_BYTES = 256


def build_sentencepiece(file: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    """Build the tokenizer, without what is added around a text.

    Raises:
        CheckpointError: scores or byte tokens are missing.
    """
    scores = file.get_list("tokenizer.ggml.scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.scores has {len(scores)} entries, need "
            f"{len(vocabulary.tokens)}; fetch it again"
        )
    if any(map(math.isnan, scores)):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.scores holds a NaN, which ranks nothing; fetch it again"
        )
    num_bytes = len(vocabulary.of_kind(TokenKind.BYTE))
    if num_bytes not in (0, _NUM_BYTES):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.token_type marks {num_bytes} tokens as bytes, need "
            f"{_NUM_BYTES} or none; fetch it again"
        )
    has_prefix = file.get("tokenizer.ggml.add_space_prefix", bool, default=True)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=list(_merges(vocabulary, scores)),
            unk_token=_unknown_token(file, vocabulary),
            fuse_unk=True,
            byte_fallback=num_bytes > 0,
        )
    )
    marks = normalizers.Replace(" ", SPACE_MARK)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE_MARK), marks]) if has_prefix else marks
    )
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_tokens(vocabulary.added_tokens(TokenKind.CONTROL, TokenKind.UNKNOWN))
    return tokenizer


def _merges(vocabulary: Vocabulary, scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Yield the pairs in the order of their rank; only pieces of plain text take part."""
    plain = {
        token: (-score, token_id)
        for token_id, (token, kind, score) in enumerate(
            zip(vocabulary.tokens, vocabulary.kinds, scores, strict=True)
        )
        if kind in (TokenKind.NORMAL, TokenKind.USER_DEFINED)
    }
    for piece in sorted(plain, key=lambda token: plain[token]):
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        pairs = [pair for pair in cuts if pair[0] in plain and pair[1] in plain]
        yield from sorted(pairs, key=lambda pair: (plain[pair[0]], plain[pair[1]]))


def _unknown_token(file: GgufFile, vocabulary: Vocabulary) -> str | None:
    named = token_id(file, "unknown")
    if named is not None and 0 <= named < len(vocabulary.tokens):
        return vocabulary.tokens[named]
    return next(iter(vocabulary.of_kind(TokenKind.UNKNOWN)), None)
