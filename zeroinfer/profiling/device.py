"""Rates of a compute device beside the CPU: its link and its products."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from zeroinfer.native import ProductKernel
from zeroinfer.planner import MatmulRate

__all__ = ["measure_device_products", "measure_link"]

_NUM_COLUMNS = 4096
_NUM_OUTPUTS = 4096


def measure_link(
    copy: Callable[[], None],
    num_bytes: int,
    *,
    num_runs: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the bytes per second of a copy to a device.

    Args:
        copy: copies `num_bytes` and returns when they are there.
        num_bytes: of one copy.
        num_runs: copies that count, after one that warms up.
        clock: seconds, monotonic.
    """
    return num_bytes / _median_s(copy, num_runs, clock)


def measure_device_products(
    kernel: ProductKernel,
    torch_device: torch.device,
    *,
    dtype: str,
    mode: str,
    finish: Callable[[], None],
    num_rows: Sequence[int] = (1, 16, 64, 256, 1024),
    num_runs: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[MatmulRate, ...]:
    """Measure a kernel on a device at each number of activation rows.

    Args:
        kernel: multiplies.
        torch_device: where.
        dtype: short name of the kernel's weight dtype, for the rates.
        mode: name of the way of multiplying, for the rates.
        finish: returns when all that was computed is done.
        num_rows: activation rows per product.
        num_runs: products that count, after one that warms up.
        clock: seconds, monotonic.

    Shapes:
        weight (4096, 4096), activations (rows, 4096).
    """
    weight = torch.full(
        (_NUM_OUTPUTS, _NUM_COLUMNS), 0.01, dtype=kernel.weight_dtype, device=torch_device
    )
    rates = []
    for rows in num_rows:
        dtype_of_rows = kernel.activation_dtype
        x = torch.full((rows, _NUM_COLUMNS), 0.01, dtype=dtype_of_rows, device=torch_device)
        out = torch.empty((rows, _NUM_OUTPUTS), dtype=dtype_of_rows, device=torch_device)

        def multiply(x: torch.Tensor = x, out: torch.Tensor = out) -> None:
            kernel.linear(x, weight, out)
            finish()

        flops = 2 * rows * _NUM_COLUMNS * _NUM_OUTPUTS
        rates.append(MatmulRate(dtype, mode, rows, flops / _median_s(multiply, num_runs, clock)))
    return tuple(rates)


def _median_s(call: Callable[[], None], num_runs: int, clock: Callable[[], float]) -> float:
    """Return the median seconds of a call; one more before it warms up."""
    durations_s = []
    for _ in range(num_runs + 1):
        start_s = clock()
        call()
        durations_s.append(clock() - start_s)
    return statistics.median(durations_s[1:])
