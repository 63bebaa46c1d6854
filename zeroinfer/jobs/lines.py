"""Lines of an input file, hashed as they are read.

Lines end at a line feed and nowhere else: JSON strings may hold the other characters at which
Python splits text. Blank lines are left out, but counted, so that line numbers stay true.
"""

import contextlib
import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from zeroinfer.errors import StorageError

__all__ = ["HashedLines", "open_input"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class HashedLines:
    """Iterates over ``(line number, bytes)``; `sha256` is that of all bytes read so far."""

    def __init__(self, raw_lines: Iterable[bytes]) -> None:
        self._raw_lines = raw_lines
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Hash of the input, blank lines and line ends included; hexadecimal."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield each line that is not blank, without its line end and byte-order mark."""
        for number, raw in enumerate(self._raw_lines, start=1):
            self._hash.update(raw)
            line = raw.rstrip(b"\r\n")
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if line.strip():
                yield number, line


@contextlib.contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    """Open an input file, or standard input for ``-``.

    Raises:
        StorageError: the file cannot be opened.
    """
    if path == "-":
        # None where the caller closed it.
        if sys.stdin is None:
            raise StorageError("input - cannot be opened: standard input is closed; give a file")
        yield sys.stdin.buffer
        return
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(Path(path).open("rb"))
        except OSError as error:
            raise StorageError(f"input {path} cannot be opened: {error.strerror}") from error
        yield file
