"""Measure a step that products bind against the products alone: what everything else costs.

    python tools/make_checkpoint.py --geometry llama-7b --num-layers 8 --out MODEL_DIR
    python tools/bench_compute.py MODEL_DIR --rows 2048,4096 --out tools/results/compute.json

All weights are resident. Prompts come in waves of as many rows as are asked for, with one new token
each: every step is the prefill of one wave. The first loads the weights and is left out; the last
has no next step and is left out as well. Engine runs and products alone alternate.
"""

import argparse
from statistics import median
from typing import Any

from bench_common import (
    end_cleanly_on_sigterm,
    format_table,
    ratios_of_neighbours,
    summarize,
    write_results,
)
from bench_engine import Bench, EngineJob, EngineRun, add_bench_arguments, drop_page_cache
from bench_rows import check

BAR = 1.15


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_bench_arguments(parser)
    parser.add_argument("--rows", type=numbers, default=[2048, 4096], help="rows of a step")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--waves", type=int, default=4, help="steps of an engine run")
    parser.add_argument("--dram", default="14GiB", help="all weights fit in it")
    parser.add_argument("--batch-invariant", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--rounds", type=int, default=3, help="A B each")
    parser.add_argument("--passes", type=int, default=2, help="products a B")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds a child may take")
    args = parser.parse_args()
    for num_rows in args.rows:
        if num_rows % args.prompt_tokens:
            parser.error(f"--rows {num_rows} is no multiple of --prompt-tokens")
    if args.waves < 3:
        parser.error(f"--waves: got {args.waves}, need 3 or more: the first and last do not count")
    return args


def job_of(args: argparse.Namespace, num_rows: int) -> EngineJob:
    return EngineJob(
        dram=args.dram,
        batch=num_rows // args.prompt_tokens,
        num_waves=args.waves,
        max_tokens=1,
        prompt_tokens=args.prompt_tokens,
        weights="dram",
        batch_invariant=args.batch_invariant,
        settings=(f"scheduler.max_num_batched_tokens={num_rows}",),
    )


def steady_steps(run: EngineRun, num_rows: int) -> list[dict[str, Any]]:
    """The steps of whole waves, without the first and the last.

    Raises:
        SystemExit: the engine cut the waves differently, or read weights again.
    """
    steps: list[dict[str, Any]] = run.report["steps"][1:-1]
    if not steps or any(step["num_tokens"] != num_rows for step in steps):
        seen = [step["num_tokens"] for step in run.report["steps"]]
        raise SystemExit(f"steps have {seen} rows, expected {num_rows} each")
    if any(step["nvme_bytes"] for step in steps):
        raise SystemExit("weights were read again; give more --dram")
    return steps


def measure(bench: Bench, args: argparse.Namespace, num_rows: int) -> dict[str, Any]:
    """Run A B A B: the engine, then its products alone."""
    job = job_of(args, num_rows)
    options = ["--rows", str(num_rows), "--head-rows", str(job.batch), "--no-read"]
    options += ["--repeats", str(args.passes)]
    step_s: list[float] = []
    products_s: list[float] = []
    ratios: list[float] = []
    for _ in range(args.rounds):
        run = bench.run_engine(job)
        steps_s = [float(step["wall_s"]) for step in steady_steps(run, num_rows)]
        weight_bytes = int(run.report["model"]["weight_bytes"])
        alone = bench.products_pass(run, pass_bytes=weight_bytes, options=options)
        step_s += steps_s
        products_s += alone["products_s"]
        ratios.append(median(steps_s) / median(alone["products_s"]))
    return {
        "row": f"{num_rows} rows",
        "batch": job.batch,
        "figures": {
            "step_s": summarize(step_s),
            "products_s": summarize(products_s),
            "step_over_products": summarize(ratios),
            "products_over_products": summarize(ratios_of_neighbours(products_s)),
            "product_mode": alone["mode"],
            "padded_rows": alone["padded_rows"],
            "commands": [" ".join(run.child.command), alone["command"]],
        },
        "checks": [check("step / products alone", median(ratios), at_most=BAR)],
    }


def table(results: list[dict[str, Any]]) -> str:
    columns = ["step", "batch", "step s", "products s", "ratio", "spread", "A/A", "bar", "met"]
    lines = []
    for result in results:
        figures, (bar,) = result["figures"], result["checks"]
        ratio, again = figures["step_over_products"], figures["products_over_products"]
        lines.append([
            result["row"], result["batch"], figures["step_s"]["median"],
            figures["products_s"]["median"], bar["value"],
            f"{ratio['min']:.3f}-{ratio['max']:.3f}",
            f"{again['min']:.3f}-{again['max']:.3f}" if again["num"] else None,
            bar["bar"], "yes" if bar["is_met"] else "NO",
        ])  # fmt: skip
    return format_table(columns, lines)


def main() -> None:
    args = parse_arguments()
    end_cleanly_on_sigterm()
    bench = Bench.create(args, None)
    drop_page_cache(bench.model)
    bench.prepare()
    results: list[dict[str, Any]] = []
    for num_rows in args.rows:
        results.append(measure(bench, args, num_rows))
        print(table(results[-1:]), flush=True)
        if args.out:
            write_results(
                args.out, "compute-bound steps", bench.model, {"rows": results},
                folders=bench.folders,
            )  # fmt: skip
    print("\nall rows\n" + table(results))


if __name__ == "__main__":
    main()
