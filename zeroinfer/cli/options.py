"""Options that several verbs share, and how they become an EngineConfig.

The help of a flag is the text of its key in the config tree. Precedence: flag, then ``--set``,
then the file, then the default.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from zeroinfer.config import FLAG_KEYS, EngineConfig, describe_config, load_config

__all__ = ["CommonOptions", "EngineOptions", "ModelOptions", "ProfileOptions"]

_HELP = {entry.key: entry for entry in describe_config()}


def _flag(flag: str, key: str, *, metavar: str) -> Any:
    """Make an option that sets one key of the config."""
    text = _HELP[key].help
    return typer.Option(flag, metavar=metavar, help=f"{text} Default {_HELP[key].default}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommonOptions:
    """What every verb has."""

    debug: Annotated[
        bool, typer.Option("--debug", help="Show debug records, and tracebacks of errors.")
    ] = False
    json_output: Annotated[
        bool, typer.Option("--json", help="Print JSON, one object a line, instead of tables.")
    ] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions(CommonOptions):
    """Which model, and where our own files go."""

    model: Annotated[str | None, _flag("--model", "model.path", metavar="PATH_OR_HUB_ID")] = None
    nvme: Annotated[
        list[Path] | None,
        typer.Option("--nvme", metavar="DIR", help=f"{_HELP['io.nvme'].help} May be repeated."),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions(ModelOptions):
    """What is measured: a disk's rate is that of a reader."""

    reader: Annotated[str | None, _flag("--reader", "io.reader", metavar="NAME")] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions(ModelOptions):
    """Everything that decides how a model runs."""

    dtype: Annotated[str | None, _flag("--dtype", "model.dtype", metavar="TYPE")] = None
    dram: Annotated[str | None, _flag("--dram", "offload.dram", metavar="SIZE")] = None
    dram_weights: Annotated[
        str | None, _flag("--dram-weights", "offload.dram_weights", metavar="SIZE")
    ] = None
    gpu_memory: Annotated[
        str | None, _flag("--gpu-memory", "offload.gpu_memory", metavar="SIZE")
    ] = None
    weights: Annotated[str | None, _flag("--weights", "offload.weights", metavar="TIER")] = None
    kv: Annotated[str | None, _flag("--kv", "kv.tier", metavar="TIER")] = None
    prefetch_depth: Annotated[
        str | None, _flag("--prefetch-depth", "offload.prefetch_depth", metavar="auto|N")
    ] = None
    max_num_seqs: Annotated[
        str | None, _flag("--max-num-seqs", "scheduler.max_num_seqs", metavar="auto|N")
    ] = None
    batch_invariant: Annotated[
        str | None,
        _flag("--batch-invariant", "compute.batch_invariant", metavar="auto|on|off"),
    ] = None
    reader: Annotated[str | None, _flag("--reader", "io.reader", metavar="NAME")] = None
    admit: Annotated[str | None, _flag("--admit", "scheduler.admit", metavar="ORDER")] = None
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE.yaml", help="Settings to start from."),
    ] = None
    set_values: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set one key of the config, such as offload.prefetch_depth=2. May be repeated.",
        ),
    ] = None

    def to_config(self) -> EngineConfig:
        """Join file, ``--set`` and flags.

        Raises:
            ConfigError: a key is unknown or a value refused.
        """
        given = {name: getattr(self, name) for name in FLAG_KEYS}
        flags = [
            f"{FLAG_KEYS[name]}={_as_text(value)}"
            for name, value in given.items()
            if value is not None and value != []
        ]
        return load_config(self.config, [*(self.set_values or ()), *flags])


def _as_text(value: str | list[Path]) -> str:
    if isinstance(value, str):
        return value
    # Not as JSON, which writes a character of the upper planes as two that YAML keeps apart.
    names = [str(folder) for folder in value]
    return str(yaml.safe_dump(names, default_flow_style=True, width=math.inf)).strip()
