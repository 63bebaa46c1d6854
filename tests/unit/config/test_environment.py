import os

import pytest

from zeroinfer.config import let_idle_threads_sleep


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_idle_threads_sleep_unless_the_user_says_otherwise(monkeypatch, given, expected):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    let_idle_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == expected
