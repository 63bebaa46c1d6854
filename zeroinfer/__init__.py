"""zeroinfer: offline LLM inference with weights streamed from DRAM or NVMe just ahead of use."""

import typing

if typing.TYPE_CHECKING:
    from zeroinfer.engine import SamplingParams
    from zeroinfer.llm import LLM, Answer

__all__ = ["LLM", "Answer", "SamplingParams", "__version__"]

__version__ = "0.1.0"

_LAZY = {
    "LLM": "zeroinfer.llm",
    "Answer": "zeroinfer.llm",
    "SamplingParams": "zeroinfer.engine",
}


def __getattr__(name: str) -> typing.Any:
    """Resolve the public names on first use, so that the command line starts at once."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
