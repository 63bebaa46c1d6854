"""Checkpoints whose layers share one layer's bytes, and the image that holds them."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tools.cgroup import CGROUP_ROOT, ThrottleGroup, disk_of, join_command
from zeroinfer.diskformat import open_checkpoint
from zeroinfer.dtypes import DType, TensorSpec
from zeroinfer.errors import BackendUnavailableError, ConfigError

TOOLS = Path(__file__).resolve().parents[2] / "tools"
IMAGE_TOOL = TOOLS / "reflink_image.sh"


def _can_make_images():
    kernel = Path("/proc/filesystems").read_text().split()
    programs = all(map(shutil.which, ("mkfs.xfs", "losetup")))
    return os.geteuid() == 0 and programs and "xfs" in kernel and Path("/dev/loop-control").exists()


@pytest.fixture
def tools(monkeypatch):
    """Import a module of tools/ by its name."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


def copy_to_end(source, source_offset, target, target_offset):
    """Stand in for the clone on file systems that cannot."""
    assert target.stat().st_size == target_offset
    with source.open("rb") as data, target.open("ab") as file:
        data.seek(source_offset)
        shutil.copyfileobj(data, file)


def make_shared(tools, out, geometry="llama-tiny", num_layers=12, clone=copy_to_end):
    geometries, maker = tools("geometries"), tools("make_checkpoint")
    named = geometries.GEOMETRIES[geometry]
    config = geometries.resolve_config(named.family, named.sizes, num_layers)
    maker.make_checkpoint(out, config, dtype=DType.BF16, seed=3, shard_bytes=None, clone=clone)
    return out


@pytest.mark.parametrize("geometry", ["llama-tiny", "gpt2-tiny", "bloom-tiny"])
def test_every_layer_has_a_valid_file_with_the_first_ones_data(tools, tmp_path, geometry):
    folder = make_shared(tools, tmp_path / "m", geometry)
    files = sorted(folder.glob("*.safetensors"))
    layers, outer = {}, []
    for path in files:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        found = {name.split(".")[1 + name.startswith("model.")]: name for name in tensors}
        numbers = [int(word) for word in found if word.isdecimal()]
        if numbers:
            (number,) = numbers
            layers[number] = {name.split(f".{number}.")[1]: t for name, t in tensors.items()}
        else:
            outer.append(path)
    assert sorted(layers) == list(range(12))
    assert len(outer) == 2
    for tensors in layers.values():
        assert tensors.keys() == layers[0].keys()
        assert all(torch.equal(tensors[name], layers[0][name]) for name in tensors)
    assert len(open_checkpoint(folder).files) == 14


def test_data_begins_at_a_block_in_every_file(tools, tmp_path):
    for path in make_shared(tools, tmp_path / "m").glob("*.safetensors"):
        length = int.from_bytes(path.read_bytes()[:8], "little")
        assert (8 + length) % 4096 == 0
        json.loads(path.read_bytes()[8 : 8 + length])


def test_index_names_every_tensor(tools, tmp_path):
    folder = make_shared(tools, tmp_path / "m")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    extents = open_checkpoint(folder).tensors
    assert index["weight_map"] == {name: extent.path.name for name, extent in extents.items()}


def test_layers_that_differ_are_refused(tools):
    shards = tools("shards")
    specs = [
        TensorSpec(name=f"model.layers.{idx}.w", shape=(4, 4 + idx), dtype=DType.F32)
        for idx in range(2)
    ]
    with pytest.raises(ConfigError, match="--share-layers needs layers of one kind: model-00002"):
        shards.split_layers(specs)


def test_a_file_system_without_reflink_is_refused_and_left_empty(tools, tmp_path):
    def refuse(source, source_offset, target, target_offset):
        raise OSError(95, "Operation not supported")

    with pytest.raises(BackendUnavailableError, match="cannot share data: Operation not supported"):
        make_shared(tools, tmp_path / "m", clone=refuse)
    assert list(tmp_path.iterdir()) == []


def test_tmpfs_refuses_the_real_clone():
    folder = Path("/dev/shm") / f"zeroinfer-{os.getpid()}"
    command = [sys.executable, str(TOOLS / "make_checkpoint.py"), "--geometry", "llama-tiny"]
    command += ["--share-layers", "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "files in /dev/shm cannot share data: " in done.stderr
    assert "make one with tools/reflink_image.sh, or leave --share-layers out" in done.stderr
    assert not folder.exists()


def test_share_layers_and_shard_size_exclude_each_other(tmp_path):
    command = [sys.executable, str(TOOLS / "make_checkpoint.py"), "--geometry", "llama-tiny"]
    command += ["--share-layers", "--shard-size", "1GB", "--out", str(tmp_path / "m")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "not allowed with" in done.stderr


def run_image_tool(*words, **options):
    return subprocess.run(
        ["bash", str(IMAGE_TOOL), *map(str, words)],
        capture_output=True, text=True, check=False, **options,
    )  # fmt: skip


@pytest.mark.timeout(120)
def test_image_holds_shared_layers_or_says_what_is_missing(tools, tmp_path):
    """On a machine that cannot make one, the tool says why; nothing is left either way."""
    image, mount_point = tmp_path / "disk.xfs", tmp_path / "mount"
    made = run_image_tool("make", image, "512M", mount_point)
    if not _can_make_images():
        assert made.returncode == 2
        assert any(word in made.stderr for word in ("needs root", "is missing; install", "no XFS"))
        assert not image.exists()
        return
    assert made.returncode == 0, made.stderr
    try:
        _check_sharing(tools, mount_point)
        _check_throttle(tools, mount_point)
        again = run_image_tool("make", image, "512M", mount_point)
        assert (again.returncode, "exists; remove it" in again.stderr) == (2, True)
    finally:
        removed = run_image_tool("remove", image, mount_point)
    assert removed.returncode == 0, removed.stderr
    assert not image.exists()
    assert not mount_point.exists()


def _check_sharing(tools, folder):
    reflink = tools("reflink")
    used = shutil.disk_usage(folder).used
    shared = make_shared(tools, folder / "m", "g-600", 24, clone=reflink.clone_to_end)
    os.sync()
    layer_bytes = (shared / "model-00003-of-00026.safetensors").stat().st_size
    assert sum(path.stat().st_size for path in shared.glob("*.safetensors")) > 24 * layer_bytes
    # One layer, two vocabularies of 4 MB, and what the file system notes for 24 clones.
    assert shutil.disk_usage(folder).used - used < 2 * layer_bytes
    assert len(open_checkpoint(shared).files) == 26


def _check_throttle(tools, folder):
    path = folder / "m" / "model-00005-of-00026.safetensors"
    device = path.stat().st_dev
    assert disk_of(path) == f"{os.major(device)}:{os.minor(device)}"
    assert (Path("/sys/dev/block") / disk_of(path) / "loop").is_dir()
    if not os.access(CGROUP_ROOT / "blkio" / "cgroup.procs", os.W_OK):
        return
    with ThrottleGroup.create("zeroinfer-test", path=path, read_bytes_per_s=10**9) as group:
        read = ["dd", f"if={path}", "of=/dev/null", "bs=1M", "iflag=direct", "count=4"]
        subprocess.run(join_command([group], read), check=True, capture_output=True)
        assert group.bytes_read == 4 << 20


@pytest.mark.parametrize("words", [(), ("make", "a"), ("remove",), ("mount", "a", "b")])
def test_image_tool_prints_its_usage(words):
    done = run_image_tool(*words)
    assert done.returncode == 2
    assert "tools/reflink_image.sh make IMAGE SIZE MOUNT_POINT" in done.stderr


def test_image_tool_names_a_missing_program(tmp_path):
    """With an empty search path but for what the script itself needs."""
    for name in ("bash", "id", "losetup"):
        if shutil.which(name):
            (tmp_path / name).symlink_to(shutil.which(name))
    done = run_image_tool(
        "make", tmp_path / "i", "512M", tmp_path / "m", env={"PATH": str(tmp_path)}
    )
    assert done.returncode == 2
    assert "is missing; install" in done.stderr or "mounting needs root" in done.stderr
    assert not (tmp_path / "i").exists()


def test_image_tool_refuses_to_remove_what_it_did_not_make(tmp_path):
    done = run_image_tool("remove", tmp_path / "none", tmp_path)
    assert done.returncode == 2
    assert "there is no image" in done.stderr or not _can_make_images()
    assert tmp_path.exists()


def test_image_tool_removes_no_file_that_is_no_image(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    done = run_image_tool("remove", tmp_path / "mine.txt", tmp_path / "none")
    assert done.returncode == 2
    assert "mine.txt is no image of XFS" in done.stderr or not _can_make_images()
    assert (tmp_path / "mine.txt").read_text() == "precious"
