"""An interpreter that lacks packages, as on a machine where nothing can be installed."""

import os
import venv
from pathlib import Path

import torch

LACKING = (
    "pydantic", "pydantic_core", "annotated_types", "typing_inspection", "typer", "rich", "gguf",
    "nanobind", "aiofiles", "zeroinfer", "editable",
)  # fmt: skip


def make_bare_python(folder: Path) -> Path:
    """Make an environment of links to what is installed here, but for `LACKING`; its python."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    (target,) = folder.glob("lib/python3*/site-packages")
    for entry in Path(torch.__file__).parents[1].iterdir():
        if not _is_lacking(entry.name):
            (target / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def _is_lacking(entry: str) -> bool:
    """Whether a module, its metadata or its path file belongs to a package that is left out."""
    name = entry.lower().replace("-", "_").lstrip("_")
    return any(name == lack or name.startswith((f"{lack}.", f"{lack}_")) for lack in LACKING)


def bare_environment() -> dict[str, str]:
    """Return this process's environment without what would bring the packages back."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
