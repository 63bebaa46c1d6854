import dataclasses
import errno
import json
import os
import pwd
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zeroinfer.errors import StorageError
from zeroinfer.planner import DiskCell, MatmulRate
from zeroinfer.profiling import (
    DiskProfile,
    compute,
    find_profile,
    load_or_measure,
    measure_folder,
    require_writable_folder,
    store,
)
from zeroinfer.units import MIB


@pytest.fixture
def measured(monkeypatch):
    """Replace the measurements; the list records what they were asked for."""
    calls = []

    def measure_disk(paths, *, budget_s, open_reader):
        calls.append(("disk", list(paths), budget_s, open_reader))
        cell = (MIB, 2, 1.5e9)
        return DiskProfile(best=DiskCell(*cell), grid=(DiskCell(*cell),))

    def measure_products(dtypes, *, budget_s):
        calls.append(("products", [dtype.short_name for dtype in dtypes], budget_s))
        return (MatmulRate("fp32", "native", 1, 1e9),)

    monkeypatch.setattr(store, "measure_disk", measure_disk)
    monkeypatch.setattr(compute, "measure_products", measure_products)
    monkeypatch.setattr(compute, "measure_memory_copy", lambda: 9e9)
    return calls


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(100 * MIB)
    return path


def profile_file(tmp_path):
    (path,) = (tmp_path / "nvme" / "profiles").glob("*.json")
    return path


def test_the_first_run_measures_and_the_second_does_not(tmp_path, weights, measured):
    first = load_or_measure(tmp_path / "nvme", [weights])
    assert first.source == "measured"
    assert (first.nvme_read_bytes_per_s, first.io_chunk_bytes, first.queue_depth) == (1.5e9, MIB, 2)
    assert first.dram_copy_bytes_per_s == 9e9
    assert abs(first.measured_at_unix_s - time.time()) < 60
    assert first.filesystem
    assert len(measured) == 2
    second = load_or_measure(tmp_path / "nvme", [weights])
    assert second == dataclasses.replace(first, source="cached")
    assert len(measured) == 2
    assert [path.name for path in (tmp_path / "nvme" / "profiles").iterdir()] == [
        profile_file(tmp_path).name
    ]


def test_forcing_measures_again_and_longer(tmp_path, weights, measured):
    load_or_measure(tmp_path / "nvme", [weights])
    assert load_or_measure(tmp_path / "nvme", [weights], is_forced=True).source == "measured"
    disk_s = [call[2] for call in measured if call[0] == "disk"]
    assert len(disk_s) == 2
    assert disk_s[0] <= 4 < disk_s[1]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"key": {}, "profile": {}}'])
def test_an_unreadable_profile_is_measured_again(tmp_path, weights, measured, caplog, text):
    load_or_measure(tmp_path / "nvme", [weights])
    path = profile_file(tmp_path)
    path.write_text(text)
    assert load_or_measure(tmp_path / "nvme", [weights]).source == "measured"
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert str(path) in warnings[0].getMessage()
    assert load_or_measure(tmp_path / "nvme", [weights]).source == "cached"


def test_a_profile_of_an_older_version_is_measured_again(tmp_path, weights, measured, caplog):
    load_or_measure(tmp_path / "nvme", [weights])
    path = profile_file(tmp_path)
    data = json.loads(path.read_text())
    data["profile"]["schema"] = 0
    path.write_text(json.dumps(data))
    assert load_or_measure(tmp_path / "nvme", [weights]).source == "measured"
    assert "schema is unknown: got 0" in caplog.text


@pytest.mark.parametrize("name", ["describe_machine", "describe_filesystems", "read_io_limits"])
def test_other_surroundings_have_a_profile_of_their_own(
    tmp_path, weights, measured, monkeypatch, name
):
    load_or_measure(tmp_path / "nvme", [weights])
    with monkeypatch.context() as patch:
        patch.setattr(store, name, lambda *args: "different")
        assert load_or_measure(tmp_path / "nvme", [weights]).source == "measured"
    assert load_or_measure(tmp_path / "nvme", [weights]).source == "cached"


def test_each_reader_has_a_profile_of_its_own_measured_with_it(
    tmp_path, weights, measured, monkeypatch
):
    opened = []
    monkeypatch.setattr(store, "resolve_reader", lambda name: f"real {name}")
    monkeypatch.setattr(store, "open_reader", lambda name, **cell: opened.append((name, cell)))
    for name in ("threads", "io_uring"):
        assert load_or_measure(tmp_path / "nvme", [weights], reader=name).source == "measured"
        assert load_or_measure(tmp_path / "nvme", [weights], reader=name).source == "cached"
    for call in measured:
        if call[0] == "disk":
            call[3](io_chunk_bytes=MIB, queue_depth=2)
    cell = {"io_chunk_bytes": MIB, "queue_depth": 2}
    assert opened == [("real threads", cell), ("real io_uring", cell)]


def test_small_weights_are_not_measured_unless_forced(tmp_path, measured, caplog):
    path = tmp_path / "tiny"
    path.write_bytes(b"x" * 1000)
    assert load_or_measure(tmp_path / "nvme", [path]).source == "assumed"
    assert measured == []
    assert load_or_measure(tmp_path / "nvme", [path], is_forced=True).source == "measured"
    assert "measured on only 1000 B of weights" in caplog.text


def test_a_kept_profile_serves_small_weights_too(tmp_path, weights, measured):
    load_or_measure(tmp_path / "nvme", [weights])
    path = tmp_path / "tiny"
    path.write_bytes(b"x" * 1000)
    assert load_or_measure(tmp_path / "nvme", [path]).source == "cached"


def test_a_folder_that_cannot_be_made_is_refused_before_measuring(tmp_path, weights, measured):
    (tmp_path / "nvme").write_text("a file")
    with pytest.raises(StorageError, match=r"cannot write to .*nvme/profiles as user \w+"):
        load_or_measure(tmp_path / "nvme", [weights])
    assert measured == []


def test_a_folder_without_write_permission_is_refused_at_once(tmp_path):
    # Source: transformers#16616. Root ignores modes, so root becomes somebody else for this.
    script = (
        "import os, sys\n"
        "from zeroinfer.errors import StorageError\n"
        "from zeroinfer.profiling import load_or_measure\n"
        "from pathlib import Path\n"
        "if os.geteuid() == 0: os.seteuid(65534)\n"
        "try: load_or_measure(Path(sys.argv[1]), [Path('/nowhere/w')])\n"
        "except StorageError as error: print(error)\n"
    )
    folder = tmp_path / "nvme"
    folder.mkdir()
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    folder.chmod(0o555)
    start_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True, text=True, timeout=30, check=False, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    user = pwd.getpwuid(65534 if os.geteuid() == 0 else os.geteuid()).pw_name
    assert done.stdout.startswith(f"cannot write to {folder / 'profiles'} as user {user}: Perm")
    assert "choose another --nvme folder" in done.stdout
    assert time.perf_counter() - start_s < 10  # Two seconds of our own, the rest is start-up.


def test_a_user_without_a_name_is_given_by_number(tmp_path, monkeypatch):
    monkeypatch.setattr(store.os, "geteuid", lambda: 123456789)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="as user 123456789"):
        require_writable_folder(tmp_path / "file")


def test_a_full_disk_is_reported_and_leaves_nothing_behind(
    tmp_path, weights, measured, monkeypatch
):
    def fsync(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", fsync)
    with pytest.raises(StorageError, match="No space left on device; free some space"):
        load_or_measure(tmp_path / "nvme", [weights])
    assert list((tmp_path / "nvme" / "profiles").iterdir()) == []


def test_missing_weights_are_named(tmp_path, measured):
    with pytest.raises(StorageError, match=r"cannot read .*missing: No such file"):
        load_or_measure(tmp_path / "nvme", [tmp_path / "missing"])


def test_a_kept_profile_is_found_and_nothing_measured(tmp_path, weights, measured):
    assert find_profile(tmp_path / "nvme", [weights]) is None
    kept = load_or_measure(tmp_path / "nvme", [weights])
    assert find_profile(tmp_path / "nvme", [weights]) == dataclasses.replace(kept, source="cached")
    assert len(measured) == 2


def test_the_folders_own_disk_is_measured_on_a_scratch_file(tmp_path, measured, monkeypatch):
    monkeypatch.setattr(store, "_SCRATCH_BYTES", 3 * MIB)
    folder = tmp_path / "nvme"
    fake_disk = store.measure_disk
    seen = []

    def measure_disk(paths, **options):
        seen.extend((path.stat().st_size, path.stat().st_dev, list(folder.iterdir()))
                    for path in paths)  # fmt: skip
        return fake_disk(paths, **options)

    monkeypatch.setattr(store, "measure_disk", measure_disk)
    profile = measure_folder(folder)
    assert profile.nvme_read_bytes_per_s == 1.5e9
    # It has no name, so that nobody has to remove it.
    assert seen == [(3 * MIB, folder.stat().st_dev, [folder / "profiles"])]
    assert find_profile(folder, [folder]) == dataclasses.replace(profile, source="cached")


def test_no_scratch_file_where_there_is_no_room(tmp_path, measured, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=500 * MIB)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda folder: usage)
    assert measure_folder(tmp_path / "nvme") is None
    assert measured == []


def test_weights_on_several_disks_are_planned_by_the_slowest_share(tmp_path, measured, monkeypatch):
    paths = []
    for name, num_mib in (("a", 100), ("b", 300)):
        path = tmp_path / name
        with path.open("wb") as file:
            file.truncate(num_mib * MIB)
        paths.append(path)
    monkeypatch.setattr(store, "_by_filesystem", lambda ps: [[p] for p in ps])
    monkeypatch.setattr(
        store, "describe_filesystems", lambda ps: " and ".join(path.name for path in ps)
    )
    rates = {"a": 1e9, "b": 2e9}

    def measure_disk(files, **options):
        cell = DiskCell(MIB, 2 if files[0].name == "a" else 8, rates[files[0].name])
        return DiskProfile(best=cell, grid=(cell,))

    monkeypatch.setattr(store, "measure_disk", measure_disk)
    profile = load_or_measure(tmp_path / "nvme", paths)
    # b takes 300 MiB / 2e9, longer than a; 400 MiB arrive in that time.
    assert profile.nvme_read_bytes_per_s == pytest.approx(2e9 * 400 / 300)
    assert profile.queue_depth == 8
    assert profile.filesystem == "a and b"
