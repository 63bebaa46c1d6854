"""What holds for every test: seeds, thread count, no network, skip rules.

The environment is set before torch is imported, and child processes inherit it.
"""

import os
import random
import sys

import pytest

# Thread count belongs to the compute grid, so it must not follow the machine.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tests.helpers.skips import pytest_make_collect_report, pytest_runtest_makereport

__all__ = ["pytest_make_collect_report", "pytest_runtest_makereport"]


@pytest.fixture(autouse=True)
def seeded():
    """Seed every generator that is loaded; torch is not loaded for the sake of it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def same_num_threads():
    """Put torch's thread count back, whatever a test set it to."""
    before = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    yield
    if before is not None:
        sys.modules["torch"].set_num_threads(before)


def pytest_runtest_setup(item):
    """Skip what needs a device or a kernel interface that this machine lacks."""
    if item.get_closest_marker("gpu") and not _has_gpu():
        pytest.skip("no CUDA device")


def _has_gpu() -> bool:
    import torch  # noqa: PLC0415 - heavy, and only tests that need a device ask

    return torch.cuda.is_available()
