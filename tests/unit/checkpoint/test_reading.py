"""Values of a folder's tensors: in pieces, whole or refused, rounded as torch rounds."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.raw_checkpoints import write_folder
from zeroinfer.checkpoint.reading import read_extent
from zeroinfer.checkpoint.values import numpy_dtype, round_values, to_float32
from zeroinfer.diskformat import open_checkpoint
from zeroinfer.dtypes import DType
from zeroinfer.errors import CheckpointError, StorageError


@pytest.fixture
def extent(tmp_path):
    tensors = {"w": ("BF16", (100, 30)), "x": ("F32", (4,))}
    return open_checkpoint(write_folder(tmp_path / "m", {"model.safetensors": tensors})).tensors[
        "w"
    ]


def test_pieces_hold_the_bytes_in_order(extent, monkeypatch):
    monkeypatch.setattr("zeroinfer.checkpoint.reading.PIECE_BYTES", 4096)
    pieces = list(read_extent(extent))
    assert [piece.nbytes for piece in pieces] == [4096, 6000 - 4096]
    data = extent.path.read_bytes()
    assert b"".join(p.tobytes() for p in pieces) == data[extent.offset : extent.offset + 6000]


def test_a_file_that_was_cut_since_is_refused(extent):
    with extent.path.open("r+b") as file:
        file.truncate(extent.offset + 1000)
    with pytest.raises(CheckpointError, match=r"ended 5000 bytes before the end of tensor w"):
        list(read_extent(extent))


def test_a_file_that_went_since_is_a_storage_error(extent):
    extent.path.unlink()
    with pytest.raises(StorageError, match=r"read of \S+model\.safetensors failed: No such file"):
        list(read_extent(extent))


def test_every_element_type_has_its_size():
    assert all(numpy_dtype(dtype).itemsize == dtype.itemsize for dtype in DType)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_bf16_is_rounded_as_torch_does(values):
    floats = np.array(values, np.float32)
    expected = torch.from_numpy(floats).to(torch.bfloat16)
    if not expected.isfinite().all():
        with pytest.raises(CheckpointError, match="beyond the range of bf16"):
            round_values(floats, DType.BF16, where="w")
        return
    rounded = round_values(floats, DType.BF16, where="w")
    np.testing.assert_array_equal(rounded.view(np.int16), expected.view(torch.int16).numpy())
    np.testing.assert_array_equal(to_float32(rounded, DType.BF16), expected.float().numpy())


@pytest.mark.parametrize("value", [1e300, -1e300])
def test_doubles_beyond_fp32_are_refused(value):
    floats = to_float32(np.array([1.0, value]), DType.F64)
    with pytest.raises(CheckpointError, match="values that are not finite"):
        round_values(floats, DType.F32, where="w")
