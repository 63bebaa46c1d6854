"""The two engines behind a tokenizer: the tokenizers library, and transformers where it must be.

Files that come without `tokenizer.json` are converted by transformers; where the result is backed
by the tokenizers library, that part is taken out and transformers is not used again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tokenizers

from zeroinfer.errors import CheckpointError
from zeroinfer.tokenization.files import TOKENIZER_JSON, TokenizerFiles

__all__ = ["Backend", "FastBackend", "SlowBackend", "open_backend"]


class Backend(Protocol):
    """Plain conversion; immutable once open, so any thread may call it."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text, with or without what the post-processor adds."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids without special tokens."""

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of an id, None outside it."""

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry, None when there is none."""

    def vocab_size(self) -> int:
        """Return the number of entries, added tokens included."""

    def special_ids(self) -> frozenset[int]:
        """Return the ids that decode leaves out."""


class FastBackend:
    """The tokenizers library, which opens in a tenth of a second and loads nothing else."""

    def __init__(self, inner: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
        """Take over `inner`: no truncation, no padding, named tokens marked as special.

        Stored truncation or padding is a leftover of training and would silently cut prompts.
        """
        inner.no_truncation()
        inner.no_padding()
        known = {token.content for token in _added(inner).values() if token.special}
        missing = [
            tokenizers.AddedToken(text, special=True, normalized=False)
            for text in dict.fromkeys(special_tokens.values())
            if text not in known and inner.token_to_id(text) is not None
        ]
        if missing:
            inner.add_special_tokens(missing)
        self._inner = inner
        self._special_ids = frozenset(i for i, token in _added(inner).items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids without special tokens."""
        text: str = self._inner.decode(ids, skip_special_tokens=True)
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of an id, None outside it."""
        token: str | None = self._inner.id_to_token(token_id) if token_id >= 0 else None
        return token

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry, None when there is none."""
        token_id: int | None = self._inner.token_to_id(token)
        return token_id

    def vocab_size(self) -> int:
        """Return the number of entries, added tokens included."""
        size: int = self._inner.get_vocab_size(with_added_tokens=True)
        return size

    def special_ids(self) -> frozenset[int]:
        """Return the ids that decode leaves out."""
        return self._special_ids


class SlowBackend:
    """A pure-Python tokenizer of transformers, for formats that the tokenizers library lacks."""

    def __init__(self, inner: Any) -> None:
        """Wrap a `PreTrainedTokenizer`."""
        self._inner = inner
        self._special_ids = frozenset(inner.all_special_ids)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""
        return list(self._inner.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids without special tokens."""
        # transformers prints "None" for an id outside the vocabulary; it has no text.
        known = [i for i in ids if 0 <= i < len(self._inner)]
        return str(
            self._inner.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of an id, None outside it."""
        if not 0 <= token_id < len(self._inner):
            return None
        return str(self._inner.convert_ids_to_tokens(token_id))

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry, None when there is none."""
        token_id: int | None = self._inner.get_vocab().get(token)
        return token_id

    def vocab_size(self) -> int:
        """Return the number of entries, added tokens included."""
        return len(self._inner)

    def special_ids(self) -> frozenset[int]:
        """Return the ids that decode leaves out."""
        return self._special_ids


def open_backend(files: TokenizerFiles) -> tuple[Backend, dict[str, str]]:
    """Open the vocabulary of a folder that has one.

    Returns:
        the backend and the special tokens, by key such as `bos_token`; transformers knows some
        that only its own classes name.

    Raises:
        CheckpointError: the vocabulary is broken or cannot be converted here.
    """
    special_tokens = dict(files.special_tokens)
    if files.has_tokenizer_json:
        return FastBackend(_read_tokenizer_json(files), special_tokens), special_tokens
    slow = _convert(files)
    special_tokens = {key: str(text) for key, text in slow.special_tokens_map.items()}
    inner = getattr(slow, "backend_tokenizer", None)
    if isinstance(inner, tokenizers.Tokenizer):
        return FastBackend(inner, special_tokens), special_tokens
    return SlowBackend(slow), special_tokens


def _read_tokenizer_json(files: TokenizerFiles) -> tokenizers.Tokenizer:
    path = files.folder / TOKENIZER_JSON
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(
            f"{path} is no tokenizer: {error}; fetch the file again or remove it to use "
            "prompt_token_ids"
        ) from error


def _convert(files: TokenizerFiles) -> Any:
    # Two seconds and 100 MiB, paid only by folders that need it.
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        return AutoTokenizer.from_pretrained(
            str(files.folder), use_fast=True, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # converters raise whatever their parsers do
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise CheckpointError(
            f"the tokenizer files of {files.folder} cannot be converted: {reason[0]}; "
            f"put a {TOKENIZER_JSON} beside them or use prompt_token_ids"
        ) from error


def _added(inner: tokenizers.Tokenizer) -> Mapping[int, tokenizers.AddedToken]:
    added: Mapping[int, tokenizers.AddedToken] = inner.get_added_tokens_decoder()
    return added
