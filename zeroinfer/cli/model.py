"""Opening the model of a verb, with progress where that takes long."""

from zeroinfer.cli.console import byte_progress
from zeroinfer.cli.options import EngineOptions
from zeroinfer.engine import OpenedModel

__all__ = ["OpenedModel", "open_model"]


def open_model(options: EngineOptions) -> OpenedModel:
    """Find and validate the model of these options; see `OpenedModel.open`."""
    with byte_progress("converting the default model:") as progress:
        return OpenedModel.open(options.to_config(), progress=progress)
