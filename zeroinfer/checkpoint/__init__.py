"""Models on disk: finding the folder of a model, and stores made of what cannot be streamed.

What needs the gguf package is imported on first use: streaming a checkpoint in place needs none
of it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from zeroinfer.checkpoint.embedded import prepare_embedded_model
from zeroinfer.checkpoint.kinds import ModelKind, model_kind
from zeroinfer.checkpoint.manifest import Manifest, SourceFile, read_manifest
from zeroinfer.checkpoint.resolve import resolve_model
from zeroinfer.checkpoint.shards import TensorSource
from zeroinfer.checkpoint.store import (
    StoreContent,
    check_store,
    find_store,
    is_store,
    write_store,
)
from zeroinfer.checkpoint.verify import verify_store

if TYPE_CHECKING:
    from zeroinfer.checkpoint.convert import convert_folder, convert_gguf, convert_model

__all__ = [
    "Manifest",
    "ModelKind",
    "SourceFile",
    "StoreContent",
    "TensorSource",
    "check_store",
    "convert_folder",
    "convert_gguf",
    "convert_model",
    "find_store",
    "is_store",
    "model_kind",
    "prepare_embedded_model",
    "read_manifest",
    "resolve_model",
    "verify_store",
    "write_store",
]

_LAZY = {
    "convert_folder": "zeroinfer.checkpoint.convert",
    "convert_gguf": "zeroinfer.checkpoint.convert",
    "convert_model": "zeroinfer.checkpoint.convert",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
