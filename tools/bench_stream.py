"""Measure streaming against what the disk and the products allow, on one model.

    python tools/bench_stream.py MODEL_DIR --rows 8,10,11,12,13 --throttle 0.8GB --out FILE.json
    python tools/bench_stream.py MODEL_DIR --rows '' --pairs 20 --out FILE.json

Rows are those of the table in tools/README.md. Rows 8, 10 and 11 run under --throttle, engine and
yardstick both; row 13 and --pairs run on the bare disk. Every engine run has a memory group of
--dram + 64 MiB. Needs root and cgroup v1 (--no-limits runs without groups, for a first look).
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bench_common import end_cleanly_on_sigterm, format_table, write_results
from bench_engine import Bench, add_bench_arguments, drop_page_cache
from bench_rows import (
    Settings,
    measure_large_budget,
    measure_pairs,
    measure_resident,
    measure_start,
    measure_streamed,
)

from zeroinfer.units import parse_bytes

ROWS = ("8", "10", "11", "12", "13")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def rows(text: str) -> list[str]:
    chosen = [part for part in text.split(",") if part]
    if unknown := set(chosen) - set(ROWS):
        raise argparse.ArgumentTypeError(f"no row {sorted(unknown)}; rows are {', '.join(ROWS)}")
    return chosen


def parse_arguments() -> argparse.Namespace:
    defaults = Settings()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_bench_arguments(parser)
    parser.add_argument("--rows", type=rows, default=["8", "11"], help="of 8,10,11,12,13")
    parser.add_argument("--throttle", type=parse_bytes, default=parse_bytes("0.8GB"),
                        help="bytes per second of rows 8, 10, 11, 12; 0 for none")  # fmt: skip
    parser.add_argument("--batches", type=numbers, default=[1, 16, 64], help="of row 8")
    parser.add_argument("--large-batches", type=numbers, default=[1, 16], help="of row 10")
    parser.add_argument("--prefill-batch", type=int, default=64, help="of row 11")
    parser.add_argument("--dram", default=defaults.dram)
    parser.add_argument("--weights", default=defaults.weights, help="of rows 8, 11 and pairs")
    parser.add_argument("--large-dram", default=defaults.large_dram, help="of row 10")
    parser.add_argument("--resident-dram", default=defaults.resident_dram, help="all fits in it")
    parser.add_argument("--max-tokens", type=int, default=defaults.max_tokens)
    parser.add_argument("--prompt-tokens", type=int, default=defaults.prompt_tokens)
    parser.add_argument("--rounds", type=int, default=defaults.num_rounds, help="A B each")
    parser.add_argument("--passes", type=int, default=defaults.num_passes, help="read passes a B")
    parser.add_argument("--timed-layers", type=int, help="of row 11's products; scaled to all")
    parser.add_argument("--pairs", type=int, default=0, help="unthrottled pairs")
    parser.add_argument("--pair-batch", type=int, default=16)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds a child may take")
    return parser.parse_args()


def settings_of(args: argparse.Namespace) -> Settings:
    return Settings(
        dram=args.dram,
        large_dram=args.large_dram,
        resident_dram=args.resident_dram,
        weights=args.weights,
        max_tokens=args.max_tokens,
        prompt_tokens=args.prompt_tokens,
        num_rounds=args.rounds,
        num_passes=args.passes,
        timed_layers=args.timed_layers,
    )


def measure(args: argparse.Namespace, throttled: Bench, free: Bench) -> Iterator[dict[str, Any]]:
    """Yield each row's result as it is measured."""
    settings = settings_of(args)
    if set(args.rows) - {"13"}:
        throttled.prepare()
    if "13" in args.rows or args.pairs:
        free.prepare()
    batches = args.batches if "8" in args.rows else []
    if "11" in args.rows:
        batches = [*(b for b in batches if b != args.prefill_batch), args.prefill_batch]
    for batch in batches:
        yield from measure_streamed(
            throttled,
            settings,
            batch=batch,
            with_prefill="11" in args.rows and batch == args.prefill_batch,
        )
    if "10" in args.rows:
        for batch in args.large_batches:
            yield measure_large_budget(throttled, settings, batch=batch)
    if "12" in args.rows:
        yield measure_resident(throttled, settings)
    if "13" in args.rows:
        yield measure_start(free, settings)
    if args.pairs:
        yield measure_pairs(free, settings, batch=args.pair_batch, num_pairs=args.pairs)


def table(results: list[dict[str, Any]]) -> str:
    lines = []
    for result in results:
        ratios = result["figures"].get("step_over_pass", {})
        repeats = result["figures"].get("pass_over_pass", {})
        for each in result["checks"]:
            is_ratio = each["name"] == "decode step / read-only pass" and ratios.get("num")
            spread = f"{ratios['min']:.3f}-{ratios['max']:.3f}" if is_ratio else None
            again = f"{repeats['min']:.3f}-{repeats['max']:.3f}" if repeats.get("num") else None
            lines.append([
                result["row"], result["batch"], each["name"], each["value"], spread,
                again if is_ratio else None, each["bar"], "yes" if each["is_met"] else "NO",
            ])  # fmt: skip
    columns = ["row", "batch", "check", "value", "spread", "A/A", "bar", "met"]
    return format_table(columns, lines)


def main() -> None:
    args = parse_arguments()
    end_cleanly_on_sigterm()
    throttled = Bench.create(args, args.throttle or None)
    free = replace(throttled, throttle_bytes_per_s=None)
    drop_page_cache(free.model)
    results: list[dict[str, Any]] = []
    for result in measure(args, throttled, free):
        results.append(result)
        print(table([result]), flush=True)
        if args.out:
            write_results(
                args.out, "streaming", free.model, {"rows": results}, folders=free.folders
            )
    print("\nall rows\n" + table(results))


if __name__ == "__main__":
    main()
