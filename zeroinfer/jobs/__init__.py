"""JSONL jobs over the engine: input forms, durable results, journal, resume, the run loop."""

from zeroinfer.jobs.inputs import InputReader, TextEncoder, read_job_input
from zeroinfer.jobs.interrupts import stop_on_signals
from zeroinfer.jobs.journal import JOURNAL_VERSION, read_journal
from zeroinfer.jobs.outputs import RecordFormat
from zeroinfer.jobs.paths import (
    OutputMode,
    check_output,
    is_stream,
    journal_path,
    refuse_same_file,
)
from zeroinfer.jobs.rows import JobInput, Row, RowError, RowStyle
from zeroinfer.jobs.run import JobEngine, JobProgress, JobResult, run_job
from zeroinfer.jobs.sinks import FileSink, Recovered, ResultSink, StreamSink

__all__ = [
    "JOURNAL_VERSION",
    "FileSink",
    "InputReader",
    "JobEngine",
    "JobInput",
    "JobProgress",
    "JobResult",
    "OutputMode",
    "RecordFormat",
    "Recovered",
    "ResultSink",
    "Row",
    "RowError",
    "RowStyle",
    "StreamSink",
    "TextEncoder",
    "check_output",
    "is_stream",
    "journal_path",
    "read_job_input",
    "read_journal",
    "refuse_same_file",
    "run_job",
    "stop_on_signals",
]
