"""The programs that measure a device run end to end on the device double."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.bare_python import bare_environment, make_bare_python

REPOSITORY = Path(__file__).resolve().parents[2]


def run_tool(name, *arguments, python=sys.executable, is_ok=True, timeout_s=58, env=None):
    command = [str(python), f"tools/{name}", *map(str, arguments)]
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
    """By an interpreter that lacks what the machine with the GPU lacks, wheels too."""
    out = tmp_path / "check.json"
    done = run_tool(
        "gpu_check.py", "--double", "--out", out, is_ok=False,
        python=make_bare_python(tmp_path / "bare"), env=bare_environment(),
    )  # fmt: skip
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
    assert "missing: psutil, PyYAML, pytest, pytest-timeout; give --wheels" in done.stderr


def test_gpu_check_without_a_gpu_says_so():
    done = run_tool(
        "gpu_check.py", "--sections", "link", is_ok=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 1
    assert "finds no CUDA device; run this on a machine with one, or try it with" in done.stderr


SETTINGS = """
from zeroinfer.config import load_config, make_config
from zeroinfer.errors import ConfigError

TREES = (
    {}, {"offload": {"dram": "5.5GiB", "prefetch_depth": 0}, "io": {"nvme": ["/a", "/b"]}},
    {"model": {"path": 7}}, {"offload": {"dram": "1GiB", "dram_weights": "2GiB"}},
    {"offlod": {}}, {"offload": {"dramm": 1}}, {"offload": 3}, {"kv": {"tier": "nvme"}},
    {"io": {"queue_depth": 0}}, {"compute": {"batch_invariant": True}},
)

def show(read, *values):
    try:
        config = read(*values)
    except ConfigError as error:
        return f"ConfigError: {error}"
    again = make_config(config)
    assert again == config and again != make_config({"offload": {"dram": 1}})
    copied = config.model_copy(update={"kv": config.kv.model_copy(update={"block_size": 3})})
    assert copied.kv.block_size == 3 and copied != config
    return str((config.model_dump(), config.model_dump(exclude_unset=True)))

for tree in TREES:
    print(show(make_config, tree))
for override in ("offload.dram=8GiB", "offload.dram=8GiBs", "compute.device=cuda", "offload=1"):
    print(show(load_config, None, [override]))
"""


def test_stand_in_for_pydantic_takes_and_refuses_the_same_settings():
    outputs = []
    for paths in ([REPOSITORY], [REPOSITORY / "tools" / "bare", REPOSITORY]):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        done = subprocess.run(
            [sys.executable, "-c", SETTINGS], capture_output=True, text=True, check=True, env=env
        )
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert outputs[0].count("ConfigError") == 9
