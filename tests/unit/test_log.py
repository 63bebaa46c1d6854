import logging
import uuid

import pytest

from zeroinfer.log import configure_logging, get_logger, warn_once


@pytest.fixture(autouse=True)
def restored_logger():
    root = logging.getLogger("zeroinfer")
    before = (root.handlers[:], root.level, root.propagate)
    yield
    root.handlers[:], root.level, root.propagate = before


def test_records_go_to_standard_error_one_line_each(capsys):
    configure_logging(debug=False)
    get_logger("zeroinfer.sample").info("landed %d bytes", 7)
    get_logger("zeroinfer.sample").debug("not shown")
    captured = capsys.readouterr()
    assert captured.err == "INFO zeroinfer.sample: landed 7 bytes\n"
    assert not captured.out


def test_debug_shows_more(capsys):
    configure_logging(debug=True)
    get_logger("zeroinfer.sample").debug("shown")
    assert "DEBUG zeroinfer.sample: shown" in capsys.readouterr().err


def test_configuring_twice_does_not_double_records(capsys):
    configure_logging(debug=False)
    configure_logging(debug=False)
    get_logger("zeroinfer.sample").info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_warn_once(capsys):
    configure_logging(debug=False)
    first, second = f"first 100% {uuid.uuid4()}", f"second {uuid.uuid4()}"
    for text in (first, first, second):
        warn_once(get_logger("zeroinfer.sample"), text)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"WARNING zeroinfer.sample: {text}" for text in (first, second)]
