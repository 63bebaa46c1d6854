import logging
import os
import signal
import subprocess
import sys

import pytest
import typer

import zeroinfer.cli
import zeroinfer.cli.app
from zeroinfer.cli.command import INTERRUPTED, make_command
from zeroinfer.cli.options import CommonOptions
from zeroinfer.errors import (
    BackendUnavailableError,
    CapacityError,
    CheckpointError,
    ConfigError,
    RequestError,
    StorageError,
    UnsupportedModelError,
)


def run_command(body, *args):
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(make_command(CommonOptions, body))
    with pytest.raises(SystemExit) as ended:
        app(list(args))
    return ended.value.code


def raising(error):
    def body(options):
        raise error

    return body


@pytest.mark.parametrize("code", [0, 5, 130])
def test_exit_code_of_a_verb_is_passed_on(code):
    assert run_command(lambda options: code) == code


@pytest.mark.parametrize(
    ("error_class", "code"),
    [
        (ConfigError, 2),
        (BackendUnavailableError, 2),
        (CapacityError, 3),
        (CheckpointError, 4),
        (UnsupportedModelError, 4),
        (StorageError, 4),
        (RequestError, 5),
    ],
)
def test_errors_are_one_line_and_a_code(error_class, code, capsys):
    assert run_command(raising(error_class("x is wrong: got 1,\n need 2"))) == code
    assert capsys.readouterr().err == "error: x is wrong: got 1,  need 2\n"


def test_unexpected_errors_point_to_debug(capsys):
    assert run_command(raising(KeyError("k"))) == 1
    text = capsys.readouterr().err
    assert text == "internal error: KeyError: 'k'; run again with --debug to see where\n"


def test_debug_shows_the_traceback(capsys):
    assert run_command(raising(ConfigError("no")), "--debug") == 2
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert text.endswith("error: no\n")


def test_sigterm_ends_like_ctrl_c(capsys):
    before = signal.getsignal(signal.SIGTERM)
    assert run_command(lambda options: os.kill(os.getpid(), signal.SIGTERM)) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_reader_that_goes_away_is_no_error():
    code = "from zeroinfer.cli.app import main; main(['env'])"
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait()


def test_usage_errors_exit_with_2(capsys):
    assert run_command(lambda options: 0, "--nope") == 2
    assert "No such option: --nope" in capsys.readouterr().err


def test_logging_is_put_back():
    package = logging.getLogger("zeroinfer")
    before = package.handlers[:], package.level, package.propagate
    assert run_command(lambda options: 0, "--debug") == 0
    assert (package.handlers, package.level, package.propagate) == before


def test_an_interrupt_while_a_verb_loads_is_an_exit_code(monkeypatch):
    def interrupt(verb):
        raise KeyboardInterrupt

    monkeypatch.setattr(zeroinfer.cli.app, "build_app", interrupt)
    assert zeroinfer.cli.main(["env"]) == INTERRUPTED


def test_an_interrupt_while_the_program_loads_leaves_no_traceback():
    code = """
import runpy, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "zeroinfer.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
runpy.run_module("zeroinfer", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (INTERRUPTED, "")
