"""Compare decode and prefill times with other engines that run a model from disk.

    tools/setup_peers.sh
    python tools/bench_peers.py MODEL_DIR --out FILE.json [--pairs 20] [--earlier FILE.json]

zeroinfer, transformers with Accelerate's disk offload, and DeepSpeed ZeRO-Inference take turns on
the same prompts, unthrottled, each in a fresh process in a memory group of --dram + 64 MiB; cached
pages of the model are dropped before each. DeepSpeed needs more than the model to load, so its
limit is set after that. A peer that the limit kills or that runs out of --timeout did not finish.
A round takes half an hour, so rounds may be run apart: --earlier adds the cells of another file.
"""

import argparse
import json
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench_child import ChildResult, run_child
from bench_common import (
    REPOSITORY,
    end_cleanly_on_sigterm,
    format_table,
    summarize,
    write_results,
)
from bench_engine import (
    LIMIT_MARGIN_BYTES,
    Bench,
    EngineJob,
    add_bench_arguments,
    drop_page_cache,
    write_prompts,
)
from bench_rows import Settings, measure_pairs
from bench_stream import numbers
from cgroup import CgroupError, MemoryGroup

from zeroinfer.units import parse_bytes

ENGINES = ("zeroinfer", "accelerate", "deepspeed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One engine at one batch in one round."""

    engine: str
    batch: int
    outcome: str
    command: str
    load_s: float | None = None
    prefill_s: float | None = None
    decode_s: tuple[float, ...] = ()
    vm_hwm_bytes: int | None = None

    @property
    def is_finished(self) -> bool:
        return self.outcome == "finished"

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Cell":
        return cls(**{**data, "decode_s": tuple(data["decode_s"])})


def run_zeroinfer(bench: Bench, args: argparse.Namespace, batch: int) -> Cell:
    run = bench.try_engine(
        EngineJob(
            dram=args.dram,
            batch=batch,
            max_tokens=args.max_tokens,
            prompt_tokens=args.prompt_tokens,
        )
    )
    command = shlex.join(run.child.command)
    if not run.child.is_ok:
        return Cell(engine="zeroinfer", batch=batch, outcome=run.child.outcome, command=command)
    return Cell(
        engine="zeroinfer",
        batch=batch,
        outcome="finished",
        command=command,
        load_s=run.report["totals"]["load_s"],
        prefill_s=sum(step["wall_s"] for step in run.prefill_steps),
        decode_s=tuple(run.decode_s),
        vm_hwm_bytes=run.child.vm_hwm_bytes,
    )


def run_peer(bench: Bench, args: argparse.Namespace, engine: str, batch: int) -> Cell:
    """Run a peer program in its own environment and read its events."""
    is_late = engine == "deepspeed"
    limit = parse_bytes(args.dram) + LIMIT_MARGIN_BYTES
    with tempfile.TemporaryDirectory(dir=bench.work, prefix=f"{engine}-") as folder:
        command = peer_command(bench, args, engine, Path(folder))
        write_prompts(Path(folder) / "prompts.jsonl", bench.model, batch, args.prompt_tokens)
        with bench.groups(None if is_late else limit) as (memory, throttle):
            try:
                child = run_child(
                    command,
                    memory=memory,
                    throttle=throttle,
                    timeout_s=bench.timeout_s,
                    environment={"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"},
                    on_event=lambda event: is_late and limit_when_loaded(event, memory, limit),
                )
            except CgroupError as error:
                return Cell(
                    engine=engine, batch=batch, outcome=str(error), command=shlex.join(command)
                )
    return peer_cell(engine, batch, child)


def limit_when_loaded(event: dict[str, Any], memory: MemoryGroup | None, limit: int) -> bool:
    """Set the limit once the peer says that it loaded; true then, so that it goes on."""
    if event["event"] != "loaded":
        return False
    if memory is not None:
        memory.set_limit(limit)
    return True


def peer_command(bench: Bench, args: argparse.Namespace, engine: str, folder: Path) -> list[str]:
    options = {
        "accelerate": ["--resident", args.accelerate_resident],
        "deepspeed": ["--handshake", "--buffer-count", str(args.deepspeed_buffers)],
    }
    return [
        str(args.peers / "bin" / "python"), str(REPOSITORY / "tools" / f"peer_{engine}.py"),
        "--model", str(bench.model), "--input", str(folder / "prompts.jsonl"),
        "--max-tokens", str(args.max_tokens), "--work", str(folder / "offload"),
        *options[engine],
    ]  # fmt: skip


def peer_cell(engine: str, batch: int, child: ChildResult) -> Cell:
    """What a peer's events say; a program that ended before `done` did not finish."""
    events = child.json_lines
    steps = [event for event in events if event["event"] == "step"]
    loaded = [event["load_s"] for event in events if event["event"] == "loaded"]
    is_done = any(event["event"] == "done" for event in events)
    outcome = child.outcome if child.outcome != "finished" or is_done else "ended early"
    if outcome.startswith("exit"):
        outcome = f"{outcome}: {(child.stderr_tail.strip().splitlines() or ['no message'])[-1]}"
    return Cell(
        engine=engine,
        batch=batch,
        outcome=outcome,
        command=shlex.join(child.command),
        load_s=loaded[0] if loaded else None,
        prefill_s=next((e["wall_s"] for e in steps if e["phase"] == "prefill"), None),
        decode_s=tuple(e["wall_s"] for e in steps if e["phase"] == "decode"),
        vm_hwm_bytes=child.vm_hwm_bytes,
    )


def measure(bench: Bench, args: argparse.Namespace) -> Iterator[Cell]:
    """Run the cells round by round, engines taking turns within each batch."""
    if "zeroinfer" in args.engines:
        bench.prepare()
    for _ in range(args.rounds):
        for batch in args.batches:
            for engine in args.engines:
                drop_page_cache(bench.model)
                if engine == "zeroinfer":
                    yield run_zeroinfer(bench, args, batch)
                else:
                    yield run_peer(bench, args, engine, batch)


def earlier_cells(path: Path | None) -> list[Cell]:
    """Cells of a round that was run before, under the same arguments."""
    if path is None:
        return []
    return [Cell.from_dict(cell) for cell in json.loads(path.read_text())["cells"]]


def summary(cells: list[Cell]) -> list[dict[str, Any]]:
    """Per engine and batch: medians and spread over the rounds, and whether ours is below."""
    rows = []
    for batch in dict.fromkeys(cell.batch for cell in cells):
        ours = median_decode([c for c in cells if c.batch == batch and c.engine == "zeroinfer"])
        for engine in dict.fromkeys(cell.engine for cell in cells):
            group = [c for c in cells if c.batch == batch and c.engine == engine]
            if not group:
                continue
            is_finished = all(cell.is_finished for cell in group)
            theirs = median_decode(group)
            is_below = not is_finished or theirs is None or (ours is not None and ours < theirs)
            rows.append({
                "engine": engine,
                "batch": batch,
                "outcomes": [cell.outcome for cell in group],
                "decode_s": summarize(value for cell in group for value in cell.decode_s),
                "prefill_s": summarize(c.prefill_s for c in group if c.prefill_s is not None),
                "load_s": summarize(c.load_s for c in group if c.load_s is not None),
                "vm_hwm_bytes": max(c.vm_hwm_bytes or 0 for c in group),
                "is_zeroinfer_below": None if ours is None or engine == "zeroinfer" else is_below,
            })  # fmt: skip
    return rows


def median_decode(cells: list[Cell]) -> float | None:
    values = [value for cell in cells if cell.is_finished for value in cell.decode_s]
    return median(values) if values else None


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        decode = row["decode_s"]
        spread = f"{decode['min']:.2f}-{decode['max']:.2f}" if decode["num"] else None
        below = {None: None, True: "yes", False: "NO"}[row["is_zeroinfer_below"]]
        outcome = " | ".join(dict.fromkeys(row["outcomes"]))
        lines.append([
            row["engine"], row["batch"], decode["median"], spread, row["prefill_s"]["median"],
            row["load_s"]["median"], row["vm_hwm_bytes"] / 2**30, outcome[:60], below,
        ])  # fmt: skip
    columns = ["engine", "batch", "decode s/step", "spread", "prefill s", "load s", "VmHWM GiB",
               "outcome", "ours below"]  # fmt: skip
    return format_table(columns, lines)


def engines(text: str) -> list[str]:
    chosen = [part for part in text.split(",") if part]
    if unknown := set(chosen) - set(ENGINES):
        raise argparse.ArgumentTypeError(f"no engine {sorted(unknown)}; need {', '.join(ENGINES)}")
    return chosen


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_bench_arguments(parser)
    parser.add_argument("--peers", type=Path, default=REPOSITORY / ".venv-peers")
    parser.add_argument("--engines", type=engines, default=list(ENGINES))
    parser.add_argument("--batches", type=numbers, default=[1, 16, 64])
    parser.add_argument("--dram", default="5.5GiB")
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--earlier", type=Path, help="results of other rounds, to be added")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of one cell")
    parser.add_argument(
        "--accelerate-resident",
        default="0",
        help="Accelerate's max_memory, as 4GiB: resident weights and room for the largest layer",
    )
    parser.add_argument("--deepspeed-buffers", type=int, default=8, help="its swap buffers")
    parser.add_argument("--pairs", type=int, default=0, help="zeroinfer / read-only pass")
    parser.add_argument("--pair-batch", type=int, default=16)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    end_cleanly_on_sigterm()
    is_alone = args.engines in ([], ["zeroinfer"])
    if not is_alone and not (args.peers / "bin" / "python").exists():
        raise SystemExit(f"no environment in {args.peers}; run tools/setup_peers.sh first")
    bench = Bench.create(args, None)
    model = bench.model
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    if "deepspeed" in args.engines and shutil.disk_usage(bench.work).free < 1.1 * weights:
        raise SystemExit(f"DeepSpeed writes {weights / 1e9:.1f} GB to {bench.work}; free that much")
    cells = earlier_cells(args.earlier)
    results: dict[str, Any] = {}
    for cell in measure(bench, args):
        cells.append(cell)
        results = {"cells": [each.to_dict() for each in cells], "summary": summary(cells)}
        print(table(summary([cell])), flush=True)
        if args.out:
            write_results(args.out, "peers", model, results, folders=bench.folders)
    print("\nall rounds\n" + table(summary(cells)))
    if args.pairs:
        settings = Settings(dram=args.dram)
        pairs = measure_pairs(bench, settings, batch=args.pair_batch, num_pairs=args.pairs)
        print(f"decode step / read-only pass: {pairs['figures']['step_over_pass']}")
        if args.out:
            results["pairs"] = pairs
            write_results(args.out, "peers", model, results, folders=bench.folders)


if __name__ == "__main__":
    main()
