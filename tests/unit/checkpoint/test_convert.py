"""GGUF files become checkpoints with the values, names and config they should have."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from tests.helpers.gguf_files import HEADS, HIDDEN, KV_HEADS, write_llama_gguf
from zeroinfer.checkpoint import convert_gguf, read_manifest, verify_store
from zeroinfer.checkpoint.gguf_tensors import unpermute_rows
from zeroinfer.diskformat import open_checkpoint
from zeroinfer.dtypes import DType
from zeroinfer.errors import CheckpointError, ConfigError


def read_extents(folder):
    """Values of every tensor by the extents, as float32, without the safetensors library."""
    checkpoint = open_checkpoint(folder)
    kinds = {DType.F32: np.float32, DType.F16: np.float16, DType.BF16: np.uint16}
    values = {}
    for name, extent in checkpoint.tensors.items():
        raw = extent.path.read_bytes()[extent.offset : extent.offset + extent.spec.nbytes]
        array = np.frombuffer(raw, kinds[extent.spec.dtype]).reshape(extent.spec.shape)
        if extent.spec.dtype is DType.BF16:
            array = (array.astype(np.uint32) << 16).view(np.float32)
        values[name] = array.astype(np.float32)
    return values


def assert_same(folder, expected):
    values = read_extents(folder)
    assert values.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(values[name], array, err_msg=name)


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_encoding_gives_the_same_values(tmp_path, quant, tied):
    expected = write_llama_gguf(tmp_path / "m.gguf", quant=quant, tied=tied)
    folder = convert_gguf(tmp_path / "m.gguf", tmp_path, dtype="fp32")
    assert_same(folder, expected)
    assert open_checkpoint(folder).config["tie_word_embeddings"] is tied
    verify_store(folder)


@pytest.mark.parametrize("head_dim", [8, 16, 32])
def test_biases_and_head_size(tmp_path, head_dim):
    expected = write_llama_gguf(tmp_path / "m.gguf", biases=True, head_dim=head_dim)
    folder = convert_gguf(tmp_path / "m.gguf", tmp_path)
    assert_same(folder, expected)
    config = open_checkpoint(folder).config
    assert (config["head_dim"], config["attention_bias"], config["mlp_bias"]) == (
        head_dim,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("quant", "dtype"), [("F32", "fp32"), ("F16", "fp16"), ("BF16", "bf16"), ("Q8_0", "fp32")]
)
def test_auto_dtype_follows_the_file(tmp_path, quant, dtype):
    write_llama_gguf(tmp_path / "m.gguf", quant=quant)
    folder = convert_gguf(tmp_path / "m.gguf", tmp_path)
    checkpoint = open_checkpoint(folder)
    assert {e.spec.dtype.short_name for e in checkpoint.tensors.values()} == {dtype}
    torch_dtype = getattr(torch, checkpoint.config["torch_dtype"])
    assert (
        safetensors.torch.load_file(checkpoint.files[0])["model.norm.weight"].dtype == torch_dtype
    )
    assert read_manifest(folder).dtype == dtype


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_types_round_as_torch_does(tmp_path, dtype):
    expected = write_llama_gguf(tmp_path / "m.gguf")
    values = read_extents(convert_gguf(tmp_path / "m.gguf", tmp_path, dtype=dtype))
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    for name, array in expected.items():
        rounded = torch.from_numpy(array).to(kind).float().numpy()
        np.testing.assert_array_equal(values[name], rounded, err_msg=name)


def test_unpermute_puts_halves_of_a_head_apart():
    in_file = np.array([0, 4, 1, 5, 2, 6, 3, 7])
    heads = np.concatenate([in_file, in_file + 8])
    np.testing.assert_array_equal(unpermute_rows(heads, head_dim=8), np.arange(16))


def test_config_and_generation_config(tmp_path):
    write_llama_gguf(tmp_path / "m.gguf", tokenizer="smollm",
                     metadata={"tokenizer.ggml.eot_token_id": 0})  # fmt: skip
    checkpoint = open_checkpoint(convert_gguf(tmp_path / "m.gguf", tmp_path))
    assert checkpoint.config | {"rope_theta": 10000.0, "rms_norm_eps": 1e-5} == checkpoint.config
    sizes = [checkpoint.config[k] for k in ("hidden_size", "num_attention_heads",
                                            "num_key_value_heads", "vocab_size")]  # fmt: skip
    assert sizes == [HIDDEN, HEADS, KV_HEADS, 280]
    assert checkpoint.config["rope_scaling"] is None
    assert checkpoint.generation_config["eos_token_id"] == [2, 0]


def test_each_tensor_is_read_in_pieces_of_whole_heads(tmp_path, monkeypatch):
    expected = write_llama_gguf(tmp_path / "m.gguf", quant="Q8_0", biases=True)
    monkeypatch.setattr("zeroinfer.checkpoint.gguf_reader.PIECE_BYTES", 4 * HIDDEN * 17)
    assert_same(convert_gguf(tmp_path / "m.gguf", tmp_path), expected)


def test_any_tool_opens_the_store_and_data_is_aligned(tmp_path):
    expected = write_llama_gguf(tmp_path / "m.gguf")
    folder = convert_gguf(tmp_path / "m.gguf", tmp_path, shard_bytes=100_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = Counter(index["weight_map"].values())
    assert len(names) > 2
    for name, count in names.items():
        tensors = safetensors.numpy.load_file(folder / name)
        assert len(tensors) == count
        for key, array in tensors.items():
            np.testing.assert_array_equal(array, expected[key])
    for extent in open_checkpoint(folder).tensors.values():
        assert extent.offset % (4096 if extent.spec.nbytes % 4096 == 0 else 4) == 0


def test_second_run_converts_nothing(tmp_path):
    write_llama_gguf(tmp_path / "m.gguf", quant="Q8_0")
    folder = convert_gguf(tmp_path / "m.gguf", tmp_path)
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    calls = []
    for dtype in ("auto", "fp32"):
        again = convert_gguf(tmp_path / "m.gguf", tmp_path, dtype=dtype,
                             progress=lambda *a: calls.append(a))  # fmt: skip
        assert again == folder
    assert not calls
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before


def test_a_moved_source_finds_its_store_by_content(tmp_path):
    write_llama_gguf(tmp_path / "m.gguf")
    folder = convert_gguf(tmp_path / "m.gguf", tmp_path)
    (tmp_path / "moved").mkdir()
    moved = (tmp_path / "m.gguf").rename(tmp_path / "moved" / "m.gguf")
    os.utime(moved, ns=(0, 0))
    assert convert_gguf(moved, tmp_path) == folder


def test_changed_source_and_other_dtype_have_stores_of_their_own(tmp_path):
    write_llama_gguf(tmp_path / "m.gguf", seed=0)
    first = convert_gguf(tmp_path / "m.gguf", tmp_path)
    other_dtype = convert_gguf(tmp_path / "m.gguf", tmp_path, dtype="bf16")
    expected = write_llama_gguf(tmp_path / "m.gguf", seed=1)
    changed = convert_gguf(tmp_path / "m.gguf", tmp_path)
    assert len({first, other_dtype, changed}) == 3
    assert_same(changed, expected)


_KILLED = """
import os, signal, sys
from pathlib import Path
from zeroinfer.checkpoint import convert_gguf
def progress(done, total):
    if done > total * 0.6:
        os.kill(os.getpid(), signal.SIGKILL)
convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), shard_bytes=50_000, progress=progress)
"""


def test_a_killed_conversion_goes_on_from_its_finished_shards(tmp_path):
    expected = write_llama_gguf(tmp_path / "m.gguf", quant="Q8_0")
    nvme = tmp_path / "nvme"
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "m.gguf"), str(nvme)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not list(nvme.glob("models/[!.]*"))
    finished = {p.name: p.stat().st_mtime_ns for p in nvme.glob("models/.partial-*/*.safetensors")}
    assert finished
    done = []
    folder = convert_gguf(tmp_path / "m.gguf", nvme, shard_bytes=50_000,
                          progress=lambda *a: done.append(a))  # fmt: skip
    assert_same(folder, expected)
    verify_store(folder)
    assert {n: (folder / n).stat().st_mtime_ns for n in finished} == finished
    assert done[0][0] > 0.2 * done[0][1]
    assert done[-1][0] == done[-1][1]
    assert not list(nvme.glob("models/.partial-*"))


def test_two_conversions_at_once_make_one_store(tmp_path):
    expected = write_llama_gguf(tmp_path / "m.gguf", quant="Q8_0")
    code = ("import sys; from pathlib import Path; from zeroinfer.checkpoint import convert_gguf; "
            "print(convert_gguf(Path(sys.argv[1]), Path(sys.argv[2])))")  # fmt: skip
    command = [sys.executable, "-c", code, str(tmp_path / "m.gguf"), str(tmp_path)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {run.communicate()[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    (folder,) = folders
    assert_same(Path(folder), expected)


def test_peak_memory_is_one_piece_not_one_model(tmp_path):
    expected = write_llama_gguf(tmp_path / "m.gguf")
    largest = []

    def spy(rows, dtype, *, where):
        largest.append(rows.nbytes)
        return rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zeroinfer.checkpoint.convert.round_values", spy)
        patch.setattr("zeroinfer.checkpoint.gguf_reader.PIECE_BYTES", 4096)
        folder = convert_gguf(tmp_path / "m.gguf", tmp_path)
    assert max(largest) <= 4096
    assert_same(folder, expected)


def test_value_beyond_fp16_is_refused(tmp_path):
    write_llama_gguf(tmp_path / "m.gguf", drop=["output_norm.weight"],
                     tensors={"output_norm.weight": np.full(HIDDEN, 1e5, np.float32)})  # fmt: skip
    with pytest.raises(CheckpointError, match=r"output_norm\.weight holds 100000, beyond .*fp16"):
        convert_gguf(tmp_path / "m.gguf", tmp_path, dtype="fp16")


def test_values_that_are_not_finite_are_refused(tmp_path):
    write_llama_gguf(tmp_path / "m.gguf", drop=["output_norm.weight"],
                     tensors={"output_norm.weight": np.full(64, np.nan, np.float32)})  # fmt: skip
    with pytest.raises(CheckpointError, match=r"output_norm\.weight holds values .* not finite"):
        convert_gguf(tmp_path / "m.gguf", tmp_path)


@pytest.mark.parametrize("dtype", ["fp64", "int8"])
def test_unknown_dtype_is_refused(tmp_path, dtype):
    write_llama_gguf(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match=dtype):
        convert_gguf(tmp_path / "m.gguf", tmp_path, dtype=dtype)


def test_missing_source_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.gguf does not exist"):
        convert_gguf(tmp_path / "none.gguf", tmp_path)


def test_other_checksum_is_refused(tmp_path):
    write_llama_gguf(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"has sha256 [0-9a-f]{64}, need 00"):
        convert_gguf(tmp_path / "m.gguf", tmp_path, expected_sha256="00")
    assert not (tmp_path / "models").exists()


def test_more_tokens_than_rows_are_refused(tmp_path):
    tokens = ["a", "b", "ab", *(f"<{i}>" for i in range(278))]
    write_llama_gguf(tmp_path / "m.gguf", tokenizer="smollm",
                     metadata={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["a b"],
                               "tokenizer.ggml.token_type": [1] * 281})  # fmt: skip
    with pytest.raises(CheckpointError, match="281 entries but the embedding only 280 rows"):
        convert_gguf(tmp_path / "m.gguf", tmp_path)


def test_a_folder_is_no_gguf_file(tmp_path):
    with pytest.raises(CheckpointError, match="is a folder, need a GGUF file"):
        convert_gguf(tmp_path, nvme_dir=tmp_path / "nvme")


@pytest.mark.parametrize("is_gone", [True, False])
def test_left_overs_go_with_their_source(tmp_path, is_gone):
    # Source: deepspeedai/DeepSpeed#4416
    def stop(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    write_llama_gguf(tmp_path / "m.gguf", seed=0)
    write_llama_gguf(tmp_path / "other.gguf", seed=1)
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(tmp_path / "m.gguf", tmp_path, shard_bytes=50_000, progress=stop)
    if is_gone:
        (tmp_path / "m.gguf").unlink()
    convert_gguf(tmp_path / "other.gguf", tmp_path)
    assert bool(list((tmp_path / "models").glob(".partial-*"))) is not is_gone


def test_a_pipe_is_no_gguf_file(tmp_path):
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"m\.gguf is a pipe or device, need a file"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "nvme")
