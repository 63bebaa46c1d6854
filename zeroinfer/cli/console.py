"""Where a verb's lines go, and progress of long work.

Tables and texts go to standard output unless that carries results; progress goes to standard
error: one live line on a terminal, a line every few seconds otherwise.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from zeroinfer.errors import StorageError
from zeroinfer.units import format_bytes

__all__ = ["Output", "StatusLine", "byte_progress", "format_seconds", "stream_errors"]

_LOG_PERIOD_S = 5.0
_LIVE_PERIOD_S = 0.1


class Output:
    """Prints a verb's texts and events."""

    def __init__(self, *, is_json: bool, is_stdout_taken: bool = False) -> None:
        self.is_json = is_json
        self._file = sys.stderr if is_stdout_taken else sys.stdout

    def text(self, text: str) -> None:
        """Print text for people; nothing with ``--json``."""
        if not self.is_json:
            self._print(text)

    def event(self, name: str, data: Mapping[str, Any]) -> None:
        """Print one JSON object with ``--json``."""
        if self.is_json:
            self._print(json.dumps({"event": name, **data}))

    def _print(self, line: str) -> None:
        with stream_errors(self._file):
            print(line, file=self._file, flush=True)


class StatusLine:
    """Shows the latest status on standard error, not more often than it can be read."""

    def __init__(self) -> None:
        self._is_live = sys.stderr.isatty()
        self._period_s = _LIVE_PERIOD_S if self._is_live else _LOG_PERIOD_S
        self._next_s = 0.0
        self._width = 0
        self._last_text = ""

    def show(self, make_text: Callable[[], str], *, is_last: bool = False) -> None:
        """Print the status if it is time.

        Args:
            make_text: makes the line; called only when it is printed.
            is_last: print in any case.
        """
        now_s = time.monotonic()
        if now_s < self._next_s and not is_last:
            return
        self._next_s = now_s + self._period_s
        text = make_text()
        if text == self._last_text:
            return
        self._last_text = text
        if self._is_live:
            print(f"\r{text:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """End a live line."""
        if self._is_live and self._width:
            print(file=sys.stderr, flush=True)
            self._width = 0


@contextmanager
def stream_errors(file: TextIO) -> Iterator[None]:
    """Turn a failed write to a standard stream into an error that says what to do.

    Raises:
        StorageError: the stream takes no more.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        is_stderr = file is sys.stderr
        if not is_stderr:
            # What is still buffered would fail again at exit, and give the exit code 120.
            with suppress(OSError):
                file.close()
        raise StorageError(
            f"write to the standard {'error' if is_stderr else 'output'} failed: "
            f"{error.strerror}; send it to a file on a disk that works and has room"
        ) from error


@contextmanager
def byte_progress(verb: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback for bytes done and bytes in all."""
    status = StatusLine()

    def advance(done: int, total: int) -> None:
        share = 100 * done // total if total else 100
        text = f"{verb} {format_bytes(done)} of {format_bytes(total)} ({share} %)"
        status.show(lambda: text, is_last=done >= total)

    try:
        yield advance
    finally:
        status.close()


def format_seconds(seconds: float | None) -> str:
    """Print a time span as ``1:02:03``, ``2:03`` or ``0.12 s``; a dash for none."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
