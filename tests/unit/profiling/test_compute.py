import itertools

import pytest
import torch

from zeroinfer import profiling
from zeroinfer.dtypes import DType
from zeroinfer.native import ProductKernel
from zeroinfer.profiling import measure_memory_copy, measure_products


@pytest.fixture(autouse=True)
def small_products(monkeypatch):
    monkeypatch.setattr("zeroinfer.profiling.compute._NUM_COLUMNS", 64)
    monkeypatch.setattr("zeroinfer.profiling.compute._NUM_OUTPUTS", 128)


def ticks(step_s):
    """Return a clock that moves on by `step_s` each time it is looked at."""
    counter = itertools.count()
    return lambda: next(counter) * step_s


def test_product_rates_are_flops_over_the_time_of_one_product():
    rates = measure_products([DType.F32], (1, 16), budget_s=1.0, clock=ticks(0.001))
    mode = ProductKernel.resolve(torch.float32).mode
    assert [rate[:3] for rate in rates] == [("fp32", mode, 1), ("fp32", mode, 16)]
    flops_per_row = 2 * 64 * 128
    for rate in rates:
        assert rate.flops_per_s == pytest.approx(rate.num_rows * flops_per_row / 0.001)


def test_every_dtype_is_measured_with_its_own_kernel():
    rates = measure_products([DType.BF16, DType.F16, DType.F32], (4,), budget_s=0.01)
    assert [rate.dtype for rate in rates] == ["bf16", "fp16", "fp32"]
    modes = [ProductKernel.resolve(dtype).mode for dtype in (torch.bfloat16, torch.float16)]
    assert [rate.mode for rate in rates[:2]] == modes
    assert all(rate.flops_per_s > 0 for rate in rates)


def test_a_product_slower_than_its_time_is_run_once():
    # Looks at the clock: deadline, start and stop of the call, check, loop.
    looks = []
    step = ticks(10.0)

    def clock():
        looks.append(None)
        return step()

    measure_products([DType.F32], (1,), budget_s=0.1, clock=clock)
    assert len(looks) == 5


def test_memory_copies_count_each_byte_once():
    rate = measure_memory_copy(num_bytes=1000, num_runs=3, clock=ticks(0.5))
    assert rate == pytest.approx(2000)


def test_unknown_names_of_the_package_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'measure_sound'"):
        _ = profiling.measure_sound
