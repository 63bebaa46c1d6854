"""Rotary scaling of a GGUF file in Hugging Face's words, and numbers read from its metadata."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from zeroinfer.checkpoint.gguf_reader import GgufFile
from zeroinfer.checkpoint.gguf_tensors import ROPE_FACTORS_NAME, checked_tensor
from zeroinfer.errors import CheckpointError, UnsupportedModelError

__all__ = ["positive", "rope_scaling", "shortest"]


def positive(file: GgufFile, key: str, *, default: int | None = None) -> int:
    """Return an integer from 1 up.

    Raises:
        CheckpointError: the key is missing and has no default, or its value is another.
    """
    value = file.get(key, int, default=default)
    if value <= 0:
        raise CheckpointError(f"{file.path}: metadata key {key} is {value}, need at least 1")
    return value


def shortest(value: float) -> float:
    """Undo the widening of a float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def rope_scaling(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the value of rope_scaling, None for plain rotary positions.

    Args:
        file: its metadata and frequency divisors are read.
        config: what is known so far; base and head size count.

    Raises:
        UnsupportedModelError: the scaling is unknown.
        CheckpointError: a number of it is missing.
    """
    prefix = f"{file.get('general.architecture', str)}.rope"
    if ROPE_FACTORS_NAME in file.tensors:
        return _llama3_scaling(file, config)
    kind = file.get(f"{prefix}.scaling.type", str, default="none")
    if f"{prefix}.scale_linear" in file.metadata:
        factor = file.get(f"{prefix}.scale_linear", float)
        return {"rope_type": "linear", "factor": shortest(factor)} if factor != 1 else None
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path}: {prefix}.scaling.type is {kind!r}, need none, linear or yarn"
        )
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": shortest(file.get(f"{prefix}.scaling.factor", float)),
    }
    if kind == "yarn":
        length = positive(file, f"{prefix}.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = length
    return scaling


def _llama3_scaling(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Find the llama3 parameters from the frequency divisors that the file holds instead.

    Between its two limits the scheme is linear in the frequency, s = a * f - b, where a divisor is
    1 / ((1 - s) / factor + s). The parameters follow but for a common scale, which low_freq_factor
    = 1 fixes (its value in every released model); they are accepted only if they give the file's
    divisors back.
    """
    half_dim = config["head_dim"] // 2
    pieces = list(file.read_rows(checked_tensor(file, ROPE_FACTORS_NAME, (half_dim,))))
    divisors = np.concatenate(pieces).astype(np.float64)
    if (divisors == 1).all():
        return None
    frequencies = config["rope_theta"] ** (-np.arange(half_dim) / half_dim) / (2 * np.pi)
    factor = float(divisors.max())
    between = (divisors > 1) & (divisors < factor)
    if between.sum() >= 2:
        smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
        slope, intercept = np.polyfit(frequencies[between], smooth[between], 1)
        expected = np.clip(slope * frequencies + intercept, 0, 1)
        rebuilt = 1 / ((1 - expected) / factor + expected)
        if intercept < 0 and np.allclose(rebuilt, divisors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": shortest(factor),
                "low_freq_factor": 1.0,
                "high_freq_factor": round(1 - 1 / float(intercept), 3),
                "original_max_position_embeddings": round(float(-slope / intercept)),
            }
    raise UnsupportedModelError(
        f"{file.path}: the frequency divisors in {ROPE_FACTORS_NAME} follow no known rope scaling; "
        "use the model's Hugging Face folder instead"
    )
