"""``verify``: read a store back and compare it with its checksums."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from zeroinfer.checkpoint import verify_store
from zeroinfer.cli.command import make_command
from zeroinfer.cli.console import Output, byte_progress
from zeroinfer.cli.options import CommonOptions
from zeroinfer.errors import ConfigError

__all__ = ["VerifyOptions", "command", "run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions(CommonOptions):
    """Which store."""

    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="DIR",
            help="A folder that convert has written; of a striped store the one with the manifest.",
        ),
    ] = None


def run(options: VerifyOptions) -> int:
    """Compare every file of the store; all of it is read."""
    if options.model is None:
        raise ConfigError("verify needs --model with the folder of a store: got none")
    with byte_progress("verifying:") as progress:
        verify_store(options.model, progress=progress)
    output = Output(is_json=options.json_output)
    output.text(f"{options.model} is whole: every file has its recorded checksum")
    output.event("verified", {"path": str(options.model)})
    return 0


command = make_command(VerifyOptions, run)
