"""Options of ``generate``; ``plan`` and ``bench`` take those of the engine alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from zeroinfer.cli.copying import COPY_HELP, STRIPE_HELP
from zeroinfer.cli.options import EngineOptions

__all__ = ["GenerateOptions", "InputOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class InputOptions(EngineOptions):
    """What is read, and how tokens are chosen."""

    input_path: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="FILE",
            help="JSONL of prompts or OpenAI batch lines, or .txt with one prompt a line; - is "
            "standard input. Left out, the built-in prompts.",
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", metavar="N", help="Most new tokens of a row. Default 256."),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="T",
            help="0 is greedy. Default as the model's generation_config says, else 0.",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", metavar="P", help="Keep the likeliest tokens up to this sum."),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", metavar="K", help="Keep the K likeliest tokens; 0 keeps all."),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", metavar="N", help="Seed of row 0; each row adds its index. Default 0."
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="STR", help="End a text before this. May be repeated."),
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on to --max-tokens whatever token comes.")
    ] = False

    def user_sampling(self) -> dict[str, Any]:
        """Return the SamplingParams fields that the user set; None where not."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions(InputOptions):
    """Where results go, and what becomes of those already there."""

    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="File for results, one line a row, in the order of finishing; a journal lies "
            "beside it until the job is complete. Left out or -, standard output.",
        ),
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an output that was interrupted.")
    ] = False
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an output that is there.")
    ] = False
    ordered: Annotated[
        bool,
        typer.Option("--ordered", help="Write rows in the order of the input; later ones wait."),
    ] = False
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write the figures as JSON.")
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write a Chrome/Perfetto trace as JSON."),
    ] = None
    copy: Annotated[bool, typer.Option("--copy", help=COPY_HELP)] = False
    stripe: Annotated[bool, typer.Option("--stripe", help=STRIPE_HELP)] = False
