"""``generate``: the main job, from an input file to durable results.

Everything that can be refused is refused in order of cost: flags and paths, then the model's
files, then the input's lines, then the plan; weights are read after all of that.
"""

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zeroinfer import __version__
from zeroinfer.cli.command import INTERRUPTED, make_command
from zeroinfer.cli.console import Output
from zeroinfer.cli.copying import show_offer
from zeroinfer.cli.job_options import GenerateOptions, InputOptions
from zeroinfer.cli.job_output import (
    ProgressView,
    render_summary,
    resume_command,
    write_at_once,
    write_json_file,
)
from zeroinfer.cli.model import OpenedModel, open_model
from zeroinfer.cli.prompts import BUILT_IN_MAX_TOKENS, read_built_in
from zeroinfer.cli.target import Target
from zeroinfer.config import EngineConfig
from zeroinfer.counters import Trace
from zeroinfer.engine import describe_sampling, resolve_sampling
from zeroinfer.errors import ZeroInferError
from zeroinfer.jobs import (
    Earlier,
    InputReader,
    JobInput,
    JobResult,
    RecordFormat,
    journal_path,
    read_job_input,
    run_job,
    stop_on_signals,
)
from zeroinfer.tokenization import Tokenizer

if TYPE_CHECKING:
    from zeroinfer.engine import Engine, SamplingParams

__all__ = ["GenerateJob", "command", "prepare_job", "run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateJob:
    """A job that passed all checks that need no weights."""

    opened: OpenedModel
    tokenizer: Tokenizer | None
    sampling: "SamplingParams"
    job_input: JobInput

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a resumed job must share with the interrupted one, as far as it is known."""
        config = self.opened.config
        return {
            "input": self.job_input.sha256,
            "model": self.opened.checkpoint.fingerprint,
            "dtype": config.model.dtype,
            "prompt_chunk_tokens": config.scheduler.prompt_chunk_tokens,
            "max_model_len": config.scheduler.max_model_len,
            **describe_sampling(self.sampling),
        }


def run(options: GenerateOptions) -> int:
    """Run the job and return its exit code."""
    target = Target.check(options)
    output = Output(is_json=options.json_output, is_stdout_taken=target.takes_stdout)
    job = prepare_job(options, is_copied=options.copy, is_striped=options.stripe)
    earlier = target.peek(job.fingerprint, num_rows=len(job.job_input.rows))
    trace = Trace(is_enabled=options.trace is not None)
    with contextlib.ExitStack() as stack:
        engine = _open_engine(stack, job, earlier, trace)
        if engine is not None:
            output.text(engine.plan.render())
            output.event("plan", engine.plan.to_dict())
            show_offer(job.opened, output)
        try:
            result = _run_steps(target, job, engine, output)
        except ZeroInferError:
            if target.path is not None and journal_path(target.path).exists():
                print(f"stopped by an error; {_how_to_resume(target)}", file=sys.stderr)
            if engine is not None:
                _write_files(options, engine.report(), trace)
            raise
        report = _report(engine, job, result)
    output.text(render_summary(result, report))
    output.event("report", report)
    _write_files(options, report, trace)
    if result.is_interrupted:
        print(f"interrupted; {_how_to_resume(target)}", file=sys.stderr)
    return result.exit_code


command = make_command(GenerateOptions, run)


def prepare_job(
    options: InputOptions, *, is_copied: bool = False, is_striped: bool = False
) -> GenerateJob:
    """Open the model's files and read the input; reads no weights but to copy them.

    Args:
        options: what the user set.
        is_copied: stream from a copy under ``--nvme``, made now if there is none.
        is_striped: spread that copy over all folders.

    Raises:
        ZeroInferError: an option, a file of the model or the input is refused.
    """
    opened = open_model(options, is_copied=is_copied, is_striped=is_striped)
    tokenizer = Tokenizer.open(opened.checkpoint.root)
    user = options.user_sampling()
    if options.input_path is None and user["max_tokens"] is None:
        user["max_tokens"] = BUILT_IN_MAX_TOKENS
    sampling = resolve_sampling(
        opened.checkpoint.generation_config, user=user, stop=options.stop or ()
    )
    reader = InputReader(
        prompts=opened.prompt_reader(tokenizer), defaults=sampling, model_names=opened.names
    )
    if options.input_path is None:
        job_input = read_built_in(reader, tokenizer)
    else:
        job_input = read_job_input(options.input_path, reader)
    return GenerateJob(opened=opened, tokenizer=tokenizer, sampling=sampling, job_input=job_input)


def _settle_batch_invariant(config: EngineConfig, earlier: Earlier) -> EngineConfig:
    """Let a resumed job keep what auto became the first time."""
    was_on = earlier.fingerprint.get("batch_invariant")
    if config.compute.batch_invariant != "auto" or was_on is None:
        return config
    compute = config.compute.model_copy(update={"batch_invariant": "on" if was_on else "off"})
    return config.model_copy(update={"compute": compute})


def _open_engine(
    stack: contextlib.ExitStack, job: GenerateJob, earlier: Earlier, trace: Trace
) -> "Engine | None":
    """Plan and open the engine; None when no row is left that it could run."""
    workload = job.job_input.workload()
    if workload is None or len(earlier.done) == len(job.job_input.rows):
        return None
    from zeroinfer.engine import Engine

    engine = Engine.open(
        _settle_batch_invariant(job.opened.config, earlier),
        checkpoint=job.opened.checkpoint,
        tokenizer=job.tokenizer,
        workload=workload,
        trace=trace if trace.is_enabled else None,
    )
    return stack.enter_context(engine)


def _run_steps(
    target: Target, job: GenerateJob, engine: "Engine | None", output: Output
) -> JobResult:
    rows = job.job_input.rows
    fingerprint, link_bytes_per_s = job.fingerprint, 0.0
    if engine is not None:
        fingerprint["batch_invariant"] = engine.batch_invariant
        link_bytes_per_s = engine.report()["profile"]["nvme_read_bytes_per_s"]
    view = ProgressView(output, link_bytes_per_s=link_bytes_per_s)
    with (
        contextlib.closing(view),
        target.open(fingerprint, num_rows=len(rows)) as sink,
        stop_on_signals(lambda: _request_stop(engine), lambda: _end_now(target)),
    ):
        result = run_job(
            rows,
            engine,
            sink=sink,
            record_format=RecordFormat(model_name=job.opened.name, clock=time.time),
            on_progress=view.show,
        )
        # Still under our handlers: a second signal may come while the files are made durable.
        sink.close(is_complete=not result.is_interrupted)
    return result


def _request_stop(engine: "Engine | None") -> None:
    os.write(2, b"\nstopping after the current unit; a second signal ends the run at once\n")
    if engine is not None:
        engine.request_stop()


def _end_now(target: Target) -> None:
    """Leave without cleaning up: the journal is made for that."""
    os.write(2, f"interrupted; {_how_to_resume(target)}\n".encode())
    os._exit(INTERRUPTED)


def _how_to_resume(target: Target) -> str:
    if target.path is not None and journal_path(target.path).exists():
        return f"go on with: {resume_command()}"
    return "nothing was kept, as there is no --output file"


def _report(engine: "Engine | None", job: GenerateJob, result: JobResult) -> dict[str, Any]:
    report = {"schema": 1, "zeroinfer": __version__} if engine is None else engine.report()
    report["job"] = {
        "input_sha256": job.job_input.sha256,
        "sampling": describe_sampling(job.sampling),
        "num_rows": result.num_rows,
        "num_done": result.num_done,
        "num_errors": result.num_errors,
        "num_generated_tokens": result.num_generated_tokens,
        "wall_s": result.wall_s,
        "is_interrupted": result.is_interrupted,
    }
    report["resume"] = dict(result.resume)
    return report


def _write_files(options: GenerateOptions, report: Mapping[str, Any], trace: Trace) -> None:
    if options.report is not None:
        write_json_file(options.report, report)
    if options.trace is not None:
        write_at_once(options.trace, trace.write)
