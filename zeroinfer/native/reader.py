"""The protocol of storage readers.

A reader moves byte ranges of files into memory the caller owns. Reads are split into chunks and
kept in flight up to the queue depth; completion is asked for by ticket. The thread-pool reader is
always there; others implement the same protocol and pass the same test suite.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from zeroinfer.counters import IoCounters

__all__ = ["DIRECT_ALIGNMENT", "OpenFile", "ReadTicket", "Reader"]

DIRECT_ALIGNMENT = 4096
"""Bytes that file offset, address and length of a direct read are multiples of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenFile:
    """A file opened by a reader; valid until the reader closes."""

    path: Path
    fd: int
    size_bytes: int
    is_direct: bool
    """Opened with O_DIRECT; otherwise reads are buffered and their pages dropped behind them."""


class ReadTicket(Protocol):
    """A submitted read; opaque to the caller except for what follows."""

    @property
    def is_done(self) -> bool:
        """Whether all chunks completed or one failed; never blocks."""
        ...


class Reader(Protocol):
    """Keeps reads in flight.

    Lifetime: the destination of a read must stay valid until its ticket was waited on or the
    reader is closed. Threads: all methods may be called from any thread. The reader's own threads
    sleep in the kernel or on a lock and never spin.
    """

    @property
    def counters(self) -> IoCounters:
        """Bytes, reads and busy time so far; what was returned earlier may lag behind."""
        ...

    def open_file(self, path: Path) -> OpenFile:
        """Open a file once; a second call returns the same handle.

        Raises:
            StorageError: the file cannot be opened.
        """
        ...

    def submit(
        self,
        file: OpenFile,
        offset: int,
        destination: memoryview,
        *,
        required_bytes: int,
        is_urgent: bool = False,
    ) -> ReadTicket:
        """Queue a read of ``len(destination)`` bytes at ``offset``; returns at once.

        For a direct file, offset, address and length are multiples of DIRECT_ALIGNMENT. The range
        may reach beyond the end of the file; at least `required_bytes` must arrive. Urgent reads
        go ahead of queued chunks.
        """
        ...

    def wait(self, ticket: ReadTicket) -> None:
        """Block, asleep, until the read is complete.

        Raises:
            StorageError: a chunk failed or the file ended before `required_bytes`; the message
                names file, offset, expected and read bytes.
        """
        ...

    def close(self) -> None:
        """Wait for reads in flight, stop threads, close files; idempotent."""
        ...
