"""Rotary position embedding: of whole heads or a part, in halves or neighbours, with every scaling.

Two kinds depend on the length of the sequence: `dynamic` (the base grows) and `longrope` (another
factor set). Their frequencies are computed for each row from its own length, never kept, so that
one long request cannot change the answers to later ones.

Letters: T rows, C pairs of columns that rotate.

Source: the formulas of the scaling papers as read from Hugging Face's modeling_rope_utils.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from zeroinfer.errors import UnsupportedModelError
from zeroinfer.layers.frame import Frame
from zeroinfer.native import Rotation

__all__ = ["RopeConfig", "step_rotation"]

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Parameters of the rotary embedding; field names are those of Hugging Face configs."""

    head_dim: int
    rope_theta: float
    max_position_embeddings: int
    rotary_dim: int | None = None
    """Columns of a head that rotate, the first ones; None is all of them."""
    is_interleaved: bool = False
    """Whether neighbours rotate against each other (GPT-J), not the two halves (Llama)."""
    rope_type: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse unknown kinds, missing parameters and parts of a head that cannot rotate.

        Raises:
            UnsupportedModelError: the kind is unknown or lacks a parameter it needs; the columns
                that rotate are no even number up to head_dim.
        """
        if self.dim % 2 or not 0 < self.dim <= self.head_dim:
            raise UnsupportedModelError(
                f"config.json: {self.dim} columns of a head of {self.head_dim} would rotate, "
                "need an even number up to all of them"
            )
        if self.rope_type not in ROPE_TYPES:
            raise UnsupportedModelError(
                f"rope scaling {self.rope_type!r} of config.json is unknown; "
                f"known: {', '.join(ROPE_TYPES)}"
            )
        for name in _NEEDED[self.rope_type]:
            if getattr(self, name) in (None, ()):
                raise UnsupportedModelError(
                    f"rope scaling {self.rope_type!r} of config.json lacks {name}"
                )

    @property
    def dim(self) -> int:
        """Columns of a head that rotate."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def pretrained_length(self) -> int:
        """Positions the model was trained on before any scaling."""
        return self.original_max_position_embeddings or self.max_position_embeddings

    @property
    def max_model_len(self) -> int:
        """Longest sequence; kinds whose factor multiplies the trained length may go on to it."""
        if self.rope_type in ("dynamic", "linear") and self.factor:
            return int(self.max_position_embeddings * max(1.0, self.factor))
        return self.max_position_embeddings


_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def _exponents(rope: RopeConfig) -> torch.Tensor:
    return torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim


def _plain(rope: RopeConfig) -> torch.Tensor:
    return 1.0 / (rope.rope_theta ** _exponents(rope))


def _linear(rope: RopeConfig) -> torch.Tensor:
    return _plain(rope) / _need(rope.factor)


def _llama3(rope: RopeConfig) -> torch.Tensor:
    factor, low, high = (
        _need(rope.factor),
        _need(rope.low_freq_factor),
        _need(rope.high_freq_factor),
    )
    inv_freq = _plain(rope)
    wavelength = 2 * math.pi / inv_freq
    smooth = (rope.pretrained_length / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength > rope.pretrained_length / low, inv_freq / factor, inv_freq)
    is_medium = (wavelength >= rope.pretrained_length / high) & (
        wavelength <= rope.pretrained_length / low
    )
    return torch.where(is_medium, blended, scaled)


def _yarn(rope: RopeConfig) -> torch.Tensor:
    factor, dim = _need(rope.factor), rope.dim

    def correction_dim(num_rotations: float) -> float:
        ratio = rope.pretrained_length / (num_rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope.rope_theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    pos_freqs = rope.rope_theta ** _exponents(rope)
    return (1.0 / (factor * pos_freqs)) * ramp + (1.0 / pos_freqs) * (1 - ramp)


_INV_FREQ: dict[str, Callable[[RopeConfig], torch.Tensor]] = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def _need(value: float | None) -> float:
    assert value is not None, "checked in RopeConfig.__post_init__"
    return value


def _attention_scaling(rope: RopeConfig) -> float:
    """Factor on cos and sin, for yarn and longrope."""
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor = rope.factor or rope.max_position_embeddings / rope.pretrained_length
    if rope.rope_type == "longrope":
        log_ratio = math.log(factor) / math.log(rope.pretrained_length) if factor > 1 else 0.0
        return math.sqrt(1 + log_ratio)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _row_inv_freq(rope: RopeConfig, rope_lengths: torch.Tensor) -> torch.Tensor:
    """Frequencies of each row, (T, C) or broadcastable."""
    if rope.rope_type == "dynamic":
        length = rope_lengths.clamp(min=rope.max_position_embeddings).double()
        factor, dim = _need(rope.factor), rope.dim
        growth = factor * length / rope.max_position_embeddings - (factor - 1)
        base = rope.rope_theta * growth ** (dim / (dim - 2))
        return (1.0 / (base[:, None] ** _exponents(rope).double())).float()
    if rope.rope_type == "longrope":
        short, long = torch.tensor(rope.short_factor), torch.tensor(rope.long_factor)
        is_long = (rope_lengths > rope.pretrained_length)[:, None]
        return _plain(rope) / torch.where(is_long, long, short)
    return _INV_FREQ[rope.rope_type](rope)


def step_rotation(rope: RopeConfig, frame: Frame) -> Rotation:
    """Cosines and sines of the step's rows, computed once per step.

    In double precision, because torch's fp32 functions may round otherwise at the end of a vector
    than inside one, and where a row lies must not show in its bits.
    """
    if "rope_cos" not in frame.memo:
        batch = frame.batch
        angles = batch.positions[:, None].float() * _row_inv_freq(rope, batch.rope_lengths)
        wide, scaling = angles.double(), _attention_scaling(rope)
        frame.memo["rope_cos"] = frame.place(wide.cos().float() * scaling)
        frame.memo["rope_sin"] = frame.place(wide.sin().float() * scaling)
    return Rotation(
        cos=frame.memo["rope_cos"],
        sin=frame.memo["rope_sin"],
        is_interleaved=rope.is_interleaved,
    )
