"""Which token ids end a text."""

from collections.abc import Mapping
from typing import Any, Protocol

from zeroinfer.errors import CheckpointError

__all__ = ["eos_token_ids"]

_KEY = "eos_token_id"


class HasEosTokenId(Protocol):
    """The part of a tokenizer needed here."""

    eos_token_id: int | None


def eos_token_ids(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    tokenizer: HasEosTokenId | None,
) -> frozenset[int]:
    """Return the end ids: of generation_config, else of config, else of the tokenizer.

    The first that names any is the only one asked, as in transformers; chat models list all their
    end ids in generation_config while config keeps the base model's.

    Args:
        config: the model's config.json.
        generation_config: its generation_config.json; empty when the folder has none.
        tokenizer: None when the folder has none.

    Raises:
        CheckpointError: the entry is neither an id nor a list of ids.
    """
    nested = config.get("text_config")
    sources = [("generation_config.json", generation_config), ("config.json", config)]
    if isinstance(nested, Mapping):
        sources.append(("config.json, text_config", nested))
    for name, source in sources:
        ids = _read_ids(source.get(_KEY), name)
        if ids:
            return ids
    eos_token_id = tokenizer.eos_token_id if tokenizer is not None else None
    return frozenset() if eos_token_id is None else frozenset({eos_token_id})


def _read_ids(value: Any, source: str) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise CheckpointError(
                f"{_KEY} of {source} is wrong: got {value!r}, need a token id or a list of them; "
                "mend the file"
            )
    return frozenset(ids)
