"""Sampling of a row: what the user set, over what the model's generation_config says."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zeroinfer.engine.request import MAX_SEED, SamplingParams
from zeroinfer.errors import ConfigError, RequestError
from zeroinfer.fields import read_bool, read_int, read_number, read_text, wrong_type

__all__ = ["SAMPLING_FIELDS", "describe_sampling", "read_sampling", "resolve_sampling"]

SAMPLING_FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos")
"""Sampling fields that a row may set for itself; the names are those of SamplingParams."""

_FROM_MODEL = {"temperature": read_number, "top_p": read_number, "top_k": read_int}


def _read_stop(name: str, value: object) -> tuple[str, ...]:
    """Return stop strings, given as one string or a list of them."""
    if isinstance(value, str):
        return (read_text(name, value),)
    if not isinstance(value, list):
        raise wrong_type(name, value, "a string or a list of strings")
    return tuple(read_text(f"{name}[{idx}]", item) for idx, item in enumerate(value))


_READERS: dict[str, Callable[[str, object], Any]] = {
    "max_tokens": read_int,
    "temperature": read_number,
    "top_p": read_number,
    "top_k": read_int,
    "seed": read_int,
    "stop": _read_stop,
    "ignore_eos": read_bool,
}


def resolve_sampling(
    generation_config: Mapping[str, Any], *, user: Mapping[str, Any], stop: Sequence[str] = ()
) -> SamplingParams:
    """Join the model's defaults and the user's values.

    Args:
        generation_config: the model's file; its values count only where ``do_sample`` is true,
            otherwise the model is greedy.
        user: SamplingParams fields the user set; None counts as not set.
        stop: stop strings.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """
    values: dict[str, Any] = {}
    try:
        if generation_config.get("do_sample") is True:
            values["temperature"] = 1.0
            for name, read in _FROM_MODEL.items():
                if generation_config.get(name) is not None:
                    values[name] = read(
                        f"{name} of generation_config.json", generation_config[name]
                    )
        values.update({name: value for name, value in user.items() if value is not None})
        return SamplingParams(stop=tuple(stop), **values)
    except RequestError as error:
        raise ConfigError(str(error)) from error


def read_sampling(
    fields: Mapping[str, Any], *, defaults: SamplingParams, row_idx: int
) -> SamplingParams:
    """Apply a row's own sampling fields over the job's.

    Args:
        fields: the line (or the body of an OpenAI line); other keys are not looked at.
        defaults: the job's sampling; its seed is that of row 0.
        row_idx: added to the job's seed where the row has none, so that rows differ and each
            row's seed is known beforehand.

    Raises:
        RequestError: a field has the wrong type or is out of range.
    """
    values: dict[str, Any] = {name: getattr(defaults, name) for name in SAMPLING_FIELDS}
    values["seed"] = (defaults.seed + row_idx) & MAX_SEED
    for name in SAMPLING_FIELDS:
        if fields.get(name) is not None:
            values[name] = _READERS[name](name, fields[name])
    return SamplingParams(**values)


def describe_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Return the values as JSON data, for fingerprints and reports."""
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
        "ignore_eos": sampling.ignore_eos,
    }
