"""The journal of a running job: what a kill must not lose and the output does not hold yet.

A text file of lines ``<crc32> <json>``. The first states what the job is (its fingerprint). Then
one line for each step: ``t`` the token each running row gained, ``r`` the rows' indices where they
differ from the line before, ``f`` rows that ended and whose output line was written before this
line, ``o`` output lines that wait for their turn in an ordered job.

The last token of a row is never here, only in its output line: a row that the journal knows is
always one that goes on. Reading stops at the first damaged line; as tokens are appended in order,
what stands before it is a true state of the job.
"""

import json
import os
import zlib
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroinfer.errors import ConfigError, StorageError

__all__ = [
    "JOURNAL_VERSION",
    "JournalState",
    "JournalWriter",
    "check_fingerprint",
    "read_journal",
    "write_all",
]

JOURNAL_VERSION = 1


@dataclass(kw_only=True, slots=True)
class JournalState:
    """What a journal says."""

    fingerprint: dict[str, Any] | None = None
    """None when not even the first line is whole."""
    token_ids: "dict[int, array[int]]" = field(default_factory=dict)
    """Tokens of rows that were running, without the rows in `done`."""
    finished: set[int] = field(default_factory=set)
    waiting_records: dict[int, str] = field(default_factory=dict)
    """Finished lines of an ordered job that were not written to the output yet."""
    whole_bytes: int = 0
    torn_bytes: int = 0


class JournalWriter:
    """Appends to an open journal. One write call for each line; the caller makes it durable."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._path = path
        self._row_idxs: list[int] = []

    def write_header(self, fingerprint: Mapping[str, Any]) -> None:
        """Write the first line."""
        self._write({"journal": JOURNAL_VERSION, "fingerprint": dict(fingerprint)})

    def write_step(
        self,
        token_ids: Mapping[int, int],
        *,
        finished: Collection[int] = (),
        waiting_records: Mapping[int, str] | None = None,
    ) -> None:
        """Append one step; nothing is written for a step that brought nothing.

        Args:
            token_ids: row index -> the token it gained, of rows that go on.
            finished: rows whose lines are in the output file by now.
            waiting_records: lines of finished rows that are not.
        """
        record: dict[str, Any] = {}
        if token_ids:
            row_idxs = sorted(token_ids)
            if row_idxs != self._row_idxs:
                record["r"] = self._row_idxs = row_idxs
            record["t"] = [token_ids[idx] for idx in row_idxs]
        if finished:
            record["f"] = sorted(finished)
        if waiting_records:
            record["o"] = {str(idx): line for idx, line in waiting_records.items()}
        if record:
            self._write(record)

    def _write(self, record: Mapping[str, Any]) -> None:
        payload = json.dumps(record, separators=(",", ":")).encode("ascii")
        write_all(self._fd, b"%08x %s\n" % (zlib.crc32(payload), payload), self._path)


def write_all(fd: int, data: bytes, path: Path) -> None:
    """Write all bytes; a signal or a full disk may cut a single call short.

    Raises:
        StorageError: the file system refused; the message names the file.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except OSError as error:
            raise StorageError(
                f"write of {len(view)} bytes to {path} failed: {error.strerror}; "
                "what was written before can be resumed"
            ) from error


def read_journal(
    path: Path, *, done: Collection[int] = (), is_header_only: bool = False
) -> JournalState:
    """Read a journal up to its end or its first damaged line; a missing one is empty.

    Args:
        path: the journal.
        done: rows that the output holds; their tokens are dropped.
        is_header_only: stop after the fingerprint.
    """
    state = JournalState()
    row_idxs: list[int] = []
    if not path.exists():
        return state
    with path.open("rb") as file:
        for raw in file:
            record = _parse_line(raw)
            if record is None:
                break
            if state.fingerprint is None:
                if record.get("journal") != JOURNAL_VERSION:
                    break
                state.fingerprint = record["fingerprint"]
            row_idxs = record.get("r", row_idxs)
            _apply_step(state, record, row_idxs, done)
            state.whole_bytes += len(raw)
            if is_header_only:
                break
    state.torn_bytes = path.stat().st_size - state.whole_bytes
    return state


def _parse_line(raw: bytes) -> dict[str, Any] | None:
    checksum, _, payload = raw.removesuffix(b"\n").partition(b" ")
    if not raw.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(payload):
        return None
    record: dict[str, Any] = json.loads(payload)
    return record


def _apply_step(
    state: JournalState, record: Mapping[str, Any], row_idxs: list[int], done: Collection[int]
) -> None:
    for row_idx, token_id in zip(row_idxs, record.get("t", ()), strict=False):
        if row_idx not in done:
            state.token_ids.setdefault(row_idx, array("I")).append(token_id)
    state.finished.update(record.get("f", ()))
    for key, line in record.get("o", {}).items():
        if int(key) not in done:
            state.waiting_records[int(key)] = line
            state.token_ids.pop(int(key), None)


def check_fingerprint(earlier: Mapping[str, Any], now: Mapping[str, Any], *, journal: Path) -> None:
    """Refuse to resume another job; keys that only one side has are not compared.

    Raises:
        ConfigError: a value differs; the message names each and both values.
    """
    differing = [
        f"{key} was {earlier[key]}, now {now[key]}"
        for key in now
        if key in earlier and earlier[key] != now[key]
    ]
    if differing:
        raise ConfigError(
            f"cannot resume from {journal}: {'; '.join(differing)}; give the values of the "
            "first run, or --overwrite to start anew"
        )
