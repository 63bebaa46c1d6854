"""Reading Hugging Face config.json: keys checked, both spellings of rope and dtype understood."""

from collections.abc import Mapping
from typing import Any

from zeroinfer.dtypes import DType
from zeroinfer.errors import CheckpointError, ConfigError, UnsupportedModelError
from zeroinfer.layers import RopeConfig
from zeroinfer.log import get_logger

__all__ = [
    "config_dtype",
    "divide_heads",
    "get_eps",
    "get_int",
    "get_value",
    "layer_windows",
    "refuse_unless",
    "rope_config",
    "sliding_window",
]

_logger = get_logger(__name__)

_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")
"""What older releases wrote beside `rope_scaling`, not inside."""
_MAY_BE_ZERO = ("mscale", "mscale_all_dim")
"""Zero means as much as not given."""
_LARGEST = 1e15
"""More than any config says, and small enough to compute with."""


def get_value(config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """Return the first of these keys that is present and not null.

    Raises:
        CheckpointError: none is, and there is no default.
    """
    for name in names:
        if config.get(name) is not None:
            return config[name]
    if default is None:
        raise CheckpointError(f"config.json lacks {names[0]!r}; fetch the model's config again")
    return default


def get_int(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Return a positive integer.

    Raises:
        CheckpointError: the key is missing, or its value is no positive integer.
    """
    value = get_value(config, *names, default=default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {names[0]} is {value!r}, need a positive integer")
    return value


def get_eps(config: Mapping[str, Any], name: str, *, default: float) -> float:
    """Return the small positive number that a norm adds.

    Raises:
        CheckpointError: the value is no positive number.
    """
    return _positive(name, get_value(config, name, default=default))


def divide_heads(hidden_size: int, num_heads: int) -> int:
    """Return the columns of one head.

    Raises:
        CheckpointError: the heads do not divide the hidden size.
    """
    if hidden_size % num_heads:
        raise CheckpointError(
            f"config.json: hidden size {hidden_size} is no multiple of its {num_heads} heads"
        )
    return hidden_size // num_heads


def sliding_window(config: Mapping[str, Any], *, default: int | None = None) -> int | None:
    """Return how many tokens a query sees; None, also written as null, is all of them.

    Raises:
        CheckpointError: the value is no positive integer.
    """
    if config.get("sliding_window", default) is None:
        return None
    return get_int(config, "sliding_window", default=default)


def layer_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the window of each layer as Qwen writes it, None where a layer sees everything.

    `layer_types` says it layer by layer; older configs say `use_sliding_window`, and from which
    layer on: `max_window_layers`.

    Raises:
        CheckpointError: the keys contradict each other.
        UnsupportedModelError: a layer is of another type.
    """
    num_layers = get_int(config, "num_hidden_layers")
    is_on = bool(config.get("use_sliding_window", False))
    window = sliding_window(config, default=4096) if is_on else None
    types = config.get("layer_types")
    if types is None:
        is_first = config.get("max_window_layers") == 0
        first = 0 if is_first else get_int(config, "max_window_layers", default=28)
        return tuple(window if idx >= first else None for idx in range(num_layers))
    if not isinstance(types, list):
        raise CheckpointError(f"config.json: layer_types is {types!r:.80}, need a list")
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"config.json: layer_types holds {name!r}, only 'full_attention' or "
                "'sliding_attention' is supported"
            )
    if len(types) != num_layers:
        raise CheckpointError(
            f"config.json: layer_types names {len(types)} layers, num_hidden_layers is {num_layers}"
        )
    if window is None and "sliding_attention" in types:
        raise CheckpointError(
            "config.json: layer_types holds 'sliding_attention', but use_sliding_window is "
            f"{is_on} and sliding_window {config.get('sliding_window')!r}"
        )
    return tuple(window if name == "sliding_attention" else None for name in types)


def refuse_unless(config: Mapping[str, Any], key: str, *supported: Any) -> None:
    """Refuse a config whose `key` is present with a value the model code does not implement.

    Raises:
        UnsupportedModelError: names key and value.
    """
    if key in config and config[key] not in supported:
        listed = " or ".join(repr(value) for value in supported)
        raise UnsupportedModelError(
            f"config.json: {key} is {config[key]!r}, only {listed} is supported"
        )


def config_dtype(config: Mapping[str, Any]) -> DType | None:
    """Return the dtype a config names, in the new (`dtype`) or old (`torch_dtype`) spelling.

    Raises:
        UnsupportedModelError: it is none that weights can be computed in.
    """
    name = config.get("dtype") or config.get("torch_dtype")
    if not isinstance(name, str) or name == "auto":
        return None
    try:
        return DType.from_name(name)
    except ConfigError as error:
        raise UnsupportedModelError(
            f"config.json: dtype {name!r} is not supported; need bf16, fp16 or fp32"
        ) from error


def rope_config(
    config: Mapping[str, Any], *, head_dim: int, rotary_factor: float | None = None
) -> RopeConfig:
    """Read rotary parameters: `rope_parameters`, or `rope_theta` with `rope_scaling`.

    When one file has both and they contradict, the newer spelling wins with a warning.

    Args:
        config: the content of config.json.
        head_dim: columns of a head.
        rotary_factor: share of a head that rotates where the config does not say; None if the
            family always rotates all of it.

    Raises:
        UnsupportedModelError: the scaling is unknown or incomplete.
    """
    old, new = _old_spelling(config), config.get("rope_parameters")
    if new is not None and not isinstance(new, Mapping):
        raise CheckpointError(f"config.json: rope_parameters is {new!r}, need an object")
    params = dict(new) if new else old
    params = {**{key: old[key] for key in _ROPE_KEYS if key in old}, **params}
    if new and _is_contradiction(config, params, old):
        _logger.warning(
            "config.json has rope_parameters %s and an older spelling %s; the newer is used",
            params, old,
        )  # fmt: skip
    rope_type = str(params.get("rope_type") or params.get("type") or "default")
    rotary_dim = _rotary_dim(params, head_dim, rotary_factor)
    return _build(config, params, rope_type, head_dim=head_dim, rotary_dim=rotary_dim)


def _positive(name: str, value: object) -> float:
    """Return a number above zero that can be computed with."""
    is_flag = isinstance(value, bool)
    if not isinstance(value, int | float) or is_flag or not 0 < value <= _LARGEST:
        raise CheckpointError(
            f"config.json: {name} is {value!r:.80}, need a positive number up to {_LARGEST:.0e}; "
            "fetch the model's config again"
        )
    return float(value)


def _factors(name: str, value: object, rotary_dim: int) -> tuple[float, ...]:
    """Return one factor for each pair of columns that rotate; empty where there are none."""
    if not value:
        return ()
    if not isinstance(value, list) or len(value) != rotary_dim // 2:
        raise CheckpointError(
            f"config.json: {name} is {value!r:.80}, need a list of {rotary_dim // 2} numbers"
        )
    return tuple(_positive(f"{name}[{idx}]", item) for idx, item in enumerate(value))


def _check_divisors(rope: RopeConfig) -> None:
    """Refuse what would make a divisor of the rope formulas zero or negative."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    if rope.rope_type == "llama3" and low is not None and high is not None and high <= low:
        raise CheckpointError(
            f"config.json: high_freq_factor is {high}, need more than low_freq_factor {low}"
        )
    if rope.rope_type == "yarn" and rope.rope_theta <= 1:
        raise CheckpointError(f"config.json: rope_theta is {rope.rope_theta}, need more than 1")
    if rope.rope_type == "longrope" and rope.pretrained_length < 2:
        raise CheckpointError(
            f"config.json: original_max_position_embeddings is {rope.pretrained_length}, need 2 or "
            "more; fetch the model's config again"
        )
    if rope.rope_type == "dynamic" and rope.rotary_dim == 2:
        raise UnsupportedModelError(
            "config.json: 2 columns of a head rotate, dynamic scaling needs 4 or more"
        )


def _old_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise CheckpointError(f"config.json: rope_scaling is {scaling!r}, need an object")
    beside = {key: config[key] for key in _ROPE_KEYS if config.get(key) is not None}
    return {"rope_theta": 10000.0, **beside, **scaling}


def _is_contradiction(
    config: Mapping[str, Any], new: Mapping[str, Any], old: Mapping[str, Any]
) -> bool:
    if any(new[key] != config[key] for key in _ROPE_KEYS if config.get(key) is not None):
        return True
    if not config.get("rope_scaling"):
        return False

    def kind(params: Mapping[str, Any]) -> tuple[Any, Any]:
        return params.get("rope_type") or params.get("type"), params.get("factor")

    return kind(new) != kind(old)


def _rotary_dim(params: Mapping[str, Any], head_dim: int, rotary_factor: float | None) -> int:
    given = params.get("partial_rotary_factor")
    factor = _positive("partial_rotary_factor", (rotary_factor or 1.0) if given is None else given)
    if rotary_factor is None and factor != 1.0:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor is {given}, only 1.0 is supported for this "
            "model_type"
        )
    return int(head_dim * factor)


def _build(
    config: Mapping[str, Any],
    params: Mapping[str, Any],
    rope_type: str,
    *,
    head_dim: int,
    rotary_dim: int,
) -> RopeConfig:
    original = params.get("original_max_position_embeddings") or config.get(
        "original_max_position_embeddings"
    )
    numbers: dict[str, Any] = {
        name: _positive(name, params[name])
        for name in (
            "factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor",
            "high_freq_factor", "mscale", "mscale_all_dim",
        )
        if params.get(name) is not None and not (name in _MAY_BE_ZERO and params[name] == 0)
    }  # fmt: skip
    rope = RopeConfig(
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=_positive("rope_theta", params["rope_theta"]),
        max_position_embeddings=get_int(config, "max_position_embeddings"),
        rope_type=rope_type,
        original_max_position_embeddings=_length(original),
        short_factor=_factors("short_factor", params.get("short_factor"), rotary_dim),
        long_factor=_factors("long_factor", params.get("long_factor"), rotary_dim),
        truncate=_flag("truncate", params.get("truncate"), default=True),
        **numbers,
    )
    _check_divisors(rope)
    return rope


def _flag(name: str, value: object, *, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} is {value!r:.80}, need true or false")
    return value


def _length(value: object) -> int | None:
    if not value:
        return None
    length = _positive("original_max_position_embeddings", value)
    if length != int(length):
        raise CheckpointError(
            f"config.json: original_max_position_embeddings is {value!r}, need a whole number"
        )
    return int(length)
