import errno
import io
import sys
from functools import partial

import pytest

from zeroinfer.cli.console import Output, StatusLine, byte_progress, format_seconds
from zeroinfer.errors import StorageError


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_one_live_line(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    status = StatusLine()
    status.show(lambda: "a long text")
    status.show(lambda: "short", is_last=True)
    status.close()
    status.close()
    assert terminal.getvalue() == "\ra long text\rshort      \n"


def test_a_log_gets_few_lines_and_none_twice(capsys):
    status = StatusLine()
    for text in ("first", "dropped"):
        status.show(lambda text=text: text)
    status.show(lambda: "last", is_last=True)
    status.show(lambda: "last", is_last=True)
    status.close()
    assert capsys.readouterr().err == "first\nlast\n"


def test_bytes_are_shown_with_their_share(capsys):
    with byte_progress("converting:") as advance:
        advance(1 << 20, 4 << 20)
        advance(4 << 20, 4 << 20)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "converting: 1.0 MiB of 4.0 MiB (25 %)", "converting: 4.0 MiB of 4.0 MiB (100 %)"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.123, "0.12 s"), (75, "1:15"), (3600, "1:00:00"), (4000.4, "1:06:40")],
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize("is_json", [False, True])
def test_a_full_standard_output_is_a_storage_error(monkeypatch, is_json):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    output = Output(is_json=is_json)
    show = partial(output.event, "store", {}) if is_json else partial(output.text, "a store")
    with pytest.raises(StorageError, match="standard output failed: No space left on device"):
        show()
