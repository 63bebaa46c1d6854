"""Opening the model of a verb: folder, checkpoint, tokenizer, and the folders of ``--nvme``."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from zeroinfer.checkpoint import prepare_embedded_model, resolve_model
from zeroinfer.cli.console import byte_progress
from zeroinfer.cli.options import EngineOptions, default_nvme_folder
from zeroinfer.config import EngineConfig
from zeroinfer.diskformat import Checkpoint, open_checkpoint
from zeroinfer.errors import CheckpointError, ConfigError, StorageError
from zeroinfer.profiling import require_writable_folder
from zeroinfer.units import MIB, format_bytes

__all__ = ["OpenedModel", "check_nvme_folders", "open_model"]

_EMBEDDED_SHARE = 0.4
"""Part of the default model's weights that may be in memory: the job is to show streaming."""
_MIN_FREE_BYTES = 4 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedModel:
    """A model on disk and the settings it will run with."""

    config: EngineConfig
    checkpoint: Checkpoint
    name: str
    """What the user calls it."""
    is_embedded: bool

    @property
    def names(self) -> frozenset[str]:
        """Names by which an OpenAI line may call the model."""
        own = self.checkpoint.config.get("_name_or_path")
        names = {self.name, self.name.rstrip("/"), self.checkpoint.root.name}
        return frozenset(names | ({own} if isinstance(own, str) and own else set()))


def open_model(options: EngineOptions) -> OpenedModel:
    """Find and validate the model; converts the embedded one if it is the first time.

    Raises:
        ConfigError: the embedded model is asked for without ``--nvme``.
        StorageError: an ``--nvme`` folder cannot be written or is full.
        CheckpointError: the model is not there, damaged, or a GGUF file.
    """
    config = options.to_config()
    is_embedded = not config.model.path
    if is_embedded and not config.io.nvme:
        raise ConfigError(
            "the default model needs a folder for its weights: got no --nvme; give --nvme DIR, or "
            "--model with a model of your own"
        )
    extra: list[str] = []
    if not config.io.nvme:
        extra.append(f"io.nvme={default_nvme_folder()}")
        config = options.to_config(*extra)
    check_nvme_folders(config)
    folder = _find_folder(config, is_embedded=is_embedded)
    checkpoint = open_checkpoint(folder)
    if is_embedded and config.offload.dram_weights is None and config.offload.weights == "auto":
        extra.append(f"offload.dram_weights={int(checkpoint.total_bytes * _EMBEDDED_SHARE)}")
        config = options.to_config(*extra)
    return OpenedModel(
        config=config,
        checkpoint=checkpoint,
        name=config.model.path or folder.name,
        is_embedded=is_embedded,
    )


def _find_folder(config: EngineConfig, *, is_embedded: bool) -> Path:
    if is_embedded:
        with byte_progress("converting the default model:") as progress:
            return prepare_embedded_model(config.io.nvme[0], progress=progress)
    if not config.model.path.endswith(".gguf"):
        return resolve_model(config.model.path)
    path = Path(config.model.path)
    fault = (
        "is a GGUF file, whose packed values cannot be streamed"
        if path.exists()
        else "is not there"
    )
    raise CheckpointError(
        f"model {path} {fault}; run: zeroinfer convert --model {path} --nvme {config.io.nvme[0]}"
    )


def check_nvme_folders(config: EngineConfig) -> None:
    """Make the folders and check that they can be written, before anything long starts.

    Raises:
        StorageError: a folder cannot be written, or its file system is full.
    """
    for folder in config.io.nvme:
        require_writable_folder(folder)
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < _MIN_FREE_BYTES:
            raise StorageError(
                f"file system of {folder} is full: got {format_bytes(free_bytes)} free, need "
                f"{format_bytes(_MIN_FREE_BYTES)}; free some or choose another --nvme folder"
            )
