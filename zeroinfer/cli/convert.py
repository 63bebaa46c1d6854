"""``convert``: a store of what cannot be streamed, or a copy of what can."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from zeroinfer.checkpoint import ModelKind, convert_model, model_kind, resolve_model
from zeroinfer.cli.command import make_command
from zeroinfer.cli.console import Output, byte_progress
from zeroinfer.cli.copying import COPY_HELP, STRIPE_HELP
from zeroinfer.cli.options import CommonOptions
from zeroinfer.errors import ConfigError
from zeroinfer.profiling import require_writable_folder

__all__ = ["ConvertOptions", "command", "run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions(CommonOptions):
    """What is converted, and to where."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="PATH_OR_HUB_ID",
            help="A GGUF file, or a folder or hub id with .bin or safetensors files.",
        ),
    ] = None
    nvme: Annotated[
        list[Path] | None,
        typer.Option(
            "--nvme", metavar="DIR", help="Folder that stores lie under. Repeated for --stripe."
        ),
    ] = None
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="auto|bf16|fp16|fp32",
            help="Element type of the store's weights; auto is the source's own, fp32 for packed "
            "values.",
        ),
    ] = "auto"
    copy: Annotated[bool, typer.Option("--copy", help=COPY_HELP)] = False
    stripe: Annotated[bool, typer.Option("--stripe", help=STRIPE_HELP)] = False


def run(options: ConvertOptions) -> int:
    """Convert, or find what an earlier run converted, and print the folder."""
    if options.model is None or not options.nvme:
        missing = "--model" if options.model is None else "--nvme"
        raise ConfigError(f"convert needs --model and --nvme DIR: got no {missing}")
    _check_folders(options.nvme, is_striped=options.stripe)
    source = _source(options.model)
    if not options.copy and model_kind(source) is ModelKind.SAFETENSORS:
        _refuse_needless(options, source)
    from zeroinfer.engine import order_of_use

    with byte_progress("converting:") as progress:
        folder = convert_model(
            source,
            options.nvme[0],
            dtype=options.dtype,
            stripes=options.nvme[1:],
            order=order_of_use,
            progress=progress,
        )
    output = Output(is_json=options.json_output)
    output.text(str(folder))
    output.event("store", {"path": str(folder)})
    return 0


command = make_command(ConvertOptions, run)


def _check_folders(folders: list[Path], *, is_striped: bool) -> None:
    if is_striped != (len(folders) > 1):
        needed = "two --nvme or more" if is_striped else "one --nvme, or --stripe"
        raise ConfigError(
            f"--stripe spreads a store over several folders: got {len(folders)} --nvme "
            f"{'with' if is_striped else 'without'} --stripe, need {needed}"
        )
    require_writable_folder(folders[0])


def _source(model: str) -> Path:
    """Find the source; a GGUF file that is missing is left to the conversion to name."""
    return Path(model) if model.endswith(".gguf") else resolve_model(model, with_pickles=True)


def _refuse_needless(options: ConvertOptions, source: Path) -> None:
    if options.dtype == "auto" and not options.stripe:
        raise ConfigError(
            f"{source} holds safetensors, which are streamed where they lie: got neither --copy "
            "nor --stripe nor --dtype; give one of them to make a store all the same"
        )
