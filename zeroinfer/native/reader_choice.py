"""Which storage reader a name stands for, and opening it."""

from zeroinfer.counters import Trace
from zeroinfer.log import get_logger, warn_once
from zeroinfer.native.reader import Reader
from zeroinfer.native.thread_reader import ThreadReader
from zeroinfer.native.uring_reader import UringReader, require_uring, uring_error

__all__ = ["open_reader", "resolve_reader"]

_logger = get_logger(__name__)

_PREFERENCE = ("io_uring", "threads")
"""Readers in the order in which `auto` tries them; threads always work.

In turns over the same bytes (`tools/bench_io.py`) both read at one rate, io_uring with a quarter
less CPU time, which is what products need.
"""


def resolve_reader(name: str) -> str:
    """Return the reader that a setting of ``io.reader`` stands for here: threads or io_uring.

    Raises:
        BackendUnavailableError: io_uring was asked for by name and is not available.
    """
    if name == "auto":
        return next(filter(_can_take, _PREFERENCE))
    if name == "io_uring":
        require_uring()
    return name


def _can_take(name: str) -> bool:
    """Whether `auto` may take a reader; the log says why not."""
    reason = uring_error() if name == "io_uring" else None
    if reason is not None:
        warn_once(_logger, f"--reader auto passes over {name}: {reason}")
    return reason is None


def open_reader(
    name: str, *, io_chunk_bytes: int, queue_depth: int, trace: Trace | None = None
) -> Reader:
    """Open the reader of a name; see ``UringReader.open`` and ``ThreadReader.open``.

    Args:
        name: threads, io_uring or auto.
        io_chunk_bytes: Bytes of one read; a positive multiple of DIRECT_ALIGNMENT.
        queue_depth: Reads in flight; at least 1.
        trace: Receives one event per chunk.

    Raises:
        BackendUnavailableError: io_uring was asked for by name and is not available.
        StorageError: a thread cannot be started.
    """
    if resolve_reader(name) == "io_uring":
        return UringReader.open(io_chunk_bytes=io_chunk_bytes, queue_depth=queue_depth, trace=trace)
    return ThreadReader.open(io_chunk_bytes=io_chunk_bytes, queue_depth=queue_depth, trace=trace)
