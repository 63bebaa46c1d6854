import numpy as np
import pytest

from zeroinfer.dtypes import DType, TensorSpec
from zeroinfer.errors import ConfigError

SIZES = {
    "BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8,
    "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


def test_sizes_cover_every_member():
    assert {dtype.value: dtype.itemsize for dtype in DType} == SIZES


def test_floats():
    assert {d.value for d in DType if d.is_floating_point} == {"BF16", "F16", "F32", "F64"}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", DType.BF16),
        ("bfloat16", DType.BF16),
        ("torch.bfloat16", DType.BF16),
        ("BF16", DType.BF16),
        ("fp16", DType.F16),
        ("torch.float16", DType.F16),
        ("half", DType.F16),
        ("F32", DType.F32),
        ("float", DType.F32),
        ("float64", DType.F64),
    ],
)
def test_spellings(name, dtype):
    assert DType.from_name(name) is dtype


@pytest.mark.parametrize("name", ["", "int8", "fp8", "torch."])
def test_unknown_spelling_is_refused(name):
    with pytest.raises(ConfigError, match="is unknown; use one of bf16, fp16, fp32") as caught:
        DType.from_name(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("dtype", [d for d in DType if d.is_floating_point])
def test_short_names_are_read_back(dtype):
    assert DType.from_name(dtype.short_name) is dtype


def test_short_name_of_others_is_theirs():
    assert DType.I32.short_name == "i32"


@pytest.mark.parametrize("shape", [(), (0,), (3,), (4, 5), (2, 0, 7)])
def test_spec_counts_as_numpy(shape):
    spec = TensorSpec(name="w", shape=shape, dtype=DType.F32)
    array = np.zeros(shape, dtype=np.float32)
    assert (spec.num_elements, spec.nbytes) == (array.size, array.nbytes)
