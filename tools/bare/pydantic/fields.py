"""What `zeroinfer.config` knows of a field."""

from dataclasses import dataclass
from typing import Any

__all__ = ["FieldInfo"]


@dataclass(frozen=True, kw_only=True)
class FieldInfo:
    annotation: Any
    default: Any
    metadata: tuple[Any, ...]
    description: str = ""
