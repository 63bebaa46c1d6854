"""Closing at the end of a ``with`` block, once for all that own threads, files or memory."""

from types import TracebackType
from typing import Self

__all__ = ["Closing"]


class Closing:
    """Makes a class with an idempotent `close` a context manager that calls it."""

    def close(self) -> None:
        """Give everything back; idempotent."""
        raise AssertionError(f"{type(self).__name__} defines no close")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
