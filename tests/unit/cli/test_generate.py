import errno
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.fake_engine import expected_tokens
from zeroinfer.cli import main
from zeroinfer.cli.job_output import resume_command
from zeroinfer.counters import Trace
from zeroinfer.errors import CapacityError, StorageError
from zeroinfer.jobs import FileSink


@pytest.fixture
def job(tmp_path, scripted_folder, facade):
    """Arguments of a small job, to be extended."""
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"prompt_token_ids": [idx + 5, 9], "max_tokens": 12}) for idx in range(9)]
    path.write_text("\n".join(lines))
    return [
        "--nvme", str(tmp_path / "nvme"), "--model", str(scripted_folder), "--input", str(path),
        "--output", str(tmp_path / "out.jsonl"),
    ]  # fmt: skip


def without(args, flag):
    idx = args.index(flag)
    return args[:idx] + args[idx + 2 :]


def records(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def test_a_job_from_file_to_file(job, tmp_path, facade, capsys):
    assert main(job) == 0
    assert len(records(tmp_path)) == 9
    for record in records(tmp_path):
        request = facade.opened[0].added[record["index"]]
        assert record["token_ids"] == expected_tokens(request)
    out, err = capsys.readouterr()
    assert out.startswith("the plan's table\n9 of 9 rows done, 0 with errors; ")
    assert "read 2.8 GiB from nvme at 1.50 GB/s" in out
    assert "peak memory 1.0 GiB of 2.0 GiB" in out
    assert "bound by nvme, at 97% of its roofline" in out
    assert "9/9 rows | " in err
    assert "GB/s (50% of link)" in err
    assert facade.opened[0].is_closed


def test_row_errors_give_exit_code_5(job, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "hi"}\n{oops\n')
    assert main(job) == 5
    assert sorted("error" in record for record in records(tmp_path)) == [False, True]


def test_no_lines_give_an_empty_output_without_an_engine(job, tmp_path, facade):
    (tmp_path / "in.jsonl").write_text("\n")
    assert main(job) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b""
    assert facade.opened == []


def test_only_bad_lines_need_no_engine(job, tmp_path, facade):
    (tmp_path / "in.jsonl").write_text("{\n{\n")
    assert main(job) == 5
    assert len(records(tmp_path)) == 2
    assert facade.opened == []


def test_openai_lines_know_the_model_by_its_names(job, tmp_path, scripted_folder):
    def line(model, custom_id):
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        url = "/v1/chat/completions"
        return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})

    names = [str(scripted_folder), "tiny", "other"]
    (tmp_path / "in.jsonl").write_text("\n".join(line(name, name) for name in names))
    assert main(job) == 5
    status = {r["custom_id"]: r["response"]["status_code"] for r in records(tmp_path)}
    assert list(status.values()).count(200) == 2
    assert status["other"] == 404


def test_the_window_of_the_model_counts(job, tmp_path):
    lines = [json.dumps({"prompt_token_ids": [5] * length}) for length in (10, 5000, 10)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert main(job) == 5
    errors = [record for record in records(tmp_path) if "error" in record]
    assert [record["index"] for record in errors] == [1]
    assert "got 5000 tokens" in errors[0]["error"]["message"]


def test_flags_beat_set_and_file(job, tmp_path, facade):
    config = tmp_path / "c.yaml"
    config.write_text("offload: {prefetch_depth: 1, weights: dram}\nscheduler: {max_num_seqs: 3}\n")
    sets = ["--set", "offload.prefetch_depth=2", "--set", "offload.weights=nvme"]
    assert main([*job, "--config", str(config), *sets, "--prefetch-depth", "4"]) == 0
    opened = facade.opened[0].config
    assert opened.offload.prefetch_depth == 4
    assert opened.offload.weights == "nvme"
    assert opened.scheduler.max_num_seqs == 3


def test_each_engine_flag_reaches_the_config(job, facade):
    flags = {
        "--dram": "9GiB", "--dram-weights": "1GiB", "--weights": "nvme", "--kv": "dram",
        "--prefetch-depth": "0", "--max-num-seqs": "7", "--batch-invariant": "off",
        "--reader": "threads", "--admit": "fifo", "--dtype": "bf16",
    }  # fmt: skip
    assert main([*job, *(word for flag in flags.items() for word in flag)]) == 0
    config = facade.opened[0].config
    assert (config.offload.dram, config.offload.dram_weights) == (9 << 30, 1 << 30)
    assert (config.offload.weights, config.kv.tier) == ("nvme", "dram")
    assert (config.offload.prefetch_depth, config.scheduler.max_num_seqs) == (0, 7)
    assert (config.compute.batch_invariant, config.io.reader) == ("off", "threads")
    assert (config.scheduler.admit, config.model.dtype) == ("fifo", "bf16")


@pytest.mark.parametrize(
    ("extra", "code", "message"),
    [
        (["--weights", "disk"], 2, "offload.weights: got 'disk', need auto, gpu, dram or nvme"),
        (["--set", "offload.prefetch_dept=1"], 2, "did you mean prefetch_depth?"),
        (["--temperature", "-1"], 2, "temperature is out of range: got -1.0"),
        (["--max-tokens", "0"], 2, "max_tokens is out of range: got 0, need at least 1"),
        (["--seed", "-1"], 2, "seed is out of range: got -1"),
        (["--resume", "--overwrite"], 2, "--resume and --overwrite contradict each other"),
        (["--report", "none/r.json"], 4, "report none/r.json: folder "),
        (["--report", "/"], 4, "report / is a folder; name a file"),
        (["--report", "x" * 300], 4, "cannot be written: File name too long"),
        (["--trace", "/"], 4, "trace / is a folder; name a file"),
        (["--trace", "/proc/t.json"], 4, "trace /proc/t.json cannot be written: "),
        (["--report", "same.json", "--trace", "same.json"], 2, "is the report same.json itself"),
    ],
)
def test_wrong_flags_are_one_line(job, extra, code, message, capsys, facade):
    assert main([*job, *extra]) == code
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert facade.opened == []


def test_sampling_flags_reach_the_rows(job, tmp_path, facade):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "seed": 1}\n')
    flags = ["--max-tokens", "3", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "4"]
    assert main([*job, *flags, "--seed", "40", "--stop", "x", "--stop", "y", "--ignore-eos"]) == 0
    first, second = sorted(facade.opened[0].added, key=lambda request: request.request_id)
    sampling = first.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (3, 0.5, 0.9)
    assert (sampling.top_k, sampling.seed, sampling.stop) == (4, 40, ("x", "y"))
    assert sampling.ignore_eos
    assert second.sampling.seed == 1


def test_output_that_is_the_input_leaves_it_intact(job, tmp_path, capsys, facade):
    path = tmp_path / "in.jsonl"
    before = hashlib.sha256(path.read_bytes()).digest()
    os.link(path, tmp_path / "hard")
    (tmp_path / "soft").symlink_to(path)
    for name in ("in.jsonl", "hard", "soft"):
        args = [*without(job, "--output"), "--output", str(tmp_path / name)]
        for extra in ([], ["--overwrite"], ["--resume"]):
            assert main(args + extra) == 2
            assert "is the input" in capsys.readouterr().err
    assert hashlib.sha256(path.read_bytes()).digest() == before
    assert facade.opened == []


def test_existing_output_is_refused_before_the_model_is_opened(job, tmp_path, capsys, facade):
    (tmp_path / "out.jsonl").write_text("old")
    job[job.index("--model") + 1] = "/nowhere"
    assert main(job) == 2
    assert "use --resume to go on with it or --overwrite" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == "old"


def test_report_holds_engine_job_and_resume(job, tmp_path):
    assert main([*job, "--report", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["schema"] == 1
    assert report["job"]["num_rows"] == report["job"]["num_done"] == 9
    assert report["job"]["sampling"]["temperature"] == 0.0
    assert report["resume"]["num_rows_done_before"] == 0


def test_trace_is_written_and_handed_to_the_engine(job, tmp_path, facade):
    assert main([*job, "--trace", str(tmp_path / "t.json")]) == 0
    assert facade.opened[0].trace.is_enabled
    assert json.loads((tmp_path / "t.json").read_text()) == {"traceEvents": []}


def test_json_prints_events_only(job, capsys):
    assert main([*job, "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = [event["event"] for event in events]
    assert names[0] == "plan"
    assert names[-1] == "report"
    assert set(names[1:-1]) == {"progress"}
    assert events[1]["num_rows"] == 9
    assert events[1]["link_share"] == pytest.approx(0.5)


def test_without_output_rows_go_to_standard_output(job, capsysbinary):
    assert main(without(job, "--output")) == 0
    out, err = capsysbinary.readouterr()
    assert len([json.loads(line) for line in out.splitlines()]) == 9
    assert b"the plan's table" in err


def test_a_device_takes_rows_without_a_journal(job, facade):
    assert main([*without(job, "--output"), "--output", "/dev/null"]) == 0
    assert len(facade.opened[0].added) == 9


def test_resume_needs_a_file(job, capsys):
    assert main([*without(job, "--output"), "--resume"]) == 2
    assert "--resume needs --output with a file: got none" in capsys.readouterr().err


def test_built_in_prompts_are_shown_as_text(job, facade, capsys):
    args = without(without(job, "--input"), "--output")
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "What is the capital of France?" in out
    assert out.index("the plan's table") < out.index("capital of France")
    assert out.rstrip().endswith("bound by nvme, at 97% of its roofline")
    assert {request.sampling.max_tokens for request in facade.opened[0].added} == {64}


def stop_after(num_steps):
    def on_open(facade):
        facade._on_step = lambda step: step == num_steps and facade.request_stop()

    return on_open


def test_interrupted_job_says_how_to_resume_and_does(job, tmp_path, facade, capsys, monkeypatch):
    monkeypatch.setattr(facade, "on_open", stop_after(5))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "zeroinfer", *job])
    report = ["--report", str(tmp_path / "r.json")]
    assert main(job + report) == 130
    err = capsys.readouterr().err
    assert err.rstrip().splitlines()[-1].startswith("interrupted; go on with: python -m zeroinfer")
    command = shlex.split(err.rstrip().splitlines()[-1].partition("go on with: ")[2])
    monkeypatch.setattr(facade, "on_open", None)
    assert main(command[3:] + report) == 0
    assert sorted(record["index"] for record in records(tmp_path)) == list(range(9))
    resume = json.loads((tmp_path / "r.json").read_text())["resume"]
    assert resume["num_rows_resumed"] > 0
    assert resume["num_rebuilt_tokens"] > 0


def test_resume_keeps_what_batch_invariant_became(job, facade, monkeypatch, capsys):
    monkeypatch.setattr(facade, "on_open", stop_after(5))
    assert main([*job, "--batch-invariant", "off"]) == 130
    monkeypatch.setattr(facade, "on_open", None)
    assert main([*job, "--resume", "--batch-invariant", "on"]) == 2
    assert "batch_invariant was False, now True" in capsys.readouterr().err
    assert main([*job, "--resume"]) == 0
    assert facade.opened[-1].config.compute.batch_invariant == "off"


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        (["--temperature", "0.7"], "temperature"),
        (["--seed", "3"], "seed"),
        (["--dtype", "bf16"], "dtype"),
    ],
)
def test_resume_with_other_settings_is_refused_before_planning(
    job, facade, monkeypatch, capsys, extra, name
):
    monkeypatch.setattr(facade, "on_open", stop_after(5))
    assert main(job) == 130
    num_opened = len(facade.opened)
    assert main([*job, "--resume", *extra]) == 2
    assert f"{name} was " in capsys.readouterr().err
    assert len(facade.opened) == num_opened


def test_resume_of_a_finished_job_opens_no_engine(job, facade):
    assert main(job) == 0
    assert main([*job, "--resume"]) == 0
    assert len(facade.opened) == 1


def test_a_plan_that_does_not_fit_leaves_no_output(job, tmp_path, facade, monkeypatch, capsys):
    def refuse(engine):
        raise CapacityError("weights need 9.0 GiB, but 1.0 GiB is free; raise --dram")

    monkeypatch.setattr(facade, "on_open", refuse)
    assert main(job) == 3
    assert not (tmp_path / "out.jsonl").exists()
    assert not (tmp_path / "out.jsonl.journal").exists()


def test_a_failing_disk_says_how_to_resume(job, tmp_path, facade, monkeypatch, capsys):
    def fail_later(engine):
        def on_step(step):
            if step == 4:
                raise StorageError("read of 4096 bytes failed: Input/output error (EIO)")

        engine._on_step = on_step

    monkeypatch.setattr(facade, "on_open", fail_later)
    assert main(job) == 4
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2].startswith("stopped by an error; go on with: ")
    assert lines[-1] == "error: read of 4096 bytes failed: Input/output error (EIO)"
    monkeypatch.setattr(facade, "on_open", None)
    assert main([*job, "--resume"]) == 0


def test_resume_command_keeps_all_but_overwrite():
    words = ["py thon", "-m", "zeroinfer", "--overwrite", "--input", "a b"]
    assert resume_command(words) == "'py thon' -m zeroinfer --input 'a b' --resume"


PROGRAM = """
import os, signal, sys, time
import zeroinfer.engine
from tests.helpers.fake_engine import FakeFacade
def on_open(facade):
    facade._on_step = lambda step: time.sleep(0.01)
    facade.request_stop = lambda: None
FakeFacade.on_open = on_open
zeroinfer.engine.Engine = FakeFacade
from zeroinfer.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_second_signal_ends_at_once(job, tmp_path):
    """The stand-in never stops by itself, so only the second signal can end it."""
    lines = [json.dumps({"prompt_token_ids": [5, i], "ignore_eos": True}) for i in range(60)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *job, "--max-tokens", "100"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    journal = tmp_path / "out.jsonl.journal"
    deadline = time.monotonic() + 30
    while not (journal.exists() and journal.stat().st_size > 2000):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    err = process.communicate(timeout=20)[1]
    assert process.returncode == 130
    assert "stopping after the current unit" in err
    assert "interrupted; go on with: " in err


def test_report_may_not_be_the_journal(job, tmp_path, capsys, facade):
    assert main([*job, "--report", str(tmp_path / "out.jsonl.journal")]) == 2
    assert "is the journal of the output" in capsys.readouterr().err
    assert facade.opened == []


def test_report_into_a_pipe_leaves_the_pipe(job, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # Opened for both, so that no writer waits for a reader.
    fd = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        assert main([*job, "--report", str(pipe)]) == 0
        assert json.loads(os.read(fd, 1 << 20))["schema"] == 1
    finally:
        os.close(fd)
    assert pipe.is_fifo()


def test_a_trace_that_fails_leaves_no_half_file(job, tmp_path, monkeypatch, capsys):
    def fail(trace, path):
        path.write_text("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Trace, "write", fail)
    assert main([*job, "--trace", str(tmp_path / "t.json")]) == 4
    out, err = capsys.readouterr()
    assert "t.json cannot be written: No space left on device" in err
    assert "9 of 9 rows done" in out
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".t.json", "t.json"))]


def test_a_full_standard_output_is_a_storage_error(job, capsys):
    assert main([*without(job, "--output"), "--output", "/dev/full", "--overwrite"]) == 4
    assert "bytes to the output failed: No space left on device" in capsys.readouterr().err


def test_a_second_signal_while_closing_says_how_to_resume(job, facade, monkeypatch, capsys):
    monkeypatch.setattr(facade, "on_open", stop_after(5))
    close, ends = FileSink.close, []

    def close_and_signal(sink, *, is_complete):
        if not ends:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        close(sink, is_complete=is_complete)

    monkeypatch.setattr(FileSink, "close", close_and_signal)
    monkeypatch.setattr(os, "_exit", ends.append)
    assert main(job) == 130
    assert ends == [130]


def test_a_closed_standard_output_is_refused_before_work(job, facade, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert main([*job, "--output", "-"]) == 4
    assert "standard output, which is closed; give --output" in capsys.readouterr().err
    assert facade.opened == []


def test_nothing_of_a_closed_standard_error_goes_among_the_results(job, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    assert main([*job, "--output", "-"]) == 0
    sys.stderr.close()
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 9
