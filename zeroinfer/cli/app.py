"""From arguments to a verb.

Only the module of the verb that runs is imported: ``--help``, ``plan`` and ``env`` start at once.
A command line that begins with an option is one of ``generate``, the main job.
"""

import gc
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer

from zeroinfer import __version__
from zeroinfer.cli.command import INTERRUPTED
from zeroinfer.config import let_idle_threads_sleep

__all__ = ["VERBS", "build_app", "main"]

VERBS = {
    "generate": "Answer a file of prompts, or the built-in ones; what runs without a verb.",
    "plan": "Print where everything would live and how long a step would take; run nothing.",
    "profile": "Measure disk, memory and products, and keep the result for the planner.",
    "convert": "Make a store of a GGUF file or of .bin files, or a copy, under --nvme.",
    "verify": "Read a store back and compare it with its checksums.",
    "bench": "Print load seconds and milliseconds per token for growing batches.",
    "env": "Print versions, memory limits, readers and disks of this machine.",
}
_GROUP_OPTIONS = ("--help", "-h", "--version")
_COLLECT_AFTER = 50_000
"""New objects until garbage is looked for. At the usual 700 that took 0.17 of the 1.87 CPU seconds
of all imports, which make hundreds of thousands and drop next to none. It holds for the whole verb:
what must go at once sits in no cycle (tests/unit/engine/test_release.py)."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        args: arguments without the program's name; None takes those of the process.
    """
    let_idle_threads_sleep()
    arguments = list(sys.argv[1:] if args is None else args)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in _GROUP_OPTIONS):
        arguments.insert(0, "generate")
    _mend_streams()
    try:
        with _rare_collections():
            build_app(arguments[0])(arguments, prog_name="zeroinfer")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        # While the verb's module was still loading, which answers interrupts itself.
        return INTERRUPTED
    return 0


def build_app(verb: str | None) -> typer.Typer:
    """Build the application with one verb loaded; the others stand in the help only."""
    app = typer.Typer(
        help="Offline LLM inference with weights streamed just ahead of use.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_group)
    for name, text in VERBS.items():
        command: Callable[..., Any] = _not_loaded
        if name == verb:
            command = import_module(f"zeroinfer.cli.{name}").command
        app.command(name=name, help=text)(command)
    return app


def _mend_streams() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A path may hold bytes that are no UTF-8: they go out as they came.
        sys.stdout.reconfigure(errors="surrogateescape")
    if sys.stderr is None:
        # Closed by the caller. What is printed to None goes among the results.
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


@contextmanager
def _rare_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"zeroinfer {__version__}")
        raise typer.Exit


def _group(
    is_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    del is_version


def _not_loaded() -> None:
    raise AssertionError("a verb ran whose module was not loaded")
