"""Commands made of option classes, and the mapping of errors to exit codes."""

import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Any, Protocol, TypeVar, get_type_hints

import typer

from zeroinfer.errors import ZeroInferError
from zeroinfer.log import configure_logging, get_logger

__all__ = ["INTERRUPTED", "make_command"]

INTERRUPTED = 130
_INTERNAL = 1
_logger = get_logger(__name__)


class HasDebug(Protocol):
    """Options of any verb."""

    @property
    def debug(self) -> bool:
        """Show tracebacks and debug records."""
        ...


Options = TypeVar("Options", bound=HasDebug)


def make_command(
    options_class: type[Options], run: Callable[[Options], int]
) -> Callable[..., None]:
    """Make a command whose options are the fields of a dataclass.

    Args:
        options_class: a dataclass; each field is annotated with its typer option and has a default.
        run: the verb; returns the exit code.
    """

    def command(**values: Any) -> None:
        options = options_class(**values)
        with _exit_codes(is_debug=options.debug):
            raise typer.Exit(run(options))

    hints = get_type_hints(options_class, include_extras=True)
    parameters = [
        inspect.Parameter(
            entry.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if entry.default is MISSING else entry.default,
            annotation=hints[entry.name],
        )
        for entry in fields(options_class)  # type: ignore[arg-type]
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {entry.name: entry.annotation for entry in parameters}
    return command


@contextmanager
def _exit_codes(*, is_debug: bool) -> Iterator[None]:
    """Turn what a verb raises into one line on standard error and an exit code."""
    # Until a job takes over, SIGTERM ends a run as Ctrl-C does.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _log_to_stderr(is_debug=is_debug):
            yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        _say("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # Whoever read our output has gone; the interpreter must not try to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_INTERNAL) from None
    except ZeroInferError as error:
        _say(f"error: {error}")
        raise typer.Exit(error.exit_code) from None
    except Exception as error:  # noqa: BLE001 - the boundary of the program
        hint = "" if is_debug else "; run again with --debug to see where"
        _say(f"internal error: {type(error).__name__}: {error}{hint}")
        raise typer.Exit(_INTERNAL) from None
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _log_to_stderr(*, is_debug: bool) -> Iterator[None]:
    """Configure the package's logger, and put it back for a program that called `main`."""
    package = get_logger("zeroinfer")
    before = package.handlers[:], package.level, package.propagate
    configure_logging(debug=is_debug)
    try:
        yield
    except (typer.Exit, KeyboardInterrupt):
        raise
    except Exception:
        _logger.debug("traceback", exc_info=True)
        raise
    finally:
        package.handlers[:], package.level, package.propagate = before


def _say(message: str) -> None:
    print(" ".join(message.splitlines()), file=sys.stderr)
