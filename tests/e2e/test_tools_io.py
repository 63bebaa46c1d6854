"""The readers beside fio: `tools/bench_io.py` with a stand-in for fio whose figures are known."""

import json
import os
import sys
from pathlib import Path

import pytest

from zeroinfer.native import uring_error, uring_reader
from zeroinfer.planner import DiskCell
from zeroinfer.units import GIB, MIB

TOOLS = Path(__file__).resolve().parents[2] / "tools"
READERS = ["threads"] if uring_error() else ["threads", "io_uring"]
SIZE = 16 * MIB

FIO = """#!/bin/sh
for word; do
  case $word in
    --version) echo fio-3.99; exit;;
    --bs=*) chunk=${word#*=};;
    --iodepth=*) depth=${word#*=};;
    --size=*) size=${word#*=};;
    --ioengine=*) engine=${word#*=};;
    --mem=mmaphuge) is_huge=yes;;
  esac
done
if [ $engine = io_uring ]; then echo 'not in this kernel' >&2; exit 1; fi
runtime=200
if [ $chunk.$depth = 2097152.4 ]; then runtime=100; fi
if [ "$is_huge" ]; then runtime=50; fi
echo 'a note stands before the document'
echo '{"jobs": [{"usr_cpu": 1.0, "sys_cpu": 4.0, "job_runtime": 200,'
echo '  "read": {"runtime": '$runtime', "io_bytes": '$size'}}]}'
"""
"""Reads nothing. Its best cell is 2 MiB x 4; it has no io_uring, and huge pages make it faster."""


@pytest.fixture(autouse=True)
def fio(tmp_path, monkeypatch):
    """Put the stand-in in fio's place and the tools on the path; return its file."""
    program = tmp_path / "bin" / "fio"
    program.parent.mkdir()
    program.write_text(FIO)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.syspath_prepend(str(TOOLS))
    return program


@pytest.fixture
def bench(monkeypatch):
    """Run the program with these arguments."""
    from bench_io import main  # noqa: PLC0415

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench_io.py", *map(str, arguments)])
        main()

    return run


def read_run(wall_s, cpu_s=0.1):
    from fio_runs import ReadRun  # noqa: PLC0415

    return ReadRun(num_bytes=10**9, wall_s=wall_s, cpu_s=cpu_s)


def words(table):
    return [" ".join(line.split()) for line in table.splitlines()]


def test_the_program_reads_the_same_bytes_on_both_sides(bench, tmp_path, capsys):
    path, out = tmp_path / "data", tmp_path / "out.json"
    path.write_bytes(os.urandom(SIZE + 5))
    bench(
        "--file", path, "--out", out, "--readers", ",".join(READERS), "--ring", "64MiB",
        "--pairs", 2, "--grid-passes", 1, "--io-chunk-bytes", "1MiB", "--queue-depth", 2,
    )  # fmt: skip
    document = json.loads(out.read_text())
    expected = {"engine": "libaio", "version": "fio-3.99", "has_huge_pages": False}
    assert document["fio"] == expected
    best = {"io_chunk_bytes": 2 * MIB, "queue_depth": 4, "read_bytes_per_s": SIZE / 0.1}
    assert document["fio_grid"][0] == pytest.approx(best)
    assert [result["reader"] for result in document["readers"]] == READERS
    for result in document["readers"]:
        own, other = result["series"]
        assert (own["fio_cell"]["io_chunk_bytes"], own["fio_cell"]["queue_depth"]) == (MIB, 2)
        assert other["fio_cell"] == pytest.approx(best)
        for series, fio_s in ((own, 0.2), (other, 0.1)):
            assert len(series["pairs"]) == 2
            for pair in series["pairs"]:
                assert pair["reader"]["num_bytes"] == pair["fio"]["num_bytes"] == SIZE
                assert pair["fio"]["wall_s"] == pytest.approx(fio_s)
                assert pair["fio"]["cpu_s"] == pytest.approx(0.01)
                assert pair["reader"]["wall_s"] > 0
    (turns,) = document["turns"]
    assert list(turns["readers"]) == READERS
    assert turns["readers"]["threads"]["ratio"]["values"] == [1.0, 1.0]
    assert "fio's best cell: 2.0 MiB x 4" in capsys.readouterr().out
    assert path.exists()


def test_fio_reads_into_huge_pages_when_told_to(fio, tmp_path):
    from fio_runs import Fio  # noqa: PLC0415

    huge = Fio.find(fio, has_huge_pages=True)
    assert huge.read(fio, 0, MIB, io_chunk_bytes=MIB, queue_depth=1).wall_s == pytest.approx(0.05)
    assert Fio.find(fio).read(fio, 0, MIB, io_chunk_bytes=MIB, queue_depth=1).wall_s > 0.1


def test_ratios_are_those_of_pairs_and_are_judged_by_their_median():
    from bench_io import Pair, summarize_series, table  # noqa: PLC0415

    walls = ((1.0, 0.9), (2.0, 2.0), (4.0, 5.0))
    pairs = [Pair(read_run(own_s, 0.2), read_run(fio_s)) for own_s, fio_s in walls]
    cell = DiskCell(MIB, 4, 0.0)
    own = summarize_series("threads", "own", cell, pairs)
    best = summarize_series("io_uring", "best", cell, pairs[:1])
    assert own["ratio"]["values"] == pytest.approx([0.9, 1.0, 1.25])
    assert words(table([own, best]))[2:] == [
        "threads own 1.0 MiB 4 0.500 0.500 1.000 0.900-1.250 0.97 met "
        "0.500-0.500 0.400-0.450 0.200 0.100 2.00 met",
        "io_uring best 1.0 MiB 4 1.000 1.111 0.900 0.900-0.900 0.93 MISSED "
        "- - 0.200 0.100 2.00 MISSED",
    ]


def test_the_table_of_turns_is_relative_to_the_first_reader():
    from bench_io import summarize_turns, table_of_turns  # noqa: PLC0415

    first = [read_run(1.0), read_run(2.0)]
    second = [read_run(0.5, 0.3), read_run(4.0, 0.3)]
    turns = {"threads": summarize_turns(first, first), "io_uring": summarize_turns(second, first)}
    assert words(table_of_turns({"readers": turns}))[2:] == [
        "threads 0.750 1.000 1.000-1.000 0.100",
        "io_uring 1.125 1.250 0.500-2.000 0.300",
    ]


def test_who_goes_first_alternates_and_the_first_pair_is_dropped():
    from bench_io import Bench  # noqa: PLC0415

    calls = []

    class Recorder(Bench):
        def read_own(self, offset):
            calls.append(("own", offset))
            return read_run(1.0)

        def read_fio(self, offset, cell):
            calls.append(("fio", offset))
            return read_run(2.0)

    recorder = Recorder(
        path=None, size_bytes=350, segment_bytes=100, num_pairs=3, reader=None, ring=None, fio=None
    )
    pairs = list(recorder.run_pairs(DiskCell(MIB, 1, 0.0)))
    assert [pair.ratio for pair in pairs] == [2.0] * 3
    assert calls == [
        ("fio", 200), ("own", 200), ("own", 0), ("fio", 0),
        ("fio", 100), ("own", 100), ("own", 200), ("fio", 200),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--readers", "threads,mmap"], "--readers: got 'mmap', need some of auto, threads, io_u"),
        (["--ring", "32MiB"], "--ring: got 33554432, need 67108864 or more"),
        (["--pairs", "0"], "--pairs: got 0, need 1 or more"),
        (["--grid-passes", "0"], "--grid-passes: got 0, need 1 or more"),
        (["--queue-depth", "4"], "--io-chunk-bytes and --queue-depth: got one, need both"),
        (["--readers", "io_uring"], "the reader io_uring is not available: it was not built"),
    ],
)
def test_arguments_that_measure_nothing_are_refused(bench, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(uring_reader, "extension", None)
    monkeypatch.setattr(uring_reader, "extension_error", "it was not built")
    with pytest.raises(SystemExit) as ended:
        bench(*arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_disk_without_room_is_refused_before_writing(bench, tmp_path):
    with pytest.raises(SystemExit, match=r"has \S+ \S+ free, need \S+ \S+$"):
        bench("--dir", tmp_path, "--size", str(10**6 * GIB), "--readers", "threads")
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_fio_that_is_missing_or_fails_is_told(bench, fio, tmp_path, monkeypatch):
    (tmp_path / "data").write_bytes(bytes(100))
    arguments = ["--file", tmp_path / "data", "--readers", "threads"]
    fio.write_text("#!/bin/sh\ncase $1 in --version) ;; *) echo no disk >&2; exit 3;; esac\n")
    both = r"fio cannot read \S+data: fio failed \(3\): no disk; fio failed \(3\): no disk$"
    with pytest.raises(SystemExit, match=both):
        bench(*arguments)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="install the package fio and run again"):
        bench(*arguments)
