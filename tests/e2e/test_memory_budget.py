"""The budget is the whole process: peaks stay below it, and a control group of it never kills.

Source: case 4.01 (FMInference/FlexLLMGen#61), in terms of a budget that includes the libraries.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.cgroups import run_limited
from zeroinfer.config import EngineConfig
from zeroinfer.units import MIB, parse_bytes

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
ALLOWANCE_BYTES = 64 * MIB
"""What the group may hold beside the budget: page cache of what is not read directly."""
FETCH_UNIT_BYTES = EngineConfig().offload.fetch_unit_bytes


@pytest.fixture(scope="session")
def g600(tmp_path_factory):
    """G-600: 575 MB in bf16, 24 layers; deleted at the end."""
    folder = tmp_path_factory.mktemp("g600") / "model"
    command = [sys.executable, "tools/make_checkpoint.py", "--family", "llama"]
    command += ["--geometry", "g-600", "--dtype", "bf16", "--out", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    yield folder
    shutil.rmtree(folder)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one command did."""

    returncode: int
    stderr: str
    report: dict
    token_ids: dict


@pytest.fixture(scope="session")
def run_job(g600, tmp_path_factory):
    """Return a function that answers two prompts of eight ids; equal calls run once."""
    folder = tmp_path_factory.mktemp("jobs")
    rows = [[(7 * row + at) % 1900 + 3 for at in range(8)] for row in range(2)]
    lines = [json.dumps({"prompt_token_ids": ids}) for ids in rows]
    (folder / "in.jsonl").write_text("\n".join(lines))

    @functools.cache
    def run(dram, weights, is_limited):
        output, report = folder / f"{dram}-{weights}.jsonl", folder / f"{dram}-{weights}.json"
        command = [
            *(sys.executable, "-m", "zeroinfer", "generate", "--model", str(g600)),
            *("--nvme", str(folder), "--input", str(folder / "in.jsonl")),
            *("--output", str(output), "--report", str(report)),
            *("--dram", dram, "--weights", weights, "--batch-invariant", "off"),
            *("--max-tokens", "2", "--ignore-eos", "--max-num-seqs", "2"),
            # One thread: nobody waits in a spinning barrier where CPUs are shared.
            *("--set", "compute.num_threads=1"),
        ]
        done = execute(command, parse_bytes(dram) + ALLOWANCE_BYTES if is_limited else None)
        is_done = output.exists() and report.exists()
        answers = map(json.loads, output.read_text().splitlines()) if is_done else ()
        return Job(
            returncode=done.returncode,
            stderr=done.stderr,
            report=json.loads(report.read_text()) if is_done else {},
            token_ids={row["index"]: row["token_ids"] for row in answers},
        )

    return lambda *, dram, weights="auto", is_limited=True: run(dram, weights, is_limited)


@pytest.fixture(scope="session")
def budgets(run_job):
    """Room for some and for most weights, beside the libraries: torch for CUDA takes more."""
    roomy = run_job(dram="8GiB", is_limited=False)
    assert roomy.returncode == 0, roomy.stderr
    base = roomy.report["plan"]["base_bytes"] // MIB
    return {"small": f"{base + 380}MiB", "large": f"{base + 640}MiB"}


def execute(command, limit_bytes):
    """Run in a memory group where one can be made; its limit kills what exceeds it."""
    is_writable = os.access(MEMORY_GROUPS / "cgroup.procs", os.W_OK)
    if limit_bytes is None or not is_writable:
        options = {"check": False, "capture_output": True, "text": True, "timeout": 50}
        return subprocess.run(command, cwd=REPOSITORY, **options)
    done = run_limited(command, limit_bytes=limit_bytes, cwd=REPOSITORY)
    assert done.num_oom_kills == 0, done.stderr
    return done


@pytest.mark.parametrize(
    ("size", "weights"), [("small", "auto"), ("small", "nvme"), ("large", "auto")]
)
def test_peak_stays_within_the_budget_and_nothing_is_killed(run_job, budgets, size, weights):
    job, budget = run_job(dram=budgets[size], weights=weights), parse_bytes(budgets[size])
    assert job.returncode == 0, job.stderr
    memory, plan = job.report["memory"], job.report["plan"]
    assert memory["dram_budget_bytes"] == budget
    assert 0 < memory["dram_peak_bytes"] <= plan["total_dram_bytes"] <= budget
    assert sorted(job.token_ids) == [0, 1]


def test_weights_on_disk_stay_on_disk(run_job, budgets):
    report = run_job(dram=budgets["small"], weights="nvme").report
    plan, totals = report["plan"], report["totals"]
    assert plan["weights"]["dram"] == 0
    read = report["io"]["nvme"]["bytes_read"]
    assert read >= totals["num_steps"] * plan["streamed_bytes_per_step"] > 1_000_000_000


def test_budget_is_filled_with_weights(run_job, budgets):
    small, large = (run_job(dram=budgets[size]).report["plan"] for size in ("small", "large"))
    for plan in (small, large):
        is_resident = plan["weights"]["nvme"] == 0
        unused = plan["dram_budget_bytes"] - plan["total_dram_bytes"]
        # Less than would hold the ring, or a piece of the table once only that is left on disk.
        assert is_resident or unused < max(plan["landing_bytes"], FETCH_UNIT_BYTES)
    assert large["weights"]["dram"] > small["weights"]["dram"] > 0


def test_budget_changes_no_token(run_job, budgets):
    streamed = run_job(dram=budgets["small"], weights="nvme").token_ids
    assert run_job(dram=budgets["small"]).token_ids == streamed
    assert run_job(dram=budgets["large"]).token_ids == streamed
    assert all(len(ids) == 2 for ids in streamed.values())


def test_suggested_budget_of_a_refusal_runs_within_itself(run_job):
    refused = run_job(dram="200MiB", is_limited=False)
    assert refused.returncode == 3, refused.stderr
    found = re.search(r"set --dram (\d+MiB)", refused.stderr)
    assert found, refused.stderr
    job = run_job(dram=found.group(1))
    assert job.returncode == 0, job.stderr
    assert job.report["memory"]["dram_peak_bytes"] <= parse_bytes(found.group(1))
