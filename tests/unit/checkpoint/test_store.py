"""Stores: whole or not there, resumed, locked, and never at the cost of other files."""

import dataclasses
import fcntl
import logging
import os
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from zeroinfer.checkpoint import (
    SourceFile,
    StoreContent,
    TensorSource,
    check_store,
    find_store,
    is_store,
    read_manifest,
    verify_store,
    write_store,
)
from zeroinfer.checkpoint.shards import default_shard_bytes, plan_shards
from zeroinfer.diskformat import read_safetensors_header
from zeroinfer.dtypes import DType, TensorSpec
from zeroinfer.errors import CapacityError, CheckpointError, StorageError
from zeroinfer.units import GIB, MIB

SHARD_BYTES = 300_000


def source_of(name, array):
    dtype = {2: DType.F16, 4: DType.F32}[array.dtype.itemsize]
    spec = TensorSpec(name=name, shape=array.shape, dtype=dtype)
    return TensorSource(spec=spec, read=lambda: iter([array]))


def make_arrays(num_layers=4, elements=65536):
    rng = np.random.default_rng(0)
    arrays = {}
    for idx in range(num_layers):
        arrays[f"layers.{idx}.norm"] = rng.standard_normal(72).astype(np.float32)
        arrays[f"layers.{idx}.matrix"] = rng.standard_normal((elements // 64, 64), np.float32)
    return arrays


def make_content(arrays, *, sha256="ab" * 32, source_path="/nowhere/m.gguf"):
    return StoreContent(
        name="my model!", dtype="fp32", auto_dtype="fp32",
        source=SourceFile(path=source_path, size_bytes=1, mtime_ns=2, sha256=sha256),
        tensors=[source_of(name, array) for name, array in arrays.items()],
        documents={"config.json": b"{}\n"},
    )  # fmt: skip


def load(folder):
    values = {}
    for path in folder.glob("*.safetensors"):
        values |= safetensors.numpy.load_file(path)
    return values


def assert_holds(folder, arrays):
    values = load(folder)
    assert values.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(values[name], array)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_round_trip(tmp_path):
    arrays = make_arrays()
    folder = write_store(tmp_path / "nvme", make_content(arrays), shard_bytes=SHARD_BYTES)
    assert folder.parent == tmp_path / "nvme" / "models"
    assert folder.name.startswith("my-model-fp32-")
    assert_holds(folder, arrays)
    verify_store(folder)
    manifest = read_manifest(folder)
    assert manifest.weight_bytes == sum(a.nbytes for a in arrays.values())
    assert set(manifest.files) == {p.name for p in folder.iterdir()} - {"manifest.json"}
    assert not [p for p in folder.parent.iterdir() if p.name.startswith(".partial")]


def test_views_are_written_once_and_contiguous(tmp_path):
    # Source: safetensors/safetensors#304
    fused = np.arange(3 * 64 * 64, dtype=np.float32).reshape(192, 64)
    arrays = {"q": fused[:64], "k": fused[64:128], "v": fused[128:], "t": fused.T,
              "strided": fused[::2, ::3]}  # fmt: skip
    folder = write_store(tmp_path, make_content(arrays))
    assert_holds(folder, arrays)
    (path,) = folder.glob("*.safetensors")
    header = path.stat().st_size - sum(a.nbytes for a in arrays.values())
    assert header == 4096


def test_large_tensors_are_aligned_and_in_order_of_use(tmp_path):
    arrays = make_arrays()
    folder = write_store(tmp_path, make_content(arrays), shard_bytes=GIB)
    (path,) = folder.glob("*.safetensors")
    extents = read_safetensors_header(path)
    matrices = [f"layers.{idx}.matrix" for idx in range(4)]
    norms = [f"layers.{idx}.norm" for idx in range(4)]
    assert sorted(extents, key=lambda name: extents[name].offset) == matrices + norms
    assert all(extents[name].offset % 4096 == 0 for name in matrices)


def test_narrow_and_wide_rest_begin_at_multiples_of_their_element():
    arrays = {
        "h": np.ones(3, np.float16),
        "f": np.ones(5, np.float32),
        "m": np.ones(1024, np.float32),
    }
    (shard,) = plan_shards([source_of(n, a) for n, a in arrays.items()], shard_bytes=GIB)
    assert [s.spec.name for s in shard.sources] == ["m", "f", "h"]


def test_when_all_sizes_are_multiples_the_order_is_kept():
    arrays = {str(i): np.ones(2048 * (1 + i % 3), np.float16) for i in range(9)}
    (shard,) = plan_shards([source_of(n, a) for n, a in arrays.items()], shard_bytes=GIB)
    assert [s.spec.name for s in shard.sources] == list(arrays)


@pytest.mark.parametrize(
    ("total", "expected"), [(MIB, 128 * MIB), (538_000_000, 128 * MIB), (128 * GIB, 2 * GIB)]
)
def test_default_shard_size(total, expected):
    assert default_shard_bytes(total) == expected


class _InterruptError(Exception):
    pass


def interrupt_after(share):
    def progress(done, total):
        if done > share * total:
            raise _InterruptError

    return progress


def interrupted(nvme, arrays, share=0.7):
    with pytest.raises(_InterruptError):
        write_store(nvme, make_content(arrays), shard_bytes=SHARD_BYTES,
                    progress=interrupt_after(share))  # fmt: skip
    (staging,) = nvme.glob("models/.partial-*")
    return staging


def test_interrupted_store_is_not_visible_and_goes_on(tmp_path):
    arrays = make_arrays()
    staging = interrupted(tmp_path, arrays)
    assert not list(tmp_path.glob("models/[!.]*"))
    assert not list(staging.glob("*.partial"))
    kept = {p.name: p.stat().st_mtime_ns for p in staging.glob("*.safetensors")}
    assert len(kept) == 2
    folder = write_store(tmp_path, make_content(arrays), shard_bytes=SHARD_BYTES)
    assert_holds(folder, arrays)
    verify_store(folder)
    assert {n: (folder / n).stat().st_mtime_ns for n in kept} == kept


def test_damaged_finished_shard_is_written_again(tmp_path):
    arrays = make_arrays()
    staging = interrupted(tmp_path, arrays)
    first = min(staging.glob("*.safetensors"))
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    folder = write_store(tmp_path, make_content(arrays), shard_bytes=SHARD_BYTES)
    assert_holds(folder, arrays)
    verify_store(folder)


@pytest.mark.parametrize(
    "journal", [b"", b"{", b"[]", b'{"model-00001-of-00004.safetensors": "00"}']
)
def test_torn_journal_means_starting_again(tmp_path, journal):
    arrays = make_arrays()
    (interrupted(tmp_path, arrays) / "finished.json").write_bytes(journal)
    folder = write_store(tmp_path, make_content(arrays), shard_bytes=SHARD_BYTES)
    assert_holds(folder, arrays)


def test_other_shard_size_after_an_interruption_starts_again(tmp_path):
    arrays = make_arrays()
    interrupted(tmp_path, arrays)
    folder = write_store(tmp_path, make_content(arrays), shard_bytes=2 * SHARD_BYTES)
    assert_holds(folder, arrays)
    assert set(read_manifest(folder).files) == {p.name for p in folder.iterdir()} - {
        "manifest.json"
    }


def test_too_little_space_is_refused_before_writing(small_disk):
    # Source: deepspeedai/DeepSpeed#1627
    arrays = make_arrays(num_layers=6, elements=262144)
    with pytest.raises(CapacityError) as caught:
        write_store(small_disk, make_content(arrays))
    for part in (str(small_disk), "needs 7.0 MiB", "2.0 MiB is free", "--nvme"):
        assert part in str(caught.value)
    assert not [p for p in (small_disk / "models").iterdir() if not p.name.endswith(".lock")]


def test_disk_filling_up_meanwhile_is_reported_and_cleaned_up(small_disk):
    # Source: deepspeedai/DeepSpeed#1627
    arrays = make_arrays(num_layers=3)
    (small_disk / "mine.txt").write_text("precious")

    def fill(done, total):
        if done > total / 2 and not (small_disk / "filler").exists():
            free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
            (small_disk / "filler").write_bytes(bytes(free - 8192))

    with pytest.raises(StorageError, match=r"No space left on device \(ENOSPC\)"):
        write_store(small_disk, make_content(arrays), shard_bytes=SHARD_BYTES, progress=fill)
    assert not [p for p in (small_disk / "models").iterdir() if not p.name.endswith(".lock")]
    assert (small_disk / "mine.txt").read_text() == "precious"
    (small_disk / "filler").unlink()
    assert_holds(write_store(small_disk, make_content(arrays)), arrays)


def test_existing_store_is_returned_untouched(tmp_path):
    folder = write_store(tmp_path, make_content(make_arrays()))
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert write_store(tmp_path, make_content(make_arrays())) == folder
    assert {p: p.stat().st_mtime_ns for p in folder.iterdir()} == before


def test_second_writer_waits_and_names_the_first(tmp_path, caplog):
    content = make_content(make_arrays())
    (tmp_path / "models").mkdir()
    lock = (tmp_path / "models" / f".{content.folder_name()}.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.write("4242\n")
    lock.flush()
    said = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record):
            if "waiting for process 4242" in record.getMessage():
                said.set()

    logger = logging.getLogger("zeroinfer.checkpoint.staging")
    listener = Listener()
    logger.addHandler(listener)
    folders = []
    with caplog.at_level(logging.INFO, logger.name):
        second = threading.Thread(target=lambda: folders.append(write_store(tmp_path, content)))
        second.start()
        assert said.wait(30)
        assert not folders
        lock.close()
        second.join(30)
    logger.removeHandler(listener)
    verify_store(folders[0])


def test_foreign_folder_of_that_name_is_refused_and_kept(tmp_path):
    content = make_content(make_arrays())
    foreign = tmp_path / "models" / content.folder_name()
    foreign.mkdir(parents=True)
    (foreign / "mine.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="is no store"):
        write_store(tmp_path, content)
    assert (foreign / "mine.txt").read_text() == "precious"


def test_neighbours_are_left_alone(tmp_path):
    other = tmp_path / "models" / ".partial-other"
    other.mkdir(parents=True)
    (other / "x.safetensors").write_bytes(b"x")
    interrupted_folder = tmp_path / "models" / "notes"
    interrupted_folder.mkdir()
    write_store(tmp_path, make_content(make_arrays()))
    assert (other / "x.safetensors").exists()
    assert interrupted_folder.exists()


def test_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=r"Not a directory \(ENOTDIR\).*writable --nvme"):
        write_store(tmp_path / "file", make_content(make_arrays()))


def test_disk_that_cannot_be_written(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageError, match=r"Read-only file system \(EROFS\).*writable --nvme"):
        write_store(small_disk, make_content(make_arrays()))


def test_find_store_by_path_size_and_time(tmp_path):
    source = tmp_path / "m.gguf"
    source.write_bytes(b"x")
    status = source.stat()
    content = make_content(make_arrays(), source_path=str(source))
    known = SourceFile(
        path=str(source), size_bytes=1, mtime_ns=status.st_mtime_ns, sha256="cd" * 32
    )
    assert find_store(tmp_path, source, dtype="auto") is None
    folder = write_store(tmp_path, dataclasses.replace(content, source=known))
    assert find_store(tmp_path, source, dtype="auto") == folder
    assert find_store(tmp_path, source, dtype="fp32") == folder
    assert find_store(tmp_path, source, dtype="bf16") is None
    os.utime(source, ns=(0, 0))
    assert find_store(tmp_path, source, dtype="auto") is None


def test_a_missing_or_cut_file_is_found_without_reading(tmp_path):
    folder = write_store(tmp_path, make_content(make_arrays()))
    (path,) = folder.glob("*.safetensors")
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 1)
    with pytest.raises(CheckpointError, match=rf"{path.name} has {size - 1} bytes, need {size}"):
        check_store(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path.name} is missing"):
        check_store(folder)


def test_a_store_that_may_not_be_searched_is_a_storage_error(tmp_path, monkeypatch):
    folder = write_store(tmp_path, make_content(make_arrays(1)))

    def deny(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", deny)
    with pytest.raises(StorageError, match=rf"{folder} cannot be read: Permission denied"):
        is_store(folder)


def test_weights_that_do_not_belong_to_a_store_are_refused(tmp_path):
    folder = write_store(tmp_path, make_content(make_arrays(1)))
    (path,) = folder.glob("*.safetensors")
    (folder / "model.safetensors").write_bytes(path.read_bytes())
    for check in (check_store, verify_store):
        with pytest.raises(CheckpointError, match=r"holds model\.safetensors, which convert did"):
            check(folder)
