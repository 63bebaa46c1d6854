"""Every preset is loaded and planned for its machine, and its comment says what the plan says."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zeroinfer.config import load_config
from zeroinfer.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "configs"
PLAIN = {"tiny.yaml": ("llama-tiny", "cpu-box"), "demo.yaml": ("smollm2-135m", "cpu-box")}
"""Files that are no presets of a machine, and what they are planned with."""
PRESETS = sorted(path for path in CONFIGS.glob("*.yaml") if path.name not in PLAIN)


@pytest.fixture
def planner(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools"))
    return importlib.import_module("plan_geometry")


def numbers_of(line):
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", line)]


def words_of(line):
    return re.sub(r"\d+(?:\.\d+)?", "#", line)


def test_there_are_presets_for_the_named_models_and_machines(planner):
    names = {planner.split_name(path.stem) for path in PRESETS}
    large = ("llama-70b", "opt-30b", "opt-175b", "bloom-176b")
    assert names == {("smollm2-135m", "cpu-box")} | {
        (model, machine) for model in large for machine in ("cpu-box", "a6000", "h200")
    }


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_is_planned_and_its_figures_are_those_of_the_plan(planner, path):
    plan = planner.plan_preset(path)
    assert plan.total_dram_bytes <= load_config(path).offload.dram
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    first = next(idx for idx, line in enumerate(lines) if line.startswith("# Predicted"))
    assert first > 0, "say first what the file is for"
    for written, planned in zip(lines[first:], planner.describe(plan, path), strict=False):
        told = written.removeprefix("# ")
        assert words_of(told) == words_of(planned), "run tools/plan_geometry.py --update"
        # Row tiles, and with them the room that activations leave to weights, follow the kernels of
        # the machine that plans.
        slack_gib = 1.0 if "weights:" in told else 0.0
        assert numbers_of(told) == pytest.approx(numbers_of(planned), rel=0.05, abs=slack_gib)


@pytest.mark.parametrize("name", PLAIN)
def test_the_other_configs_are_planned_too(planner, name):
    geometry, machine = PLAIN[name]
    plan = planner.plan_for(load_config(CONFIGS / name), geometry, planner.HARDWARE[machine])
    assert plan.max_num_seqs >= 1


def test_headers_alone_take_no_disk(planner, tmp_path):
    planner.write_headers(tmp_path, "llama-70b")
    files = list(tmp_path.glob("*.safetensors"))
    assert sum(path.stat().st_size for path in files) > 137e9
    assert sum(path.stat().st_blocks * 512 for path in files) < 10e6


def test_update_writes_the_figures_into_the_comment(planner, tmp_path):
    path = tmp_path / "opt-30b-cpu-box.yaml"
    path.write_text(
        "# For nights.\n# Predicted, old:\n#   step 1\n#   python tools/plan_geometry.py x\n"
        "# Kept.\noffload:\n  dram: 21GiB\n"
    )
    planner.update(path, ["Predicted, new:", "  python tools/plan_geometry.py y"])
    assert path.read_text() == (
        "# For nights.\n# Predicted, new:\n#   python tools/plan_geometry.py y\n# Kept.\noffload:\n"
        "  dram: 21GiB\n"
    )


def test_a_name_without_machine_is_refused(planner):
    with pytest.raises(ConfigError, match="preset opt-30b-moon has no geometry and machine"):
        planner.split_name("opt-30b-moon")


def test_command_prints_figures_and_table():
    path = "configs/smollm2-135m-cpu-box.yaml"
    done = subprocess.run(
        [sys.executable, "tools/plan_geometry.py", path],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Predicted, not measured, for 1024 prompts of 128 tokens" in done.stdout
    assert re.search(r"^tier +weights", done.stdout, re.MULTILINE)
