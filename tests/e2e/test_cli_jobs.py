"""The command line over the real engine: results, kills, interrupts, refusals."""

import hashlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.checkpoints import tiny_llama
from tests.helpers.scripted_model import SCRIPT, SCRIPT_PROMPT, script_ids, write_scripted_model
from zeroinfer.cli import main

PROGRAM = [sys.executable, "-m", "zeroinfer"]

# One thread: two would wait for each other where the tests run beside other work.
SINGLE = ("--ignore-eos", "--max-num-seqs", "4", "--set", "compute.num_threads=1")


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    return write_scripted_model(tmp_path_factory.mktemp("scripted") / "model")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama") / "model"
    tiny_llama(folder)
    return folder


@pytest.fixture(scope="module")
def nvme(tmp_path_factory):
    return tmp_path_factory.mktemp("nvme")


def write_lines(path, lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def arguments(model, nvme, tmp_path, *extra):
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    return ["--model", str(model), "--nvme", str(nvme), *files, *extra]


def by_index(path):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({record["index"] for record in records}) == len(records)
    return {record["index"]: record.get("token_ids") for record in records}


def test_scripted_text_comes_out_exactly(scripted, nvme, tmp_path):
    write_lines(tmp_path / "in.jsonl", [{"prompt": SCRIPT_PROMPT}])
    assert main(arguments(scripted, nvme, tmp_path)) == 0
    (record,) = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert record["text"] == SCRIPT
    assert record["token_ids"] == script_ids()
    assert record["finish_reason"] == "stop"
    assert record["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": len(script_ids()),
        "total_tokens": 1 + len(script_ids()),
    }


def test_bad_rows_beside_good_ones(scripted, nvme, tmp_path):
    """Source: ray-project/ray#59194."""

    def line(custom_id, **body):
        body = {"prompt": SCRIPT_PROMPT, "model": "model", **body}
        url = "/v1/completions"
        return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}

    lines = [json.dumps(line("first")), '{"custom_id": "cut", "method": "PO']
    lines.append(json.dumps({"custom_id": "none", "method": "POST", "url": "/v1/completions"}))
    lines.append(json.dumps(line("long", prompt=[5] * 5000)))
    lines.append(json.dumps(line("type", max_tokens="many")))
    lines.append(json.dumps(line("last")))
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert main(arguments(scripted, nvme, tmp_path)) == 5
    records = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    errors = {r["custom_id"]: r["error"]["line"] for r in records if r["error"] is not None}
    assert errors == {"cut": 2, "none": 3, "long": 4, "type": 5}
    texts = [r["response"]["body"]["choices"][0]["text"] for r in records if r["error"] is None]
    assert texts == [SCRIPT, SCRIPT]


def llama_lines(num_rows=12, **fields):
    chance = random.Random(3)
    return [
        {"prompt_token_ids": chance.choices(range(3, 97), k=1 + idx % 7), **fields}
        for idx in range(num_rows)
    ]


def wait_for_growth(path, num_bytes, process):
    start = path.stat().st_size if path.exists() else 0
    deadline = time.monotonic() + 40
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.stat().st_size >= start + num_bytes:
            return
        time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("temperature", "num_wanted"), [(0, 10), (0.9, 3)])
def test_kill_at_random_moments_then_resume(llama, nvme, tmp_path, temperature, num_wanted):
    """Source: vllm-project/vllm#52505."""
    write_lines(tmp_path / "in.jsonl", llama_lines(max_tokens=150, temperature=temperature))
    args = arguments(llama, nvme, tmp_path, *SINGLE)
    args += ["--weights", "nvme", "--batch-invariant", "on"]
    output, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
    chance = random.Random(7)
    num_kills = 0
    for attempt in range(num_wanted):
        extra = ["--resume"] if attempt else []
        process = subprocess.Popen([*PROGRAM, *args, *extra], stderr=subprocess.PIPE)
        wait_for_growth(journal, chance.randint(200, 1500), process)
        process.kill()
        process.communicate()
        num_kills += process.returncode == -signal.SIGKILL
    assert num_kills == num_wanted
    assert main([*args, "--resume", "--report", str(tmp_path / "r.json")]) == 0
    resumed = by_index(output)
    assert not journal.exists()
    assert main([*args, "--overwrite"]) == 0
    assert resumed == by_index(output)
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["resume"]["num_rebuilt_tokens"] > 0


@pytest.mark.slow
def test_ctrl_c_then_the_printed_command(llama, nvme, tmp_path):
    write_lines(tmp_path / "in.jsonl", llama_lines(max_tokens=200))
    args = arguments(llama, nvme, tmp_path, *SINGLE)
    journal = tmp_path / "out.jsonl.journal"
    process = subprocess.Popen([*PROGRAM, *args], stderr=subprocess.PIPE, text=True)
    wait_for_growth(journal, 2000, process)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert "stopping after the current unit" in err
    command = shlex.split(err.rstrip().splitlines()[-1].partition("go on with: ")[2])
    assert command[:3] == PROGRAM
    assert main(command[3:]) == 0
    resumed = by_index(tmp_path / "out.jsonl")
    assert main([*args, "--overwrite"]) == 0
    assert resumed == by_index(tmp_path / "out.jsonl")


def test_plan_is_what_the_run_prints_first(llama, nvme, tmp_path, capsys):
    write_lines(tmp_path / "in.jsonl", llama_lines(max_tokens=2))
    args = arguments(llama, nvme, tmp_path)
    assert main(["plan", *args[:-2]]) == 0
    table = capsys.readouterr().out.splitlines()
    assert main(args) == 0
    assert capsys.readouterr().out.splitlines()[0] == table[0]
    assert table[0].split()[:2] == ["tier", "weights"]


def test_bench_runs_on_the_real_engine(llama, nvme, capsys):
    args = ["bench", "--model", str(llama), "--nvme", str(nvme), "--batch-sizes", "1,3"]
    assert main([*args, "--tokens", "3", "--prompt-tokens", "4", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["batch_size"] for row in rows] == [1, 3]
    assert all(row["ms_per_token"] > 0 and row["load_s"] > 0 for row in rows)


def test_report_and_trace_of_a_real_run(llama, nvme, tmp_path):
    write_lines(tmp_path / "in.jsonl", llama_lines(max_tokens=3))
    report, trace = tmp_path / "r.json", tmp_path / "t.json"
    args = arguments(llama, nvme, tmp_path, "--report", str(report), "--trace", str(trace))
    assert main([*args, "--weights", "nvme"]) == 0
    data = json.loads(report.read_text())
    assert set(data) >= {
        "schema", "zeroinfer", "model", "plan", "profile", "totals", "io", "time", "memory",
        "steps", "roofline", "job", "resume",
    }  # fmt: skip
    assert data["totals"]["num_requests"] == data["job"]["num_rows"] == 12
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}


def empty_folder(folder, tmp_path):
    return tmp_path / "empty"


def truncated(folder, tmp_path):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1000])
    return folder


def missing_weights(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    return folder


def unknown_type(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    return folder


def nothing(folder, tmp_path):
    return folder


@pytest.mark.parametrize(
    ("damage", "extra", "code", "words"),
    [
        (empty_folder, [], 4, ["empty"]),
        (truncated, [], 4, ["model.safetensors"]),
        (missing_weights, [], 4, ["safetensors"]),
        (unknown_type, [], 4, ["model_type 'nonesuch'", "llama"]),
        (nothing, ["--set", "offload.prefetch_dept=1"], 2, ["did you mean prefetch_depth?"]),
        (nothing, ["--dram", "100MiB"], 3, ["--dram"]),
    ],
)
def test_wrong_inputs_are_refused(scripted, nvme, tmp_path, capsys, damage, extra, code, words):
    (tmp_path / "empty").mkdir()
    folder = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(scripted), str(folder)], check=True)
    write_lines(tmp_path / "in.jsonl", [{"prompt": SCRIPT_PROMPT}])
    before = hashlib.sha256((tmp_path / "in.jsonl").read_bytes()).digest()
    model = damage(folder, tmp_path)
    assert main(arguments(model, nvme, tmp_path, *extra)) == code
    err = capsys.readouterr().err
    assert all(word in err for word in words), err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert hashlib.sha256((tmp_path / "in.jsonl").read_bytes()).digest() == before
    assert not os.path.lexists(tmp_path / "out.jsonl")
