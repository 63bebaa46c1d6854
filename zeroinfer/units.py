"""Sizes: parsing and printing bytes, ceiling division, alignment.

GiB is 2**30 and GB is 10**9, here and everywhere; the two are never mixed.
"""

import re
from fractions import Fraction

from zeroinfer.errors import ConfigError

__all__ = ["GIB", "MIB", "align_down", "align_up", "ceil_div", "format_bytes", "parse_bytes"]

MIB = 1 << 20
GIB = 1 << 30

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": MIB, "gib": GIB, "tib": 1 << 40,
    "k": 1 << 10, "m": MIB, "g": GIB, "t": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Read a size such as ``5.5GiB``, ``512MiB``, ``8GB`` or a plain number of bytes.

    Raises:
        ConfigError: the text is no size.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"size {text!r} is not understood; write it like 5.5GiB, 512MiB or 8GB")
    return int(Fraction(match.group(1)) * unit)


def format_bytes(num_bytes: float) -> str:
    """Print a size in binary units with one decimal, such as ``5.5 GiB``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def ceil_div(numerator: int, denominator: int) -> int:
    """Divide and round up."""
    return -(-numerator // denominator)


def align_up(value: int, alignment: int) -> int:
    """Round up to a multiple of alignment."""
    return ceil_div(value, alignment) * alignment


def align_down(value: int, alignment: int) -> int:
    """Round down to a multiple of alignment."""
    return value // alignment * alignment
