"""From what the user calls a model to a folder on this machine.

A path that exists wins. Anything else that looks like a hub id is looked up in the hub's cache and,
where the cache does not hold all of it, fetched. The hub's errors are mapped here and nowhere else.
"""

import re
from pathlib import Path

from zeroinfer.checkpoint.kinds import ModelKind, find_pickles, model_kind
from zeroinfer.diskformat import open_checkpoint
from zeroinfer.errors import CheckpointError, StorageError, UnsupportedModelError
from zeroinfer.log import get_logger

__all__ = ["resolve_model"]

_LOGGER = get_logger(__name__)
_HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
# Sub-folders hold other formats of the same weights; consolidated files hold them a second time.
_UNWANTED = ("*/*", "consolidated*.safetensors")
_PICKLES = "pytorch_model*.bin"


def resolve_model(model: str, *, cache_dir: Path | None = None, with_pickles: bool = False) -> Path:
    """Return the folder (or GGUF file) of a model; may fetch it from the hub, blocking.

    A complete copy in the hub's cache is used without asking the network whether it is the newest.

    Args:
        model: A path, or a hub id such as ``org/name``.
        cache_dir: The hub's cache; None is where huggingface_hub keeps it.
        with_pickles: Take a hub model whose weights are ``.bin`` files alone; they are fetched only
            if there is nothing better.

    Raises:
        CheckpointError: neither a path nor a model that the hub or its cache can give.
        StorageError: the path lies in a folder that may not be searched.
    """
    path = _existing(model)
    if path is not None:
        return path.absolute()
    if not _HUB_ID.fullmatch(model) or model.endswith((".gguf", ".safetensors")):
        raise CheckpointError(
            f"model {model!r} does not exist and is no hub id of the form org/name; give a folder "
            "or check the name"
        )
    cached = _snapshot(model, cache_dir, is_local=True)
    if isinstance(cached, Path) and _fault(cached, with_pickles=with_pickles) is None:
        return cached
    _LOGGER.info("model %s is not complete in the hub's cache; fetching it", model)
    fetched = _snapshot(model, cache_dir, is_local=False)
    if isinstance(fetched, Path) and with_pickles and not _has_safetensors(fetched):
        wanted = (*_WANTED, _PICKLES)
        fetched = _snapshot(model, cache_dir, is_local=False, wanted=wanted)
    if isinstance(fetched, Path):
        return fetched
    return _without_network(model, cache_dir, fetched, with_pickles=with_pickles)


def _existing(model: str) -> Path | None:
    try:
        path = Path(model).expanduser()
        return path if model and (path.exists() or path.is_symlink()) else None
    except RuntimeError:
        # ~name of a user who is not there.
        return None
    except OSError as error:
        raise StorageError(f"model {model!r} cannot be looked at: {error.strerror}") from error


def _without_network(
    model: str, cache_dir: Path | None, reason: Exception, *, with_pickles: bool
) -> Path:
    """Fall back on a cached copy whose weights are whole, whatever else of it is missing."""
    cached = _snapshot(model, cache_dir, is_local=True, wanted=("config.json",))
    if not isinstance(cached, Path):
        raise CheckpointError(
            f"model {model!r} is neither a folder nor reachable on the hub: {_line(reason)}; give "
            "a folder or check the name"
        ) from reason
    fault = _fault(cached, with_pickles=with_pickles)
    if fault is not None:
        raise CheckpointError(
            f"model {model!r} is incomplete in the hub's cache ({fault}) and not reachable on the "
            f"hub: {_line(reason)}; give a folder or fetch it again"
        ) from reason
    _LOGGER.warning("hub not reachable (%s); using the cached files %s", _line(reason), cached)
    return cached


def _snapshot(
    model: str, cache_dir: Path | None, *, is_local: bool, wanted: tuple[str, ...] = _WANTED
) -> Path | Exception:
    """Ask huggingface_hub for the snapshot folder; return its refusal instead of raising it."""
    import huggingface_hub  # noqa: PLC0415 - 0.3 s that a local folder need not pay

    try:
        folder = huggingface_hub.snapshot_download(
            model,
            cache_dir=cache_dir,
            local_files_only=is_local,
            allow_patterns=list(wanted),
            ignore_patterns=list(_UNWANTED),
        )
    except _hub_errors() as error:
        return error
    return Path(folder)


def _hub_errors() -> tuple[type[Exception], ...]:
    """List what snapshot_download may raise, over the versions of huggingface_hub.

    Its HTTP library changed between versions; the base of its own HTTP error is that library's
    error, under which connection failures stand too.
    """
    from huggingface_hub import errors  # noqa: PLC0415 - as above

    names = ("EntryNotFoundError", "XetDownloadError", "RevisionResolutionError")
    own = (getattr(errors, name) for name in names if hasattr(errors, name))
    return (OSError, ValueError, *errors.HfHubHTTPError.__bases__, *own)


def _fault(folder: Path, *, with_pickles: bool) -> CheckpointError | None:
    """Return what keeps a folder from being a whole model; None if nothing does."""
    try:
        if with_pickles and model_kind(folder) is ModelKind.PICKLES:
            find_pickles(folder)
        else:
            open_checkpoint(folder)
    except UnsupportedModelError:
        return None
    except CheckpointError as error:
        return error
    return None


def _has_safetensors(folder: Path) -> bool:
    return model_kind(folder) is ModelKind.SAFETENSORS


def _line(error: Exception) -> str:
    """Cut a foreign message to its first line."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
