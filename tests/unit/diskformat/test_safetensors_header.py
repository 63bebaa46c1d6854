"""Headers: what is read from good files, and one malformed file per refusal."""

import io
import json
import os

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.helpers.raw_checkpoints import raw_header, write_raw, write_safetensors
from zeroinfer.diskformat import read_safetensors_header
from zeroinfer.dtypes import DType
from zeroinfer.errors import CheckpointError, StorageError, UnsupportedModelError

TENSORS = {"a": ("BF16", (3, 5)), "b": ("F32", ()), "empty": ("F16", (0, 4)), "c": ("U8", (7,))}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def refusal(path, error=CheckpointError):
    with pytest.raises(error) as info:
        read_safetensors_header(path)
    message = str(info.value)
    assert str(path) in message
    assert info.value.exit_code == 4
    return message


def edited(path, change):
    """Write TENSORS with a header that `change` has altered."""
    header, data_bytes = raw_header(TENSORS)
    change(header)
    return write_raw(path, header, data_bytes)


def test_extents_are_absolute_and_in_file_order(path):
    write_safetensors(path, TENSORS, metadata={"format": "pt"})
    extents = read_safetensors_header(path)
    data_start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert [e.offset - data_start for e in extents.values()] == [0, 30, 34, 34]
    assert list(extents) == ["a", "b", "empty", "c"]
    assert extents["a"].spec.shape == (3, 5)
    assert extents["a"].spec.dtype is DType.BF16
    assert extents["b"].spec.nbytes == 4
    assert extents["c"].path == path


def test_a_file_without_tensors_is_valid(path):
    assert read_safetensors_header(write_safetensors(path, {})) == {}


def test_padding_after_the_json_is_allowed(path):
    header, data_bytes = raw_header(TENSORS)
    write_raw(path, json.dumps(header).encode() + b"   ", data_bytes)
    assert len(read_safetensors_header(path)) == 4


@settings(max_examples=50, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(
            st.sampled_from([d.value for d in DType]),
            st.lists(st.integers(0, 4), max_size=3).map(tuple),
        ),
        max_size=6,
    )
)
def test_any_layout_is_read_back(tmp_path_factory, shapes):
    path = tmp_path_factory.mktemp("h") / "x.safetensors"
    tensors = {f"t{i}": shape for i, shape in enumerate(shapes)}
    extents = read_safetensors_header(write_safetensors(path, tensors))
    assert {n: (e.spec.dtype.value, e.spec.shape) for n, e in extents.items()} == tensors
    end = path.stat().st_size - sum(e.spec.nbytes for e in extents.values())
    for extent in extents.values():
        assert extent.offset == end
        end += extent.spec.nbytes


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=64), length=st.integers(0, 80))
def test_garbage_is_refused_and_never_crashes(tmp_path_factory, data, length):
    path = tmp_path_factory.mktemp("g") / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + data)
    with pytest.raises(CheckpointError):
        read_safetensors_header(path)


def test_missing_file(path):
    assert "does not exist" in refusal(path)


def test_folder_in_place_of_the_file(path):
    path.mkdir()
    assert "not a regular file" in refusal(path)


def test_named_pipe_does_not_block(path):
    os.mkfifo(path)
    assert "not a regular file" in refusal(path)


def test_unreadable_file_is_a_storage_error(path, monkeypatch):
    write_safetensors(path, TENSORS)

    def deny(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(io, "open", deny)
    assert "Permission denied" in refusal(path, StorageError)


@pytest.mark.parametrize("size", [0, 7])
def test_file_shorter_than_the_length_field(path, size):
    path.write_bytes(bytes(size))
    assert f"got {size} bytes, need at least 8" in refusal(path)


def test_header_of_absurd_length(path):
    write_raw(path, b"{}", 0, header_length=100_000_001)
    assert "header of 100000001 bytes" in refusal(path)


def test_cut_inside_the_header(path):
    """Source: airllm#137 (2.04)."""
    write_safetensors(path, TENSORS)
    full = path.read_bytes()
    path.write_bytes(full[:40])
    message = refusal(path)
    header_end = 8 + int.from_bytes(full[:8], "little")
    assert f"expected at least {header_end} bytes, found 40" in message
    assert "fetch the file again" in message


def test_cut_inside_the_data(path):
    """Source: airllm#137 (2.04)."""
    write_safetensors(path, {"a": ("F32", (1000,))})
    size = path.stat().st_size
    os.truncate(path, size - 1000)
    message = refusal(path)
    assert f"expected {size} bytes, found {size - 1000}" in message
    assert "fetch the file again" in message


def test_bytes_after_the_last_tensor(path):
    """Source: ComfyUI#15602 (2.19)."""
    write_safetensors(path, TENSORS)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"xxxx")
    assert f"4 bytes after tensor 'c': expected {size} bytes, found {size + 4}" in refusal(path)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (b"\xff\xfe{}", "no valid JSON"),
        (b"{'a': 1}", "no valid JSON"),
        (b"[" * 100_000, "no valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "no valid JSON"),
        (b"[]", "no JSON object: got list"),
        (b'{"a": 1, "a": 2}', "key 'a' twice"),
        (b'{"a": {"dtype": "F32", "dtype": "F32"}}', "key 'dtype' twice"),
    ],
)
def test_header_that_is_no_json_object(path, text, part):
    assert part in refusal(write_raw(path, text, 0))


@pytest.mark.parametrize("entry", [1, {}, {"dtype": "F32", "shape": [1]}])
def test_entry_without_its_fields(path, entry):
    edited(path, lambda header: header.update(a=entry))
    assert "entry of tensor 'a'" in refusal(path)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "U16", "f32", None])
def test_unknown_dtype_names_tensor_and_dtype(path, dtype):
    edited(path, lambda header: header["c"].update(dtype=dtype))
    message = refusal(path, UnsupportedModelError)
    assert "tensor 'c'" in message
    assert f"got {dtype!r}" in message


@pytest.mark.parametrize(
    "shape", [None, 15, [-3, -5], [3.0, 5], [True, 15], [1 << 63], [1] * 65, ["3", 5]]
)
def test_bad_shape(path, shape):
    edited(path, lambda header: header["a"].update(shape=shape))
    assert "shape of tensor 'a'" in refusal(path)


@pytest.mark.parametrize("offsets", [None, [0], [0, 30, 31], [30, 0], [-2, 28], [0.0, 30.0]])
def test_bad_offsets(path, offsets):
    edited(path, lambda header: header["a"].update(data_offsets=offsets))
    assert "data_offsets of tensor 'a'" in refusal(path)


def test_offsets_that_disagree_with_the_shape(path):
    edited(path, lambda header: header["a"].update(shape=[3, 4]))
    assert "got [0, 30], need 24 bytes for shape [3, 4] of BF16" in refusal(path)


def test_shape_whose_product_is_beyond_printing(path):
    edited(path, lambda header: header["a"].update(shape=[(1 << 63) - 1] * 64))
    assert "data_offsets of tensor 'a'" in refusal(path)


def test_overlap(path):
    edited(path, lambda header: header["b"].update(data_offsets=[28, 32]))
    assert "tensor 'b'" in (message := refusal(path))
    assert "overlaps tensor 'a'" in message


def test_hole(path):
    header, data_bytes = raw_header(TENSORS)
    header["c"]["data_offsets"] = [36, 43]
    write_raw(path, header, data_bytes + 2)
    assert "hole of 2 bytes before tensor 'c'" in refusal(path)


def test_hole_before_the_first_tensor(path):
    write_raw(path, {"a": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}, 6)
    assert "hole of 2 bytes before tensor 'a'" in refusal(path)
