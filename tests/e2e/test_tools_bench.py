"""The benchmark programs run end to end, in small, and count what they say they count."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = REPOSITORY / "tools"
FAKE = REPOSITORY / "tests" / "helpers" / "fake_zeroinfer.py"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "torch_dtype": "bfloat16",
}


def has_control_groups() -> bool:
    groups = [Path("/sys/fs/cgroup") / name for name in ("memory", "blkio")]
    return all((g / "cgroup.procs").exists() and os.access(g, os.W_OK) for g in groups)


needs_control_groups = pytest.mark.skipif(
    not has_control_groups(), reason="needs root and the cgroup v1 controllers memory and blkio"
)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for idx in range(2):
        tensor = torch.zeros(300_000 + idx, dtype=torch.bfloat16)
        save_file(
            {f"model.layers.{idx}.mlp.up_proj.weight": tensor}, folder / f"m-{idx}.safetensors"
        )
    return folder


@pytest.fixture
def tools_path(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))


def run_tool(name, *arguments, is_ok=True, timeout_s=50):
    command = [sys.executable, str(TOOLS / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert not is_ok or done.returncode == 0, done.stderr
    return done


def wait_for(condition, *, timeout_s=30):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came true"
        time.sleep(0.02)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except OSError:
        return False


def reader_options(*, chunk="1MiB", depth=2):
    return ["--io-chunk-bytes", chunk, "--queue-depth", str(depth)]


def test_read_pass_reads_exactly_the_bytes_of_a_step(model):
    done = run_tool(
        "read_pass.py", model, *reader_options(), "--pass-bytes", 700_000, "--passes", 3
    )
    result = json.loads(done.stdout)
    assert result["bytes_per_pass"] == 700_000
    assert len(result["pass_s"]) == 3
    assert 3 * 700_000 <= result["bytes_read"] <= 3 * (700_000 + 2 * 4096)


def test_read_pass_defaults_to_all_weights_and_wraps_around(model):
    total = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    whole = json.loads(run_tool("read_pass.py", model, *reader_options(), "--passes", 1).stdout)
    more = run_tool(
        "read_pass.py", model, *reader_options(), "--passes", 1, "--pass-bytes", total + 5000
    )
    assert whole["bytes_per_pass"] == total
    assert json.loads(more.stdout)["bytes_per_pass"] == total + 5000


def test_read_pass_refuses_a_folder_without_weights(tmp_path):
    done = run_tool("read_pass.py", tmp_path, *reader_options(), is_ok=False)
    assert done.returncode == 1
    assert "no *.safetensors" in done.stderr


def test_products_pass_times_products_while_reading(model):
    options = ["--rows", 40, "--head-rows", 3, "--repeats", 2]
    result = json.loads(run_tool("products_pass.py", model, *reader_options(), *options).stdout)
    assert len(result["products_s"]) == 2
    assert min(result["products_s"]) > 0
    assert result["padded_rows"] >= 40


def test_bench_stream_measures_every_row_and_writes_its_result(model, tmp_path):
    out = tmp_path / "out.json"
    program = f"{sys.executable} {FAKE}"
    limits = [] if has_control_groups() else ["--no-limits"]
    sizes = ["--dram", "5GiB", "--batches", "1,2", "--large-batches", "1", "--prefill-batch", "2"]
    rounds = ["--rounds", "2", "--passes", "2", "--pairs", "1", "--pair-batch", "2"]
    done = run_tool(
        "bench_stream.py", model, "--rows", "8,10,11,12,13", "--out", out, "--program", program,
        *sizes, *rounds, *limits,
    )  # fmt: skip
    document = json.loads(out.read_text())
    measured = [(row["row"], row["batch"]) for row in document["rows"]]
    assert measured == [(8, 1), (8, 2), (11, 2), (10, 1), (12, 1), (13, 1), ("pairs", 2)]
    first = document["rows"][0]
    assert first["figures"]["decode_bytes"] == sum(p.stat().st_size for p in model.glob("m-*"))
    assert first["figures"]["step_over_pass"]["num"] == 2
    assert len(first["figures"]["commands"]) == 2
    assert {"cpu", "kernel", "torch", "zeroinfer_commit"} <= set(document["machine"])
    assert "all rows" in done.stdout
    # A result file says nothing about the folders of the machine it was made on.
    commands = first["figures"]["commands"]
    assert "--model MODEL_DIR --input JOB_DIR/prompts.jsonl" in commands[0]
    assert commands[1].startswith("python tools/read_pass.py MODEL_DIR")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_bench_stream_measures_zeroinfer_itself(tmp_path):
    model, out = tmp_path / "llama-tiny", tmp_path / "out.json"
    run_tool("make_checkpoint.py", "--geometry", "llama-tiny", "--out", model)
    run_tool(
        "bench_stream.py", model, "--rows", "8", "--batches", "2", "--weights", "nvme",
        "--dram", "1GiB", "--max-tokens", "3", "--rounds", "1", "--passes", "1", "--throttle", "0",
        "--no-limits", "--traces", tmp_path, "--out", out, timeout_s=170,
    )  # fmt: skip
    (row,) = json.loads(out.read_text())["rows"]
    values = {check["name"]: check["value"] for check in row["checks"]}
    # Padding to whole blocks is a large part of so small a model: no bar here.
    assert values["read / needed"] >= 1.0
    assert 0.1 < values["peak / budget"] <= 1.0
    assert row["figures"]["decode_bytes"] > 0
    assert row["figures"]["step_over_pass"]["num"] == 1
    assert len(list(tmp_path.glob("*.trace.json"))) == 1


def test_bench_compute_compares_steps_with_their_products(model, tmp_path):
    out = tmp_path / "out.json"
    limits = [] if has_control_groups() else ["--no-limits"]
    run_tool(
        "bench_compute.py", model, "--rows", "32", "--prompt-tokens", "16", "--rounds", "2",
        "--passes", "1", "--dram", "15GiB", "--out", out, "--program", f"{sys.executable} {FAKE}",
        *limits,
    )  # fmt: skip
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["row"], row["batch"]) == ("32 rows", 2)
    figures = row["figures"]
    # Four waves: the first loads and the last fetches for nobody.
    assert figures["step_s"]["values"] == [0.01] * 4
    assert figures["products_s"]["num"] == figures["step_over_products"]["num"] == 2
    assert "--set scheduler.max_num_batched_tokens=32" in figures["commands"][0]


@pytest.mark.usefixtures("tools_path")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "128,130"], "--rows 130 is no multiple of --prompt-tokens"),
        (["--waves", "2"], "--waves: got 2, need 3 or more"),
    ],
)
def test_bench_compute_refuses_what_gives_no_steady_step(arguments, message, monkeypatch, capsys):
    from bench_compute import parse_arguments  # noqa: PLC0415

    monkeypatch.setattr(sys, "argv", ["bench_compute.py", "model", *arguments])
    with pytest.raises(SystemExit):
        parse_arguments()
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("tools_path")
def test_bench_compute_refuses_steps_that_measure_something_else():
    from bench_compute import steady_steps  # noqa: PLC0415
    from bench_engine import EngineRun  # noqa: PLC0415

    def run(*num_tokens, nvme_bytes=0):
        steps = [{"num_tokens": count, "nvme_bytes": nvme_bytes} for count in num_tokens]
        return EngineRun(job=None, child=None, report={"steps": steps})

    assert len(steady_steps(run(8, 8, 8, 8), 8)) == 2
    with pytest.raises(SystemExit, match=r"steps have \[8, 4, 8\] rows, expected 8 each"):
        steady_steps(run(8, 4, 8), 8)
    with pytest.raises(SystemExit, match="weights were read again; give more --dram"):
        steady_steps(run(8, 8, 8, nvme_bytes=1), 8)


def test_bench_kernels_compares_both_ways(tmp_path):
    out = tmp_path / "out.json"
    run_tool(
        "bench_kernels.py", "--rows", "4", "--pairs", "1", "--threads", "1", "--only", "rotary",
        "--out", out,
    )  # fmt: skip
    cells = json.loads(out.read_text())["cells"]
    assert [cell["name"] for cell in cells] == ["rotary, 4 rows, fp32", "rotary, 4 rows, bf16"]
    assert all(cell["torch_over_fused"]["num"] == 1 and cell["gb_s"] > 0 for cell in cells)


def test_bench_stream_reports_a_failing_engine_with_its_message(model):
    program = f"{sys.executable} -c \"raise SystemExit('no such disk')\""
    done = run_tool(
        "bench_stream.py", model, "--rows", "8", "--batches", "1", "--no-limits",
        "--program", program, is_ok=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "no such disk" in done.stderr


def test_bench_peers_compares_engines_that_take_turns(model, tmp_path):
    peers = tmp_path / "peers"
    (peers / "bin").mkdir(parents=True)
    events = [
        {"event": "loaded", "load_s": 1.0},
        {"event": "step", "phase": "prefill", "wall_s": 0.5},
        {"event": "step", "phase": "decode", "wall_s": 0.25},
    ]
    last = '{"event": "done", "vm_hwm_bytes": 1}'
    lines = "".join(f"echo '{json.dumps(event)}'\n" for event in events)
    # The stand-in for DeepSpeed waits for its limit; the one for Accelerate ends before `done`.
    script = f"#!/bin/sh\n{lines}case $1 in *deepspeed*) read go; echo '{last}';; esac\n"
    (peers / "bin" / "python").write_text(script)
    (peers / "bin" / "python").chmod(0o755)
    out = tmp_path / "out.json"
    limits = [] if has_control_groups() else ["--no-limits"]
    arguments = [
        "bench_peers.py", model, "--peers", peers, "--batches", "2", "--rounds", "1", "--out", out,
        "--program", f"{sys.executable} {FAKE}", *limits,
    ]  # fmt: skip
    run_tool(*arguments)
    rows = {row["engine"]: row for row in json.loads(out.read_text())["summary"]}
    assert rows["zeroinfer"]["outcomes"] == ["finished"]
    assert rows["deepspeed"]["outcomes"] == ["finished"]
    assert rows["deepspeed"]["decode_s"]["values"] == [0.25]
    assert rows["deepspeed"]["is_zeroinfer_below"]
    assert rows["accelerate"]["outcomes"] == ["ended early"]
    run_tool(*arguments, "--engines", "deepspeed", "--earlier", out)
    both = {row["engine"]: row for row in json.loads(out.read_text())["summary"]}
    assert both["zeroinfer"] == rows["zeroinfer"]
    assert both["deepspeed"]["decode_s"]["values"] == [0.25, 0.25]


def test_bench_peers_names_the_set_up_that_is_missing(model, tmp_path):
    done = run_tool("bench_peers.py", model, "--peers", tmp_path / "none", is_ok=False)
    assert done.returncode == 1
    assert "setup_peers.sh" in done.stderr


@pytest.mark.usefixtures("tools_path")
def test_a_child_out_of_time_is_ended_and_told_apart():
    from bench_child import run_child  # noqa: PLC0415

    result = run_child([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.3)
    assert result.outcome == "timed out"
    assert result.wall_s < 20


@pytest.mark.usefixtures("tools_path")
def test_a_child_ends_with_a_benchmark_that_is_killed(tmp_path):
    pid_path = tmp_path / "pid"
    child = f"import os, time; open({str(pid_path)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    program = (
        f"import sys; sys.path.insert(0, {str(TOOLS)!r})\n"
        f"from bench_child import run_child; run_child([sys.executable, '-c', {child!r}])"
    )
    bench = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_for(lambda: pid_path.exists() and pid_path.read_text())
    finally:
        bench.kill()
        bench.wait()
    pid = int(pid_path.read_text())
    wait_for(lambda: not is_running(pid))


@pytest.mark.usefixtures("tools_path")
def test_peak_of_a_child_is_sampled_over_its_tree():
    from bench_child import run_child  # noqa: PLC0415

    grandchild = "import time; x = bytearray(80 << 20); time.sleep(0.5)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    result = run_child([sys.executable, "-c", child], timeout_s=30)
    assert result.is_ok
    assert 80 << 20 < result.vm_hwm_bytes < 160 << 20


@needs_control_groups
@pytest.mark.usefixtures("tools_path")
def test_memory_group_kills_what_grows_beyond_its_limit():
    from bench_child import run_child  # noqa: PLC0415
    from cgroup import MemoryGroup  # noqa: PLC0415

    with MemoryGroup.create("zeroinfer-test", limit_bytes=64 << 20) as group:
        result = run_child([sys.executable, "-c", "x = b'1' * (200 << 20)"], memory=group)
        assert result.outcome == "killed by the limit"
        assert group.peak_bytes <= 64 << 20
    assert not group.folder.exists()


@needs_control_groups
@pytest.mark.usefixtures("tools_path")
def test_throttle_group_slows_and_counts_reads(tmp_path):
    from bench_child import run_child  # noqa: PLC0415
    from cgroup import CgroupError, ThrottleGroup  # noqa: PLC0415

    path = tmp_path / "data"
    with path.open("wb") as file:
        file.write(os.urandom(8 << 20))
        os.fsync(file.fileno())
    command = ["dd", f"if={path}", "of=/dev/null", "bs=1M", "iflag=direct"]
    try:
        with ThrottleGroup.create("zeroinfer-test", path=path, read_bytes_per_s=10 << 20) as group:
            start_s = time.monotonic()
            result = run_child(command, throttle=group)
            elapsed_s = time.monotonic() - start_s
    except CgroupError as error:
        pytest.skip(str(error))
    assert result.is_ok, result.stderr_tail
    assert elapsed_s > 0.5
    assert result.group_bytes_read is not None
    assert result.group_bytes_read >= 8 << 20


@pytest.mark.usefixtures("tools_path")
def test_a_missing_controller_is_named(tmp_path):
    from cgroup import CgroupError, MemoryGroup  # noqa: PLC0415

    with (
        pytest.raises(CgroupError, match="controller memory not found"),
        MemoryGroup.create("zeroinfer-test", limit_bytes=1, root=tmp_path),
    ):
        pass
