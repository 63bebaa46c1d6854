"""How the value of one key is read, refused, printed and described.

A setting sits in the annotation of its field, so that pydantic checks with it and the reference is
written from it. Messages leave out the key; the loader puts it in front. Spellings that YAML turns
into something else (``on``, ``off``, ``~/dir``) are read as they were typed.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import yaml
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from zeroinfer.units import GIB, MIB, parse_bytes

__all__ = ["Choice", "Flag", "Folders", "Integer", "Setting", "Size", "Text"]

_YAML_SWITCHES = {True: "on", False: "off"}


class Setting(abc.ABC):
    """Reads one kind of value; immutable, used from any thread."""

    @abc.abstractmethod
    def parse(self, value: object) -> Any:
        """Check a value that YAML or a caller gave and return it in its final type.

        Raises:
            ValueError: the value is refused; the message says what is needed.
        """

    @abc.abstractmethod
    def describe(self) -> str:
        """Say in a few words which values are accepted."""

    def parse_text(self, text: str) -> Any:
        """Read what stands after ``=`` in an override; the same errors as `parse`."""
        return self.parse(yaml.safe_load(text))

    def show(self, value: object) -> str:
        """Print a value in the form in which a user would write it."""
        return "none" if value is None else str(value)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Let pydantic call `parse` and nothing else."""
        return core_schema.no_info_plain_validator_function(self.parse)


@dataclass(frozen=True, slots=True)
class Choice(Setting):
    """One of a few names; names that a later version brings are refused with their reason."""

    names: tuple[str, ...]
    not_built: Mapping[str, str] = field(default_factory=dict)
    """Name -> why it is refused and what to use instead."""

    def parse(self, value: object) -> str:
        """Return the name; a YAML truth value counts as on or off."""
        name = _YAML_SWITCHES[value] if isinstance(value, bool) else value
        if isinstance(name, str) and name in self.names:
            return name
        if isinstance(name, str) and name in self.not_built:
            raise ValueError(f"{name} is not available: {self.not_built[name]}")
        raise ValueError(f"got {name!r}, need {self.describe()}")

    def describe(self) -> str:
        """List the names."""
        return _join_or(self.names)


@dataclass(frozen=True, kw_only=True, slots=True)
class Integer(Setting):
    """A whole number from `minimum` up to `maximum`, if there is one, or ``auto``."""

    minimum: int
    maximum: int | None = None
    has_auto: bool = True

    def parse(self, value: object) -> int | str:
        """Return the number, or ``auto``."""
        if self.has_auto and value == "auto":
            return "auto"
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            and self.minimum <= value
            and (self.maximum is None or value <= self.maximum)
        ):
            return value
        raise ValueError(f"got {value!r}, need {self.describe()}")

    def describe(self) -> str:
        """Name the range."""
        above = " or more" if self.maximum is None else f" to {self.maximum}"
        number = f"a whole number, {self.minimum}{above}"
        return f"auto or {number}" if self.has_auto else number


@dataclass(frozen=True, kw_only=True, slots=True)
class Size(Setting):
    """A number of bytes written like 5.5GiB, perhaps ``auto``, perhaps left out."""

    minimum_bytes: int = 1
    multiple_of_bytes: int = 1
    has_auto: bool = False
    is_optional: bool = False

    def parse(self, value: object) -> int | str | None:
        """Return bytes, ``auto`` or None."""
        if (self.has_auto and value == "auto") or (self.is_optional and value is None):
            return value if isinstance(value, str) else None
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(f"got {value!r}, need {self.describe()}")
        num_bytes = parse_bytes(value)
        if num_bytes < self.minimum_bytes or num_bytes % self.multiple_of_bytes:
            raise ValueError(f"got {value}, need {self.describe()}")
        return num_bytes

    def describe(self) -> str:
        """Name the form and the range."""
        words = "a size such as 5.5GiB"
        if self.multiple_of_bytes > 1:
            words += f", in steps of {_show_bytes(self.multiple_of_bytes)}"
        if self.minimum_bytes > 1:
            words += f", at least {_show_bytes(self.minimum_bytes)}"
        return f"auto or {words}" if self.has_auto else words

    def show(self, value: object) -> str:
        """Print bytes in the largest unit that divides them."""
        return _show_bytes(value) if isinstance(value, int) else Setting.show(self, value)


@dataclass(frozen=True, slots=True)
class Flag(Setting):
    """true or false."""

    def parse(self, value: object) -> bool:
        """Return the truth value; numbers and other words are refused."""
        if isinstance(value, bool):
            return value
        raise ValueError(f"got {value!r}, need {self.describe()}")

    def describe(self) -> str:
        """Name both."""
        return "true or false"

    def show(self, value: object) -> str:
        """Print YAML's spelling."""
        return str(value).lower()


@dataclass(frozen=True, slots=True)
class Text(Setting):
    """Any text, taken as it is typed."""

    def parse(self, value: object) -> str:
        """Return the text."""
        if isinstance(value, str):
            return value
        raise ValueError(f"got {value!r}, need {self.describe()}; put it in quotes")

    def parse_text(self, text: str) -> str:
        """Return the text; a folder may well be called 123 or null."""
        return text

    def describe(self) -> str:
        """Say text."""
        return "text"

    def show(self, value: object) -> str:
        """Print the text, or quotes if there is none."""
        return str(value) or '""'


@dataclass(frozen=True, slots=True)
class Folders(Setting):
    """One folder or a list of them; ``~`` is the home folder."""

    def parse(self, value: object) -> tuple[Path, ...]:
        """Return the paths in order; they need not exist yet."""
        entries = value if isinstance(value, list | tuple) else [value]
        try:
            paths = [Path(e).expanduser() for e in entries if _is_path(e)]
        except RuntimeError as error:
            raise ValueError(f"got {value!r}, a home folder nobody has; write it out") from error
        if len(paths) < len(entries):
            raise ValueError(f"got {value!r}, need {self.describe()}")
        return tuple(paths)

    def parse_text(self, text: str) -> tuple[Path, ...]:
        """Read a YAML list where the text starts with a bracket, else one path as typed."""
        return self.parse(yaml.safe_load(text) if text.startswith("[") else text)

    def describe(self) -> str:
        """Name both forms."""
        return "a folder or a list of folders"

    def show(self, value: object) -> str:
        """Print the list."""
        return ", ".join(map(str, value)) if isinstance(value, tuple) and value else "none"


def _is_path(value: object) -> TypeGuard[str | Path]:
    return isinstance(value, str | Path) and bool(str(value)) and "\0" not in str(value)


def _show_bytes(num_bytes: int) -> str:
    units = (("GiB", GIB), ("MiB", MIB), ("KiB", 1024))
    for name, unit in units:
        if num_bytes % unit == 0:
            return f"{num_bytes // unit}{name}"
    return str(num_bytes)


def _join_or(names: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
