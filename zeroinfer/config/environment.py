"""The process environment: the one place that reads or sets its variables."""

import os

__all__ = ["let_idle_threads_sleep"]


def let_idle_threads_sleep() -> None:
    """Make OpenMP threads sleep at barriers instead of spinning, unless the user chose otherwise.

    A spinning thread takes the time slice of the reader or of whatever else runs: with three other
    busy processes on two cores, a product of 17 million weights took 4-10 times as long. Only
    works before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
