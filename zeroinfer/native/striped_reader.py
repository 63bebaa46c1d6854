"""One reader per file system, so that weights spread over several disks come from all of them.

A single reader serves its oldest read first; as a tensor lies on one disk and is larger than what
is in flight, the other disks would wait. Here each disk has a queue of its own.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from zeroinfer.closing import Closing
from zeroinfer.counters import IoCounters, Trace
from zeroinfer.errors import StorageError
from zeroinfer.native.reader import OpenFile, Reader, ReadTicket

__all__ = ["StripedReader", "count_devices", "open_over"]


def open_over(paths: Iterable[Path], open_reader: Callable[..., Reader], *, trace: Trace) -> Reader:
    """Open what reads some files: one reader, or one for each of their file systems.

    Args:
        paths: files that will be read.
        open_reader: opens one reader; called with ``trace``.
        trace: receives the events of all readers.

    Raises:
        StorageError: a file cannot be looked at.
    """
    is_single = count_devices(paths) < 2
    return open_reader(trace=trace) if is_single else StripedReader(open_reader, trace)


def count_devices(paths: Iterable[Path]) -> int:
    """Return the number of file systems that some files lie on; links are followed.

    Raises:
        StorageError: a file cannot be looked at.
    """
    return len({_device(path) for path in paths})


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    """A read, with the reader that serves it."""

    reader: Reader
    inner: ReadTicket

    @property
    def is_done(self) -> bool:
        return self.inner.is_done


class StripedReader(Closing):
    """Implements ``Reader`` with as many readers as there are file systems.

    See ``Reader`` for lifetime and thread rules. Files are opened from one thread.
    """

    def __init__(self, open_reader: Callable[..., Reader], trace: Trace) -> None:
        """Begin without readers.

        Args:
            open_reader: opens the reader of one more file system; called with ``trace``.
            trace: receives the events of all readers, in lanes named after their disks.
        """
        self._open_reader = open_reader
        self._trace = trace
        self._readers: dict[int, Reader] = {}
        self._owners: dict[Path, Reader] = {}
        self._counters = IoCounters()
        self._is_closed = False

    @property
    def counters(self) -> IoCounters:
        """Sums over the readers; busy is the longest of their busy times, as they overlap."""
        parts = [reader.counters for reader in self._readers.values()]
        self._counters.bytes_read = sum(part.bytes_read for part in parts)
        self._counters.num_reads = sum(part.num_reads for part in parts)
        self._counters.busy_s = max((part.busy_s for part in parts), default=0.0)
        return self._counters

    def open_file(self, path: Path) -> OpenFile:
        """Open a file with the reader of its file system; see ``Reader.open_file``."""
        if self._is_closed:
            raise StorageError(f"cannot open {path}: the reader is closed")
        device = _device(path)
        if device not in self._readers:
            trace = self._trace.within(_disk_name(device))
            self._readers[device] = self._open_reader(trace=trace)
        self._owners[path] = self._readers[device]
        return self._owners[path].open_file(path)

    def submit(
        self,
        file: OpenFile,
        offset: int,
        destination: memoryview,
        *,
        required_bytes: int,
        is_urgent: bool = False,
    ) -> ReadTicket:
        """Queue a read at the file's own reader; see ``Reader.submit``."""
        reader = self._owners[file.path]
        inner = reader.submit(
            file, offset, destination, required_bytes=required_bytes, is_urgent=is_urgent
        )
        return _Ticket(reader, inner)

    def wait(self, ticket: ReadTicket) -> None:
        """Block, asleep, until the read is complete; see ``Reader.wait``."""
        assert isinstance(ticket, _Ticket), f"not a ticket of this reader: {ticket!r}"
        ticket.reader.wait(ticket.inner)

    def close(self) -> None:
        """Close all readers; idempotent."""
        self._is_closed = True
        for reader in self._readers.values():
            reader.close()


def _device(path: Path) -> int:
    try:
        return path.stat().st_dev
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}; check the file") from error


def _disk_name(device: int) -> str:
    """Return the kernel's name of a disk, such as nvme0n1p1; numbers where it has none."""
    numbers = f"{os.major(device)}:{os.minor(device)}"
    return Path("/sys/dev/block", numbers).resolve().name
