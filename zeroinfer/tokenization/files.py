"""What a model folder says about its tokenizer: special tokens, chat templates, vocabulary files.

Only the small JSON and Jinja files are read here; the vocabulary itself is the backend's business.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroinfer.errors import CheckpointError

__all__ = ["TOKENIZER_JSON", "TokenizerFiles", "read_tokenizer_files"]

TOKENIZER_JSON = "tokenizer.json"
_CONFIG_JSON = "tokenizer_config.json"
_SPECIAL_JSON = "special_tokens_map.json"
_TEMPLATE_JINJA = "chat_template.jinja"
_TEMPLATE_JSON = "chat_template.json"
_TEMPLATE_FOLDER = "additional_chat_templates"
_SLOW_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
)
_SPECIAL_KEYS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """The tokenizer part of a model folder, small files read."""

    folder: Path
    has_tokenizer_json: bool
    has_slow_files: bool
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Key such as `bos_token` -> its text; only those that are set."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Template name -> Jinja source; the usual one is called `default`."""


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read special tokens and chat templates of a folder; nothing of it need exist.

    Raises:
        CheckpointError: a file is there but is not what its name promises.
    """
    config = _read_json(folder / _CONFIG_JSON)
    return TokenizerFiles(
        folder=folder,
        has_tokenizer_json=(folder / TOKENIZER_JSON).is_file(),
        has_slow_files=any((folder / name).is_file() for name in _SLOW_FILES),
        special_tokens=_special_tokens({**_read_json(folder / _SPECIAL_JSON), **config}),
        chat_templates=_chat_templates(folder, config),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON: {error}; fetch the file again") from error
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise CheckpointError(f"{path} holds the wrong JSON: got {kind}, need an object")
    return document


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as text: {error}") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for key in (f"{name}_token" for name in _SPECIAL_KEYS):
        value = config.get(key)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str) and text:
            tokens[key] = text
    return tokens


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Collect templates; files of their own win over the config, which wins over the processor's.

    Source: transformers, tokenization_utils_base.py, the order of its `from_pretrained`.
    """
    from_files = {path.stem: path for path in sorted((folder / _TEMPLATE_FOLDER).glob("*.jinja"))}
    if (folder / _TEMPLATE_JINJA).is_file():
        from_files["default"] = folder / _TEMPLATE_JINJA
    if from_files:
        return {name: _read_text(path) for name, path in from_files.items()}
    for path, document in (
        (folder / _CONFIG_JSON, config),
        (folder / _TEMPLATE_JSON, _read_json(folder / _TEMPLATE_JSON)),
    ):
        if document.get("chat_template") is not None:
            return _named_templates(document["chat_template"], path)
    return {}


def _named_templates(value: Any, path: Path) -> dict[str, str]:
    """Read the three spellings: one string, an object by name, a list of name and template."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    if isinstance(value, dict) and all(
        isinstance(text, str) for pair in value.items() for text in pair
    ):
        return value
    raise CheckpointError(
        f"chat_template in {path} is not understood: got {type(value).__name__}, "
        "need a string or named strings; mend the file or use prompt instead of messages"
    )
