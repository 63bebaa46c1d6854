"""Options that several verbs share, and how they become an EngineConfig.

The help of a flag is the text of its key in the config tree. Precedence: flag, then ``--set``,
then the file, then the default.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from zeroinfer.config import EngineConfig, describe_config, load_config

__all__ = ["CommonOptions", "EngineOptions", "ModelOptions", "default_nvme_folder"]

_HELP = {entry.key: entry for entry in describe_config()}

_CONFIG_KEYS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "dram": "offload.dram",
    "dram_weights": "offload.dram_weights",
    "weights": "offload.weights",
    "prefetch_depth": "offload.prefetch_depth",
    "kv": "kv.tier",
    "max_num_seqs": "scheduler.max_num_seqs",
    "admit": "scheduler.admit",
    "batch_invariant": "compute.batch_invariant",
    "reader": "io.reader",
}


def _flag(flag: str, key: str, *, metavar: str) -> Any:
    """Make an option that sets one key of the config."""
    text = _HELP[key].help
    return typer.Option(flag, metavar=metavar, help=f"{text} Default {_HELP[key].default}.")


def default_nvme_folder() -> Path:
    """Return the folder that takes our files where the user named none."""
    return Path.home() / ".cache" / "zeroinfer"


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
class EngineOptions(ModelOptions):
    """Everything that decides how a model runs."""

    dtype: Annotated[str | None, _flag("--dtype", "model.dtype", metavar="TYPE")] = None
    dram: Annotated[str | None, _flag("--dram", "offload.dram", metavar="SIZE")] = None
    dram_weights: Annotated[
        str | None, _flag("--dram-weights", "offload.dram_weights", metavar="SIZE")
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

    def to_config(self, *extra: str) -> EngineConfig:
        """Join file, ``--set`` and flags.

        Args:
            extra: overrides for values that the user left open and the verb fills in.

        Raises:
            ConfigError: a key is unknown or a value refused.
        """
        flags = [
            f"{key}={getattr(self, name)}"
            for name, key in _CONFIG_KEYS.items()
            if getattr(self, name) is not None
        ]
        if self.nvme:
            flags.append(f"io.nvme={json.dumps([str(folder) for folder in self.nvme])}")
        return load_config(self.config, [*(self.set_values or ()), *flags, *extra])
