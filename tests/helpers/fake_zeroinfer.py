"""A stand-in for zeroinfer's command line: writes the report of a run that it did not make.

Started as a program by the tests of tools/. Steps take 10 ms and stream the whole checkpoint,
unless the weights are asked to be resident.
"""

import argparse
import json
import sys
import time
from pathlib import Path


def main() -> None:
    if sys.argv[1] == "profile":
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["generate"])
    for name in ("nvme", "model", "input", "output", "report"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("dram", "weights", "batch-invariant"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("max-num-seqs", "max-tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--overwrite", action="store_true", required=True)
    parser.add_argument("--ignore-eos", action="store_true", required=True)
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    rows = [json.loads(line)["prompt_token_ids"] for line in args.input.read_text().splitlines()]
    num_waves = len(rows) // args.max_num_seqs
    assert len(rows) == num_waves * args.max_num_seqs, "one place a row of each wave"
    total = sum(path.stat().st_size for path in args.model.glob("*.safetensors"))
    streamed = 0 if args.weights == "dram" or args.dram == "15GiB" else total
    num_seqs, num_tokens = args.max_num_seqs, sum(map(len, rows)) // num_waves
    steps = []
    for _ in range(num_waves):
        steps.append(step(num_tokens, num_seqs, streamed))
        steps += [step(num_seqs, num_seqs, streamed) for _ in range(args.max_tokens - 1)]
    report = {
        "model": {"weight_bytes": total},
        "plan": {"weights": {"dram": 11 << 30, "nvme": streamed}, "batch_invariant": True},
        "profile": {
            "nvme_read_bytes_per_s": 1e9,
            "io_chunk_bytes": 1 << 20,
            "queue_depth": 2,
        },
        "totals": {"load_s": 0.1, "first_layer_s": 0.2},
        "io": {"nvme": {"bytes_read": max(total, streamed * len(steps)),
                        "bytes_needed": max(total, streamed * len(steps))}},
        "memory": {"dram_peak_bytes": 1 << 20},
        "steps": steps,
    }  # fmt: skip
    time.sleep(0.15)
    args.report.write_text(json.dumps(report))


def step(num_tokens: int, num_seqs: int, nvme_bytes: int) -> dict[str, float]:
    return {
        "wall_s": 0.01,
        "num_tokens": num_tokens,
        "num_seqs": num_seqs,
        "nvme_bytes": nvme_bytes,
        "fetch_wait_s": 0.0,
        "compute_s": 0.01,
    }


if __name__ == "__main__":
    main()
