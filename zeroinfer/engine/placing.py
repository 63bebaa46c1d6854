"""Which folder a model is read from: its own, a store made earlier, or a copy made now."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zeroinfer.checkpoint import (
    ModelKind,
    check_store,
    find_store,
    is_store,
    model_kind,
    prepare_embedded_model,
    resolve_model,
)
from zeroinfer.config import EngineConfig
from zeroinfer.errors import (
    CheckpointError,
    ConfigError,
    StorageError,
    UnsupportedModelError,
)
from zeroinfer.log import get_logger

__all__ = ["check_flags", "find_folder", "order_of_use"]

_logger = get_logger(__name__)
_FAULTS = {
    ModelKind.GGUF: "is a GGUF file, whose packed values cannot be streamed",
    ModelKind.PICKLES: "holds its weights as .bin files alone, which cannot be streamed",
}


def check_flags(config: EngineConfig, *, is_copied: bool, is_striped: bool) -> None:
    """Refuse flags that contradict each other, and disks that are not mounted.

    Raises:
        ConfigError: there is nothing to spread, or nothing to spread it over.
        StorageError: a further folder is missing; it is not made, as it may be a mount point.
    """
    if not is_striped:
        return
    if not is_copied or len(config.io.nvme) < 2:
        raise ConfigError(
            "--stripe spreads a copy over several folders: need --copy and two --nvme or more, got "
            f"{'' if is_copied else 'no --copy and '}{len(config.io.nvme)} --nvme"
        )
    for folder in config.io.nvme[1:]:
        if not folder.is_dir():
            raise StorageError(f"--nvme folder {folder} does not exist; mount its disk or make it")


def find_folder(
    config: EngineConfig,
    *,
    is_copied: bool = False,
    is_striped: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Return the folder to stream from; makes a store only where the user asked for one.

    Args:
        config: names the model and at least one ``io.nvme`` folder.
        is_copied: make a verified copy under the first folder, in the config's dtype, or find the
            one made earlier.
        is_striped: spread the copy over all the folders.
        progress: receives bytes done and bytes in all.

    Raises:
        CheckpointError: the model is not there, damaged, or must be converted first.
        CapacityError: a copy does not fit.
        StorageError: a folder cannot be written.
    """
    nvme_dir, further = config.io.nvme[0], config.io.nvme[1:] if is_striped else ()
    if not config.model.path:
        return prepare_embedded_model(nvme_dir, stripes=further, progress=progress)
    path = _existing_source(config, with_pickles=is_copied)
    if is_store(path):
        check_store(path)
    if is_copied and not _is_own_store(path, nvme_dir):
        from zeroinfer.checkpoint import convert_model  # noqa: PLC0415 - loads gguf

        return convert_model(
            path,
            nvme_dir,
            dtype=config.model.dtype,
            stripes=further,
            order=order_of_use,
            progress=progress,
        )
    if model_kind(path) in _FAULTS:
        return _earlier_store(config, path)
    return path


def order_of_use(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Sequence[str]:
    """Return a checkpoint's tensor names in the order in which a pass uses them.

    Args:
        config: content of config.json.
        shapes: every tensor of the checkpoint.

    Returns:
        nothing for a model that cannot be run here, which may be copied all the same.

    Raises:
        CheckpointError: config and weights do not belong together.
    """
    from zeroinfer.models import bind, build_model  # noqa: PLC0415 - loads torch

    try:
        model = build_model(config)
    except UnsupportedModelError:
        return ()
    return list(dict.fromkeys(bind(model, shapes).names.values()))


def _existing_source(config: EngineConfig, *, with_pickles: bool) -> Path:
    path = Path(config.model.path)
    if path.suffix != ".gguf":
        return resolve_model(config.model.path, with_pickles=with_pickles)
    try:
        is_there = path.exists()
    except OSError as error:
        raise StorageError(f"model {path} cannot be looked at: {error.strerror}") from error
    if not is_there:
        raise CheckpointError(f"model {path} is not there; {_how_to_convert(config)}")
    return path


def _is_own_store(path: Path, nvme_dir: Path) -> bool:
    return is_store(path) and path.resolve().is_relative_to(nvme_dir.resolve())


def _earlier_store(config: EngineConfig, path: Path) -> Path:
    """Find a store that an earlier run made of a source that cannot be streamed."""
    dtype = config.model.dtype
    for wanted in ("auto", None) if dtype == "auto" else (dtype, "auto"):
        for nvme_dir in config.io.nvme:
            found = find_store(nvme_dir, path, dtype=wanted)
            if found is not None:
                _logger.info("streaming %s from its store %s", path, found)
                return found
    raise CheckpointError(f"model {path} {_FAULTS[model_kind(path)]}; {_how_to_convert(config)}")


def _how_to_convert(config: EngineConfig) -> str:
    words = ["zeroinfer", "convert", "--model", config.model.path, "--nvme", str(config.io.nvme[0])]
    return f"run: {shlex.join(words)}"
