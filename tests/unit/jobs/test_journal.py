import os
from array import array
from pathlib import Path

import pytest

from zeroinfer.errors import ConfigError, StorageError
from zeroinfer.jobs.journal import JournalWriter, check_fingerprint, read_journal, write_all


@pytest.fixture
def journal(tmp_path):
    path = tmp_path / "out.journal"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    yield path, JournalWriter(fd, path)
    os.close(fd)


def write_example(writer):
    writer.write_header({"model": "abc"})
    writer.write_step({0: 10, 1: 11})
    writer.write_step({1: 13, 0: 12})
    writer.write_step({0: 14, 2: 20}, finished=[1])
    writer.write_step({}, waiting_records={2: '{"index":2,"text":"\u00e4"}'})


def test_tokens_and_marks_come_back(journal):
    path, writer = journal
    write_example(writer)
    state = read_journal(path)
    assert state.fingerprint == {"model": "abc"}
    assert state.token_ids == {0: array("I", [10, 12, 14]), 1: array("I", [11, 13])}
    assert state.finished == {1}
    assert state.waiting_records == {2: '{"index":2,"text":"\u00e4"}'}
    assert (state.whole_bytes, state.torn_bytes) == (path.stat().st_size, 0)


def test_rows_that_are_done_are_dropped(journal):
    path, writer = journal
    write_example(writer)
    assert set(read_journal(path, done={1, 2}).token_ids) == {0}


def test_a_step_without_news_writes_nothing(journal):
    path, writer = journal
    writer.write_step({})
    assert path.stat().st_size == 0


def test_a_step_takes_few_bytes(journal):
    path, writer = journal
    writer.write_step(dict.fromkeys(range(16), 30_000))
    before = path.stat().st_size
    writer.write_step(dict.fromkeys(range(16), 30_001))
    assert path.stat().st_size - before < 128


def test_every_cut_leaves_a_true_state(journal, tmp_path):
    path, writer = journal
    write_example(writer)
    data = path.read_bytes()
    whole = {0: [10, 12, 14], 1: [11, 13], 2: [20]}
    cut_path = tmp_path / "cut"
    for length in range(len(data)):
        cut_path.write_bytes(data[:length])
        state = read_journal(cut_path)
        assert state.whole_bytes + state.torn_bytes == length
        assert data[: state.whole_bytes].count(b"\n") == data[:length].count(b"\n")
        for row_idx, tokens in state.token_ids.items():
            assert list(tokens) == whole[row_idx][: len(tokens)]


def test_damage_in_the_middle_ends_the_reading(journal):
    path, writer = journal
    write_example(writer)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b"12", b"99")
    path.write_bytes(b"".join(lines))
    state = read_journal(path)
    assert state.token_ids == {0: array("I", [10]), 1: array("I", [11])}
    assert state.torn_bytes == sum(map(len, lines[2:]))


def test_missing_empty_and_unknown_journals_have_no_fingerprint(tmp_path):
    assert read_journal(tmp_path / "none").fingerprint is None
    (tmp_path / "empty").touch()
    assert read_journal(tmp_path / "empty").fingerprint is None


def test_header_can_be_read_alone(journal):
    path, writer = journal
    write_example(writer)
    state = read_journal(path, is_header_only=True)
    assert (state.fingerprint, state.token_ids) == ({"model": "abc"}, {})


def test_each_difference_is_named():
    earlier = {"model": "a", "input": "x", "seed": 1, "only_earlier": 0}
    now = {"model": "b", "input": "x", "seed": 2, "only_now": 0}
    with pytest.raises(ConfigError) as caught:
        check_fingerprint(earlier, now, journal=Path("out.journal"))
    message = str(caught.value)
    assert "cannot resume from out.journal: model was a, now b; seed was 1, now 2;" in message
    assert "--overwrite" in message
    check_fingerprint(earlier, {"model": "a"}, journal=Path("out.journal"))


def test_full_disk_names_the_file():
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(StorageError, match=r"write of 3 bytes to out failed: No space left"):
            write_all(fd, b"abc", Path("out"))
    finally:
        os.close(fd)


def test_short_writes_are_continued(monkeypatch, tmp_path):
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, bytes(data[:2])))
    path = tmp_path / "out"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    write_all(fd, b"abcde", path)
    os.close(fd)
    assert path.read_bytes() == b"abcde"
