"""Compare the readers with fio: throughput and CPU time, in interleaved pairs.

Each at its own chunk and depth, then against fio's best cell of the grid; at last the readers take
turns at one cell, by which `auto` is decided. Both sides read the same bytes with O_DIRECT; who
goes first alternates, so that neither gains from a cache below the guest. The spread of equal runs
(A/A) stands beside each result: a ratio inside it says nothing. Run it on an idle machine.

The ring has huge pages, as in every job; fio's memory has not, which cuts its requests into smaller
ones. `--fio-huge-pages` gives fio the same, once the system has set some aside, and so compares the
mechanisms alone; `--small-pages` takes them from the ring.

    python tools/bench_io.py --dir /data --out tools/results/bench_io.json
"""

import argparse
import contextlib
import mmap
import os
import resource
import shutil
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench_common import format_table, ratios_of_neighbours, summarize, write_results
from fio_runs import Fio, ReadRun

from zeroinfer.errors import BackendUnavailableError
from zeroinfer.memory import Arena
from zeroinfer.native import Reader, open_reader, resolve_reader
from zeroinfer.planner import DiskCell
from zeroinfer.profiling import measure_disk
from zeroinfer.units import GIB, MIB, align_down, format_bytes, parse_bytes

UNIT_BYTES = 32 * MIB
"""Bytes of one submitted read; about a fetch unit of a model of seven billion parameters."""
WRITE_BYTES = 16 * MIB
BARS = {"own": 0.97, "best": 0.93}
"""Least reader / fio at the reader's cell and at fio's best."""
CPU_BARS = {"threads": 3.0, "io_uring": 1.5}
"""Most CPU seconds per GB over fio's, by reader."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Reader and fio on the same bytes."""

    reader: ReadRun
    fio: ReadRun

    @property
    def ratio(self) -> float:
        return self.reader.bytes_per_s / self.fio.bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What both sides read."""

    path: Path
    size_bytes: int
    segment_bytes: int
    num_pairs: int
    reader: Reader
    ring: memoryview
    fio: Fio

    def run_pairs(self, cell: DiskCell) -> Iterator[Pair]:
        """Warm up once, then run pairs over segments that move through the file."""
        num_segments = self.size_bytes // self.segment_bytes
        for idx in range(-1, self.num_pairs):
            offset = (idx % num_segments) * self.segment_bytes
            if idx % 2:
                fio_run, reader_run = self.read_fio(offset, cell), self.read_own(offset)
            else:
                reader_run, fio_run = self.read_own(offset), self.read_fio(offset, cell)
            if idx >= 0:
                yield Pair(reader_run, fio_run)

    def read_fio(self, offset: int, cell: DiskCell) -> ReadRun:
        return self.fio.read(
            self.path,
            offset,
            self.segment_bytes,
            io_chunk_bytes=cell.io_chunk_bytes,
            queue_depth=cell.queue_depth,
        )

    def read_own(self, offset: int) -> ReadRun:
        """Stream the segment through the ring, as units are; the queue never drains in between."""
        file = self.reader.open_file(self.path)
        num_slots = len(self.ring) // UNIT_BYTES
        tickets = deque()
        cpu_s, start_s = _cpu_s(), time.perf_counter()
        for idx, start in enumerate(range(0, self.segment_bytes, UNIT_BYTES)):
            if len(tickets) == num_slots:
                self.reader.wait(tickets.popleft())
            length = min(UNIT_BYTES, self.segment_bytes - start)
            slot_start = idx % num_slots * UNIT_BYTES
            slot = self.ring[slot_start : slot_start + length]
            tickets.append(self.reader.submit(file, offset + start, slot, required_bytes=length))
        while tickets:
            self.reader.wait(tickets.popleft())
        wall_s = time.perf_counter() - start_s
        return ReadRun(num_bytes=self.segment_bytes, wall_s=wall_s, cpu_s=_cpu_s() - cpu_s)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def summarize_series(reader: str, name: str, cell: DiskCell, pairs: list[Pair]) -> dict[str, Any]:
    """Medians, spreads and the verdict of one series of pairs."""
    sides = {"reader": [p.reader for p in pairs], "fio": [p.fio for p in pairs]}
    rates = {side: [run.bytes_per_s for run in runs] for side, runs in sides.items()}
    cpu = {side: summarize(run.cpu_s_per_gb for run in runs) for side, runs in sides.items()}
    ratio = summarize(pair.ratio for pair in pairs)
    # fio rounds its share of CPU down, so short runs may show none.
    cpu_ratio = cpu["reader"]["median"] / max(cpu["fio"]["median"], 1e-4)
    return {
        "reader": reader,
        "series": name,
        "fio_cell": cell._asdict(),
        "ratio": ratio,
        "bar": BARS[name],
        "is_met": ratio["median"] >= BARS[name],
        "bytes_per_s": {side: summarize(values) for side, values in rates.items()},
        "a_a": {side: summarize(ratios_of_neighbours(values)) for side, values in rates.items()},
        "cpu_s_per_gb": cpu,
        "cpu_ratio": cpu_ratio,
        "cpu_bar": CPU_BARS[reader],
        "is_cpu_met": cpu_ratio <= CPU_BARS[reader],
        "pairs": [asdict(pair) for pair in pairs],
    }


def table(results: list[dict[str, Any]]) -> str:
    columns = ("reader", "series", "fio chunk", "depth", "reader GB/s", "fio GB/s", "ratio",
               "range", "bar", "A/A reader", "A/A fio", "CPU s/GB", "fio",
               "CPU ratio")  # fmt: skip
    return format_table(columns, [_table_row(result) for result in results])


def _table_row(result: dict[str, Any]) -> list[Any]:
    def spread(summary: dict[str, Any]) -> str:
        return f"{summary['min']:.3f}-{summary['max']:.3f}" if summary["num"] else "-"

    rates, cpu = result["bytes_per_s"], result["cpu_s_per_gb"]
    cell = DiskCell(**result["fio_cell"])
    return [
        result["reader"],
        result["series"],
        format_bytes(cell.io_chunk_bytes),
        cell.queue_depth,
        rates["reader"]["median"] / 1e9,
        rates["fio"]["median"] / 1e9,
        result["ratio"]["median"],
        spread(result["ratio"]),
        f"{result['bar']} {'met' if result['is_met'] else 'MISSED'}",
        spread(result["a_a"]["reader"]),
        spread(result["a_a"]["fio"]),
        cpu["reader"]["median"],
        cpu["fio"]["median"],
        f"{result['cpu_ratio']:.2f} {'met' if result['is_cpu_met'] else 'MISSED'}",
    ]


@contextlib.contextmanager
def data_file(args: argparse.Namespace) -> Iterator[Path]:
    """Yield the file to read: the user's own, or a new one that is deleted afterwards."""
    if args.file is not None:
        yield args.file
        return
    free_bytes = shutil.disk_usage(args.dir).free
    if free_bytes < args.size + GIB:
        raise SystemExit(
            f"{args.dir} has {format_bytes(free_bytes)} free, need {format_bytes(args.size + GIB)}"
        )
    path = args.dir / f"bench_io.{os.getpid()}.bin"
    try:
        write_random(path, align_down(args.size, WRITE_BYTES))
        yield path
    finally:
        path.unlink(missing_ok=True)


def write_random(path: Path, size_bytes: int) -> None:
    """Write random bytes past the page cache; equal blocks could be stored once below us."""
    source = np.random.Generator(np.random.SFC64(0))
    memory = mmap.mmap(-1, WRITE_BYTES)
    words = np.frombuffer(memory, dtype=np.uint64)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    try:
        for _ in range(0, size_bytes, WRITE_BYTES):
            words[:] = source.integers(0, 2**64, size=words.size, dtype=np.uint64)
            count = os.write(fd, memory)
            if count != WRITE_BYTES:
                raise SystemExit(f"write to {path} came short: {count} of {WRITE_BYTES} bytes")
        os.fsync(fd)
    finally:
        os.close(fd)


def create_ring(args: argparse.Namespace) -> memoryview:
    """Return the memory that is read into, every page of it present."""
    num_bytes = align_down(args.ring, UNIT_BYTES)
    if not args.small_pages:
        return Arena.create(num_bytes, name="ring", is_prefaulted=True).view(0, num_bytes)
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    ring = memoryview(mapping)
    for start in range(0, num_bytes, mmap.PAGESIZE):
        ring[start] = 0
    return ring


def choose_cell(args: argparse.Namespace, path: Path, reader: str) -> DiskCell:
    """Return a reader's chunk and depth: given, or measured as every job measures them."""
    if args.io_chunk_bytes and args.queue_depth:
        return DiskCell(args.io_chunk_bytes, args.queue_depth, 0.0)
    cell = measure_disk(
        [path], budget_s=args.profile_seconds, open_reader=partial(open_reader, reader)
    ).best
    print(f"the cell of {reader}: {format_bytes(cell.io_chunk_bytes)} x {cell.queue_depth}")
    return cell


def choose_segment_bytes(args: argparse.Namespace, size_bytes: int, cell: DiskCell) -> int:
    """Return the whole file, or what takes about `--seconds` at the measured rate."""
    if not args.seconds:
        return size_bytes
    rate = cell.read_bytes_per_s or 1e9
    return min(size_bytes, max(UNIT_BYTES, align_down(int(args.seconds * rate), UNIT_BYTES)))


def measure(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Run both series of each reader and return their results."""
    # A whole number of the largest chunk, so that every cell reads the same bytes.
    size_bytes = align_down(path.stat().st_size, 16 * MIB)
    fio = Fio.find(path, has_huge_pages=args.fio_huge_pages)
    grid = fio.measure_grid(path, size_bytes, num_passes=args.grid_passes)
    print(f"fio's best cell: {format_bytes(grid[0].io_chunk_bytes)} x {grid[0].queue_depth}")
    ring = create_ring(args)
    results = []
    for name in args.readers:
        cell = choose_cell(args, path, name)
        with open_cell(name, cell) as reader:
            bench = Bench(
                path=path,
                size_bytes=size_bytes,
                segment_bytes=choose_segment_bytes(args, size_bytes, cell),
                num_pairs=args.pairs,
                reader=reader,
                ring=ring,
                fio=fio,
            )
            results.append(measure_reader(bench, name, cell, grid[0]))
            is_direct = reader.open_file(path).is_direct
    turns = []
    for cell in dict.fromkeys(DiskCell(**result["cell"]) for result in results):
        turns.append(compare_readers(bench, cell, args.readers))
        print(table_of_turns(turns[-1]), flush=True)
    return {
        "size_bytes": size_bytes,
        "is_direct": is_direct,
        "has_huge_pages": not args.small_pages,
        "fio": asdict(fio),
        "fio_grid": [cell._asdict() for cell in grid],
        "readers": results,
        "turns": turns,
    }


def measure_reader(
    bench: Bench, name: str, own_cell: DiskCell, best_cell: DiskCell
) -> dict[str, Any]:
    """Run both series of one reader."""
    series = []
    for kind, cell in (("own", own_cell), ("best", best_cell)):
        series.append(summarize_series(name, kind, cell, list(bench.run_pairs(cell))))
        print(table(series[-1:]), flush=True)
    return {
        "reader": name,
        "cell": own_cell._asdict(),
        "segment_bytes": bench.segment_bytes,
        "series": series,
    }


def compare_readers(bench: Bench, cell: DiskCell, names: list[str]) -> dict[str, Any]:
    """Let readers take turns over the same bytes at one cell; ratios are to the first reader."""
    runs: dict[str, list[ReadRun]] = {name: [] for name in names}
    num_segments = bench.size_bytes // bench.segment_bytes
    with contextlib.ExitStack() as stack:
        benches = {
            name: replace(bench, reader=stack.enter_context(open_cell(name, cell)))
            for name in names
        }
        for idx in range(-1, bench.num_pairs):
            offset = (idx % num_segments) * bench.segment_bytes
            for name in names if idx % 2 else reversed(names):
                run = benches[name].read_own(offset)
                if idx >= 0:
                    runs[name].append(run)
    return {
        "cell": cell._asdict(),
        "readers": {name: summarize_turns(runs[name], runs[names[0]]) for name in names},
    }


def summarize_turns(runs: list[ReadRun], first: list[ReadRun]) -> dict[str, Any]:
    return {
        "bytes_per_s": summarize(run.bytes_per_s for run in runs),
        "cpu_s_per_gb": summarize(run.cpu_s_per_gb for run in runs),
        "ratio": summarize(
            run.bytes_per_s / other.bytes_per_s for run, other in zip(runs, first, strict=True)
        ),
    }


def table_of_turns(turns: dict[str, Any]) -> str:
    rows = [
        [
            name,
            result["bytes_per_s"]["median"] / 1e9,
            result["ratio"]["median"],
            f"{result['ratio']['min']:.3f}-{result['ratio']['max']:.3f}",
            result["cpu_s_per_gb"]["median"],
        ]
        for name, result in turns["readers"].items()
    ]
    return format_table(("reader", "GB/s", "to the first", "range", "CPU s/GB"), rows)


def open_cell(name: str, cell: DiskCell) -> Reader:
    return open_reader(name, io_chunk_bytes=cell.io_chunk_bytes, queue_depth=cell.queue_depth)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("/tmp"), help="where the file is made")
    parser.add_argument("--size", type=parse_bytes, default=4 * GIB)
    parser.add_argument("--file", type=Path, help="read this file instead; it is kept")
    parser.add_argument("--readers", default="threads,io_uring", help="names, with commas")
    parser.add_argument("--pairs", type=int, default=20, help="per series")
    parser.add_argument("--seconds", type=float, help="about this long per run (whole file)")
    parser.add_argument("--ring", type=parse_bytes, default=256 * MIB)
    parser.add_argument("--small-pages", action="store_true", help="a ring without huge pages")
    parser.add_argument("--fio-huge-pages", action="store_true", help="huge pages for fio as well")
    parser.add_argument("--io-chunk-bytes", type=parse_bytes, help="the reader's (measured)")
    parser.add_argument("--queue-depth", type=int, help="the reader's (measured)")
    parser.add_argument("--profile-seconds", type=float, default=6.0)
    parser.add_argument("--grid-passes", type=int, default=2, help="fio runs per cell")
    parser.add_argument("--out", type=Path, help="results as JSON")
    args = parser.parse_args()
    mistake = find_mistake(args)
    if mistake:
        parser.error(mistake)
    try:
        args.readers = list(dict.fromkeys(map(resolve_reader, args.readers.split(","))))
    except BackendUnavailableError as error:
        parser.error(str(error))
    return args


def find_mistake(args: argparse.Namespace) -> str | None:
    """Return what is wrong with the arguments, if anything is."""
    known = ("auto", *CPU_BARS)
    for name in args.readers.split(","):
        if name not in known:
            return f"--readers: got {name!r}, need some of {', '.join(known)}"
    for option, value, least in (
        ("--ring", args.ring, 2 * UNIT_BYTES),
        ("--pairs", args.pairs, 1),
        ("--grid-passes", args.grid_passes, 1),
    ):
        if value < least:
            return f"{option}: got {value}, need {least} or more"
    if (args.io_chunk_bytes is None) != (args.queue_depth is None):
        return "--io-chunk-bytes and --queue-depth: got one, need both or neither"
    return None


def main() -> None:
    args = parse_arguments()
    with data_file(args) as path:
        results = measure(args, path)
        if args.out:
            write_results(
                args.out, "readers beside fio", path, results, folders={"DIR": path.parent}
            )


if __name__ == "__main__":
    main()
