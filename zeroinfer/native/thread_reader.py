"""A storage reader made of sleeping threads that call ``preadv`` with O_DIRECT.

It needs nothing but POSIX, so it works where io_uring is forbidden. Each thread takes the next
chunk of the oldest read.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from zeroinfer.counters import Trace
from zeroinfer.native.chunked_reader import Chunk, ChunkedReader, check_cell

__all__ = ["PreadvCall", "ThreadReader"]

PreadvCall = Callable[[int, Sequence[memoryview], int], int]
"""The signature of ``os.preadv``: file descriptor, buffers, offset; returns bytes read."""


class ThreadReader(ChunkedReader):
    """Keeps up to `queue_depth` direct reads in flight, each in a thread of its own."""

    def __init__(
        self, *, io_chunk_bytes: int, queue_depth: int, trace: Trace | None, preadv: PreadvCall
    ) -> None:
        super().__init__(io_chunk_bytes=io_chunk_bytes, queue_depth=queue_depth, trace=trace)
        self._preadv = preadv

    @classmethod
    def open(
        cls,
        *,
        io_chunk_bytes: int,
        queue_depth: int,
        trace: Trace | None = None,
        preadv: PreadvCall = os.preadv,
    ) -> "ThreadReader":
        """Start the threads.

        Args:
            io_chunk_bytes: Bytes of one read call; a positive multiple of DIRECT_ALIGNMENT.
            queue_depth: Threads, so reads in flight; at least 1.
            trace: Receives one event per chunk in the lanes ``read 0``, ``read 1``, ...
            preadv: The read call; tests pass one that is slow, comes short or fails.

        Raises:
            ValueError: chunk size or depth is out of range.
            StorageError: a thread cannot be started.
        """
        check_cell(io_chunk_bytes=io_chunk_bytes, queue_depth=queue_depth)
        reader = cls(
            io_chunk_bytes=io_chunk_bytes, queue_depth=queue_depth, trace=trace, preadv=preadv
        )
        reader._start_threads([partial(reader._run, f"read {idx}") for idx in range(queue_depth)])
        return reader

    def _run(self, lane: str) -> None:
        """Read chunks until the reader closes; the body of each thread."""
        while (chunk := self._take_chunk()) is not None:
            start_s = time.perf_counter()
            self._read(chunk)
            self._finish_chunk(chunk, lane=lane, start_s=start_s)
            # A sleeping thread must not keep the caller's memory alive.
            del chunk

    def _read(self, chunk: Chunk) -> None:
        """Read until the chunk is full, or holds what is required of it and came short."""
        is_needed = True
        try:
            while is_needed:
                view, offset = chunk.rest()
                with view:
                    is_needed = chunk.add(self._preadv(chunk.ticket.file.fd, (view,), offset))
        except OSError as error:
            # The traceback's frames would keep the caller's memory alive.
            chunk.cause = error.with_traceback(None)
