"""Folders of .bin files become stores; nothing in a pickle ever runs."""

import json
import logging
import os
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.checkpoints import tiny_model, write_bin
from zeroinfer.checkpoint import ModelKind, convert_folder, model_kind, verify_store
from zeroinfer.checkpoint.kinds import find_pickles
from zeroinfer.diskformat import open_checkpoint, read_safetensors_header
from zeroinfer.errors import CheckpointError, ConfigError, StorageError, UnsupportedModelError


def read_store(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def save(folder, state, name="pytorch_model.bin", **options):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama", "torch_dtype": "float32"}')
    torch.save(state, folder / name, **options)
    return folder


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_every_tensor_arrives(tmp_path, family, num_shards):
    # Source: vllm-project/vllm#947
    model = tiny_model(family)
    folder = write_bin(tmp_path / "m", model, num_shards=num_shards)
    assert model_kind(folder) is ModelKind.PICKLES
    store = convert_folder(folder, tmp_path / "nvme", shard_bytes=30_000)
    found, state = read_store(store), model.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    verify_store(store)
    assert open_checkpoint(store).config == json.loads((folder / "config.json").read_text())


def test_a_tied_pair_of_one_storage_has_both_names(tmp_path):
    table = torch.randn(8, 4)
    folder = save(tmp_path / "m", {"embed.weight": table, "lm_head.weight": table})
    found = read_store(convert_folder(folder, tmp_path / "nvme"))
    assert torch.equal(found["embed.weight"], table)
    assert torch.equal(found["lm_head.weight"], table)


def test_views_are_written_once_each_and_contiguous(tmp_path):
    # Source: safetensors/safetensors#304
    fused = torch.arange(192 * 64, dtype=torch.float32).reshape(192, 64)
    state = {"q": fused[:64], "k": fused[64:128], "v": fused[128:], "t": fused.T,
             "s": fused[::2, ::3]}  # fmt: skip
    store = convert_folder(save(tmp_path / "m", state), tmp_path / "nvme")
    found = read_store(store)
    assert all(torch.equal(found[name], view) for name, view in state.items())
    (path,) = store.glob("*.safetensors")
    sizes = sum(view.numel() * 4 for view in state.values())
    assert path.stat().st_size == 4096 + sizes
    assert set(read_safetensors_header(path)) == set(state)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool],
    ids=str,
)
def test_bytes_of_every_type_are_kept(tmp_path, dtype):
    state = {
        "a": (torch.arange(60).reshape(3, 20) % 3).to(dtype),
        "empty": torch.empty((0, 4), dtype=dtype),
        "one": torch.ones((), dtype=dtype),
    }
    found = read_store(convert_folder(save(tmp_path / "m", state), tmp_path / "nvme"))
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert all(found[name].dtype is dtype for name in state)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_floats_are_rounded_on_demand(tmp_path, name):
    state = {"w": torch.randn(64, 8), "ids": torch.arange(5), "bias": torch.tensor(-1e9)}
    folder = save(tmp_path / "m", state)
    store = convert_folder(folder, tmp_path / "nvme", dtype=name)
    found = read_store(store)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    assert torch.equal(found["w"], state["w"].to(kind))
    assert found["ids"].dtype is torch.int64
    assert found["bias"] == state["bias"]
    assert open_checkpoint(store).config["torch_dtype"] == {"bf16": "bfloat16",
                                                            "fp16": "float16"}[name]  # fmt: skip
    assert convert_folder(folder, tmp_path / "nvme") != store


def test_files_of_old_torch_are_read_too(tmp_path):
    state = {"w": torch.randn(4, 4)}
    folder = save(tmp_path / "m", state, _use_new_zipfile_serialization=False)
    assert torch.equal(read_store(convert_folder(folder, tmp_path / "nvme"))["w"], state["w"])


def test_it_is_said_once(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "zeroinfer")
    folder = write_bin(tmp_path / "m", tiny_model("llama"), num_shards=3)
    convert_folder(folder, tmp_path / "nvme", shard_bytes=20_000)
    (record,) = caplog.records
    assert "weights as pickles" in record.getMessage()


def test_one_file_is_held_at_a_time_and_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("zeroinfer.checkpoint.pickles._PIECE_BYTES", 512)
    held, options_seen = [], []
    real = getattr(torch, "load")  # noqa: B009 - the plain spelling is kept to one module

    def spy(path, **options):
        assert not [ref for ref in held if ref() is not None]
        options_seen.append(options)
        state = real(path, **options)
        held.extend(map(weakref.ref, state.values()))
        return state

    monkeypatch.setattr(torch, "load", spy)
    model = tiny_model("llama")
    store = convert_folder(write_bin(tmp_path / "m", model, num_shards=2), tmp_path / "nvme")
    found = read_store(store)
    assert all(torch.equal(found[name], t) for name, t in model.state_dict().items())
    assert len(options_seen) >= 4
    assert all(options["weights_only"] and options["mmap"] for options in options_seen)


class Marker:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("is_zip", [True, False])
def test_code_in_a_pickle_does_not_run(tmp_path, is_zip):
    # Source: lyogavin/airllm#296
    marker = tmp_path / "marker"
    state = {"w": torch.ones(2), "x": Marker(marker)}
    folder = save(tmp_path / "m", state, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be loaded as tensors"):
        convert_folder(folder, tmp_path / "nvme")
    assert not marker.exists()
    assert not list((tmp_path / "nvme").glob("models/[!.]*"))


def test_a_cut_file_is_refused_by_name(tmp_path):
    folder = save(tmp_path / "m", {"w": torch.randn(64, 64)})
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be loaded"):
        convert_folder(folder, tmp_path / "nvme")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([torch.ones(2)], "holds a list, need tensors by name"),
        ({"epoch": 3}, "holds 'epoch' of type int, need tensors by name"),
        ({"__metadata__": torch.ones(2)}, "holds a tensor called __metadata__, need another"),
        ({"model": {"w": torch.ones(2)}}, "holds 'model' of type dict"),
    ],
)
def test_what_is_no_state_dict_is_refused(tmp_path, state, message):
    with pytest.raises(CheckpointError, match=message):
        convert_folder(save(tmp_path / "m", state), tmp_path / "nvme")


@pytest.mark.parametrize(
    "tensor", [torch.eye(3).to_sparse(), torch.ones(2, dtype=torch.complex64)], ids=["sparse", "c"]
)
def test_tensors_that_cannot_be_written_are_refused(tmp_path, tensor):
    with pytest.raises(UnsupportedModelError, match="need a dense tensor of one of"):
        convert_folder(save(tmp_path / "m", {"w": tensor}), tmp_path / "nvme")


def test_a_name_in_two_files_is_refused(tmp_path):
    folder = save(tmp_path / "m", {"w": torch.ones(2)}, "pytorch_model-00001-of-00002.bin")
    save(folder, {"w": torch.ones(2)}, "pytorch_model-00002-of-00002.bin")
    with pytest.raises(CheckpointError, match=r"tensor 'w' is in .*, need it once"):
        convert_folder(folder, tmp_path / "nvme")


@pytest.mark.parametrize(
    "weight_map", [None, {}, {"w": 3}, {"w": []}, {"w": "../x.bin"}, {"w": "/x.bin"}]
)
def test_a_malformed_index_is_refused(tmp_path, weight_map):
    path = tmp_path / "pytorch_model.bin.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"weight_map of .* is wrong"):
        find_pickles(tmp_path)


def test_a_missing_file_of_the_index_is_named(tmp_path):
    folder = write_bin(tmp_path / "m", tiny_model("llama"), num_shards=3)
    (folder / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(CheckpointError, match="missing pytorch_model-00002-of-00003"):
        convert_folder(folder, tmp_path / "nvme")


def test_safetensors_go_first_and_the_pickle_stays_closed(tmp_path, caplog, monkeypatch):
    # Source: lyogavin/airllm#305
    caplog.set_level(logging.INFO, "zeroinfer")
    folder = tmp_path / "m"
    model = tiny_model("llama")
    model.save_pretrained(folder)
    save(folder, {"w": torch.ones(2)})
    model.config.save_pretrained(folder)
    monkeypatch.setattr(torch, "load", None)
    found = read_store(convert_folder(folder, tmp_path / "nvme"))
    assert found.keys() == load_file(folder / "model.safetensors").keys()
    assert "not opened: pytorch_model.bin" in caplog.text


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no safetensors files"):
        convert_folder(tmp_path, tmp_path / "nvme")


def test_unknown_dtype_is_refused(tmp_path):
    folder = save(tmp_path / "m", {"w": torch.ones(2)})
    with pytest.raises(ConfigError, match="int8"):
        convert_folder(folder, tmp_path / "nvme", dtype="int8")


def test_a_missing_numbered_file_is_named_without_an_index(tmp_path):
    folder = save(tmp_path / "m", {"w": torch.ones(2)}, "pytorch_model-00002-of-00003.bin")
    message = r"missing pytorch_model-00001-of-00003\.bin, pytorch_model-00003-of-00003\.bin"
    with pytest.raises(CheckpointError, match=message):
        convert_folder(folder, tmp_path / "nvme")


def test_a_tensor_without_values_is_refused(tmp_path):
    folder = save(tmp_path / "m", {"w": torch.ones(2), "x": torch.ones(2, device="meta")})
    with pytest.raises(CheckpointError, match="holds tensor 'x' without its values"):
        convert_folder(folder, tmp_path / "nvme")


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path):
    # Source: NVIDIA/TensorRT-LLM#17368
    folder = save(tmp_path / "m", {name: torch.randn(64, 64) for name in "abc"})

    def cut_after_the_first(done, total):
        if done > 64 * 64 * 4:
            os.truncate(folder / "pytorch_model.bin", 4096)

    with pytest.raises(CheckpointError, match=r"was cut while it was read: got 4096 bytes, need"):
        convert_folder(folder, tmp_path / "nvme", progress=cut_after_the_first)
    assert not list((tmp_path / "nvme").glob("models/[!.]*"))


def test_a_pipe_is_no_file_of_weights(tmp_path):
    folder = save(tmp_path / "m", {"w": torch.ones(2)})
    (folder / "pytorch_model.bin").unlink()
    os.mkfifo(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"missing pytorch_model\.bin"):
        convert_folder(folder, tmp_path / "nvme")


def test_a_folder_that_may_not_be_listed_is_a_storage_error(tmp_path, monkeypatch):
    def deny(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", deny)
    with pytest.raises(StorageError, match=f"model {tmp_path} cannot be read: Permission denied"):
        model_kind(tmp_path)
