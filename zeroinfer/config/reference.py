"""The list of all keys, and the page that is generated from it."""

import inspect
from collections.abc import Iterator
from typing import NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from zeroinfer.config.settings import Setting
from zeroinfer.config.tree import EngineConfig

__all__ = ["KeyHelp", "describe_config", "find_setting", "render_reference"]

_HEAD = """# Configuration

A file given with `--config` holds any of the keys below, grouped by section; what it leaves out has
its default. `--set section.key=value` overrides one key, and the flags of the command line override
both. Unknown keys and values out of range are refused with the line they stand on. `zeroinfer plan`
prints what every `auto` became.

Sizes are written `5.5GiB`, `512MiB` (powers of 1024) or `8GB` (powers of 1000).

    offload:
      dram: 5.5GiB
      prefetch_depth: auto
    io:
      nvme: ~/zeroinfer

The files `MODEL-MACHINE.yaml` are presets to start from; each begins with what it is for and what
the plan predicts. They are made for `cpu-box` (two cores, 24 GiB), `a6000` (a workstation with 48
GB of GPU and 128 GiB of memory) and `h200` (141 GB and 256 GiB), whose rates stand in
`tools/hardware.py`; `python tools/plan_geometry.py FILE` prints the whole plan. `tiny.yaml` is for
tests, `demo.yaml` holds the settings of `make demo` as a file to start from, and `constraints.txt`
pins what `make install` installs. This page is generated: `make docs`.
"""


class KeyHelp(NamedTuple):
    """One key as a user sees it."""

    key: str
    """Dotted path, such as ``offload.dram``."""
    values: str
    """What is accepted, in words."""
    default: str
    """The default as a user would write it."""
    help: str
    """One paragraph without line breaks."""


def describe_config() -> list[KeyHelp]:
    """List every key in the order of the tree."""
    return [
        KeyHelp(key, setting.describe(), setting.show(info.default), _text_of(info))
        for key, info, setting in _iter_keys()
    ]


def find_setting(key: str) -> Setting | None:
    """Return how the value of a dotted key is read; None if there is no such key."""
    return next((setting for name, _, setting in _iter_keys() if name == key), None)


def render_reference() -> str:
    """Write the page ``configs/README.md``."""
    parts = [_HEAD]
    for section, info in EngineConfig.model_fields.items():
        parts.append(f"\n## {section}\n\n{_text_of(info)}\n")
        parts += [
            f"\n- `{entry.key}`: {entry.values}; default {entry.default}.\n  {entry.help}\n"
            for entry in describe_config()
            if entry.key.startswith(f"{section}.")
        ]
    return "".join(parts)


def _iter_keys() -> Iterator[tuple[str, FieldInfo, Setting]]:
    for section, section_info in EngineConfig.model_fields.items():
        model = section_info.annotation
        assert isinstance(model, type), f"section {section} has no class: {model!r}"
        assert issubclass(model, BaseModel), f"section {section} is no pydantic model: {model!r}"
        for name, info in model.model_fields.items():
            setting = next(entry for entry in info.metadata if isinstance(entry, Setting))
            yield f"{section}.{name}", info, setting


def _text_of(info: FieldInfo) -> str:
    return " ".join(inspect.cleandoc(info.description or "").split())
