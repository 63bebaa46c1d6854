"""Models on disk: finding the folder of a model."""

from zeroinfer.checkpoint.resolve import resolve_model

__all__ = ["resolve_model"]
