"""tools/soak.py tells growth from noise, and a short soak of a tiny model does not grow."""

import argparse
import importlib
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.scripted_model import write_scripted_model
from zeroinfer.units import MIB

TOOL = Path(__file__).resolve().parents[2] / "tools/soak.py"


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOL.parent))
    return importlib.import_module("soak")


def series(soak, *, num=100, rss=lambda at: 300 * MIB, descriptors=lambda at: 9, threads=5):
    return [
        soak.Sample(
            at_s=float(at), rss_bytes=int(rss(at)), untrimmed_rss_bytes=0,
            num_descriptors=descriptors(at), num_threads=threads,
        )
        for at in range(num)
    ]  # fmt: skip


def test_flat_memory_passes_whatever_the_warm_up_did(soak):
    noise = random.Random(0)
    samples = series(soak, rss=lambda at: (300 if at > 18 else 200) * MIB + noise.randrange(MIB))
    verdict = soak.judge(samples, max_drift=0.01)
    assert verdict.faults == []
    assert abs(verdict.drift) < 0.003


def test_slow_growth_fails(soak):
    samples = series(soak, rss=lambda at: 300 * MIB * (1 + at / 100 * 0.03))
    (fault,) = soak.judge(samples, max_drift=0.01).faults
    assert re.search(
        r"memory went from 302\.\d MiB to 308\.\d MiB: \+1\.78%, need at most \+1\.00%", fault
    )


def test_one_descriptor_that_stays_open_fails(soak):
    (fault,) = soak.judge(series(soak, descriptors=lambda at: 9 + (at > 60)), max_drift=0.01).faults
    assert fault == "1 descriptors were left open"


def test_descriptors_that_come_and_go_are_no_leak(soak):
    samples = series(soak, descriptors=lambda at: 9 + at % 3)
    assert soak.judge(samples, max_drift=0.01).faults == []


def test_too_short_a_soak_has_no_verdict(soak):
    with pytest.raises(SystemExit, match="4 batches after the warm-up, need 12"):
        soak.judge(series(soak, num=5), max_drift=0.01)


def test_batches_are_drawn_again_from_the_same_seed(soak):
    first, again = (
        [soak.make_batch(random.Random(7), vocab_size=97, has_tokenizer=True) for _ in range(1)]
        for _ in range(2)
    )
    assert first == again
    chance = random.Random(1)
    batches = [soak.make_batch(chance, vocab_size=97, has_tokenizer=True) for _ in range(60)]
    prompts = [prompt for batch, _ in batches for prompt in batch]
    assert {type(prompt) for prompt in prompts} == {str, list}
    assert "" in prompts
    assert any(isinstance(prompt[0], dict) for prompt in prompts if prompt)


@pytest.mark.slow
def test_a_short_soak_of_a_tiny_model(tmp_path):
    model = write_scripted_model(tmp_path / "model", chat_template="{{ messages[0]['content'] }}")
    command = [sys.executable, str(TOOL), "--model", str(model), "--nvme", str(tmp_path / "nvme")]
    command += ["--batches", "24", "--drop-every", "10", "--out", str(tmp_path / "soak.json")]
    # Seconds say little about memory; that it is measured and judged is what is tested here.
    done = subprocess.run(
        [*command, "--max-drift", "0.1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "soak.json").read_text())
    assert result["num_batches"] == len(result["samples"]) == 24
    assert result["num_answers"] > result["num_errors"] > 0
    assert result["num_dropped"] == 3
    assert result["verdict"]["num_new_descriptors"] == 0
    assert json.loads(done.stdout)["faults"] == []


@pytest.mark.parametrize("text", ["nan", "-0.01", "1"])
def test_a_drift_that_nothing_exceeds_is_refused(soak, text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"got {text}, need a share"):
        soak.share(text)
