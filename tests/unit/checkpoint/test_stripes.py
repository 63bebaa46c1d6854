"""Stores spread over several folders, and copies: whole, verified, and refused by name if not."""

import errno
import hashlib
import json
import mmap
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tests.helpers.raw_checkpoints import write_folder
from zeroinfer.checkpoint import (
    SourceFile,
    StoreContent,
    TensorSource,
    convert_folder,
    find_store,
    read_manifest,
    staging,
    verify_store,
    write_store,
)
from zeroinfer.checkpoint.shards import plan_shards
from zeroinfer.diskformat import Extent, open_checkpoint, plan_runs
from zeroinfer.dtypes import DType, TensorSpec
from zeroinfer.errors import CapacityError, CheckpointError, ConfigError, StorageError
from zeroinfer.native import ThreadReader

SHARD_BYTES = 200_000


def source_of(name, array):
    spec = TensorSpec(name=name, shape=array.shape, dtype=DType.F32)
    return TensorSource(spec=spec, read=lambda: iter([array]))


def make_arrays(num_layers=6):
    rng = np.random.default_rng(0)
    return {f"layers.{idx}": rng.standard_normal((256, 96), np.float32)
            for idx in range(num_layers)}  # fmt: skip


def make_content(arrays, *, sha256="cd" * 32):
    return StoreContent(
        name="m", dtype="fp32", auto_dtype="fp32",
        source=SourceFile(path="/nowhere", size_bytes=1, mtime_ns=2, sha256=sha256),
        tensors=[source_of(name, array) for name, array in arrays.items()],
        documents={"config.json": b"{}\n", "additional_chat_templates/a.jinja": b"{{ x }}"},
    )  # fmt: skip


@pytest.fixture
def dirs(tmp_path):
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.fixture
def store(dirs):
    return write_store(dirs[0], make_content(make_arrays()), stripes=dirs[1:],
                       shard_bytes=SHARD_BYTES)  # fmt: skip


def assert_holds(folder, arrays):
    values = {}
    for path in folder.glob("*.safetensors"):
        values |= safetensors.numpy.load_file(path)
    assert values.keys() == arrays.keys()
    assert all(np.array_equal(values[name], array) for name, array in arrays.items())


def test_any_tool_opens_the_first_folder(store, dirs):
    assert_holds(store, make_arrays())
    assert (store / "additional_chat_templates" / "a.jinja").read_bytes() == b"{{ x }}"
    verify_store(store)
    checkpoint = open_checkpoint(store)
    homes = {path.resolve().parents[2] for path in checkpoint.files}
    assert homes == set(dirs)
    assert read_manifest(store).stripes == tuple(
        str(folder / "models" / f"{store.name}.part-{idx}")
        for idx, folder in enumerate(dirs[1:], 1)
    )


def test_every_stretch_of_a_pass_lies_on_all_folders():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, 60) * 1024
    tensors = [source_of(str(i), np.zeros(size, np.float32)) for i, size in enumerate(sizes)]
    shards = plan_shards(tensors, shard_bytes=SHARD_BYTES, num_stripes=3)
    stripe = {s.spec.name: shard.stripe for shard in shards for s in shard.sources}
    assert len(stripe) == 60
    held = np.zeros(3)
    for idx, size in enumerate(sizes):
        held[stripe[str(idx)]] += size
        assert held.max() - held.min() <= sizes.max()


def test_names_count_all_files_and_order_them_by_use():
    tensors = [source_of(str(i), np.zeros(1024, np.float32)) for i in range(6)]
    shards = plan_shards(tensors, shard_bytes=8192, num_stripes=2)
    assert [s.name for s in shards] == [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert [[s.spec.name for s in shard.sources] for shard in shards] == [
        ["0", "2"], ["1", "3"], ["4"], ["5"],
    ]  # fmt: skip
    assert [shard.stripe for shard in shards] == [0, 1, 0, 1]


def test_a_missing_folder_is_named(store, dirs):
    (dirs[1] / "models").rename(dirs[1] / "unmounted")
    with pytest.raises(CheckpointError, match=rf"{dirs[1]}/models/\S+ is missing; mount its disk"):
        verify_store(store)
    with pytest.raises(CheckpointError, match=r"a link to \S+two/models\S+, which does not exist"):
        open_checkpoint(store)


def test_a_flipped_byte_in_another_folder_is_found(store, dirs):
    path = min((dirs[2] / "models").glob("*/*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{path.name} is damaged: sha256 is"):
        verify_store(store)


def test_each_set_of_folders_has_a_store_of_its_own(store, dirs):
    content = make_content(make_arrays())
    plain = write_store(dirs[0], content)
    other = write_store(dirs[1], content, stripes=[dirs[0]])
    assert len({store.name, plain.name, other.name}) == 3
    assert write_store(dirs[0], content, stripes=dirs[1:]) == store
    for folder in (store, plain, other):
        verify_store(folder)


def test_a_folder_that_is_not_there_is_not_made(dirs, tmp_path):
    absent = tmp_path / "absent"
    with pytest.raises(StorageError, match=f"folder {absent} of a striped store does not exist"):
        write_store(dirs[0], make_content(make_arrays()), stripes=[absent])
    assert not absent.exists()


def test_a_folder_given_twice_is_refused(dirs):
    with pytest.raises(ConfigError, match=f"folder {dirs[0]} is given twice"):
        write_store(dirs[0], make_content(make_arrays()), stripes=[dirs[1], dirs[0] / "."])


class _InterruptError(Exception):
    pass


def stop_after(share):
    def progress(done, total):
        if done > share * total:
            raise _InterruptError

    return progress


def test_an_interrupted_striped_store_goes_on(dirs):
    content = make_content(make_arrays())
    options = {"stripes": dirs[1:], "shard_bytes": SHARD_BYTES}
    with pytest.raises(_InterruptError):
        write_store(dirs[0], content, progress=stop_after(0.6), **options)
    kept = {p: p.stat().st_mtime_ns for d in dirs for p in d.glob("models/*/*.safetensors")}
    assert kept
    (dirs[1] / "models" / f"{content.folder_name(dirs)}.part-1" / "x.partial").touch()
    store = write_store(dirs[0], content, **options)
    assert_holds(store, make_arrays())
    verify_store(store)
    assert not [p for d in dirs for p in d.rglob("*.partial")]
    moved = {store / p.name if ".partial-" in str(p) else p: t for p, t in kept.items()}
    assert {p: p.stat().st_mtime_ns for p in moved} == moved


def test_space_is_checked_in_every_folder(dirs, monkeypatch):
    usage = shutil.disk_usage(dirs[0])._replace(free=1000)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(CapacityError, match=r"needs \d\.\d MiB but 1000 B is free"):
        write_store(dirs[0], make_content(make_arrays()), stripes=dirs[1:])
    assert not [p for d in dirs for p in (d / "models").iterdir() if not p.name.endswith(".lock")]


def fail_writes(monkeypatch, code, *, after):
    """Let the writes of weights fail once so many bytes were written."""
    real = staging.sync
    state = {"done": 0}

    def sync(path):
        if path.suffix == ".partial" and ".safetensors" in path.name:
            state["done"] += path.stat().st_size
            if state["done"] > after:
                raise OSError(code, os.strerror(code))
        real(path)

    monkeypatch.setattr(staging, "sync", sync)


@pytest.mark.parametrize(
    ("code", "is_kept"), [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EIO, True)]
)
def test_a_write_that_fails_is_reported_and_cleaned_up(dirs, monkeypatch, code, is_kept):
    # Source: deepspeedai/DeepSpeed#1627
    content = make_content(make_arrays())
    options = {"stripes": dirs[1:], "shard_bytes": SHARD_BYTES}
    with monkeypatch.context() as patch:
        fail_writes(patch, code, after=400_000)
        with pytest.raises(StorageError) as caught:
            write_store(dirs[0], content, **options)
    assert errno.errorcode[code] in str(caught.value)
    assert ".safetensors" in str(caught.value)
    assert caught.value.exit_code == 4
    left = [p for d in dirs for p in d.rglob("*") if p.is_file() and p.suffix != ".lock"]
    assert bool(left) is is_kept
    verify_store(write_store(dirs[0], content, **options))


@pytest.fixture
def model(tmp_path):
    tensors = {"a": ("BF16", (300, 7)), "b": ("F32", (64, 64)), "c": ("I64", ())}
    shards = {"model-00001-of-00002.safetensors": tensors,
              "model-00002-of-00002.safetensors": {"d": ("BF16", (4097,))}}  # fmt: skip
    folder = write_folder(tmp_path / "hf", shards)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "training_args.bin").write_bytes(b"x")
    return folder


def raw_tensors(folder):
    return {
        name: extent.path.read_bytes()[extent.offset : extent.offset + extent.spec.nbytes]
        for name, extent in open_checkpoint(folder).tensors.items()
    }


@pytest.mark.parametrize("num_stripes", [0, 2])
def test_a_copy_has_the_same_bytes(model, dirs, num_stripes):
    order = []

    def order_of_use(config, shapes):
        order.append((config["model_type"], shapes["a"]))
        return ["d", "a"]

    stripes = dirs[1 : 1 + num_stripes]
    store = convert_folder(model, dirs[0], stripes=stripes, order=order_of_use)
    assert raw_tensors(store) == raw_tensors(model)
    assert order == [("llama", (300, 7))]
    assert (store / "config.json").read_bytes() == (model / "config.json").read_bytes()
    assert (store / "tokenizer.json").is_file()
    assert not (store / "training_args.bin").exists()
    index = json.loads((store / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"a", "b", "c", "d"}
    assert read_manifest(store).dtype == "mixed"
    verify_store(store)


def test_a_later_run_finds_the_copy(model, dirs):
    store = convert_folder(model, dirs[0])
    calls = []
    assert convert_folder(model, dirs[0], progress=lambda *a: calls.append(a)) == store
    assert not calls
    assert find_store(dirs[0], model, dtype=None) == store
    assert find_store(dirs[0], model, dtype=None, stripes=dirs[1:]) is None
    (model / "tokenizer.json").write_text('{"changed": 1}')
    assert find_store(dirs[0], model, dtype=None) is None
    assert convert_folder(model, dirs[0]) != store


@pytest.mark.parametrize("code", [1, 255])
def test_a_disk_that_gives_other_bytes_back_is_found(model, dirs, monkeypatch, code):
    real = os.posix_fadvise

    def damage(fd, *args):
        real(fd, *args)
        with Path(f"/proc/self/fd/{fd}").readlink().open("r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)[0]
            file.seek(-1, 2)
            file.write(bytes([last ^ code]))

    monkeypatch.setattr(os, "posix_fadvise", damage)
    with pytest.raises(StorageError, match=r"reads back otherwise than it was written: sha256 is"):
        convert_folder(model, dirs[0])
    assert not list(dirs[0].glob("models/[!.]*"))


def test_a_source_that_changes_meanwhile_is_refused(model, dirs):
    def touch(done, total):
        os.utime(model / "config.json", ns=(5, 5))

    with pytest.raises(CheckpointError, match=f"{model} changed while it was copied"):
        convert_folder(model, dirs[0], progress=touch)
    assert not list(dirs[0].glob("models/[!.]*"))


def test_left_overs_of_a_source_that_changed_are_removed(model, dirs):
    # Source: deepspeedai/DeepSpeed#4416
    with pytest.raises(_InterruptError):
        convert_folder(model, dirs[0], stripes=dirs[1:], progress=stop_after(0.5), shard_bytes=5000)
    assert list(dirs[0].glob("models/.partial-*"))
    assert list(dirs[1].glob("models/*"))
    other = make_content(make_arrays(1))
    write_store(dirs[0], other)
    assert list(dirs[0].glob("models/.partial-*")), "its source is as it was: it can go on"
    os.utime(model / "tokenizer.json", ns=(5, 5))
    write_store(dirs[0], make_content(make_arrays(1), sha256="ef" * 32))
    assert not list(dirs[0].glob("models/.partial-*"))
    assert not list(dirs[1].glob("models/*"))


def test_a_left_over_in_use_is_kept(model, dirs):
    with pytest.raises(_InterruptError):
        convert_folder(model, dirs[0], progress=stop_after(0.5), shard_bytes=5000)
    (partial,) = dirs[0].glob("models/.partial-*")
    os.utime(model / "tokenizer.json", ns=(5, 5))
    with staging.locked(partial.parent, partial.name.removeprefix(".partial-")):
        write_store(dirs[0], make_content(make_arrays(1)))
    assert partial.is_dir()


def test_tensors_of_any_size_come_back_through_direct_reads(tmp_path, dirs):
    # Source: deepspeedai/DeepSpeed#1070
    sizes = (1, 511, 512, 513, 4095, 4097, 262145)
    tensors = {f"t{size}": ("BF16", (size,)) for size in sizes}
    model = write_folder(tmp_path / "hf", {"model.safetensors": tensors})
    store = convert_folder(model, dirs[0], stripes=dirs[1:])
    extents = open_checkpoint(store).tensors
    wanted = [Extent(path=e.path, offset=e.offset, length=e.spec.nbytes) for e in extents.values()]
    landed = {}
    with ThreadReader.open(io_chunk_bytes=65536, queue_depth=2) as reader:
        for run in plan_runs(wanted, alignment=4096, max_gap_bytes=4096):
            ring = memoryview(mmap.mmap(-1, run.length))
            file = reader.open_file(run.path)
            ticket = reader.submit(file, run.offset, ring, required_bytes=run.required_bytes)
            reader.wait(ticket)
            for idx, start in run.pieces:
                name = list(extents)[idx]
                landed[name] = bytes(ring[start : start + wanted[idx].length])
    assert landed == raw_tensors(model)


def test_two_models_in_one_folder_do_not_touch_each_other(tmp_path, dirs):
    # Source: huggingface/transformers#31800
    models = [
        write_folder(tmp_path / f"m{width}", {"model.safetensors": {"w": ("F32", (64, width))}})
        for width in (32, 48)
    ]
    for _ in range(5):
        with ThreadPoolExecutor(2) as pool:
            stores = list(pool.map(lambda model: convert_folder(model, dirs[0]), models))
        for model, store in zip(models, stores, strict=True):
            verify_store(store)
            assert raw_tensors(store) == raw_tensors(model)
        shutil.rmtree(dirs[0] / "models")


def test_stores_of_two_first_folders_share_no_file(dirs):
    # Source: huggingface/transformers#31800
    content = make_content(make_arrays())
    options = {"stripes": dirs[2:], "shard_bytes": SHARD_BYTES}
    first = write_store(dirs[0], content, **options)
    with pytest.raises(_InterruptError):
        write_store(dirs[1], content, progress=stop_after(0.6), **options)
    verify_store(first)
    second = write_store(dirs[1], content, **options)
    assert first.name != second.name
    for store in (first, second):
        verify_store(store)
        assert_holds(store, make_arrays())


def test_a_loop_of_links_is_no_folder(dirs, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StorageError, match="loop of a striped store does not exist"):
        write_store(dirs[0], make_content(make_arrays()), stripes=[tmp_path / "loop"])


@pytest.mark.parametrize("name", ["finished.json", "manifest.json"])
def test_files_that_are_called_like_ours_are_left_out(model, dirs, name):
    (model / name).write_text('{"mine": 1}')
    store = convert_folder(model, dirs[0])
    verify_store(store)
    assert name not in read_manifest(store).files
    assert convert_folder(model, dirs[0]) == store


def test_a_left_over_that_cannot_be_locked_is_left_to_its_owner(model, dirs):
    with pytest.raises(_InterruptError):
        convert_folder(model, dirs[0], progress=stop_after(0.5), shard_bytes=5000)
    (partial,) = dirs[0].glob("models/.partial-*")
    lock = partial.with_name(f".{partial.name.removeprefix('.partial-')}.lock")
    lock.unlink()
    lock.mkdir()
    os.utime(model / "tokenizer.json", ns=(5, 5))
    verify_store(write_store(dirs[0], make_content(make_arrays(1))))
    assert partial.is_dir()


def manifest_text(**body):
    """A manifest with the right checksum, whatever it says."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({**body, "sha256": hashlib.sha256(text.encode()).hexdigest()})


STRANGE = {
    "empty": lambda path: path.touch(),
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "deep": lambda path: path.write_text("[" * 100_000),
    "no keys": lambda path: path.write_text(manifest_text(format_version=2)),
    "wrong types": lambda path: path.write_text(
        manifest_text(format_version=2, files={"a": 5}, source=5, dtype="fp32", auto_dtype="fp32",
                      weight_bytes=1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE)
def test_a_strange_neighbour_is_no_hindrance(model, dirs, make):
    neighbour = dirs[0] / "models" / "another"
    neighbour.mkdir(parents=True)
    make(neighbour / "manifest.json")
    with pytest.raises(CheckpointError, match="another"):
        verify_store(neighbour)
    store = convert_folder(model, dirs[0])
    verify_store(store)
    assert convert_folder(model, dirs[0]) == store


def test_a_neighbour_that_may_not_be_read_is_no_hindrance(model, dirs, monkeypatch):
    neighbour = write_store(dirs[0], make_content(make_arrays(1)))
    real = Path.read_bytes

    def read_bytes(path):
        if path.parent == neighbour:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    verify_store(convert_folder(model, dirs[0]))
    with pytest.raises(StorageError, match=r"read of .*manifest\.json failed: Permission denied"):
        verify_store(neighbour)
