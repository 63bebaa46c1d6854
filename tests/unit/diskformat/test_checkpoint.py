"""Folders: which are opened, what is said of the others."""

import io
import json
import logging
import os
import pickle  # noqa: TID251 - the pickle under test must be seen not to run
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.raw_checkpoints import (
    edit_json,
    make_hub_cache,
    write_folder,
    write_index,
    write_safetensors,
)
from zeroinfer.diskformat import open_checkpoint, read_safetensors_header
from zeroinfer.errors import CheckpointError, StorageError

W = ("F32", (40, 30))
NAMES = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
SHARDS = {NAMES[0]: {"a": W, "b": W}, NAMES[1]: {"c": W}, NAMES[2]: {"d": W, "e": W}}


@pytest.fixture
def single(tmp_path):
    return write_folder(tmp_path / "single", {"model.safetensors": {"a": W, "b": ("BF16", (3,))}})


@pytest.fixture
def sharded(tmp_path):
    return write_folder(tmp_path / "sharded", SHARDS)


def refusal(folder, error=CheckpointError):
    with pytest.raises(error) as info:
        open_checkpoint(folder)
    assert info.value.exit_code == 4
    assert "\n" not in str(info.value)
    return str(info.value)


class Marker:
    """A pickle that leaves a file behind when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_single_file_without_index(single):
    """Source: airllm#185 (2.06)."""
    checkpoint = open_checkpoint(single)
    assert checkpoint.tensors == read_safetensors_header(single / "model.safetensors")
    assert checkpoint.files == (single / "model.safetensors",)
    assert checkpoint.total_bytes == 4800 + 6
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.generation_config == {}


def test_shards_with_index(sharded):
    checkpoint = open_checkpoint(sharded)
    assert {n: e.path.name for n, e in checkpoint.tensors.items()} == {
        "a": NAMES[0], "b": NAMES[0], "c": NAMES[1], "d": NAMES[2], "e": NAMES[2],
    }  # fmt: skip
    assert [path.name for path in checkpoint.files] == NAMES


def test_any_safetensors_files_without_index(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    assert sorted(open_checkpoint(sharded).tensors) == list("abcde")


def test_one_file_of_another_name(single):
    (single / "model.safetensors").rename(single / "weights.safetensors")
    assert sorted(open_checkpoint(single).tensors) == ["a", "b"]


def test_generation_config_is_read(single):
    (single / "generation_config.json").write_text('{"eos_token_id": [2, 259]}')
    assert open_checkpoint(single).generation_config == {"eos_token_id": [2, 259]}


def test_missing_shards_are_all_listed(sharded):
    """Source: sglang#32279 (2.01)."""
    (sharded / NAMES[0]).unlink()
    (sharded / NAMES[1]).unlink()
    message = refusal(sharded)
    assert f"missing {NAMES[0]}, {NAMES[1]};" in message


def test_missing_shard_without_index_is_seen_by_its_number(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    (sharded / NAMES[1]).unlink()
    assert f"missing {NAMES[1]};" in refusal(sharded)


@pytest.mark.parametrize("keep", [-1000, 20])
def test_cut_file_is_refused_at_open(single, keep):
    """Source: airllm#137 (2.04)."""
    path = single / "model.safetensors"
    os.truncate(path, keep % path.stat().st_size)
    assert str(path) in (message := refusal(single))
    assert "expected" in message
    assert "found" in message
    assert "fetch the file again" in message


def test_trailing_bytes_are_refused_at_open(sharded):
    """Source: ComfyUI#15602 (2.19)."""
    with (sharded / NAMES[1]).open("ab") as file:
        file.write(b"1234")
    assert "4 bytes after tensor 'c'" in refusal(sharded)


def test_tensor_of_the_index_that_its_shard_does_not_hold(sharded):
    write_index(
        sharded, {"a": NAMES[0], "b": NAMES[0], "c": NAMES[2], "d": NAMES[2], "x": NAMES[1]}
    )
    message = refusal(sharded)
    assert "'c', 'x'" in message
    assert f"'c' should be in {NAMES[2]}, it is in {NAMES[1]}" in message


def test_tensor_of_the_index_that_no_file_holds(sharded):
    weight_map = {t: name for name, tensors in SHARDS.items() for t in tensors}
    write_index(sharded, weight_map | {f"x{i}": NAMES[0] for i in range(7)})
    message = refusal(sharded)
    assert "'x4' and 2 more" in message
    assert "no other file has it" in message


def test_tensor_that_the_index_does_not_name_is_kept_and_said(sharded, caplog):
    write_index(sharded, {"a": NAMES[0], "c": NAMES[1], "d": NAMES[2]})
    assert sorted(open_checkpoint(sharded).tensors) == list("abcde")
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "'b', 'e'" in record.getMessage()


def test_index_decides_between_two_copies(tmp_path):
    shards = {"x.safetensors": {"a": W, "b": W}, "y.safetensors": {"b": W}}
    folder = write_folder(
        tmp_path / "m", shards, index={"a": "x.safetensors", "b": "y.safetensors"}
    )
    assert open_checkpoint(folder).tensors["b"].path.name == "y.safetensors"


def test_two_copies_without_index_are_refused(tmp_path):
    shards = {"x.safetensors": {"a": W, "b": W}, "y.safetensors": {"b": W}}
    message = refusal(write_folder(tmp_path / "m", shards, index=False))
    assert "tensor 'b' is both in" in message
    assert "x.safetensors" in message
    assert "y.safetensors" in message


@pytest.mark.parametrize("file", ["../x.safetensors", "/x.safetensors", "x.bin", 3])
def test_index_that_points_elsewhere(sharded, file):
    write_index(sharded, {"a": file})
    message = refusal(sharded)
    assert "tensor 'a'" in message
    assert repr(file) in message


@pytest.mark.parametrize("weight_map", [None, {}, [1]])
def test_index_without_weight_map(sharded, weight_map):
    write_index(sharded, weight_map)
    assert "weight_map" in refusal(sharded)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (None, "does not exist"),
        (" \n", "is empty"),
        ("{", "no valid JSON"),
        ("[]", "no JSON object"),
        ('{"a": 1, "a": 2}', "key 'a' twice"),
    ],
)
def test_config_that_is_none(single, text, part):
    path = single / "config.json"
    path.unlink() if text is None else path.write_text(text)
    assert str(path) in (message := refusal(single))
    assert part in message


def test_unreadable_config_is_a_storage_error(single, monkeypatch):
    def deny(_self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", deny)
    assert "Permission denied" in refusal(single, StorageError)


def test_unreadable_folder_is_a_storage_error(single, monkeypatch):
    def deny(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", deny)
    assert f"cannot be read: Permission denied ({single})" in refusal(single, StorageError)


def test_empty_folder(tmp_path):
    assert "holds no safetensors files: got nothing" in refusal(tmp_path)


def test_folder_without_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "got config.json alone" in refusal(tmp_path)


def test_missing_folder(tmp_path):
    assert f"{tmp_path / 'no'} does not exist" in refusal(tmp_path / "no")


def test_file_in_place_of_the_folder(single):
    message = refusal(single / "model.safetensors")
    assert "is a file" in message
    assert message.endswith(f"give {single}")


def test_gguf_says_how_to_convert(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")
    command = f"zeroinfer convert --model {path} --nvme DIR"
    assert command in refusal(path)
    assert command in refusal(tmp_path)


def test_only_pickles_are_refused_and_not_run(tmp_path):
    """Source: airllm#296 (2.12), vllm#947 (2.14)."""
    marker = tmp_path / "marker"
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Marker(marker)))
    message = refusal(folder)
    assert "pytorch_model.bin" in message
    assert f"zeroinfer convert --model {folder} --nvme DIR" in message
    assert not marker.exists()


def test_safetensors_beside_a_pickle_are_used_and_said(single, caplog, monkeypatch):
    """Source: airllm#305 (2.11)."""
    caplog.set_level(logging.INFO, logger="zeroinfer")
    (single / "pytorch_model.bin").write_bytes(b"other numbers")
    index = {"weight_map": {"a": "pytorch_model.bin", "b": "pytorch_model.bin"}}
    (single / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    opened = []
    real_open = io.open

    def spy(path, *args, **kwargs):
        opened.append(Path(path).name)
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(io, "open", spy)
    assert sorted(open_checkpoint(single).tensors) == ["a", "b"]
    (record,) = caplog.records
    assert "not opened: pytorch_model.bin" in record.getMessage()
    assert sorted(opened) == ["config.json", "model.safetensors"]


def test_single_file_wins_over_an_index_as_in_transformers(sharded, caplog):
    caplog.set_level(logging.INFO, logger="zeroinfer")
    write_safetensors(sharded / "model.safetensors", {"z": W})
    assert sorted(open_checkpoint(sharded).tensors) == ["z"]
    assert NAMES[0] in caplog.text


def test_trainers_leftovers_are_no_weights(single, caplog):
    caplog.set_level(logging.INFO, logger="zeroinfer")
    (single / "training_args.bin").write_bytes(b"x")
    open_checkpoint(single)
    assert not caplog.records


def test_hub_snapshot_by_relative_path_survives_chdir(sharded, tmp_path, monkeypatch):
    """Source: huggingface_hub#1388 (2.20)."""
    snapshot = make_hub_cache(tmp_path / "hub", "org/name", sharded)
    monkeypatch.chdir(snapshot.parent)
    checkpoint = open_checkpoint(Path(snapshot.name))
    monkeypatch.chdir(tmp_path)
    assert all(path.is_absolute() and path.is_file() for path in checkpoint.files)
    checkpoint.verify_unchanged()


def test_dangling_link_is_named_with_its_target(sharded, tmp_path):
    """Source: huggingface_hub#1388 (2.20)."""
    snapshot = make_hub_cache(tmp_path / "hub", "org/name", sharded)
    target = (snapshot / NAMES[1]).readlink()
    (snapshot / NAMES[1]).resolve().unlink()
    message = refusal(snapshot)
    assert f"{NAMES[1]} (a link to {target}, which does not exist)" in message


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_dangling_config_is_named_with_its_target(single, name):
    (single / name).unlink(missing_ok=True)
    (single / name).symlink_to("../blobs/77")
    assert f"{name} is a link to ../blobs/77, which does not exist" in refusal(single)


def test_dangling_folder_is_named_with_its_target(tmp_path):
    (tmp_path / "m").symlink_to("gone")
    assert "is a link to gone, which does not exist" in refusal(tmp_path / "m")


def test_unknown_dtype_stops_the_open(tmp_path):
    folder = write_folder(tmp_path / "m", {"model.safetensors": {"a": W}})
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F99"'))
    assert "got 'F99'" in refusal(folder)


def test_fingerprint_is_stable_and_follows_moves(sharded, tmp_path):
    before = open_checkpoint(sharded).fingerprint
    assert open_checkpoint(sharded).fingerprint == before
    moved = shutil.move(sharded, tmp_path / "moved")
    assert open_checkpoint(Path(moved)).fingerprint == before


def test_fingerprint_sees_each_change(sharded):
    seen = {open_checkpoint(sharded).fingerprint}
    edit_json(sharded / "config.json", rope_theta=1.0)
    seen.add(open_checkpoint(sharded).fingerprint)
    (sharded / "generation_config.json").write_text('{"eos_token_id": 2}')
    seen.add(open_checkpoint(sharded).fingerprint)
    os.utime(sharded / NAMES[0], ns=(1, 1))
    seen.add(open_checkpoint(sharded).fingerprint)
    write_safetensors(sharded / NAMES[0], {"a": W, "b": ("F32", (30, 40))})
    os.utime(sharded / NAMES[0], ns=(1, 1))
    seen.add(open_checkpoint(sharded).fingerprint)
    assert len(seen) == 5


def test_unchanged_files_verify(sharded):
    open_checkpoint(sharded).verify_unchanged()


@pytest.mark.parametrize("change", ["size", "mtime", "gone"])
def test_changed_file_is_named(sharded, change):
    checkpoint = open_checkpoint(sharded)
    path = sharded / NAMES[1]
    status = path.stat()
    if change == "gone":
        path.unlink()
    elif change == "size":
        os.truncate(path, status.st_size - 1)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    else:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(CheckpointError, match=r"does not exist|changed since") as info:
        checkpoint.verify_unchanged()
    assert str(path) in str(info.value)


def test_opening_reads_headers_only(tmp_path):
    """A sparse file of 1 TiB opens at once."""
    folder = write_folder(tmp_path / "m", {"model.safetensors": {}})
    end = 1 << 40
    header = {"a": {"dtype": "U8", "shape": [end], "data_offsets": [0, end]}}
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)
    assert open_checkpoint(folder).total_bytes == end


def test_torch_is_not_loaded():
    code = "import sys, zeroinfer.diskformat; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_pipe_is_refused_and_not_waited_for(single, name):
    (single / name).unlink(missing_ok=True)
    os.mkfifo(single / name)
    assert f"{name} is not a regular file" in refusal(single)
