"""Opening the model of a verb, with progress where that takes long."""

from zeroinfer.cli.console import byte_progress
from zeroinfer.cli.options import EngineOptions
from zeroinfer.engine import OpenedModel

__all__ = ["OpenedModel", "open_model"]


def open_model(
    options: EngineOptions, *, is_copied: bool = False, is_striped: bool = False
) -> OpenedModel:
    """Find and validate the model of these options; see `OpenedModel.open`."""
    with byte_progress("writing the model's store:") as progress:
        return OpenedModel.open(
            options.to_config(), is_copied=is_copied, is_striped=is_striped, progress=progress
        )
