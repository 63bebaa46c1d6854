"""Makes appended bytes durable beside the step loop.

The loop appends to the page cache, which outlives a killed process, and asks this thread to bring
the files to the disk, which outlives a power cut. Syncs wait for the disk that weights stream from,
so requests of a short while are served together.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from zeroinfer.errors import StorageError

__all__ = ["Syncer"]

_PERIOD_S = 0.2
"""Least time from one sync to the next; steps of models worth streaming take longer."""


class Syncer:
    """A sleeping thread that syncs open files, in the order given.

    The output stands before the journal, so that a journal never marks a row whose line a power
    cut can still take.
    """

    def __init__(self, files: Sequence[tuple[int, Path]]) -> None:
        self._files = files
        self._condition = threading.Condition()
        self._is_dirty = False
        self._is_closing = False
        self._error: StorageError | None = None
        self._thread = threading.Thread(target=self._run, name="zeroinfer-sync", daemon=True)

    def start(self) -> None:
        """Start the thread; the descriptors stay open until `close` returned."""
        self._thread.start()

    def request(self) -> None:
        """Ask for a sync; returns at once.

        Raises:
            StorageError: an earlier sync failed.
        """
        with self._condition:
            if self._error is not None:
                raise self._error
            self._is_dirty = True
            self._condition.notify()

    def close(self) -> None:
        """Sync what is left and stop the thread; blocks. Idempotent.

        Raises:
            StorageError: a sync failed.
        """
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._is_dirty or self._is_closing)
                if not self._is_dirty:
                    return
                self._is_dirty = False
            self._sync_all()
            with self._condition:
                self._condition.wait_for(lambda: self._is_closing, timeout=_PERIOD_S)

    def _sync_all(self) -> None:
        for fd, path in self._files:
            try:
                os.fdatasync(fd)
            except OSError as error:
                with self._condition:
                    self._error = StorageError(f"sync of {path} failed: {error.strerror}")
                return
