"""Rates of memory copies and matrix products on the CPU."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from zeroinfer.dtypes import DType
from zeroinfer.native import ProductKernel, torch_dtype
from zeroinfer.planner import MatmulRate
from zeroinfer.units import MIB

__all__ = ["measure_memory_copy", "measure_products"]

_NUM_COLUMNS = 4096
_NUM_OUTPUTS = 4096


def measure_memory_copy(
    *, num_bytes: int = 32 * MIB, num_runs: int = 5, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the bytes per second that torch copies from DRAM to DRAM, each byte counted once."""
    source = torch.zeros(num_bytes, dtype=torch.uint8)
    target = torch.ones(num_bytes, dtype=torch.uint8)
    durations_s = [_time(lambda: target.copy_(source), clock) for _ in range(num_runs + 1)]
    return num_bytes / statistics.median(durations_s[1:])


def measure_products(
    dtypes: Sequence[DType],
    num_rows: Sequence[int] = (1, 16, 64, 256),
    *,
    budget_s: float = 1.5,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[MatmulRate, ...]:
    """Measure the kernel of each weight dtype at each number of activation rows.

    Args:
        dtypes: Float dtypes of weights: BF16, F16 or F32.
        num_rows: Activation rows per product.
        budget_s: Seconds to spend in all; each cell is run at least once.
        clock: Seconds, monotonic.

    Shapes:
        weight (4096, 4096), activations (rows, 4096).
    """
    cell_s = budget_s / (len(dtypes) * len(num_rows))
    return tuple(
        rate for dtype in dtypes for rate in _measure_dtype(dtype, num_rows, cell_s, clock)
    )


def _measure_dtype(
    dtype: DType, num_rows: Sequence[int], cell_s: float, clock: Callable[[], float]
) -> list[MatmulRate]:
    kernel = ProductKernel.resolve(torch_dtype(dtype))
    weight = torch.full((_NUM_OUTPUTS, _NUM_COLUMNS), 0.01, dtype=torch_dtype(dtype))
    rates = []
    for rows in num_rows:
        x = torch.full((rows, _NUM_COLUMNS), 0.01, dtype=kernel.activation_dtype)
        out = torch.empty((rows, _NUM_OUTPUTS), dtype=kernel.activation_dtype)
        duration_s = _time_repeatedly(lambda: kernel.linear(x, weight, out), cell_s, clock)  # noqa: B023
        flops = 2 * rows * _NUM_COLUMNS * _NUM_OUTPUTS
        rates.append(MatmulRate(dtype.short_name, kernel.mode, rows, flops / duration_s))
    return rates


def _time_repeatedly(
    call: Callable[[], object], cell_s: float, clock: Callable[[], float]
) -> float:
    """Return the median seconds of a call within about `cell_s`.

    The first call warms up and counts only when it used up the time by itself.
    """
    deadline_s = clock() + cell_s
    first_s = _time(call, clock)
    durations_s = [first_s if clock() >= deadline_s else _time(call, clock)]
    while clock() < deadline_s:
        durations_s.append(_time(call, clock))
    return statistics.median(durations_s)


def _time(call: Callable[[], object], clock: Callable[[], float]) -> float:
    start_s = clock()
    call()
    return clock() - start_s
