"""The garbage collector, kept out of a test: what refers to itself then stays for good."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Collect what there is, then collect nothing until the end of the block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
