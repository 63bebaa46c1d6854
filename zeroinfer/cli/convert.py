"""``convert``: a store of a GGUF file, which can then be streamed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from zeroinfer.checkpoint import convert_gguf
from zeroinfer.cli.command import make_command
from zeroinfer.cli.console import Output, byte_progress
from zeroinfer.cli.options import CommonOptions
from zeroinfer.errors import ConfigError
from zeroinfer.profiling import require_writable_folder

__all__ = ["ConvertOptions", "command", "run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions(CommonOptions):
    """What is converted, and to where."""

    model: Annotated[
        Path | None, typer.Option("--model", metavar="FILE.gguf", help="The GGUF file.")
    ] = None
    nvme: Annotated[
        Path | None, typer.Option("--nvme", metavar="DIR", help="Folder that stores lie under.")
    ] = None
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", metavar="auto|bf16|fp16|fp32", help="Element type of the store's weights."
        ),
    ] = "auto"


def run(options: ConvertOptions) -> int:
    """Convert, or find what an earlier run converted, and print the folder."""
    if options.model is None or options.nvme is None:
        missing = "--model" if options.model is None else "--nvme"
        raise ConfigError(f"convert needs --model FILE.gguf and --nvme DIR: got no {missing}")
    require_writable_folder(options.nvme)
    with byte_progress("converting:") as progress:
        folder = convert_gguf(options.model, options.nvme, dtype=options.dtype, progress=progress)
    output = Output(is_json=options.json_output)
    output.text(str(folder))
    output.event("store", {"path": str(folder)})
    return 0


command = make_command(ConvertOptions, run)
