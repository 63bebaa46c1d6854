"""The compiled extension, or why there is none; the only import of it.

Everything it does has a fall-back in Python or torch, since zeroinfer installs without a compiler.
"""

import importlib
from types import ModuleType

__all__ = ["extension", "extension_error", "has_fused_kernels"]

_NAME = "zeroinfer._C"


def _load() -> tuple[ModuleType | None, str | None]:
    try:
        return importlib.import_module(_NAME), None
    except ModuleNotFoundError as error:
        if error.name != _NAME:
            return None, f"{_NAME} cannot be loaded: {error}"
        return None, (
            f"{_NAME} is missing, since zeroinfer was installed without a C and C++ compiler or "
            "its build failed; install gcc and g++ and then zeroinfer again"
        )
    except ImportError as error:
        return None, f"{_NAME} cannot be loaded: {error}; install zeroinfer again"


extension, extension_error = _load()


def has_fused_kernels() -> bool:
    """Whether the compiled kernels are here and fast on this CPU."""
    return extension is not None and bool(extension.kernels_are_fast())
