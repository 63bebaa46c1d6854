"""Multiply matrices shaped like a model's layers while the reader streams its weights.

The yardstick for a compute-bound step: the engine's own product kernel, with the same rows and row
tiles, but no norms, attention, sampling or scheduling; the disk is kept as busy as in the engine.
The matrices of one layer are filled at random and used for every layer: they are larger than any
cache. With --no-read the products run alone.

    python tools/products_pass.py MODEL_DIR --rows 2048 --head-rows 64 --io-chunk-bytes 1MiB \\
        --queue-depth 4
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from read_pass import (
    add_reader_arguments,
    plan_pass,
    read_passes,
    slot_bytes_for,
    weight_files,
)

from zeroinfer.native import ProductKernel, ThreadReader

__all__ = ["layer_shapes"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def layer_shapes(config: dict[str, Any]) -> list[tuple[int, int]]:
    """(N, K) of the matrices of one llama layer, from its config.json."""
    hidden = config["hidden_size"]
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // num_heads
    kv_rows = (config.get("num_key_value_heads") or num_heads) * head_dim
    intermediate = config["intermediate_size"]
    return [
        (num_heads * head_dim, hidden),
        (kv_rows, hidden),
        (kv_rows, hidden),
        (hidden, num_heads * head_dim),
        (intermediate, hidden),
        (intermediate, hidden),
        (hidden, intermediate),
    ]


def random_weight(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """A matrix of small values that is filled without an fp32 copy of it."""
    return torch.empty(shape, dtype=dtype).uniform_(-0.02, 0.02)


def multiply(kernel: ProductKernel, weight: torch.Tensor, num_rows: int) -> float:
    """Multiply `num_rows` rows, padded as the kernel asks, and return the seconds it took."""
    rows = kernel.padded_rows(num_rows)
    x = torch.ones(rows, weight.shape[1], dtype=kernel.activation_dtype)
    out = torch.zeros(rows, weight.shape[0], dtype=kernel.activation_dtype)
    start_s = time.perf_counter()
    kernel.linear(x, weight, out)
    return time.perf_counter() - start_s


def time_products(kernel: ProductKernel, config: dict[str, Any], args: argparse.Namespace) -> float:
    """Seconds of all products of one step; sampled layers stand for all of them."""
    weights = [random_weight(shape, kernel.weight_dtype) for shape in layer_shapes(config)]
    head = random_weight((config["vocab_size"], config["hidden_size"]), kernel.weight_dtype)
    num_layers = int(config["num_hidden_layers"])
    num_timed = min(num_layers, args.timed_layers or num_layers)
    for weight in weights:
        multiply(kernel, weight, 1)
    layers_s = sum(
        multiply(kernel, weight, args.rows) for _ in range(num_timed) for weight in weights
    )
    return layers_s * num_layers / num_timed + multiply(kernel, head, args.head_rows)


@contextmanager
def streaming(args: argparse.Namespace, times_s: list[float]) -> Iterator[None]:
    """Keep reading the model's files, in a thread, while the body runs."""
    slot_bytes = slot_bytes_for(args.io_chunk_bytes, args.queue_depth, args.ring_bytes)
    segments = plan_pass(weight_files(args.model), args.pass_bytes, slot_bytes)
    reader = ThreadReader.open(io_chunk_bytes=args.io_chunk_bytes, queue_depth=args.queue_depth)
    stop = threading.Event()

    def read() -> None:
        times_s.extend(
            read_passes(
                reader,
                segments,
                slot_bytes=slot_bytes,
                num_passes=None,
                is_stopped=stop.is_set,
            )
        )

    thread = threading.Thread(target=read, name="stream")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        reader.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_reader_arguments(parser)
    parser.add_argument("--rows", type=int, required=True, help="rows of the layers' products")
    parser.add_argument("--head-rows", type=int, required=True, help="rows of the head's product")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--timed-layers", type=int, help="time only so many layers and scale")
    parser.add_argument("--batch-invariant", choices=["on", "off"], default="on")
    parser.add_argument("--no-read", action="store_true", help="products alone")
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text())
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    kernel = ProductKernel.resolve(_DTYPES[dtype], is_batch_invariant=args.batch_invariant == "on")
    read_s: list[float] = []
    products_s: list[float] = []
    for _ in range(args.repeats):
        if args.no_read:
            products_s.append(time_products(kernel, config, args))
            continue
        with streaming(args, read_s):
            products_s.append(time_products(kernel, config, args))
    print(json.dumps({
        "products_s": products_s,
        "read_pass_s": statistics.median(read_s) if read_s else None,
        "padded_rows": kernel.padded_rows(args.rows),
        "mode": kernel.mode,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
