import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroinfer.errors import ConfigError
from zeroinfer.units import GIB, MIB, align_down, align_up, ceil_div, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("5.5GiB", 11 * GIB // 2),
        ("512MiB", 512 * MIB),
        ("8GB", 8 * 10**9),
        (" 1.5 kb ", 1500),
        ("4k", 4096),
        ("2T", 2 << 40),
        ("17", 17),
        ("17B", 17),
        ("0.3KiB", 307),
        ("9007199254740993", 2**53 + 1),
        (123, 123),
    ],
)
def test_parse(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "x", "-1GiB", "5.5.5GiB", "5 GiBs", "1e9", "GiB", "nan", ".5G"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="is not understood; write it like"):
        parse_bytes(text)


def test_huge_number_does_not_overflow():
    assert parse_bytes("9" * 400) == int("9" * 400)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5.5 * GIB, "5.5 GiB"),
        (2048 * GIB, "2.0 TiB"),
        (10**18, "909494.7 TiB"),
        (-3 * MIB, "-3.0 MiB"),
    ],
)
def test_format(num_bytes, text):
    assert format_bytes(num_bytes) == text


@given(st.integers(0, 1 << 50))
def test_printed_sizes_are_read_back(num_bytes):
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= 0.051 * max(num_bytes, 1)


@given(st.integers(0, 1 << 60), st.integers(1, 1 << 30))
def test_rounding(value, alignment):
    up, down = align_up(value, alignment), align_down(value, alignment)
    assert up % alignment == down % alignment == 0
    assert down <= value <= up < down + 2 * alignment
    assert ceil_div(value, alignment) * alignment == up
    assert (up == down) == (value % alignment == 0)
