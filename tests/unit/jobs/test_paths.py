import hashlib
import os

import pytest

from zeroinfer.errors import ConfigError, StorageError
from zeroinfer.jobs import OutputMode, check_output, is_stream, journal_path, refuse_same_file
from zeroinfer.jobs.paths import open_locked


@pytest.fixture
def job_input(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n')
    return path


def make_same(tmp_path, job_input):
    return job_input


def make_symlink(tmp_path, job_input):
    (tmp_path / "link").symlink_to(job_input)
    return tmp_path / "link"


def make_hard_link(tmp_path, job_input):
    os.link(job_input, tmp_path / "hard")
    return tmp_path / "hard"


def make_relative(tmp_path, job_input):
    return tmp_path / ".." / tmp_path.name / job_input.name


@pytest.mark.parametrize("mode", list(OutputMode))
@pytest.mark.parametrize("make", [make_same, make_symlink, make_hard_link, make_relative])
def test_output_that_is_the_input_is_refused(tmp_path, job_input, make, mode):
    """Source: vllm-project/vllm#52505."""
    before = hashlib.sha256(job_input.read_bytes()).digest()
    output = make(tmp_path, job_input)
    with pytest.raises(ConfigError, match="is the input"):
        check_output(str(output), input_path=str(job_input), mode=mode)
    assert hashlib.sha256(job_input.read_bytes()).digest() == before


def test_journal_that_is_the_input_is_refused(tmp_path):
    job_input = tmp_path / "a.journal"
    job_input.touch()
    with pytest.raises(ConfigError, match=r"journal of the output .* is the input"):
        check_output(str(tmp_path / "a"), input_path=str(job_input), mode=OutputMode.NEW)


def test_redirected_standard_input_counts(monkeypatch, job_input):
    with job_input.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        with pytest.raises(ConfigError, match="is the input - itself"):
            check_output(str(job_input), input_path="-", mode=OutputMode.OVERWRITE)


def test_existing_output_needs_a_word(tmp_path, job_input):
    output = tmp_path / "out"
    output.write_text("old")
    with pytest.raises(ConfigError, match=r"out exists; use --resume to go on with it or --over"):
        check_output(str(output), input_path=str(job_input), mode=OutputMode.NEW)
    assert output.read_text() == "old"
    for mode in (OutputMode.RESUME, OutputMode.OVERWRITE):
        assert check_output(str(output), input_path=str(job_input), mode=mode) == output


def test_folder_as_output(tmp_path):
    with pytest.raises(StorageError, match="is a folder; name a file"):
        check_output(str(tmp_path), input_path=None, mode=OutputMode.NEW)
    with pytest.raises(StorageError, match="output / is a folder; name a file"):
        check_output("/", input_path="in.jsonl", mode=OutputMode.NEW)


def test_output_that_cannot_be_looked_at(tmp_path):
    with pytest.raises(StorageError, match="cannot be looked at: File name too long"):
        check_output(str(tmp_path / ("x" * 300)), input_path=None, mode=OutputMode.NEW)


def test_output_in_a_missing_folder(tmp_path):
    with pytest.raises(StorageError, match=r"folder .*/none does not exist; create it"):
        check_output(str(tmp_path / "none" / "out"), input_path=None, mode=OutputMode.NEW)


def test_two_names_of_one_output_share_a_journal(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "out")
    path = check_output(str(tmp_path / "link"), input_path=None, mode=OutputMode.NEW)
    assert journal_path(path) == tmp_path / "out.journal"


def test_devices_are_streams(tmp_path):
    path = check_output("/dev/null", input_path=None, mode=OutputMode.NEW)
    assert is_stream(path)
    assert not is_stream(tmp_path / "none")


def test_reports_are_checked_too(job_input):
    with pytest.raises(ConfigError, match=r"report .* is the input"):
        refuse_same_file("report", job_input, "input", str(job_input))


def test_a_locked_journal_is_refused(tmp_path):
    path = tmp_path / "out.journal"
    fd = open_locked(path)
    try:
        with pytest.raises(ConfigError, match=r"another run is writing .*out\.journal"):
            open_locked(path)
    finally:
        os.close(fd)
    os.close(open_locked(path))


def test_journal_in_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "out.journal").mkdir()
    with pytest.raises(StorageError, match=r"journal .* cannot be written: Is a directory"):
        open_locked(tmp_path / "out.journal")
