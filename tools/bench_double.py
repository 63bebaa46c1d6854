"""Measure what overlap brings, on a device double of set speed: no GPU needed, no model either.

    python tools/bench_double.py --out tools/results/double.json --plot double.svg

Equal units stream to the device from DRAM, or from storage of set speed through the staging
buffer, and each is computed on for a set time, the same at every batch up to --ridge and growing
from there. Reading, copying and, up to the ridge, computing a unit take --unit-ms each. What a
pass then costs is known: without prefetching the sum of its parts, with it the slowest of them and
one fetch. Coordinator, transport and planner are the engine's own.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench_common import end_cleanly_on_sigterm, format_table, write_results

from zeroinfer.diskformat import TensorExtent
from zeroinfer.dtypes import DType, TensorSpec
from zeroinfer.memory import DoubleDevice
from zeroinfer.native import ThreadReader
from zeroinfer.offload import DeviceStore, DeviceTransport, FetchCoordinator, unit_sources
from zeroinfer.planner import (
    GpuInputs,
    OpData,
    ParamData,
    Plan,
    PlanInputs,
    Profile,
    StageData,
    WorkspaceModel,
    build_units,
    make_plan,
)
from zeroinfer.units import GIB, MIB

UNIT_BYTES = 64 * 1024
"""Small, so that copying and reading take no time of their own beside the set one."""
TOLERANCE = 0.10
NO_WORKSPACE = WorkspaceModel(row_bytes=0, logits_row_bytes=0, fixed_bytes=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One measurement: where the weights are, how far ahead they are fetched, and the batch."""

    path: str
    """`dram` or `nvme`."""
    depth: int
    batch: int
    num_units: int
    unit_s: float
    compute_s: float
    """Of one unit at this batch."""

    @property
    def fetch_s(self) -> float:
        """From submission to landing of one unit: its read, if any, and its copy."""
        return self.unit_s * (2 if self.path == "nvme" else 1)

    @property
    def expected_s(self) -> float:
        """Seconds of a pass that finds nothing prefetched."""
        if self.depth == 0:
            return self.num_units * (self.fetch_s + self.compute_s)
        # Two units ahead keep both links busy; one is on either of them at a time.
        link_s = self.unit_s if self.depth > 1 else self.fetch_s
        return self.num_units * max(link_s, self.compute_s) + self.fetch_s


class SlowDisk:
    """A read call that takes a set time; reads that queue follow each other without a pause."""

    def __init__(self, read_s: float) -> None:
        self._read_s = read_s
        self._free_s = 0.0

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        now_s = time.perf_counter()
        # A reader that comes a little late has been woken late, as a disk's queue never is.
        is_queued = now_s - self._free_s < self._read_s / 4
        self._free_s = (self._free_s if is_queued else now_s) + self._read_s
        time.sleep(max(0.0, self._free_s - now_s))
        return os.preadv(fd, buffers, offset)


def write_weights(path: Path, num_units: int) -> dict[str, TensorExtent]:
    """Write the file the units are read from, every tensor on its own blocks."""
    path.write_bytes(bytes(num_units * UNIT_BYTES))
    shape = (UNIT_BYTES // 1024, 256)
    return {
        f"unit{idx}": TensorExtent(
            spec=TensorSpec(name=f"unit{idx}", shape=shape, dtype=DType.F32),
            path=path,
            offset=idx * UNIT_BYTES,
        )
        for idx in range(num_units)
    }


def plan_cell(cell: Cell, extents: dict[str, TensorExtent]) -> Plan:
    """Plan a pass over all units with the planner's own rules."""
    rows = UNIT_BYTES // 1024
    stages = [
        StageData(
            name=name,
            ops=(OpData(params=(ParamData(name=name, num_rows=rows, row_bytes=1024),)),),
        )
        for name in extents
    ]
    units = build_units(stages, target_bytes=UNIT_BYTES)
    sources = unit_sources(units, extents)
    return make_plan(
        PlanInputs(
            units=units,
            footprints=tuple(source.footprint for source in sources),
            staging_bytes=0,
            budget_bytes=GIB,
            base_bytes=0,
            dram_weights_bytes=None,
            weights=cell.path,
            kv_bytes_per_token=0,
            kv_block_size=None,
            workspace=NO_WORKSPACE,
            num_requests=cell.batch,
            max_prompt_tokens=1,
            total_prompt_tokens=cell.batch,
            max_new_tokens=1,
            max_model_len=16,
            max_num_seqs=cell.batch,
            max_num_batched_tokens=None,
            prompt_chunk_tokens=1,
            prefetch_depth=cell.depth,
            batch_invariant="off",
            row_tile=1,
            dtype="fp32",
            product_mode="native",
            profile=replace(Profile.assumed(), h2d_bytes_per_s=UNIT_BYTES / cell.unit_s),
            gpu=GpuInputs(
                budget_bytes=GIB,
                footprints=tuple(source.device_footprint for source in sources),
                host_workspace=NO_WORKSPACE,
            ),
        )
    )


def measure(cell: Cell, folder: Path, *, num_runs: int) -> float:
    """Return the seconds of the fastest of some passes that find nothing prefetched.

    What else runs on the machine can only delay a pass, so one that costs what it should ends it.
    """
    extents = write_weights(folder / "weights.bin", cell.num_units)
    plan = plan_cell(cell, extents)

    with ExitStack() as stack:
        device = DoubleDevice.open(
            bytes_per_s=UNIT_BYTES / cell.unit_s, unit_compute_s=cell.compute_s
        )
        reader = ThreadReader.open(io_chunk_bytes=MIB, queue_depth=1, preadv=SlowDisk(cell.unit_s))
        sources = unit_sources(plan.units, extents)
        store = DeviceStore.open(plan, sources, reader=reader, device=device)
        stack.callback(store.close)
        stack.callback(device.close)
        stack.callback(reader.close)
        transport = DeviceTransport(store=store, reader=reader, device=device)
        fetch = FetchCoordinator(
            plan=plan, homes=store.homes, tables={}, reader=reader, transport=transport
        )
        # The first pass reads what stays in DRAM and does not count.
        run_pass(device, fetch, plan)
        fastest_s = run_pass(device, fetch, plan)
        for _ in range(num_runs - 1):
            if fastest_s <= (1 + TOLERANCE / 2) * cell.expected_s:
                break
            fastest_s = min(fastest_s, run_pass(device, fetch, plan))
    return fastest_s


def run_pass(device: DoubleDevice, fetch: FetchCoordinator, plan: Plan) -> float:
    """Fetch, compute, release every unit once; return the seconds until all is computed."""
    start_s = time.perf_counter()
    fetch.start_step(has_next=False)
    for unit in plan.units:
        fetch.acquire(unit.unit_idx)
        fetch.release(unit.unit_idx)
    end = device.record()
    device.synchronize(end)
    return end.done_s - start_s


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    unit_s = args.unit_ms / 1000
    for path in args.paths:
        for batch in args.batches:
            for depth in args.depths:
                yield Cell(
                    path=path,
                    depth=depth,
                    batch=batch,
                    num_units=args.units,
                    unit_s=unit_s,
                    compute_s=unit_s * max(1.0, batch / args.ridge),
                )


def measure_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every cell; the gain is over depth 0 of the same batch."""
    rows: list[dict[str, Any]] = []
    plain: dict[tuple[str, int], float] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for cell in cells(args):
            pass_s = measure(cell, Path(folder), num_runs=args.runs)
            if cell.depth == 0:
                plain[cell.path, cell.batch] = pass_s
            without_s = plain.get((cell.path, cell.batch))
            rows.append({
                "path": cell.path, "batch": cell.batch, "depth": cell.depth,
                "compute_over_copy": cell.compute_s / cell.unit_s, "pass_s": pass_s,
                "expected_s": cell.expected_s, "ratio": pass_s / cell.expected_s,
                "gain": without_s / pass_s if without_s else None,
                "is_met": abs(pass_s / cell.expected_s - 1) <= TOLERANCE,
            })  # fmt: skip
            print(table(rows[-1:], with_head=len(rows) == 1), flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]], *, with_head: bool = True) -> str:
    columns = ["path", "batch", "depth", "pass_s", "expected_s", "ratio", "gain", "is_met"]
    text = format_table(columns, [[row[name] for name in columns] for row in rows])
    return text if with_head else text.splitlines()[-1]


def plot(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Draw the gain over the batch, one line per depth."""
    from matplotlib import pyplot  # noqa: PLC0415 - only the extra `bench` brings it

    paths = sorted({row["path"] for row in rows})
    figure, axes = pyplot.subplots(1, len(paths), figsize=(5 * len(paths), 4), squeeze=False)
    for axis, path in zip(axes[0], paths, strict=True):
        for depth in sorted({row["depth"] for row in rows} - {0}):
            line = [row for row in rows if (row["path"], row["depth"]) == (path, depth)]
            axis.plot(
                [row["batch"] for row in line], [row["gain"] for row in line],
                marker="o", label=f"depth {depth}",
            )  # fmt: skip
        axis.set(title=f"weights in {path}", xlabel="batch", ylabel="gain over depth 0", ylim=(0.9))
        axis.set_xscale("log", base=2)
        axis.legend()
    figure.tight_layout()
    figure.savefig(out)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=16, help="of a pass")
    parser.add_argument("--unit-ms", type=float, default=20.0, help="of a read and of a copy")
    parser.add_argument("--depths", type=numbers, default=[0, 1, 2, 4])
    parser.add_argument("--batches", type=numbers, default=[1, 16, 64, 128, 256])
    parser.add_argument("--ridge", type=int, default=32, help="batch from which computing grows")
    parser.add_argument("--paths", type=lambda text: text.split(","), default=["dram", "nvme"])
    parser.add_argument("--runs", type=int, default=5, help="passes at most; the fastest counts")
    parser.add_argument("--folder", type=Path, help="for the file of weights")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--plot", type=Path, help="SVG or PNG file; needs the extra `bench`")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    end_cleanly_on_sigterm()
    rows = measure_all(args)
    missed = [row for row in rows if not row["is_met"]]
    print(
        f"{len(rows) - len(missed)} of {len(rows)} cells within {TOLERANCE:.0%} of what they cost"
    )
    if args.out:
        folder = Path(args.folder or tempfile.gettempdir())
        write_results(args.out, "device double", folder, {"rows": rows}, folders={"TMP": folder})
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
