"""Which reader a setting becomes, and what is said when it cannot be had."""

import pytest

from zeroinfer.errors import BackendUnavailableError
from zeroinfer.log import warn_once
from zeroinfer.native import (
    ThreadReader,
    UringReader,
    open_reader,
    reader_choice,
    resolve_reader,
    uring_error,
    uring_reader,
)

CELL = {"io_chunk_bytes": 4096, "queue_depth": 1}
REASON = "zeroinfer._C is missing; install gcc and g++"


@pytest.fixture
def no_extension(monkeypatch):
    monkeypatch.setattr(uring_reader, "extension", None)
    monkeypatch.setattr(uring_reader, "extension_error", REASON)
    warn_once.cache_clear()


@pytest.fixture(params=[("threads", "io_uring"), ("io_uring", "threads")], ids="-".join)
def preference(request, monkeypatch):
    """Either order of the readers, whichever measured better."""
    monkeypatch.setattr(reader_choice, "_PREFERENCE", request.param)
    return request.param


def test_auto_takes_the_best_reader_that_is_available(preference, monkeypatch, caplog):
    monkeypatch.setattr(reader_choice, "uring_error", lambda: None)
    assert resolve_reader("auto") == preference[0]
    assert caplog.records == []


def test_auto_passes_over_a_better_reader_with_one_line(preference, no_extension, caplog):
    # Source: DeepSpeed#1037.
    for _ in range(3):
        with open_reader("auto", **CELL) as reader:
            assert isinstance(reader, ThreadReader)
    lines = [record.getMessage() for record in caplog.records]
    is_better = preference[0] == "io_uring"
    assert lines == [f"--reader auto passes over io_uring: {REASON}"] * is_better


def test_threads_by_name_need_nothing(preference, no_extension, caplog):
    with open_reader("threads", **CELL) as reader:
        assert isinstance(reader, ThreadReader)
    assert caplog.records == []


def test_io_uring_by_name_is_never_replaced(preference, no_extension):
    # Source: DeepSpeed#1037.
    for ask in (resolve_reader, lambda name: open_reader(name, **CELL)):
        with pytest.raises(BackendUnavailableError) as caught:
            ask("io_uring")
        assert str(caught.value) == (
            f"the reader io_uring is not available: {REASON}; or use --reader threads"
        )


@pytest.mark.io_uring
@pytest.mark.skipif(uring_error() is not None, reason=f"no io_uring: {uring_error()}")
def test_io_uring_by_name_opens_it():
    with open_reader("io_uring", **CELL) as reader:
        assert isinstance(reader, UringReader)
