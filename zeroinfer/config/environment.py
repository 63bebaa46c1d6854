"""The process environment: the one place that reads or sets its variables."""

import os
from pathlib import Path

__all__ = ["default_nvme_folder", "let_idle_threads_sleep"]


def default_nvme_folder() -> Path:
    """Return the folder that takes our files where the user named none."""
    return Path.home() / ".cache" / "zeroinfer"


def let_idle_threads_sleep() -> None:
    """Let OpenMP threads spin at a barrier for microseconds, then sleep, unless the user chose.

    A thread that spins on, as is the default, takes the time slice of the reader or of whatever
    else runs: with three other busy processes on two cores, a product of 17 million weights took
    4-10 times as long. One that sleeps at once is woken late: 8 rows of SmolLM2 took 15 s where a
    short spin took 10. Only works before torch is imported, and with GNU OpenMP.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
