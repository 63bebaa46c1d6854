"""Text that grows token by token, and the strings that end it.

A token is not a piece of text: characters span tokens, tokens span characters, and decoders look
at neighbours (a space before the first word is dropped). So the text of a token is the difference
between two decodings of a short window of ids, released once no later token can change it.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from zeroinfer.errors import RequestError

__all__ = ["TextStream"]

_MARK = "\ufffd"
# A character spans at most four tokens; in a window this long that never ended whole, bytes that
# become no character are waiting, and only the last few marks may still turn into one.
_WINDOW_TOKENS = 64
_KEPT_TOKENS = 16
_UNFINISHED_MARKS = 3


class Decoder(Protocol):
    """The part of a tokenizer needed here."""

    @property
    def special_ids(self) -> Collection[int]:
        """Ids without text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids."""

    def id_to_token(self, token_id: int) -> str | None:
        """Return the spelling of an id, None outside the vocabulary."""


class TextStream:
    """The text of one growing sequence; not shared between threads.

    Text is released when it is stable: a character is whole, and nothing in it can be the start
    of a stop string. Chunks joined are `text`, which after `finish` is the whole answer. Costs the
    same for each token, however long the text is.
    """

    def __init__(
        self, tokenizer: Decoder, stop: Sequence[str] = (), initial_ids: Sequence[int] = ()
    ) -> None:
        """Start with what was generated before.

        Args:
            tokenizer: decodes.
            stop: strings that end the text; the one that is complete first counts.
            initial_ids: ids of the same answer from an interrupted run, not the prompt; their
                text is in `text` and never in a chunk.

        Raises:
            RequestError: a stop string is empty.
        """
        self._window = _Window(tokenizer)
        self._cutter = _StopCutter(stop)
        self._chunks: list[str] = []
        for token_id in initial_ids:
            self.push(token_id)

    @property
    def text(self) -> str:
        """All text released so far; the whole answer after `finish`."""
        if len(self._chunks) > 1:
            self._chunks = ["".join(self._chunks)]
        return self._chunks[0] if self._chunks else ""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found; the text ends exactly before it."""
        return self._cutter.is_stopped

    def push(self, token_id: int) -> str:
        """Add the next id and return the text that became stable, often empty."""
        if self.is_stopped:
            return ""
        return self._release(self._cutter.push(self._window.push(token_id)))

    def finish(self) -> str:
        """End the sequence and return the text held back; a character cut short shows as a mark."""
        if self.is_stopped:
            return ""
        chunk = self._cutter.push(self._window.finish())
        return self._release(chunk + self._cutter.finish())

    def _release(self, chunk: str) -> str:
        if chunk:
            self._chunks.append(chunk)
        return chunk


class _Window:
    """Decodes the last ids again with each new one and tells what text is new.

    `_ids` are the window, `_shown` the text of it already given out, `_num_read` how many of its
    ids are fully in that text. The ids before `_num_read` stay as the context of the next ones.

    Source: the prefix and read offsets of text-generation-inference and vLLM.
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_read = 0
        self._shown = ""

    def push(self, token_id: int) -> str:
        tokenizer = self._tokenizer
        if token_id in tokenizer.special_ids or tokenizer.id_to_token(token_id) is None:
            return ""
        self._ids.append(token_id)
        text = tokenizer.decode(self._ids)
        is_whole = not text.endswith(_MARK)
        if not is_whole and len(self._ids) > _WINDOW_TOKENS:
            return self._give_up(text)
        new = self._difference(text if is_whole else text.rstrip(_MARK), is_whole=is_whole)
        if is_whole:
            self._advance()
        else:
            self._shown += new
        return new

    def finish(self) -> str:
        """Return what is left, marks included."""
        text = self._tokenizer.decode(self._ids)
        new = self._difference(text, is_whole=True)
        self._ids, self._num_read, self._shown = [], 0, ""
        return new

    def _difference(self, text: str, *, is_whole: bool) -> str:
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        # A byte-fallback decoder turns a whole run of bytes into marks while its end is no
        # character, also those given out already: wait, then take the new ids by themselves.
        return self._tokenizer.decode(self._ids[self._num_read :]) if is_whole else ""

    def _advance(self) -> None:
        """Move the window on: the ids just read become the context of the next ones."""
        self._ids = self._ids[self._num_read :]
        self._num_read = len(self._ids)
        self._shown = self._tokenizer.decode(self._ids)

    def _give_up(self, text: str) -> str:
        """Release marks that no further id can turn into text, and shorten the window."""
        if not text.startswith(self._shown):
            text, self._shown = self._tokenizer.decode(self._ids[self._num_read :]), ""
        num_held = min(_UNFINISHED_MARKS, len(text) - len(text.rstrip(_MARK)))
        new = text[len(self._shown) : len(text) - num_held]
        self._ids = self._ids[-_KEPT_TOKENS:]
        self._num_read = 0
        kept = self._tokenizer.decode(self._ids)
        self._shown = kept[: max(0, len(kept) - num_held)]
        return new


class _StopCutter:
    """Finds the first complete stop string and holds back text that may begin one.

    The match that ends first counts, so the result does not depend on how text is cut into
    chunks; of two that end together, the longer.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if any(not text for text in stop):
            raise RequestError("stop holds an empty string; remove it")
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._held = ""
        self.is_stopped = False

    def push(self, chunk: str) -> str:
        if not self._stop or not chunk:
            return chunk
        text = self._held + chunk
        start = self._first_match(text)
        if start is not None:
            self.is_stopped = True
            self._held = ""
            return text[:start]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """Return what was held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        starts = ((text.find(stop), len(stop)) for stop in self._stop)
        ends = [(start + size, start) for start, size in starts if start >= 0]
        return min(ends)[1] if ends else None

    def _num_held(self, text: str) -> int:
        for size in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[len(text) - size :]
            if any(stop.startswith(tail) for stop in self._stop):
                return size
        return 0
