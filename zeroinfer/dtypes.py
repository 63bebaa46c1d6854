"""Names and sizes of element types, and the description of a tensor; no torch here."""

import enum
import math
from dataclasses import dataclass

from zeroinfer.errors import ConfigError

__all__ = ["DType", "TensorSpec"]


class DType(enum.Enum):
    """Element types a checkpoint may hold; the values are the spelling of safetensors headers."""

    BF16 = "BF16"
    F16 = "F16"
    F32 = "F32"
    F64 = "F64"
    I64 = "I64"
    I32 = "I32"
    I16 = "I16"
    I8 = "I8"
    U8 = "U8"
    BOOL = "BOOL"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def is_floating_point(self) -> bool:
        """Whether this is a float type that weights may be stored in."""
        return self in _FLOATS

    @classmethod
    def from_name(cls, name: str) -> "DType":
        """Read a user's or a config's spelling: bf16, bfloat16, torch.float32, F16, ...

        Raises:
            ConfigError: the name is none of the float types.
        """
        key = name.lower().removeprefix("torch.")
        if key not in _ALIASES:
            raise ConfigError(f"dtype {name!r} is unknown; use one of bf16, fp16, fp32")
        return _ALIASES[key]

    @property
    def short_name(self) -> str:
        """The command line's spelling: bf16, fp16, fp32; else safetensors' in lower case."""
        return _SHORT.get(self, self.value.lower())


_ITEMSIZE = {
    DType.BF16: 2, DType.F16: 2, DType.F32: 4, DType.F64: 8, DType.I64: 8,
    DType.I32: 4, DType.I16: 2, DType.I8: 1, DType.U8: 1, DType.BOOL: 1,
}  # fmt: skip
_FLOATS = frozenset({DType.BF16, DType.F16, DType.F32, DType.F64})
_SHORT = {DType.BF16: "bf16", DType.F16: "fp16", DType.F32: "fp32", DType.F64: "fp64"}
_ALIASES = {
    "bf16": DType.BF16, "bfloat16": DType.BF16,
    "fp16": DType.F16, "f16": DType.F16, "float16": DType.F16, "half": DType.F16,
    "fp32": DType.F32, "f32": DType.F32, "float32": DType.F32, "float": DType.F32,
    "fp64": DType.F64, "f64": DType.F64, "float64": DType.F64, "double": DType.F64,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A tensor by name, shape and element type, wherever its bytes are."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def num_elements(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, contiguous."""
        return self.num_elements * self.dtype.itemsize
