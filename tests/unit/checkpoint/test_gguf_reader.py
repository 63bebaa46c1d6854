"""Broken and strange GGUF files are refused by name; good ones give all their values."""

import re
import struct

import gguf
import numpy as np
import pytest

from tests.helpers.gguf_files import HIDDEN, write_llama_gguf
from zeroinfer.checkpoint.gguf_reader import open_gguf
from zeroinfer.errors import CheckpointError, StorageError, UnsupportedModelError


@pytest.fixture
def model(tmp_path):
    write_llama_gguf(tmp_path / "m.gguf", quant="Q4_0", tokenizer="smollm")
    return tmp_path / "m.gguf"


def test_metadata_and_table(model):
    file = open_gguf(model)
    assert file.get("general.architecture", str) == "llama"
    assert file.get("llama.rope.freq_base", float) == 10000.0
    assert len(file.get("tokenizer.ggml.tokens", list)) > 256
    assert file.tensors["blk.0.attn_k.weight"].shape == (32, HIDDEN)
    assert file.tensors["blk.0.attn_k.weight"].is_quantized
    assert not file.tensors["output_norm.weight"].is_quantized


def test_own_accessor_agrees_with_the_package(model):
    theirs = gguf.GGUFReader(model)
    ours = open_gguf(model)
    assert {k: f.contents() for k, f in theirs.fields.items()} == dict(ours.metadata)
    for tensor in theirs.tensors:
        rows = np.concatenate(list(ours.read_rows(ours.tensors[tensor.name])))
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("share", [0.00001, 0.0005, 0.01, 0.05, 0.08, 0.3, 0.9, 0.99999])
def test_truncated_file_is_refused(model, share):
    data = model.read_bytes()
    model.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        open_gguf(model)


def test_truncation_names_both_sizes(model):
    data = model.read_bytes()
    model.write_bytes(data[:-1000])
    with pytest.raises(CheckpointError, match=rf"has {len(data) - 1000} bytes, need at least \d+"):
        open_gguf(model)


def test_file_cut_after_opening_is_refused(model):
    file = open_gguf(model)
    last = max(file.tensors.values(), key=lambda t: t.offset)
    with model.open("r+b") as handle:
        handle.truncate(last.offset + 8)
    with pytest.raises(CheckpointError, match=re.escape(last.name)):
        list(file.read_rows(last))


def test_file_gone_after_opening_is_a_storage_error(model):
    file = open_gguf(model)
    model.unlink()
    with pytest.raises(StorageError, match=r"m\.gguf"):
        list(file.read_rows(file.tensors["output_norm.weight"]))


def test_wild_array_length_is_refused_at_once(model):
    data = bytearray(model.read_bytes())
    key = b"tokenizer.ggml.token_type"
    length = data.index(key) + len(key) + 8
    data[length : length + 8] = (1 << 60).to_bytes(8, "little")
    model.write_bytes(data)
    with pytest.raises(CheckpointError, match="cut or damaged"):
        open_gguf(model)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 something else", b"GGUF"])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        open_gguf(tmp_path / "m.gguf")


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_gguf(tmp_path / "m.gguf")
    with pytest.raises(StorageError, match="Is a directory"):
        open_gguf(tmp_path)


def test_other_byte_order_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="byte order"):
        open_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", ["Q8_1", "I32", "Q8_K"])
def test_packing_without_a_decoder_is_refused_by_name(tmp_path, kind):
    _, group_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    packed = np.zeros((2, group_bytes), np.uint8)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", packed, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=rf"blk\.0\.ffn_up\.weight is packed as {kind}"):
        open_gguf(path)


@pytest.mark.parametrize(
    ("key", "kind"),
    [("llama.none", int), ("general.architecture", int), ("llama.block_count", str)],
)
def test_metadata_of_another_type_is_refused(model, key, kind):
    with pytest.raises(CheckpointError, match=key):
        open_gguf(model).get(key, kind)


def test_an_integer_serves_where_a_float_is_asked_for(model):
    assert open_gguf(model).get("llama.block_count", float) == 2.0


def rewrite_entry(path, name, *, dims=None, offset=None):
    """Change what the table of tensors says of one; returns its old offset."""
    (entry,) = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name]
    num_dims, at = len(entry.shape), entry.field.offset + 8 + len(name) + 4
    del entry
    data = bytearray(path.read_bytes())
    if dims is not None:
        data[at : at + 8 * num_dims] = struct.pack(f"<{num_dims}Q", *dims)
    at += 8 * num_dims + 4
    old = int.from_bytes(data[at : at + 8], "little")
    if offset is not None:
        data[at : at + 8] = struct.pack("<Q", offset)
    path.write_bytes(data)
    return old


@pytest.mark.parametrize("version", [1, 4, 2**32 - 1])
def test_other_versions_are_refused_by_number(model, version):
    data = model.read_bytes()
    model.write_bytes(data[:4] + struct.pack("<I", version) + data[8:])
    with pytest.raises(UnsupportedModelError, match=f"is GGUF of version {version}, need one of"):
        open_gguf(model)


@pytest.mark.parametrize("shift", [0, 32])
def test_two_tensors_of_the_same_bytes_are_refused(model, shift):
    other = rewrite_entry(model, "blk.1.ffn_up.weight")
    rewrite_entry(model, "blk.0.ffn_up.weight", offset=other + shift)
    with pytest.raises(CheckpointError, match=r"blk\..\.ffn_up\.weight overlaps tensor blk\."):
        open_gguf(model)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_an_offset_that_wraps_into_the_header_is_refused(model):
    rewrite_entry(model, "blk.0.ffn_up.weight", offset=2**64 - 64)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight overlaps the header"):
        open_gguf(model)


def test_a_shape_whose_size_wraps_is_refused(model):
    rewrite_entry(model, "blk.0.ffn_up.weight", dims=(2**32, 2**32))
    with pytest.raises(CheckpointError, match="cut or damaged: cannot reshape"):
        open_gguf(model)


def test_arrays_in_arrays_without_end_are_refused(tmp_path):
    key = struct.pack("<Q", 3) + b"a.b" + struct.pack("<I", 9)
    nested = struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 4, 0)
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    (tmp_path / "m.gguf").write_bytes(start + key + nested + bytes(64))
    with pytest.raises(CheckpointError, match="cut or damaged"):
        open_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(tmp_path, value):
    write_llama_gguf(tmp_path / "m.gguf", metadata={"llama.rope.freq_base": value})
    with pytest.raises(CheckpointError, match=f"freq_base is {value}, need a finite number"):
        open_gguf(tmp_path / "m.gguf").get("llama.rope.freq_base", float)
