import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import fake_job
from tests.helpers.fake_engine import FakeEngine, expected_tokens
from tests.helpers.fake_job import run_fake_job
from zeroinfer.engine import PromptReader, SamplingParams
from zeroinfer.errors import ConfigError, StorageError
from zeroinfer.jobs import (
    InputReader,
    OutputMode,
    RecordFormat,
    StreamSink,
    journal_path,
    read_job_input,
    read_journal,
    run_job,
    stop_on_signals,
)


def write_input(path, num_rows=20, bad=()):
    lines = [
        "{oops" if idx in bad else json.dumps({"prompt_token_ids": [idx + 1, 5], "max_tokens": 30})
        for idx in range(num_rows)
    ]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def job_input(tmp_path):
    return write_input(tmp_path / "in.jsonl")


def records_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def expected_records(job_input):
    prompts = PromptReader(tokenizer=None)
    reader = InputReader(prompts=prompts, defaults=SamplingParams(max_tokens=30))
    rows = read_job_input(str(job_input), reader).rows
    return {
        row.index: expected_tokens(row.to_request()) if row.error is None else None for row in rows
    }


def check_complete(job_input, output):
    """Every row once, with the tokens of an undisturbed run; no journal is left."""
    records = records_of(output)
    expected = expected_records(job_input)
    assert sorted(record["index"] for record in records) == list(expected)
    assert {record["index"]: record.get("token_ids") for record in records} == expected
    assert not journal_path(output).exists()


def test_rows_come_in_the_order_of_finishing(job_input, tmp_path):
    """Source: vllm-project/vllm#394."""
    output = tmp_path / "out"
    result = run_fake_job(job_input, output)
    check_complete(job_input, output)
    order = [record["index"] for record in records_of(output)]
    assert order != sorted(order)
    assert (result.exit_code, result.num_done, result.num_errors) == (0, 20, 0)


def test_ordered_rows_come_in_the_order_of_the_input(job_input, tmp_path):
    output = tmp_path / "out"
    run_fake_job(job_input, output, is_ordered=True)
    check_complete(job_input, output)
    order = [record["index"] for record in records_of(output)]
    assert order == sorted(order)


def test_bad_rows_leave_records_and_exit_code_5(tmp_path):
    job_input = write_input(tmp_path / "in.jsonl", bad={0, 7})
    for is_ordered in (False, True):
        output = tmp_path / f"out-{is_ordered}"
        result = run_fake_job(job_input, output, is_ordered=is_ordered)
        check_complete(job_input, output)
        assert (result.exit_code, result.num_errors) == (5, 2)
    assert [record["index"] for record in records_of(output)] == list(range(20))


def test_rows_that_the_engine_refuses_or_fails(job_input, tmp_path):
    engine = FakeEngine(failing_ids=[3])
    result = run_fake_job(job_input, tmp_path / "out", engine=engine)
    assert (result.exit_code, result.num_errors, result.num_done) == (5, 1, 20)
    refusing = FakeEngine(max_model_len=1)
    result = run_fake_job(job_input, tmp_path / "out2", engine=refusing)
    assert (result.exit_code, result.num_errors, result.num_done) == (5, 20, 20)
    assert "window 1" in records_of(tmp_path / "out2")[0]["error"]["message"]


def test_no_lines_is_an_empty_output(tmp_path):
    """Source: vllm-project/vllm#28703."""
    job_input = write_input(tmp_path / "in.jsonl", num_rows=0)
    result = run_fake_job(job_input, tmp_path / "out")
    assert result.exit_code == 0
    assert (tmp_path / "out").read_bytes() == b""
    assert not journal_path(tmp_path / "out").exists()


def stop_at(engine, step):
    engine._on_step = lambda num_steps: num_steps == step and engine.request_stop()
    return engine


def test_a_stopped_job_resumes_where_it_was(job_input, tmp_path):
    output = tmp_path / "out"
    result = run_fake_job(job_input, output, engine=stop_at(FakeEngine(), 12))
    assert (result.is_interrupted, result.exit_code) == (True, 130)
    done = len(records_of(output))
    assert 0 < done < 20
    state = read_journal(journal_path(output))
    running = {idx: list(ids) for idx, ids in state.token_ids.items() if idx not in state.finished}
    assert running

    engine = FakeEngine()
    result = run_fake_job(job_input, output, mode=OutputMode.RESUME, engine=engine)
    check_complete(job_input, output)
    assert len(engine.added) == 20 - done
    resumed = [r for r in engine.added if r.generated_token_ids]
    assert {r.request_id: list(r.generated_token_ids) for r in resumed} == running
    assert result.resume == {
        "num_rows_done_before": done,
        "num_rows_resumed": len(running),
        "num_rebuilt_tokens": sum(map(len, running.values())),
        "num_rebuilt_prompt_tokens": 2 * len(running),
        "num_lost_rows": 0,
        "num_torn_bytes": 0,
    }


@pytest.mark.parametrize("is_ordered", [False, True])
def test_stopping_after_every_step_ends_all_the_same(job_input, tmp_path, is_ordered):
    output = tmp_path / "out"
    num_tokens = 0
    mode = OutputMode.NEW
    for _ in range(1000):
        engine = stop_at(FakeEngine(), 1)
        result = run_fake_job(job_input, output, mode=mode, is_ordered=is_ordered, engine=engine)
        num_tokens += result.num_generated_tokens
        mode = OutputMode.RESUME
        if not result.is_interrupted:
            break
    check_complete(job_input, output)
    assert num_tokens == sum(map(len, expected_records(job_input).values()))


def test_resume_without_an_output_starts_fresh(job_input, tmp_path):
    output = tmp_path / "out"
    run_fake_job(job_input, output, engine=stop_at(FakeEngine(), 12))
    output.unlink()
    result = run_fake_job(job_input, output, mode=OutputMode.RESUME)
    check_complete(job_input, output)
    assert result.resume["num_rows_done_before"] == 0


def test_resume_of_a_complete_job_does_nothing(job_input, tmp_path):
    output = tmp_path / "out"
    run_fake_job(job_input, output)
    before = output.read_bytes()
    engine = FakeEngine()
    result = run_fake_job(job_input, output, mode=OutputMode.RESUME, engine=engine)
    assert (result.exit_code, engine.added, output.read_bytes()) == (0, [], before)
    assert not journal_path(output).exists()


def test_errors_of_the_first_run_count_in_the_exit_code_of_the_second(tmp_path):
    job_input = write_input(tmp_path / "in.jsonl", bad={2})
    output = tmp_path / "out"
    run_fake_job(job_input, output, engine=stop_at(FakeEngine(), 5))
    result = run_fake_job(job_input, output, mode=OutputMode.RESUME)
    check_complete(job_input, output)
    assert (result.exit_code, result.num_errors) == (5, 1)


def test_overwrite_starts_anew(job_input, tmp_path):
    output = tmp_path / "out"
    run_fake_job(job_input, output, engine=stop_at(FakeEngine(), 12), fingerprint={"seed": 1})
    run_fake_job(job_input, output, mode=OutputMode.OVERWRITE, fingerprint={"seed": 2})
    check_complete(job_input, output)


def test_waiting_lines_of_an_ordered_job_survive(job_input, tmp_path):
    """Rows that end before their turn are in the journal, errors among them."""
    output = tmp_path / "out"
    first = FakeEngine(failing_ids=[2], max_num_seqs=8)
    run_fake_job(job_input, output, is_ordered=True, engine=stop_at(first, 3))
    waiting = read_journal(journal_path(output)).waiting_records
    assert 2 in waiting
    engine = FakeEngine()
    result = run_fake_job(job_input, output, mode=OutputMode.RESUME, is_ordered=True, engine=engine)
    assert not waiting.keys() & {request.request_id for request in engine.added}
    assert (result.num_errors, result.exit_code) == (1, 5)
    assert [record["index"] for record in records_of(output)] == list(range(20))


def test_another_job_is_refused_by_fingerprint(job_input, tmp_path):
    output = tmp_path / "out"
    run_fake_job(job_input, output, engine=stop_at(FakeEngine(), 12), fingerprint={"seed": 1})
    before = output.read_bytes(), journal_path(output).read_bytes()
    with pytest.raises(ConfigError, match="seed was 1, now 2"):
        run_fake_job(job_input, output, mode=OutputMode.RESUME, fingerprint={"seed": 2})
    write_input(job_input, num_rows=21)
    with pytest.raises(ConfigError, match=r"input was [0-9a-f]{64}, now"):
        run_fake_job(job_input, output, mode=OutputMode.RESUME, fingerprint={"seed": 1})
    with pytest.raises(ConfigError, match="ordered was False, now True"):
        run_fake_job(job_input, output, mode=OutputMode.RESUME, is_ordered=True)
    assert (output.read_bytes(), journal_path(output).read_bytes()) == before


def test_part_of_an_output_without_journal_is_refused(job_input, tmp_path):
    output = tmp_path / "out"
    run_fake_job(job_input, output, engine=stop_at(FakeEngine(), 12))
    journal_path(output).unlink()
    with pytest.raises(StorageError, match=r"holds \d+ of 20 rows and its journal .* is missing"):
        run_fake_job(job_input, output, mode=OutputMode.RESUME)
    assert not journal_path(output).exists()


def test_torn_lines_are_cut_off(job_input, tmp_path):
    """Source: vllm-project/vllm#52505."""
    output = tmp_path / "out"
    run_fake_job(job_input, output, engine=stop_at(FakeEngine(), 12))
    done = len(records_of(output))
    output_bytes = output.read_bytes()
    output.write_bytes(output_bytes[:-15])
    journal_bytes = journal_path(output).read_bytes()
    journal_path(output).write_bytes(journal_bytes[:-3])
    result = run_fake_job(job_input, output, mode=OutputMode.RESUME)
    check_complete(job_input, output)
    assert result.resume["num_rows_done_before"] == done - 1
    assert result.resume["num_lost_rows"] in (0, 1)
    assert result.resume["num_torn_bytes"] > 0


def test_any_cut_of_output_and_journal_resumes(job_input, tmp_path):
    """A power cut may keep any prefix of either file."""
    output = tmp_path / "out"
    run_fake_job(job_input, output, engine=stop_at(FakeEngine(), 12))
    whole = output.read_bytes(), journal_path(output).read_bytes()
    header = whole[1].index(b"\n") + 1
    chance = random.Random(5)
    for _ in range(40):
        output.write_bytes(whole[0][: chance.randint(0, len(whole[0]))])
        journal_path(output).write_bytes(whole[1][: chance.randint(header, len(whole[1]))])
        run_fake_job(job_input, output, mode=OutputMode.RESUME)
        check_complete(job_input, output)


def test_two_jobs_on_one_output_are_refused(job_input, tmp_path):
    output = tmp_path / "out"
    refusals = []

    def start_second(num_steps):
        if num_steps == 3:
            with pytest.raises(ConfigError, match="another run is writing") as caught:
                run_fake_job(job_input, output, mode=OutputMode.RESUME)
            refusals.append(caught.value)

    run_fake_job(job_input, output, engine=FakeEngine(on_step=start_second))
    assert len(refusals) == 1
    check_complete(job_input, output)


def test_a_failing_engine_leaves_a_job_that_resumes(job_input, tmp_path):
    output = tmp_path / "out"

    def fail(num_steps):
        if num_steps == 9:
            raise StorageError("read of 4096 bytes failed: Input/output error (EIO)")

    with pytest.raises(StorageError, match="EIO"):
        run_fake_job(job_input, output, engine=FakeEngine(on_step=fail))
    run_fake_job(job_input, output, mode=OutputMode.RESUME)
    check_complete(job_input, output)


def test_the_engine_holds_a_bounded_part_of_the_job(job_input):
    reader = InputReader(prompts=PromptReader(tokenizer=None), defaults=SamplingParams())
    rows = read_job_input(str(job_input), reader).rows
    stream = io.BytesIO()
    engine = FakeEngine(max_num_seqs=2)
    progress = []
    run_job(
        rows,
        engine,
        sink=StreamSink(stream, is_ordered=True),
        record_format=RecordFormat(model_name="m", clock=lambda: 0.0),
        max_outstanding=5,
        on_progress=progress.append,
    )
    assert engine.max_seen_outstanding == 5
    assert [json.loads(line)["index"] for line in stream.getvalue().splitlines()] == list(range(20))
    assert progress[-1].num_done == progress[-1].num_rows == 20
    assert progress[-1].eta_s == 0
    assert progress[0].eta_s > 0
    assert progress[0].tokens_per_s == pytest.approx(200)
    assert progress[0].nvme_gb_s == pytest.approx(1.0)
    assert progress[0].step_s == pytest.approx(0.01)


def start_job(job_input, output, mode, order):
    command = [sys.executable, fake_job.__file__, str(job_input), str(output)]
    return subprocess.Popen(
        [*command, mode.value, order, "0.004"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def wait_for(path, num_bytes, process):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and path.stat().st_size >= num_bytes:
            return
        time.sleep(0.001)


@pytest.mark.parametrize("order", ["free", "ordered"])
def test_kill_at_random_moments_loses_at_most_a_step(tmp_path, order):
    """Source: vllm-project/vllm#52505."""
    job_input = write_input(tmp_path / "in.jsonl", num_rows=40, bad={11})
    output = tmp_path / "out"
    journal = journal_path(output)
    chance = random.Random(1234)
    num_kills = 0
    mode = OutputMode.NEW
    for _ in range(6):
        size = journal.stat().st_size if journal.exists() else 0
        process = start_job(job_input, output, mode, order)
        wait_for(journal, size + chance.randint(1, 900), process)
        process.kill()
        process.communicate()
        num_kills += process.returncode == -signal.SIGKILL
        mode = OutputMode.RESUME
    process = start_job(job_input, output, mode, order)
    text = process.communicate(timeout=50)[0]
    assert process.returncode == 5, text
    check_complete(job_input, output)
    assert num_kills >= 3
    num_tokens = sum(map(int, (tmp_path / "out.tokens").read_text().split()))
    num_needed = sum(len(tokens or ()) for tokens in expected_records(job_input).values())
    assert 0 <= num_tokens - num_needed <= num_kills * 4
    if order == "ordered":
        assert [record["index"] for record in records_of(output)] == list(range(40))


def test_first_signal_stops_the_second_ends():
    calls = []
    with stop_on_signals(lambda: calls.append("stop"), lambda: calls.append("end")):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert calls == ["stop", "end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_job_program_is_where_the_tests_think():
    assert Path(fake_job.__file__).name == "fake_job.py"
