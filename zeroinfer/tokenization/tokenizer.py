"""The tokenizer of a model folder: prompts and chats to ids, ids to text.

The begin token is the trap here: the post-processor adds one, chat templates write one, and users
paste one. Whoever wrote it, a prompt starts with exactly one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zeroinfer.errors import RequestError
from zeroinfer.tokenization.backend import Backend, open_backend
from zeroinfer.tokenization.chat import ChatTemplate
from zeroinfer.tokenization.files import read_tokenizer_files

__all__ = ["Tokenizer"]

_PROBE = "a"


class Tokenizer:
    """Text to ids and back; holds no state between calls."""

    def __init__(
        self, backend: Backend, *, special_tokens: Mapping[str, str], chat_template: ChatTemplate
    ) -> None:
        """Join the parts; `open` is the usual way in.

        Args:
            backend: the vocabulary.
            special_tokens: text by key such as `bos_token`.
            chat_template: renders messages.
        """
        self._backend = backend
        self._chat_template = chat_template
        self._added_begin_id = _added_begin_id(backend)
        named_begin_id = _named_id(backend, special_tokens, "bos_token")
        self.bos_token_id = self._added_begin_id if named_begin_id is None else named_begin_id
        """Id that begins a prompt, None when the model has none."""
        self.eos_token_id = _named_id(backend, special_tokens, "eos_token")
        """Id that ends a text, None when the folder names none."""
        self.special_ids = backend.special_ids()
        """Ids without text."""

    @classmethod
    def open(cls, folder: Path) -> "Tokenizer | None":
        """Open the tokenizer of a model folder.

        Returns:
            None when the folder holds no tokenizer at all; such a model serves token ids.

        Raises:
            CheckpointError: tokenizer files are there but broken.
        """
        files = read_tokenizer_files(folder)
        if not (files.has_tokenizer_json or files.has_slow_files):
            return None
        backend, special_tokens = open_backend(files)
        template = ChatTemplate(files.chat_templates, special_tokens)
        return cls(backend, special_tokens=special_tokens, chat_template=template)

    @property
    def vocab_size(self) -> int:
        """Number of entries, added tokens included; a model may have more rows."""
        return self._backend.vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a prompt; empty for an empty prompt of a model without begin token.

        A begin token that the text brings along is not added a second time.

        Raises:
            RequestError: the text is no valid Unicode.
        """
        ids = self._encode(text, add_special_tokens=add_special_tokens)
        return _single_begin(ids, self._added_begin_id) if add_special_tokens else ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a chat, ending where the model is to answer.

        The template writes the special tokens, so the post-processor adds none.

        Raises:
            RequestError: no chat template, or it refuses the messages, or they are no chat.
        """
        text = self._chat_template.render(messages)
        return _single_begin(self._encode(text, add_special_tokens=False), self.bos_token_id)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids without special tokens; ids without an entry have none."""
        return self._backend.decode(ids)

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of an id, None outside it."""
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry, None when there is none."""
        return self._backend.token_to_id(token)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is no valid Unicode: got {error.object[error.start]!a} at character "
                f"{error.start}, need no lone surrogates; remove it"
            ) from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens)


def _named_id(backend: Backend, special_tokens: Mapping[str, str], key: str) -> int | None:
    text = special_tokens.get(key)
    return None if text is None else backend.token_to_id(text)


def _added_begin_id(backend: Backend) -> int | None:
    """Return the id that the post-processor puts before a text, found by trying it."""
    plain = backend.encode(_PROBE, add_special_tokens=False)
    full = backend.encode(_PROBE, add_special_tokens=True)
    has_prefix = bool(full) and full[: len(plain)] != plain
    return full[0] if has_prefix else None


def _single_begin(ids: list[int], begin_id: int | None) -> list[int]:
    """Cut a run of begin tokens at the start down to one."""
    num_begin = 0
    while num_begin < len(ids) and ids[num_begin] == begin_id:
        num_begin += 1
    return ids[num_begin - 1 :] if num_begin > 1 else ids
