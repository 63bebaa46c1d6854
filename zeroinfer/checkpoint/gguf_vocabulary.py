"""The vocabulary of a GGUF file: tokens, their kinds, and the ids with a role."""

import enum
from dataclasses import dataclass

from tokenizers import AddedToken

from zeroinfer.checkpoint.gguf_reader import GgufFile
from zeroinfer.errors import CheckpointError

__all__ = ["SPACE_MARK", "TokenKind", "Vocabulary", "read_vocabulary", "token_id"]

SPACE_MARK = "\u2581"
"""What sentencepiece writes for a space."""


class TokenKind(enum.IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Tokens by id."""

    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    """`TokenKind` of each token; other numbers count as normal."""

    @property
    def ids(self) -> dict[str, int]:
        """Token -> id."""
        return {token: token_id for token_id, token in enumerate(self.tokens)}

    def of_kind(self, *kinds: TokenKind) -> list[str]:
        """Return the tokens of these kinds, by id."""
        return [t for t, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds]

    def added_tokens(self, *special: TokenKind) -> list[AddedToken]:
        """Return the tokens that are cut out of a text before it is split.

        One that is written with marks for its spaces is looked for after spaces became marks.

        Args:
            special: kinds whose tokens have no text of their own.
        """
        return [
            AddedToken(token, normalized=SPACE_MARK in token, special=kind in special)
            for token, kind in zip(self.tokens, self.kinds, strict=True)
            if kind in (*special, TokenKind.USER_DEFINED)
        ]


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """Read tokens and kinds.

    Raises:
        CheckpointError: a token stands twice, or there is not one kind for each.
    """
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    num_repeated = len(tokens) - len(set(tokens))
    if num_repeated:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.tokens holds {num_repeated} tokens twice; fetch it again"
        )
    plain: list[int] = [TokenKind.NORMAL.value] * len(tokens)
    kinds = file.get_list("tokenizer.ggml.token_type", int, default=plain)
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.token_type has {len(kinds)} entries, need {len(tokens)}; "
            "fetch it again"
        )
    return Vocabulary(tokens=tuple(tokens), kinds=tuple(kinds))


def token_id(file: GgufFile, role: str) -> int | None:
    """Return the id with a role such as ``eos`` or ``unknown``; None if the file names none."""
    key = f"tokenizer.ggml.{role}_token_id"
    return file.get(key, int) if key in file.metadata else None
