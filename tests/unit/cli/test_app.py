import gc
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from typer.main import get_command

import zeroinfer.cli.app
from zeroinfer import __version__
from zeroinfer.cli import VERBS, main
from zeroinfer.cli.app import build_app

COMMON = {"--debug", "--json", "--help", "-h"}
MODEL = COMMON | {"--model", "--nvme"}
ENGINE = MODEL | {
    "--dtype", "--dram", "--dram-weights", "--gpu-memory", "--weights", "--kv", "--prefetch-depth",
    "--max-num-seqs", "--batch-invariant", "--reader", "--admit", "--config", "--set",
}  # fmt: skip
INPUT = ENGINE | {
    "--input", "--max-tokens", "--temperature", "--top-p", "--top-k", "--seed", "--stop",
    "--ignore-eos",
}  # fmt: skip
FLAGS = {
    "generate": INPUT
    | {"--output", "--resume", "--overwrite", "--ordered", "--report", "--trace"}
    | {"--copy", "--stripe"},
    "plan": INPUT,
    "profile": MODEL | {"--reader"},
    "convert": COMMON | {"--model", "--nvme", "--dtype", "--copy", "--stripe"},
    "verify": COMMON | {"--model"},
    "bench": ENGINE | {"--batch-sizes", "--prompt-tokens", "--tokens"},
    "env": COMMON | {"--nvme"},
}


def flags_of(verb):
    command = get_command(build_app(verb)).commands[verb]
    names = set(command.context_settings.get("help_option_names", ["--help", "-h"]))
    for parameter in command.params:
        names.update(parameter.opts)
    return names


def test_every_verb_is_listed():
    assert set(FLAGS) == set(VERBS)


@pytest.mark.parametrize("verb", FLAGS)
def test_flag_list_is_pinned(verb):
    assert flags_of(verb) == FLAGS[verb]


@pytest.mark.parametrize(
    "flag",
    ["--ranks", "--parallel", "--quantize", "--kv-dtype"],
)
def test_flags_of_later_versions_are_refused(flag, capsys):
    assert main([flag, "1"]) == 2
    assert f"No such option: {flag}" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["score", "embed", "serve", "plann"])
def test_unknown_verbs_are_refused(verb, capsys):
    assert main([verb]) == 2
    assert f"No such command '{verb}'" in capsys.readouterr().err


def test_help_lists_the_verbs(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help(verb, capsys):
    assert main([verb, "--help"]) == 0
    assert VERBS[verb].split(".")[0][:40] in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"zeroinfer {__version__}\n"


def test_without_a_verb_generate_runs(capsys):
    assert main([]) == 2
    assert "the default model needs a folder" in capsys.readouterr().err


PROBE = """
import sys
from zeroinfer.cli import main
code = main(sys.argv[1:])
heavy = ("torch", "transformers", "huggingface_hub", "gguf", "jinja2", "rich")
loaded = [name for name in heavy if name in sys.modules]
sys.exit(f"loaded {loaded}" if loaded else code)
"""


@pytest.mark.parametrize("args", [["--help"], ["env"], ["generate", "--help"], ["plan", "--help"]])
def test_light_command_lines_load_nothing_heavy(args):
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *args], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_full_standard_output_ends_a_verb_with_the_code_of_storage():
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "zeroinfer", "env"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 4
    assert "write to the standard output failed: No space left on device" in done.stderr
    assert "Exception ignored" not in done.stderr


def test_garbage_is_looked_for_rarely_while_a_verb_runs(monkeypatch):
    before, seen = gc.get_threshold(), []
    monkeypatch.setattr(
        zeroinfer.cli.app, "build_app", lambda verb: lambda *a, **k: seen.append(gc.get_threshold())
    )
    assert main(["env"]) == 0
    assert seen[0][0] > 10 * before[0]
    assert gc.get_threshold() == before


def test_a_verb_loads_only_its_own_module():
    code = "import sys; from zeroinfer.cli import main; main(['env', '--help']);"
    code += "sys.exit(any(f'zeroinfer.cli.{v}' in sys.modules for v in ('generate', 'bench')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_python_m_runs_the_same_program():
    done = subprocess.run(
        [sys.executable, "-m", "zeroinfer", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"zeroinfer {__version__}\n"


def test_modules_have_commands():
    for verb in VERBS:
        assert callable(import_module(f"zeroinfer.cli.{verb}").command)
