"""The programs that measure a device run end to end on the device double."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def run_tool(name, *arguments, is_ok=True, timeout_s=58, env=None):
    command = [sys.executable, f"tools/{name}", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s, check=False,
        env=env,
    )  # fmt: skip
    assert not is_ok or done.returncode == 0, done.stderr
    return done


def cells(tmp_path, *arguments):
    out = tmp_path / "double.json"
    run_tool("bench_double.py", "--out", out, "--folder", tmp_path, *arguments)
    return json.loads(out.read_text())["rows"]


@pytest.mark.slow
def test_overlap_costs_the_slowest_and_one_fetch(tmp_path):
    """Sixteen units, as long to fetch as to compute: the sum without prefetching, else the most."""
    rows = cells(tmp_path, "--batches", 1, "--unit-ms", 12)
    assert [row["depth"] for row in rows] == [0, 1, 2, 4] * 2
    # One unit ahead is on one of two links at a time, with four threads woken for each.
    exact = [row for row in rows if (row["path"], row["depth"]) != ("nvme", 1)]
    assert all(row["is_met"] for row in exact), rows
    gains = {(row["path"], row["depth"]): row["gain"] for row in rows}
    assert min(gains["dram", depth] for depth in (1, 2, 4)) > 1.6
    assert min(gains["nvme", depth] for depth in (2, 4)) > 2.2


@pytest.mark.slow
def test_gain_of_overlap_fades_as_the_batch_grows(tmp_path):
    options = ["--depths", "0,2", "--paths", "dram", "--unit-ms", 4, "--units", 8]
    rows = cells(tmp_path, "--batches", "1,64,256", *options)
    gains = [row["gain"] for row in rows if row["depth"] == 2]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 1.5
    assert gains[2] < 1.25


@pytest.mark.slow
def test_gpu_check_runs_all_it_does_on_the_double(tmp_path):
    out = tmp_path / "check.json"
    done = run_tool("gpu_check.py", "--double", "--out", out, is_ok=False)
    assert done.returncode in (0, 1), done.stderr
    result = json.loads(out.read_text())
    sections = {name: result[name] for name in ("tests", "link", "streaming")}
    assert not [section["error"] for section in sections.values() if "error" in section]
    checks = [row for section in sections.values() for row in section["checks"]]
    # How fast the double is on a busy machine is no matter here.
    exact = [row for row in checks if "step" not in row["check"] and "share" not in row["check"]]
    assert len(exact) == 4
    assert all(row["is_met"] for row in exact), exact
    assert result["streaming"]["decode_step_s"].keys() == {"gpu", "dram", "nvme"}
    assert "share of the link" in done.stdout
    assert result["gpu"]["device"] == "double"


def test_gpu_check_says_which_wheels_are_missing(tmp_path):
    """A bare interpreter, without site packages: nothing of what is needed is there."""
    command = [sys.executable, "-S", "tools/gpu_check.py", "--double"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "missing: pydantic, psutil, PyYAML, pytest, pytest-timeout; give --wheels" in done.stderr
