"""One logger for the package; warnings that are said once."""

import functools
import logging
import sys

__all__ = ["configure_logging", "get_logger", "warn_once"]


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass ``__name__``."""
    return logging.getLogger(name)


def configure_logging(*, debug: bool) -> None:
    """Send the package's records to standard error, one line each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("zeroinfer")
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if debug else logging.INFO)
    root.propagate = False


@functools.cache
def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a warning the first time this text is seen in the process."""
    logger.warning("%s", message)
