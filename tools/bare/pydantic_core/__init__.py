"""Names that `zeroinfer.config.settings` imports; what is behind them runs in pydantic alone."""

__all__ = ["CoreSchema", "core_schema"]


class CoreSchema:
    pass


core_schema = None
