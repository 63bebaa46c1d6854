"""From a YAML file and overrides to a checked EngineConfig.

Every error of YAML and of pydantic becomes a ConfigError here and nowhere else. YAML is composed by
hand rather than loaded at once, so that each key keeps its line and a key written twice is seen.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from zeroinfer.config.reference import describe_config, find_setting
from zeroinfer.config.tree import EngineConfig
from zeroinfer.errors import ConfigError

__all__ = ["load_config"]

_CONSTRUCTOR_FAULTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What the makers of numbers, dates and other tagged values raise: they check nothing before."""


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> EngineConfig:
    """Read a config file, apply overrides and check the whole.

    Args:
        path: YAML file; None starts from the defaults.
        overrides: ``section.key=value`` each, applied in order; values are read as YAML, paths and
            texts as they are typed.

    Raises:
        ConfigError: the file cannot be read or is no YAML, a key is unknown or a value refused.
    """
    draft = _Draft() if path is None else _read_file(path)
    for override in overrides:
        _apply_override(draft, override)
    return draft.check()


def make_config(
    start: EngineConfig | Mapping[str, Any] | str | Path | None = None,
    values: Mapping[str, Any] | None = None,
) -> EngineConfig:
    """Set keys of a config by their dotted names and check the whole; for callers in Python.

    Args:
        start: a config, the tree of one (section -> key -> value), a YAML file, or None for the
            defaults.
        values: dotted key -> value in its own type, not as text.

    Raises:
        ConfigError: the file cannot be read or is no YAML, a key is unknown or a value refused.
    """
    draft = _draft_of(start)
    for key, value in (values or {}).items():
        if find_setting(key) is None:
            raise ConfigError(_unknown(key, ""))
        draft.put(key, value)
    return draft.check()


def _draft_of(start: EngineConfig | Mapping[str, Any] | str | Path | None) -> "_Draft":
    if isinstance(start, str | Path):
        return _read_file(Path(start))
    if isinstance(start, EngineConfig):
        return _Draft(tree=start.model_dump(exclude_unset=True))
    # Sections are copied: what is set must not reach the caller's own mapping.
    sections = _sections(start).items()
    return _Draft(tree={k: dict(v) if isinstance(v, Mapping) else v for k, v in sections})


def _sections(start: object) -> Mapping[str, Any]:
    if start is None or isinstance(start, Mapping):
        return start or {}
    raise ConfigError(
        f"config has the wrong type: got {type(start).__name__}, need an EngineConfig, sections "
        "with their keys, or the path of a YAML file"
    )


@dataclass(kw_only=True, slots=True)
class _Draft:
    """Values not yet checked, with the place of each key in its file."""

    tree: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    """Dotted key -> ``path:line``; a key that an override gave has none."""

    def where(self, key: str) -> str:
        """Return `` in path:line`` or nothing."""
        return f" in {self.places[key]}" if key in self.places else ""

    def put(self, key: str, value: Any) -> None:
        """Set a known key; a section that is no mapping stays, for `check` to refuse."""
        section, _, name = key.partition(".")
        branch = self.tree.setdefault(section, {})
        if isinstance(branch, dict):
            branch[name] = value
            self.places.pop(key, None)

    def check(self) -> EngineConfig:
        """Return the config.

        Raises:
            ConfigError: a key is unknown or a value refused.
        """
        try:
            return EngineConfig.model_validate(self.tree)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ConfigError(_explain(first, self)) from error


def _read_file(path: Path) -> _Draft:
    draft = _Draft()
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if root is not None:
            draft.tree = _read_mapping(root, loader=loader, prefix="", path=path, draft=draft)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"config file {path} cannot be read: {reason}; check --config") from error
    except yaml.YAMLError as error:
        raise ConfigError(_explain_yaml(error, str(path))) from error
    except RecursionError as error:
        raise ConfigError(
            f"{path} is nested beyond reason: need sections with their keys; mend it"
        ) from error
    return draft


def _read_mapping(
    node: yaml.Node, *, loader: yaml.SafeLoader, prefix: str, path: Path, draft: _Draft
) -> dict[str, Any]:
    if not isinstance(node, yaml.MappingNode):
        place = f"{path}:{node.start_mark.line + 1}"
        raise ConfigError(f"{place} holds {_text(node)}, need keys with values, such as model:")
    tree: dict[str, Any] = {}
    for key_node, value_node in node.value:
        name = _text(key_node)
        key = f"{prefix}{name}"
        place = f"{path}:{key_node.start_mark.line + 1}"
        if name in tree:
            raise ConfigError(f"key {key} is set twice: {draft.places[key]} and {place}; keep one")
        draft.places[key] = place
        if isinstance(value_node, yaml.MappingNode) and not prefix:
            tree[name] = _read_mapping(
                value_node, loader=loader, prefix=f"{key}.", path=path, draft=draft
            )
        else:
            tree[name] = _construct(loader, value_node, place)
    if not prefix:
        _drop_empty_sections(tree)
    return tree


def _construct(loader: yaml.SafeLoader, node: yaml.Node, place: str) -> Any:
    try:
        return loader.construct_object(node, deep=True)
    except _CONSTRUCTOR_FAULTS as error:
        raise ConfigError(f"{place} holds a value that cannot be read: {error}; mend it") from error


def _drop_empty_sections(tree: dict[str, Any]) -> None:
    """Let a section whose keys are all commented out mean its defaults."""
    for name in EngineConfig.model_fields:
        if name in tree and tree[name] is None:
            del tree[name]


def _apply_override(draft: _Draft, override: str) -> None:
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator:
        raise ConfigError(f"override {override!r} has no '=': need section.key=value")
    setting = find_setting(key)
    if setting is None:
        if key in EngineConfig.model_fields:
            example = _keys_under(key)[0]
            raise ConfigError(f"{key} is a section: got {text!r}, need a key such as {example}")
        raise ConfigError(_unknown(key, ""))
    try:
        value = setting.parse_text(text)
    except yaml.YAMLError as error:
        raise ConfigError(_explain_yaml(error, override)) from error
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    except (*_CONSTRUCTOR_FAULTS, RecursionError) as error:
        raise ConfigError(
            f"{key}: got {text!r:.80}, which YAML cannot read ({error}); write a plain value"
        ) from error
    draft.put(key, value)


def _explain(error: Mapping[str, Any], draft: _Draft) -> str:
    key = ".".join(map(str, error["loc"]))
    where = draft.where(key)
    if error["type"] == "extra_forbidden":
        return _unknown(key, where)
    if error["type"] == "model_type":
        need = f"need keys under it, such as {_keys_under(key)[0]}"
        return f"{key}{where}: got {error['input']!r}, {need}"
    cause = error.get("ctx", {}).get("error", error["msg"])
    return f"{key}{where}: {cause}"


def _unknown(key: str, where: str) -> str:
    """Name the nearest key: first beside the wrong one, then anywhere in the tree."""
    section, _, name = key.rpartition(".")
    siblings = [k.rpartition(".")[2] for k in _keys_under(section)] if section else []
    siblings = siblings or list(EngineConfig.model_fields)
    everywhere = {k.rpartition(".")[2]: k for k in _keys_under("")}
    near = difflib.get_close_matches(name, siblings, n=1)
    near = near or [everywhere[k] for k in difflib.get_close_matches(name, everywhere, n=1)]
    advice = f"did you mean {near[0]}?" if near else f"need one of {', '.join(siblings)}"
    return f"unknown key {key}{where}; {advice}"


def _keys_under(section: str) -> list[str]:
    prefix = f"{section}." if section else ""
    return [entry.key for entry in describe_config() if entry.key.startswith(prefix)]


def _explain_yaml(error: yaml.YAMLError, source: str) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"{source}:{mark.line + 1}" if mark is not None else source
    problem = getattr(error, "problem", None) or "unreadable"
    return f"{place} is not valid YAML: {problem}; check the indentation and quotes there"


def _text(node: yaml.Node) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else "a list or mapping"
