"""The sampling of a job: what the user set, over what the model's generation_config says."""

from collections.abc import Mapping, Sequence
from typing import Any

from zeroinfer.engine import SamplingParams
from zeroinfer.errors import ConfigError, RequestError
from zeroinfer.jobs.fields import read_int, read_number

__all__ = ["describe_sampling", "resolve_sampling"]

_FROM_MODEL = {"temperature": read_number, "top_p": read_number, "top_k": read_int}


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
