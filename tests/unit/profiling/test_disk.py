import pytest

from tests.helpers.fake_disk import FakeDisk
from zeroinfer.errors import StorageError
from zeroinfer.native import ThreadReader
from zeroinfer.profiling import measure_disk
from zeroinfer.units import MIB


def make_file(path, num_bytes):
    with path.open("wb") as file:
        file.truncate(num_bytes)
    return path


def by_cell(table, default):
    return lambda chunk, depth: table.get((chunk // MIB, depth), default)


def test_the_fastest_cell_is_chosen(tmp_path):
    disk = FakeDisk(rate_of=by_cell({(2, 4): 2e9}, 1e9))
    path = make_file(tmp_path / "w", 512 * MIB)
    found = measure_disk([path], budget_s=3.0, open_reader=disk.open, clock=disk.clock, seed=0)
    assert (found.best.io_chunk_bytes, found.best.queue_depth) == (2 * MIB, 4)
    assert found.best.read_bytes_per_s == pytest.approx(2e9, rel=0.01)
    assert max(found.grid, key=lambda cell: cell.read_bytes_per_s)[:2] == (2 * MIB, 4)


def test_a_smaller_depth_wins_within_three_percent(tmp_path):
    path = make_file(tmp_path / "w", 512 * MIB)
    for rate, depth in ((1.96e9, 2), (1.90e9, 8)):
        disk = FakeDisk(rate_of=by_cell({(1, 8): 2e9, (4, 2): rate}, 1e9))
        found = measure_disk([path], budget_s=3.0, open_reader=disk.open, clock=disk.clock, seed=0)
        assert found.best.queue_depth == depth


def test_a_disk_that_drifts_does_not_change_the_choice(tmp_path):
    # The whole disk slows down to half and recovers, again and again, while it is measured.
    disk = FakeDisk(
        rate_of=by_cell({(1, 2): 2e9}, 1e9), drift=lambda now_s: 1.0 if now_s % 0.7 < 0.35 else 0.5
    )
    path = make_file(tmp_path / "w", 512 * MIB)
    found = measure_disk([path], budget_s=3.0, open_reader=disk.open, clock=disk.clock, seed=3)
    assert found.best[:2] == (MIB, 2)


def test_the_budget_holds(tmp_path):
    path = make_file(tmp_path / "w", 512 * MIB)
    for budget_s in (1.0, 5.0):
        disk = FakeDisk(rate_of=lambda chunk, depth: 2e9)
        measure_disk([path], budget_s=budget_s, open_reader=disk.open, clock=disk.clock, seed=0)
        assert 0.8 * budget_s < disk.now_s < 1.25 * budget_s


def test_a_slow_disk_ends_too_and_every_cell_is_measured(tmp_path):
    path = make_file(tmp_path / "w", 512 * MIB)
    disk = FakeDisk(rate_of=lambda chunk, depth: 1e8)
    found = measure_disk([path], budget_s=1.0, open_reader=disk.open, clock=disk.clock, seed=0)
    assert len(found.grid) == 20
    assert all(cell.read_bytes_per_s > 0 for cell in found.grid)


def test_reads_are_spread_over_the_files_by_size(tmp_path):
    paths = [make_file(tmp_path / name, size * MIB) for name, size in (("a", 300), ("b", 900))]
    disk = FakeDisk(rate_of=lambda chunk, depth: 2e9)
    measure_disk(paths, budget_s=3.0, open_reader=disk.open, clock=disk.clock, seed=0)
    num_bytes = {path: sum(n for p, _, n in disk.reads if p == path) for path in paths}
    assert 1.5 < num_bytes[paths[1]] / num_bytes[paths[0]] < 6
    offsets = {offset for path, offset, _ in disk.reads if path == paths[1]}
    assert max(offsets) > 700 * MIB
    assert min(offsets) < 200 * MIB
    assert all(offset % 4096 == 0 for offset in offsets)


def test_real_files_are_measured_whatever_their_size(tmp_path):
    paths = []
    for idx, size in enumerate((0, 100, 3 * MIB + 5)):
        paths.append(tmp_path / str(idx))
        paths[-1].write_bytes(b"\x01" * size)
    found = measure_disk(paths, budget_s=0.05, open_reader=ThreadReader.open)
    assert found.best.read_bytes_per_s > 0


def test_nothing_to_read_is_refused(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(StorageError, match="got 1 files, all empty; need data"):
        measure_disk([tmp_path / "empty"], budget_s=0.1)
    with pytest.raises(StorageError, match=r"cannot measure .*missing: No such file"):
        measure_disk([tmp_path / "missing"], budget_s=0.1)
