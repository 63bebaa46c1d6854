"""One file per architecture, and the registry."""

from zeroinfer.models.base import Binding, Model, Stage, bind
from zeroinfer.models.hf_config import config_dtype
from zeroinfer.models.registry import MODEL_TYPES, build_model

__all__ = ["MODEL_TYPES", "Binding", "Model", "Stage", "bind", "build_model", "config_dtype"]
