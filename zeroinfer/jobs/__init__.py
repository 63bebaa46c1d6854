"""JSONL jobs over the engine: input forms, durable results, journal, resume, the run loop."""

from zeroinfer.jobs.inputs import InputReader, read_job_input
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
from zeroinfer.jobs.sinks import (
    Earlier,
    FileSink,
    Recovered,
    ResultSink,
    StreamSink,
    peek_earlier,
)

__all__ = [
    "JOURNAL_VERSION",
    "Earlier",
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
    "check_output",
    "is_stream",
    "journal_path",
    "peek_earlier",
    "read_job_input",
    "read_journal",
    "refuse_same_file",
    "run_job",
    "stop_on_signals",
]
