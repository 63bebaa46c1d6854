"""Compare the compiled kernels with plain torch in interleaved runs (A B A B ...).

    python tools/bench_kernels.py --out tools/results/kernels.json

Sizes are those of one Llama-7B layer. A cell's ratio is the median over pairs of torch's time over
the kernel's; attention is timed as the layer runs it, stores into the KV cache included.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_common import format_table, ratios_of_neighbours, summarize, write_results

from zeroinfer.kvcache import KVCache, KVPlane
from zeroinfer.layers import AttentionConfig, Frame, PackedBatch, SequenceSlice, attend
from zeroinfer.native import Activation, ProductKernel, Rotation, RowKernels, half_to_bf16

WIDTH, INNER, NUM_HEADS, HEAD_DIM = 4096, 11008, 32, 128
BLOCK_SIZE = 128
MIN_RUN_S = 0.02
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GATES = (Activation.SILU, Activation.GELU, Activation.GELU_TANH)
DECODES = ((64, 40), (256, 40), (64, 544))
PROMPTS = ((64, 32), (4, 512), (1, 2048))

Run = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One operation; `make` allocates its tensors and returns it in one of both ways."""

    name: str
    num_bytes: int
    """What it reads and writes."""
    make: Callable[[RowKernels], Run]


def norm_cell(num_rows: int, dtype: torch.dtype, *, is_rms: bool) -> Cell:
    def make(kernels: RowKernels) -> Run:
        x = torch.randn(num_rows, WIDTH, dtype=dtype)
        weight = torch.ones(WIDTH, dtype=torch.bfloat16)
        return lambda: kernels.norm(x, weight, eps=1e-5, is_rms=is_rms)

    name = "RMS norm" if is_rms else "layer norm"
    return Cell(name=name, num_bytes=2 * num_rows * WIDTH * dtype.itemsize, make=make)


def rotary_cell(num_rows: int, dtype: torch.dtype) -> Cell:
    def make(kernels: RowKernels) -> Run:
        heads = torch.randn(num_rows, NUM_HEADS, HEAD_DIM, dtype=dtype)
        angles = torch.randn(num_rows, HEAD_DIM // 2)
        rotation = Rotation(cos=angles.cos().to(dtype), sin=angles.sin().to(dtype))
        return lambda: kernels.rotate(heads, rotation)

    return Cell(name="rotary", num_bytes=2 * num_rows * WIDTH * dtype.itemsize, make=make)


def gated_cell(num_rows: int, dtype: torch.dtype, activation: Activation) -> Cell:
    def make(kernels: RowKernels) -> Run:
        gate, up = (torch.randn(num_rows, INNER, dtype=dtype) for _ in range(2))
        return lambda: kernels.activate(activation, gate, up=up)

    name = f"{activation.name.lower()} x up"
    return Cell(name=name, num_bytes=3 * num_rows * INNER * dtype.itemsize, make=make)


def attention_frame(num_seqs: int, num_rows: int, length: int, kernels: RowKernels) -> Frame:
    """A step of sequences of one length of which the last rows are computed."""
    per_sequence = -(-length // BLOCK_SIZE)
    planes = [KVPlane(name=n, num_heads=NUM_HEADS, head_dim=HEAD_DIM) for n in ("key", "value")]
    kv = KVCache.create(
        planes, num_layers=1, num_blocks=num_seqs * per_sequence, block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
    )  # fmt: skip
    for plane in ("key", "value"):
        kv.plane(0, plane).zero_()
    sequences = tuple(
        SequenceSlice(
            row_start=idx * num_rows, num_rows=num_rows, num_computed_tokens=length - num_rows,
            num_prompt_tokens=length if num_rows > 1 else 1,
            block_table=tuple(range(idx * per_sequence, (idx + 1) * per_sequence)),
        )
        for idx in range(num_seqs)
    )  # fmt: skip
    rows = torch.zeros(num_seqs * num_rows, dtype=torch.int64)
    batch = PackedBatch(
        input_ids=rows, positions=rows, rope_lengths=rows, logits_indices=rows[:1],
        num_rows=len(rows), sequences=sequences,
    )  # fmt: skip
    frame = Frame(
        batch=batch, kernel=ProductKernel.resolve(torch.float32), kv=kv, kernels=kernels,
        prompt_chunk_tokens=256, layer_idx=0,
    )  # fmt: skip
    for name in ("q", "k", "v"):
        frame[name] = torch.randn(len(rows), WIDTH)
    return frame


def attention_cell(name: str, num_seqs: int, num_rows: int, length: int) -> Cell:
    config = AttentionConfig(num_heads=NUM_HEADS, num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM)
    run = attend(config, query="q", key="k", value="v", dst="out")

    def make(kernels: RowKernels) -> Run:
        frame = attention_frame(num_seqs, num_rows, length, kernels)
        return lambda: run(frame)

    return Cell(name=name, num_bytes=2 * 2 * num_seqs * length * WIDTH, make=make)


def landing_cell() -> Cell:
    def make(kernels: RowKernels) -> Run:
        halves = torch.randn(16 << 20, dtype=torch.float16)
        if kernels.is_fused:
            return lambda: half_to_bf16(halves)
        return lambda: halves.view(torch.bfloat16).copy_(halves)

    return Cell(name="fp16 to bf16, 32 MiB", num_bytes=2 * (32 << 20), make=make)


def cells(num_rows: int) -> Iterator[Cell]:
    for name, dtype in DTYPES.items():
        row_cells = [norm_cell(num_rows, dtype, is_rms=is_rms) for is_rms in (True, False)]
        row_cells.append(rotary_cell(num_rows, dtype))
        row_cells += [gated_cell(num_rows, dtype, activation) for activation in GATES]
        for cell in row_cells:
            yield replace(cell, name=f"{cell.name}, {num_rows} rows, {name}")
    for num_seqs, length in DECODES:
        yield attention_cell(f"decode {num_seqs} x {length} keys", num_seqs, 1, length)
    for num_seqs, length in PROMPTS:
        yield attention_cell(f"prompt {num_seqs} x {length}", num_seqs, length, length)
    yield landing_cell()


def time_run(run: Run, num_calls: int) -> float:
    start_s = time.perf_counter()
    for _ in range(num_calls):
        run()
    return (time.perf_counter() - start_s) / num_calls


def num_calls_for(run: Run) -> int:
    run()
    return max(1, int(MIN_RUN_S / time_run(run, 1)))


def measure(cell: Cell, num_pairs: int) -> dict[str, Any]:
    """Time both ways in turns."""
    fused, plain = (cell.make(RowKernels.resolve(mode)) for mode in ("on", "off"))
    num_fused, num_plain = num_calls_for(fused), num_calls_for(plain)
    fused_s, plain_s = [], []
    for _ in range(num_pairs):
        fused_s.append(time_run(fused, num_fused))
        plain_s.append(time_run(plain, num_plain))
    ratios = [slow / fast for slow, fast in zip(plain_s, fused_s, strict=True)]
    return {
        "name": cell.name,
        "fused_s": summarize(fused_s),
        "torch_s": summarize(plain_s),
        "torch_over_fused": summarize(ratios),
        "fused_over_fused": summarize(ratios_of_neighbours(fused_s)),
        "gb_s": cell.num_bytes / median(fused_s) / 1e9,
    }


def table(results: list[dict[str, Any]]) -> str:
    columns = ["operation", "kernel ms", "torch ms", "torch / kernel", "spread", "GB/s"]
    lines = []
    for result in results:
        ratio = result["torch_over_fused"]
        lines.append([
            result["name"], 1e3 * result["fused_s"]["median"], 1e3 * result["torch_s"]["median"],
            ratio["median"], f"{ratio['min']:.2f}-{ratio['max']:.2f}", result["gb_s"],
        ])  # fmt: skip
    return format_table(columns, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048, help="rows of norms and activations")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--threads", type=int, help="threads of both ways (torch's choice)")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    results = []
    with torch.inference_mode():
        for cell in cells(args.rows):
            if args.only in cell.name:
                results.append(measure(cell, args.pairs))
                print(table(results[-1:]), flush=True)
    print(f"\nall operations, {torch.get_num_threads()} threads\n{table(results)}")
    if args.out:
        write_results(args.out, "compiled kernels beside torch", Path(), {"cells": results})


if __name__ == "__main__":
    main()
