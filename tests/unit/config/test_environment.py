import os

import pytest

from zeroinfer.config import let_idle_threads_sleep


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_idle_threads_sleep_soon_unless_the_user_says_otherwise(monkeypatch, given, expected):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    let_idle_threads_sleep()
    assert os.environ.get("GOMP_SPINCOUNT") == expected
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
