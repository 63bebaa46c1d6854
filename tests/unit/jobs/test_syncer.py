import os
import threading

import pytest

from zeroinfer.errors import StorageError
from zeroinfer.jobs.syncer import Syncer


def test_files_are_synced_in_order(monkeypatch, tmp_path):
    synced, has_synced = [], threading.Event()

    def sync(fd):
        synced.append(fd)
        if len(synced) == 2:
            has_synced.set()

    monkeypatch.setattr(os, "fdatasync", sync)
    syncer = Syncer([(101, tmp_path / "out"), (102, tmp_path / "journal")])
    syncer.start()
    syncer.request()
    assert has_synced.wait(10)
    syncer.close()
    assert synced[:2] == [101, 102]
    assert len(synced) % 2 == 0


def test_close_syncs_what_is_left(monkeypatch, tmp_path):
    synced = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    syncer = Syncer([(101, tmp_path / "out")])
    syncer.start()
    for _ in range(5):
        syncer.request()
    syncer.close()
    assert synced
    assert not syncer._thread.is_alive()


def test_failure_is_raised_at_the_next_call(monkeypatch, tmp_path):
    failed = threading.Event()

    def fail(fd):
        failed.set()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    syncer = Syncer([(101, tmp_path / "out")])
    syncer.start()
    syncer.request()
    assert failed.wait(10)
    with pytest.raises(StorageError, match=r"sync of .*/out failed: Input/output error"):
        syncer.close()
    with pytest.raises(StorageError):
        syncer.request()
