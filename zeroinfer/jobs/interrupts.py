"""Signals of a job: the first asks it to stop, the second ends it at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["stop_on_signals"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals(
    request_stop: Callable[[], None], end_now: Callable[[], None]
) -> Iterator[None]:
    """Handle Ctrl-C and SIGTERM while the body runs; main thread only.

    Args:
        request_stop: called at the first signal; must be safe inside a handler.
        end_now: called at every later one; should not return.
    """
    num_signals = 0

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        del signum, frame
        num_signals += 1
        (request_stop if num_signals == 1 else end_now)()

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
