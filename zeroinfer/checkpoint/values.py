"""Element types of weights as numpy sees them, and rounding from one to another.

numpy has no bfloat16: such values travel as uint16 holding the bits.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from zeroinfer.dtypes import DType
from zeroinfer.errors import CheckpointError, ConfigError

__all__ = ["TORCH_NAMES", "numpy_dtype", "round_values", "to_float32", "weight_dtype"]

TORCH_NAMES = {DType.BF16: "bfloat16", DType.F16: "float16", DType.F32: "float32"}
"""Types that weights are written in, as config.json spells them."""
_NUMPY_NAMES = {
    DType.BF16: "<u2", DType.F16: "<f2", DType.F32: "<f4", DType.F64: "<f8", DType.I64: "<i8",
    DType.I32: "<i4", DType.I16: "<i2", DType.I8: "i1", DType.U8: "u1", DType.BOOL: "u1",
}  # fmt: skip


def weight_dtype(name: str) -> DType:
    """Read a user's spelling of a type that weights are written in.

    Raises:
        ConfigError: it is none.
    """
    dtype = DType.from_name(name)
    if dtype not in TORCH_NAMES:
        raise ConfigError(f"dtype {name!r} is not written; use one of auto, bf16, fp16, fp32")
    return dtype


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the type in which numpy holds the values, or their bits."""
    return np.dtype(_NUMPY_NAMES[dtype])


def to_float32(values: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """Return float values of a type as float32.

    Args:
        values: as `numpy_dtype` holds them.
        dtype: what they are.
    """
    if dtype is DType.BF16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        return values.astype(np.float32, copy=False)


def round_values(values: npt.NDArray[Any], dtype: DType, *, where: str) -> npt.NDArray[Any]:
    """Round float32 values to the nearest of a type, ties to even.

    Args:
        values: float32.
        dtype: one that weights are written in.
        where: file and tensor for the message.

    Raises:
        CheckpointError: a value is not finite, or beyond the range of the type.
    """
    if not np.isfinite(values).all():
        raise CheckpointError(f"{where} holds values that are not finite; fetch it again")
    if dtype is DType.F32:
        return values
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16) if dtype is DType.F16 else _to_bf16(values)
    infinity = 0x7C00 if dtype is DType.F16 else 0x7F80
    if ((rounded.view(np.uint16) & infinity) == infinity).any():
        largest = float(np.abs(values).max())
        raise CheckpointError(
            f"{where} holds {largest:g}, beyond the range of {dtype.short_name}; use --dtype fp32"
        )
    return rounded


def _to_bf16(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # Finite values only, so the addition cannot wrap.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
