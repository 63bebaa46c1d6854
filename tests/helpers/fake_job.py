"""A whole job over the fake engine, as a program that a test can kill: ``python fake_job.py``.

Arguments: input, output, mode, ``ordered`` or ``free``, seconds of sleep in each step. The number
of new tokens of each step is noted in ``<output>.tokens`` before anything of it is written.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.helpers.fake_engine import FakeEngine
from zeroinfer.engine import PromptReader, SamplingParams, StepOutput
from zeroinfer.jobs import (
    FileSink,
    InputReader,
    JobResult,
    OutputMode,
    RecordFormat,
    check_output,
    read_job_input,
    run_job,
)


def run_fake_job(
    input_path: Path,
    output: Path,
    *,
    mode: OutputMode = OutputMode.NEW,
    is_ordered: bool = False,
    engine: FakeEngine | None = None,
    fingerprint: dict[str, object] | None = None,
) -> JobResult:
    """Read, run and write one job, as the command line does."""
    path = check_output(str(output), input_path=str(input_path), mode=mode)
    prompts = PromptReader(tokenizer=None)
    reader = InputReader(prompts=prompts, defaults=SamplingParams(max_tokens=30))
    job = read_job_input(str(input_path), reader)
    sink = FileSink.open(
        path,
        fingerprint={"input": job.sha256, **(fingerprint or {})},
        num_rows=len(job.rows),
        mode=mode,
        is_ordered=is_ordered,
    )
    result = None
    try:
        result = run_job(
            job.rows,
            engine or FakeEngine(),
            sink=sink,
            record_format=RecordFormat(model_name="fake", clock=lambda: 0.0),
        )
    finally:
        sink.close(is_complete=result is not None and not result.is_interrupted)
    return result


class CountingEngine(FakeEngine):
    """Notes the new tokens of each step in a file that outlives the process."""

    def __init__(self, log: Path, sleep_s: float) -> None:
        super().__init__(on_step=lambda _: time.sleep(sleep_s))
        self._log = log

    def step(self) -> StepOutput:
        output = super().step()
        with self._log.open("a") as file:
            file.write(f"{len(output.new_token_ids)}\n")
        return output


def _main() -> int:
    input_path, output, mode, order, sleep_s = sys.argv[1:]
    engine = CountingEngine(Path(f"{output}.tokens"), float(sleep_s))
    result = run_fake_job(
        Path(input_path),
        Path(output),
        mode=OutputMode(mode),
        is_ordered=order == "ordered",
        engine=engine,
    )
    return result.exit_code


if __name__ == "__main__":
    sys.exit(_main())
