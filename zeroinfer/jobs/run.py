"""The run loop of a job: rows in, steps, results out.

Rows are handed to the engine as places free up, so that requests exist for a bounded part of the
input only. Every result goes to the sink in the step that brought it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from zeroinfer.engine import Request, StepInterrupted, StepOutput
from zeroinfer.errors import RequestError
from zeroinfer.jobs.outputs import RecordFormat
from zeroinfer.jobs.rows import Row, RowError
from zeroinfer.jobs.sinks import Recovered, ResultSink

__all__ = ["JobEngine", "JobProgress", "JobResult", "run_job"]

_RATE_WINDOW = 16


class JobEngine(Protocol):
    """What a job needs of the engine."""

    def add_request(self, request: Request) -> None:
        """Queue a request; raises RequestError if it can never run."""
        ...

    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do."""
        ...

    def step(self) -> StepOutput:
        """Run one step; raises StepInterrupted after a request to stop."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class JobProgress:
    """Where a running job stands; rates are over the last steps."""

    num_done: int
    num_rows: int
    num_running: int
    num_errors: int
    num_generated_tokens: int
    tokens_per_s: float
    nvme_gb_s: float
    """10**9 bytes read from storage a second."""
    step_s: float
    eta_s: float | None
    """None until a rate is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """How a job ended."""

    num_rows: int
    num_done: int
    """Rows with a line in the output, errors and earlier runs included."""
    num_errors: int
    num_generated_tokens: int
    """New tokens of this run."""
    wall_s: float
    is_interrupted: bool
    resume: dict[str, int]
    """What was taken over from an earlier run, for the report."""

    @property
    def exit_code(self) -> int:
        """0 all rows answered, 5 some have errors, 130 interrupted."""
        if self.is_interrupted:
            return 130
        return RequestError.exit_code if self.num_errors else 0


def run_job(
    rows: Sequence[Row],
    engine: JobEngine | None,
    *,
    sink: ResultSink,
    record_format: RecordFormat,
    max_outstanding: int = 4096,
    on_progress: Callable[[JobProgress], None] | None = None,
) -> JobResult:
    """Run a job to its end or to the first request to stop.

    Args:
        rows: all rows of the input.
        engine: None when no row is left to run.
        sink: where lines go; closed by the caller.
        record_format: writes the lines.
        max_outstanding: requests that the engine holds at most, waiting and running.
        on_progress: called after each step.

    Raises:
        ZeroInferError: the engine or the output failed; what was written stays resumable.
    """
    job = _Job(rows=rows, recovered=sink.recovered, record_format=record_format)
    sink.write_step(job.take_errors(), {})
    is_interrupted = False
    if engine is not None:
        feed = job.requests()
        while True:
            refused = _fill(engine, feed, job, max_outstanding)
            if refused:
                sink.write_step(refused, {})
            if not engine.has_unfinished_requests():
                break
            try:
                output = engine.step()
            except StepInterrupted:
                is_interrupted = True
                break
            sink.write_step(job.take_step(output), output.new_token_ids)
            if on_progress is not None:
                on_progress(job.progress())
    return job.result(is_interrupted=is_interrupted)


def _fill(
    engine: JobEngine, feed: Iterator[Request], job: "_Job", max_outstanding: int
) -> list[tuple[int, str]]:
    """Add requests while there is room; return the lines of those that were refused."""
    refused = []
    while job.num_outstanding < max_outstanding:
        request = next(feed, None)
        if request is None:
            break
        try:
            engine.add_request(request)
            job.num_outstanding += 1
        except RequestError as error:
            refused.append(job.take_refusal(request.request_id, str(error)))
    return refused


@dataclass(kw_only=True, slots=True)
class _Job:
    """Counts of a running job."""

    rows: Sequence[Row]
    recovered: Recovered
    record_format: RecordFormat
    num_outstanding: int = 0
    num_finished: int = 0
    num_errors: int = 0
    num_generated: int = 0
    recent: list[tuple[float, int, int, float]] = field(default_factory=list)
    num_running: int = 0
    tokens_left: int = 0
    start_s: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.num_finished = len(self.recovered.done)
        self.num_errors = self.recovered.num_errors
        self.tokens_left = sum(row.sampling.max_tokens for row in self._runnable())
        self.tokens_left -= sum(len(tokens) for tokens in self.recovered.token_ids.values())

    def _runnable(self) -> Iterator[Row]:
        done = self.recovered.done
        return (row for row in self.rows if row.error is None and row.index not in done)

    def take_errors(self) -> list[tuple[int, str]]:
        """Return the lines of rows that are errors, without those an earlier run wrote."""
        bad = [
            (row, row.error)
            for row in self.rows
            if row.error is not None and row.index not in self.recovered.done
        ]
        self.num_errors += len(bad)
        self.num_finished += len(bad)
        return [(row.index, self.record_format.format_error(row, error)) for row, error in bad]

    def requests(self) -> Iterator[Request]:
        """Yield requests, those of interrupted rows first: their places were theirs before."""
        started = self.recovered.token_ids
        for row in self._runnable():
            if row.index in started:
                # The journal never holds a row's last token; a foreign file might.
                yield row.to_request(started[row.index][: row.sampling.max_tokens - 1])
        for row in self._runnable():
            if row.index not in started:
                yield row.to_request()

    def take_refusal(self, row_idx: int, message: str) -> tuple[int, str]:
        """Count a request that the engine refused and return its line."""
        self.num_errors += 1
        self.num_finished += 1
        error = RowError(message=message)
        return row_idx, self.record_format.format_error(self.rows[row_idx], error)

    def take_step(self, output: StepOutput) -> list[tuple[int, str]]:
        """Count a step and return the lines of the rows it finished."""
        self.num_outstanding -= len(output.finished)
        self.num_finished += len(output.finished)
        self.num_errors += sum(1 for ended in output.finished if ended.error is not None)
        self.num_generated += len(output.new_token_ids)
        self.num_running = output.stats.num_seqs - len(output.finished)
        self.tokens_left -= len(output.new_token_ids)
        for ended in output.finished:
            most = self.rows[ended.request_id].sampling.max_tokens
            self.tokens_left -= max(0, most - len(ended.token_ids))
        stats = output.stats
        self.recent.append(
            (stats.wall_s, len(output.new_token_ids), stats.nvme_bytes, time.perf_counter())
        )
        del self.recent[:-_RATE_WINDOW]
        return [
            (ended.request_id, self.record_format.format_result(self.rows[ended.request_id], ended))
            for ended in output.finished
        ]

    def progress(self) -> JobProgress:
        """Return where the job stands, with rates over the last steps."""
        wall_s = max(sum(step[0] for step in self.recent), 1e-9)
        tokens_per_s = sum(step[1] for step in self.recent) / wall_s
        return JobProgress(
            num_done=self.num_finished,
            num_rows=len(self.rows),
            num_running=self.num_running,
            num_errors=self.num_errors,
            num_generated_tokens=self.num_generated,
            tokens_per_s=tokens_per_s,
            nvme_gb_s=sum(step[2] for step in self.recent) / wall_s / 1e9,
            step_s=wall_s / len(self.recent),
            eta_s=max(self.tokens_left, 0) / tokens_per_s if tokens_per_s else None,
        )

    def result(self, *, is_interrupted: bool) -> JobResult:
        """Sum up."""
        return JobResult(
            num_rows=len(self.rows),
            num_done=self.num_finished,
            num_errors=self.num_errors,
            num_generated_tokens=self.num_generated,
            wall_s=time.perf_counter() - self.start_s,
            is_interrupted=is_interrupted,
            resume=self._resume_counts(),
        )

    def _resume_counts(self) -> dict[str, Any]:
        started = self.recovered.token_ids
        return {
            "num_rows_done_before": len(self.recovered.done),
            "num_rows_resumed": len(started),
            "num_rebuilt_tokens": sum(len(tokens) for tokens in started.values()),
            "num_rebuilt_prompt_tokens": sum(
                len(self.rows[idx].prompt_token_ids) for idx in started
            ),
            "num_lost_rows": self.recovered.num_lost_rows,
            "num_torn_bytes": self.recovered.num_torn_bytes,
        }
