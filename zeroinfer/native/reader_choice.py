"""Which storage reader a name stands for, and opening it."""

from zeroinfer.counters import Trace
from zeroinfer.log import get_logger, warn_once
from zeroinfer.native.reader import Reader
from zeroinfer.native.thread_reader import ThreadReader
from zeroinfer.native.uring_reader import UringReader, require_uring, uring_error

__all__ = ["open_reader", "resolve_reader"]

_logger = get_logger(__name__)

_AUTO_READER = "threads"
"""What `auto` takes: io_uring was not measured to be the better one yet."""


def resolve_reader(name: str) -> str:
    """Return the reader that a setting of ``io.reader`` stands for here: threads or io_uring.

    Raises:
        BackendUnavailableError: io_uring was asked for by name and is not available.
    """
    if name == "io_uring":
        require_uring()
    if name != "auto":
        return name
    reason = uring_error() if _AUTO_READER == "io_uring" else None
    if reason is None:
        return _AUTO_READER
    warn_once(_logger, f"weights are read by threads, since {reason}")
    return "threads"


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
