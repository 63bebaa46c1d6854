"""Where a job's results go: checked first, looked at before the model opens, opened after."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroinfer.cli.job_options import GenerateOptions
from zeroinfer.cli.job_output import TextSink, check_writable
from zeroinfer.cli.prompts import BUILT_IN_PROMPTS
from zeroinfer.errors import ConfigError, StorageError
from zeroinfer.jobs import (
    Earlier,
    FileSink,
    OutputMode,
    ResultSink,
    StreamSink,
    check_output,
    is_stream,
    journal_path,
    peek_earlier,
    refuse_same_file,
)

__all__ = ["Target"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The output of one run."""

    path: Path | None
    """Resolved output; None is standard output."""
    mode: OutputMode
    is_ordered: bool
    shows_texts: bool
    """Texts for people instead of JSON lines."""

    @classmethod
    def check(cls, options: GenerateOptions) -> "Target":
        """Refuse whatever would destroy data or fail at the end.

        Raises:
            ConfigError: options contradict each other, a file is named twice, or the output exists.
            StorageError: a folder is missing, or the standard output closed.
        """
        mode = _mode(options)
        _check_side_files(options)
        to_stdout = options.output is None or options.output == "-"
        if to_stdout and sys.stdout is None:
            raise StorageError(
                "results would go to standard output, which is closed; give --output"
            )
        path = None
        if not to_stdout:
            path = check_output(options.output or "", input_path=options.input_path, mode=mode)
        if mode is OutputMode.RESUME and (path is None or is_stream(path)):
            raise ConfigError(
                f"--resume needs --output with a file: got {options.output or 'none'}, which has "
                "no journal"
            )
        return cls(
            path=path,
            mode=mode,
            is_ordered=options.ordered,
            shows_texts=options.output is None
            and options.input_path is None
            and not options.json_output,
        )

    @property
    def takes_stdout(self) -> bool:
        """Whether result lines go to standard output, so that tables must not."""
        return self.path is None and not self.shows_texts

    @property
    def is_file(self) -> bool:
        """Whether there is a journal."""
        return self.path is not None and not is_stream(self.path)

    def peek(self, fingerprint: Mapping[str, Any], *, num_rows: int) -> Earlier:
        """Look at an interrupted run; see `peek_earlier`."""
        if self.path is None or is_stream(self.path):
            return Earlier(done=frozenset(), fingerprint={})
        return peek_earlier(
            self.path,
            fingerprint=fingerprint,
            num_rows=num_rows,
            mode=self.mode,
            is_ordered=self.is_ordered,
        )

    @contextlib.contextmanager
    def open(self, fingerprint: Mapping[str, Any], *, num_rows: int) -> Iterator[ResultSink]:
        """Open the output; the body closes it as complete, all else leaves it resumable."""
        if self.shows_texts:
            yield TextSink(BUILT_IN_PROMPTS)
        elif self.path is None:
            yield StreamSink(sys.stdout.buffer, is_ordered=self.is_ordered)
        elif is_stream(self.path):
            with self.path.open("wb") as stream:
                yield StreamSink(stream, is_ordered=self.is_ordered)
        else:
            sink = FileSink.open(
                self.path,
                fingerprint=fingerprint,
                num_rows=num_rows,
                mode=self.mode,
                is_ordered=self.is_ordered,
            )
            try:
                yield sink
            finally:
                sink.close(is_complete=False)


def _mode(options: GenerateOptions) -> OutputMode:
    if options.resume and options.overwrite:
        raise ConfigError("--resume and --overwrite contradict each other: got both, need one")
    if options.resume:
        return OutputMode.RESUME
    return OutputMode.OVERWRITE if options.overwrite else OutputMode.NEW


def _check_side_files(options: GenerateOptions) -> None:
    others = [("input", options.input_path)]
    if options.output is not None and options.output != "-":
        journal = journal_path(Path(os.path.realpath(options.output)))
        others += [("output", options.output), ("journal of the output", str(journal))]
    for role, path in (("report", options.report), ("trace", options.trace)):
        if path is None:
            continue
        for other_role, other in others:
            if other is not None:
                refuse_same_file(role, Path(os.path.realpath(path)), other_role, other)
        check_writable(role, path)
        others.append((role, str(path)))
