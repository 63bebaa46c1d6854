"""Where results go: a file with a journal beside it, or a stream.

A file sink appends finished rows' lines to the output, then the step's tokens to the journal, so
that a kill at any moment loses at most the step it interrupts.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from zeroinfer.errors import ConfigError, StorageError
from zeroinfer.jobs.journal import (
    JournalState,
    JournalWriter,
    check_fingerprint,
    read_journal,
    write_all,
)
from zeroinfer.jobs.outputs import RecoveredOutput, is_error_line, recover_output
from zeroinfer.jobs.paths import OutputMode, journal_path, open_locked, sync_folder
from zeroinfer.jobs.syncer import Syncer

if TYPE_CHECKING:
    from array import array

__all__ = ["Earlier", "FileSink", "Recovered", "ResultSink", "StreamSink", "peek_earlier"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """What an interrupted run left."""

    done: frozenset[int] = frozenset()
    """Rows that need no work."""
    num_errors: int = 0
    token_ids: "Mapping[int, array[int]]" = field(default_factory=dict)
    """Tokens of rows that go on."""
    num_lost_rows: int = 0
    """Rows that had ended and whose output lines a power cut took; they run again."""
    num_torn_bytes: int = 0
    """Bytes of half-written lines cut off the output and the journal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Earlier:
    """What can be known of an earlier run before the model is opened."""

    done: frozenset[int]
    fingerprint: Mapping[str, Any]
    """Empty when there is nothing to go on with."""


class ResultSink(Protocol):
    """Takes the results of each step. Used from one thread; a step's calls are in order."""

    @property
    def recovered(self) -> Recovered:
        """What an earlier run left; empty for a fresh job."""
        ...

    def write_step(self, records: Sequence[tuple[int, str]], token_ids: Mapping[int, int]) -> None:
        """Write finished rows' lines, then note the tokens of rows that go on.

        Args:
            records: row index and output line, in the order of finishing.
            token_ids: row index -> new token, of all rows; those in `records` are left out.

        Raises:
            StorageError: the output cannot be written.
        """
        ...

    def close(self, *, is_complete: bool) -> None:
        """Make everything durable and, when the job is complete, remove the journal."""
        ...


class _Turnstile:
    """Lets lines through as they come, or in the order of their rows."""

    def __init__(
        self, *, is_ordered: bool, num_passed: int = 0, waiting: Mapping[int, str] | None = None
    ) -> None:
        self._is_ordered = is_ordered
        self._next_idx = num_passed
        self._waiting = dict(waiting or {})

    def admit(self, records: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
        """Return the lines whose turn it is, earlier ones that waited included."""
        if not self._is_ordered:
            return list(records)
        self._waiting.update(records)
        ready = []
        while self._next_idx in self._waiting:
            ready.append((self._next_idx, self._waiting.pop(self._next_idx)))
            self._next_idx += 1
        return ready


class StreamSink:
    """Writes lines to standard output or a pipe; nothing can be resumed."""

    def __init__(self, stream: BinaryIO, *, is_ordered: bool) -> None:
        self._stream = stream
        self._turnstile = _Turnstile(is_ordered=is_ordered)

    @property
    def recovered(self) -> Recovered:
        """Nothing: a stream remembers no earlier run."""
        return Recovered()

    def write_step(self, records: Sequence[tuple[int, str]], token_ids: Mapping[int, int]) -> None:
        """Write and flush the lines; tokens of running rows are not kept."""
        del token_ids
        ready = self._turnstile.admit(records)
        if ready:
            data = "".join(f"{line}\n" for _, line in ready).encode("utf-8")
            try:
                self._stream.write(data)
                self._stream.flush()
            except BrokenPipeError:
                raise
            except OSError as error:
                # What is still buffered must not fail a second time when the stream is flushed.
                with contextlib.suppress(OSError):
                    self._stream.close()
                raise StorageError(
                    f"write of {len(data)} bytes to the output failed: {error.strerror}; give "
                    "--output a file with room"
                ) from error

    def close(self, *, is_complete: bool) -> None:
        """Leave the stream open: it is the caller's."""
        del is_complete


class FileSink:
    """Appends lines to a file and each step's tokens to the journal beside it."""

    def __init__(
        self,
        *,
        path: Path,
        output_fd: int,
        journal_fd: int,
        recovered: Recovered,
        turnstile: _Turnstile,
    ) -> None:
        self._path = path
        self._output_fd = output_fd
        self._journal_fd = journal_fd
        self._recovered = recovered
        self._turnstile = turnstile
        self._is_closed = False
        self._journal = JournalWriter(journal_fd, journal_path(path))
        self._syncer = Syncer([(output_fd, path), (journal_fd, journal_path(path))])

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        fingerprint: Mapping[str, Any],
        num_rows: int,
        mode: OutputMode,
        is_ordered: bool,
    ) -> "FileSink":
        """Open output and journal under a lock.

        Args:
            path: the output as `check_output` returned it.
            fingerprint: what must stay the same for a job to be the same job.
            num_rows: rows of the input.
            mode: start, resume or overwrite.
            is_ordered: write lines in the order of the input.

        Raises:
            ConfigError: another run works on this output, or the fingerprint differs.
            StorageError: a file cannot be opened or is not what it should be.
        """
        fingerprint = {**fingerprint, "ordered": is_ordered}
        with contextlib.ExitStack() as undo:
            journal_fd = open_locked(journal_path(path))
            undo.callback(_give_up_journal, journal_fd, journal_path(path))
            output, journal = _read_earlier(path, fingerprint, num_rows, mode)
            output_fd = _open_output(path, mode, output.whole_bytes)
            undo.callback(os.close, output_fd)
            sink = cls(
                path=path,
                output_fd=output_fd,
                journal_fd=journal_fd,
                recovered=_join(output, journal),
                turnstile=_Turnstile(
                    is_ordered=is_ordered,
                    num_passed=len(output.done),
                    waiting=journal.waiting_records,
                ),
            )
            sink._begin(journal, fingerprint)
            undo.pop_all()
        return sink

    @property
    def recovered(self) -> Recovered:
        """What an earlier run left."""
        return self._recovered

    def write_step(self, records: Sequence[tuple[int, str]], token_ids: Mapping[int, int]) -> None:
        """Append lines, then the journal's line; both reach the page cache before this returns."""
        ready = self._turnstile.admit(records)
        if ready:
            data = "".join(f"{line}\n" for _, line in ready).encode("utf-8")
            write_all(self._output_fd, data, self._path)
        ended = {idx for idx, _ in records}
        written = {idx for idx, _ in ready}
        self._journal.write_step(
            {idx: token_id for idx, token_id in token_ids.items() if idx not in ended},
            finished=written,
            waiting_records={idx: line for idx, line in records if idx not in written},
        )
        self._syncer.request()

    def close(self, *, is_complete: bool) -> None:
        """Make everything durable and close; a complete job needs its journal no more.

        A second call does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._syncer.close()
            if is_complete:
                journal_path(self._path).unlink(missing_ok=True)
        finally:
            # The journal's descriptor holds the lock, so it goes last.
            os.close(self._output_fd)
            os.close(self._journal_fd)

    def _begin(self, journal: JournalState, fingerprint: Mapping[str, Any]) -> None:
        os.ftruncate(self._journal_fd, journal.whole_bytes)
        if journal.fingerprint is None:
            self._journal.write_header(fingerprint)
        sync_folder(self._path.parent)
        self._syncer.start()
        self.write_step([], {})


def peek_earlier(
    path: Path,
    *,
    fingerprint: Mapping[str, Any],
    num_rows: int,
    mode: OutputMode,
    is_ordered: bool,
) -> Earlier:
    """Look at an earlier run and refuse what `FileSink.open` would refuse; changes nothing.

    Args:
        path: the output as `check_output` returned it.
        fingerprint: the part of it that is known already.
        num_rows: rows of the input.
        mode: start, resume or overwrite.
        is_ordered: write lines in the order of the input.

    Raises:
        ConfigError: another run works on this output, or the fingerprint differs.
        StorageError: the output is not one of this job.
    """
    journal = journal_path(path)
    if journal.is_file():
        os.close(open_locked(journal))
    output, state = _read_earlier(path, {**fingerprint, "ordered": is_ordered}, num_rows, mode)
    return Earlier(
        done=output.done | state.waiting_records.keys(), fingerprint=state.fingerprint or {}
    )


def _read_earlier(
    path: Path, fingerprint: Mapping[str, Any], num_rows: int, mode: OutputMode
) -> tuple[RecoveredOutput, JournalState]:
    nothing = RecoveredOutput(done=frozenset(), num_errors=0, whole_bytes=0, torn_bytes=0)
    if mode is not OutputMode.RESUME or not path.exists():
        return nothing, JournalState()
    header = read_journal(journal_path(path), is_header_only=True).fingerprint
    if header is not None:
        check_fingerprint(header, fingerprint, journal=journal_path(path))
    output = recover_output(path, num_rows=num_rows)
    if header is None and 0 < len(output.done) < num_rows:
        raise StorageError(
            f"cannot resume {path}: it holds {len(output.done)} of {num_rows} rows and its journal "
            f"{journal_path(path)} is missing; use --overwrite to start anew"
        )
    return output, read_journal(journal_path(path), done=output.done)


def _open_output(path: Path, mode: OutputMode, whole_bytes: int) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    if mode is OutputMode.NEW:
        flags |= os.O_EXCL
    try:
        fd = os.open(path, flags, 0o666)
        os.ftruncate(fd, whole_bytes)
    except FileExistsError as error:
        raise ConfigError(f"output {path} appeared meanwhile; choose another") from error
    except OSError as error:
        raise StorageError(f"output {path} cannot be written: {error.strerror}") from error
    return fd


def _give_up_journal(fd: int, path: Path) -> None:
    """Leave no empty journal behind a refusal."""
    if os.fstat(fd).st_size == 0:
        path.unlink(missing_ok=True)
    os.close(fd)


def _join(output: RecoveredOutput, journal: JournalState) -> Recovered:
    lost = journal.finished - output.done
    waiting_errors = sum(is_error_line(line) for line in journal.waiting_records.values())
    return Recovered(
        done=output.done | journal.waiting_records.keys(),
        num_errors=output.num_errors + waiting_errors,
        token_ids=journal.token_ids,
        num_lost_rows=len(lost),
        num_torn_bytes=output.torn_bytes + journal.torn_bytes,
    )
