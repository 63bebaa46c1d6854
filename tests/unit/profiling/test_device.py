import itertools

import pytest
import torch

from zeroinfer.native import ProductKernel
from zeroinfer.profiling import measure_device_products, measure_link


def clock_of(*durations_s):
    """Return a clock by which the nth call takes the nth duration, the last one for ever."""
    now_s, steps = 0.0, itertools.chain(durations_s, itertools.repeat(durations_s[-1]))
    is_start = True

    def clock():
        nonlocal now_s, is_start
        if not is_start:
            now_s += next(steps)
        is_start = not is_start
        return now_s

    return clock


def test_link_rate_is_the_median_without_the_first_copy():
    copies = []
    rate = measure_link(
        lambda: copies.append(1), 1000, num_runs=3, clock=clock_of(9.0, 1.0, 2.0, 4.0)
    )
    assert rate == 500
    assert len(copies) == 4


def test_products_are_named_and_finished_before_the_clock_is_read():
    kernel, finished = ProductKernel.resolve(torch.float32), []
    rates = measure_device_products(
        kernel,
        torch.device("cpu"),
        dtype="fp32",
        mode="cuda",
        finish=lambda: finished.append(1),
        num_rows=(1, 2),
        num_runs=1,
        clock=clock_of(1.0),
    )
    assert [rate[:3] for rate in rates] == [("fp32", "cuda", 1), ("fp32", "cuda", 2)]
    assert rates[1].flops_per_s == pytest.approx(2 * 2 * 4096 * 4096)
    assert len(finished) == 4
