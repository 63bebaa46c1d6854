"""From a prompt as a user gives it (a text, token ids, a conversation) to ids that can run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from zeroinfer.engine.request import SamplingParams
from zeroinfer.errors import RequestError, ZeroInferError
from zeroinfer.fields import json_type, read_text, refuse_unknown_keys, wrong_type

__all__ = ["PromptReader", "TextEncoder"]


class TextEncoder(Protocol):
    """What reading a prompt needs of a tokenizer."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the ids of a prompt."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        """Return the ids of a conversation in the model's template, ready for the answer."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptReader:
    """Reads prompts for one model. Errors name the field that was wrong."""

    tokenizer: TextEncoder | None
    """None where the model folder has none; then only token ids serve."""
    vocab_size: int | None = None
    max_model_len: int | None = None
    """Most tokens of prompt and answer together; None where the model sets no limit."""

    def encode_text(self, text: str) -> Sequence[int]:
        """Return the ids of a text.

        Raises:
            RequestError: it is empty, or the model has no tokenizer.
        """
        if not text:
            raise RequestError("the prompt is empty; need at least one token")
        return self._run_tokenizer(lambda tokenizer: tokenizer.encode(text))

    def encode_messages(self, value: object) -> Sequence[int]:
        """Return the ids of a conversation: a list of role and content.

        Raises:
            RequestError: it is none, or the model has no tokenizer or no chat template.
        """
        messages = _check_messages(value)
        return self._run_tokenizer(lambda tokenizer: tokenizer.encode_chat(messages))

    def check_ids(self, name: str, value: object) -> Sequence[int]:
        """Return token ids after a look at each.

        Raises:
            RequestError: it is no list of integers of the vocabulary.
        """
        if not isinstance(value, list | tuple):
            raise wrong_type(name, value, "a list of integers")
        limit = self.vocab_size or 2**32
        if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < limit:
            return value
        for idx, token_id in enumerate(value):
            if type(token_id) is not int:
                raise wrong_type(f"{name}[{idx}]", token_id, "an integer")
            if not 0 <= token_id < limit:
                raise RequestError(
                    f"{name}[{idx}] is not in the vocabulary: got {token_id}, need 0 to {limit - 1}"
                )
        return value

    def fit(self, ids: Sequence[int], sampling: SamplingParams) -> SamplingParams:
        """Return the sampling with its max_tokens cut to the room that the model's window leaves.

        Raises:
            RequestError: the prompt is empty, fills the window, or holds an unknown id.
        """
        if not len(ids):
            raise RequestError("the prompt is empty; need at least one token")
        if self.vocab_size is not None and max(ids) >= self.vocab_size:
            raise RequestError(
                f"the tokenizer gives id {max(ids)}, but the model knows ids below "
                f"{self.vocab_size}; model and tokenizer do not belong together"
            )
        if self.max_model_len is None:
            return sampling
        if len(ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt is too long: got {len(ids)} tokens, and the model's window of "
                f"{self.max_model_len} must hold it and one new token; shorten it"
            )
        # An answer ends at the window with finish_reason "length".
        room = self.max_model_len - len(ids)
        return replace(sampling, max_tokens=room) if sampling.max_tokens > room else sampling

    def _run_tokenizer(self, encode: Callable[[TextEncoder], Sequence[int]]) -> Sequence[int]:
        if self.tokenizer is None:
            raise RequestError(
                "the model folder has no tokenizer, so text cannot be read; give prompt_token_ids"
            )
        try:
            return encode(self.tokenizer)
        except RequestError:
            raise
        except ZeroInferError as error:
            # A missing chat template, for one, is a fault of the prompt that needs it.
            raise RequestError(str(error)) from error


def _check_messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list | tuple):
        raise wrong_type("messages", value, "a list")
    if not value:
        raise RequestError("messages is empty; need at least one message")
    return [_check_message(f"messages[{idx}]", message) for idx, message in enumerate(value)]


def _check_message(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise wrong_type(name, value, "an object")
    refuse_unknown_keys(value, ("role", "content", "name"), where=name)
    for key in ("role", "content"):
        if value.get(key) is None:
            raise RequestError(f"{name} has no {key}; need role and content")
    message = dict(value, role=read_text(f"{name}.role", value["role"]))
    message["content"] = _join_content(f"{name}.content", value["content"])
    return message


def _join_content(name: str, value: object) -> str:
    """Take a text, or OpenAI's list of text parts."""
    if not isinstance(value, list):
        return read_text(name, value)
    texts = []
    for idx, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else json_type(part)
        if kind != "text":
            raise RequestError(f"{name}[{idx}] is not supported: got {kind!r}, need a text part")
        texts.append(read_text(f"{name}[{idx}].text", part.get("text")))
    return "".join(texts)
