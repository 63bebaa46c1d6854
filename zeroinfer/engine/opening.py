"""From settings to a model on disk: its folder, its headers, and the folders of ``io.nvme``.

No weight is read, and opening loads no torch, so that what is wrong is said at once.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass

from zeroinfer.config import EngineConfig, default_nvme_folder
from zeroinfer.diskformat import Checkpoint, open_checkpoint
from zeroinfer.engine.placing import check_flags, find_folder
from zeroinfer.engine.prompts import PromptReader, TextEncoder
from zeroinfer.errors import ConfigError, StorageError
from zeroinfer.profiling import require_writable_folder
from zeroinfer.units import MIB, format_bytes

__all__ = ["OpenedModel"]

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

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        *,
        is_copied: bool = False,
        is_striped: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> "OpenedModel":
        """Find and validate the model; converts the embedded one if it is the first time.

        Args:
            config: what the user set.
            is_copied: stream from a copy under the first ``--nvme`` folder, made now if need be.
            is_striped: spread that copy over all ``--nvme`` folders.
            progress: receives bytes done and bytes in all of a conversion.

        Raises:
            ConfigError: the embedded model is asked for without ``--nvme``.
            StorageError: an ``--nvme`` folder cannot be written or is full.
            CheckpointError: the model is not there, damaged, or must be converted first.
        """
        is_embedded = not config.model.path
        if is_embedded and not config.io.nvme:
            raise ConfigError(
                "the default model needs a folder for its weights: got no --nvme; give --nvme DIR, "
                "or --model with a model of your own"
            )
        if not config.io.nvme:
            io = config.io.model_copy(update={"nvme": (default_nvme_folder(),)})
            config = config.model_copy(update={"io": io})
        check_flags(config, is_copied=is_copied, is_striped=is_striped)
        _check_nvme_folders(config)
        folder = find_folder(config, is_copied=is_copied, is_striped=is_striped, progress=progress)
        checkpoint = open_checkpoint(folder)
        if is_embedded:
            config = _limit_embedded(config, checkpoint)
        return cls(
            config=config,
            checkpoint=checkpoint,
            name=config.model.path or folder.name,
            is_embedded=is_embedded,
        )

    @property
    def names(self) -> frozenset[str]:
        """Names by which an OpenAI line may call the model."""
        own = self.checkpoint.config.get("_name_or_path")
        names = {self.name, self.name.rstrip("/"), self.checkpoint.root.name}
        return frozenset(names | ({own} if isinstance(own, str) and own else set()))

    def prompt_reader(self, tokenizer: TextEncoder | None) -> PromptReader:
        """Return what reads prompts for this model; loads torch with the model's description.

        Raises:
            CheckpointError: the model cannot be run.
        """
        from zeroinfer.models import build_model  # noqa: PLC0415 - the first to load torch

        model = build_model(self.checkpoint.config)
        limit, most = self.config.scheduler.max_model_len, model.max_model_len
        return PromptReader(
            tokenizer=tokenizer,
            vocab_size=model.vocab_size,
            max_model_len=most if limit == "auto" else min(limit, most),
        )


def _limit_embedded(config: EngineConfig, checkpoint: Checkpoint) -> EngineConfig:
    """Keep part of the default model on disk, unless the user chose."""
    if config.offload.dram_weights is not None or config.offload.weights != "auto":
        return config
    limit_bytes = int(checkpoint.total_bytes * _EMBEDDED_SHARE)
    offload = config.offload.model_copy(update={"dram_weights": limit_bytes})
    return config.model_copy(update={"offload": offload})


def _check_nvme_folders(config: EngineConfig) -> None:
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
