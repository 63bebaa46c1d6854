"""Where weights lie and how they are read never changes a bit.

Oracle: the plain loop, everything resident, nothing ahead of its use.
"""

import pytest

from tests.helpers.engines import assert_same_bits, greedy_requests, half_resident, run_requests
from zeroinfer.offload import FetchCoordinator

ROWS = [[5, 900, 17, 33, 1500, 2, 8], [77], list(range(100, 133)), [1999, 0, 1999]]
NUM_NEW_TOKENS = 4
WIDE = 64 * 1024

PLAIN = {"offload.weights": "dram", "offload.prefetch_depth": 0}
STREAMED = {"offload.weights": "nvme"}
WAYS = {
    "resident": {"offload.weights": "dram"},
    "depth-0": {**STREAMED, "offload.prefetch_depth": 0},
    "depth-1": {**STREAMED, "offload.prefetch_depth": 1},
    "depth-2": {**STREAMED, "offload.prefetch_depth": 2},
    "depth-auto": STREAMED,
    "small-chunks": {**STREAMED, "io.io_chunk_bytes": "4KiB", "io.queue_depth": 3},
    "odd-chunks": {**STREAMED, "io.io_chunk_bytes": "20KiB", "io.queue_depth": 1},
    "large-chunks": {**STREAMED, "io.io_chunk_bytes": "8MiB"},
    "small-units": {**STREAMED, "offload.fetch_unit_bytes": WIDE},
    "small-units-depth-0": {
        **STREAMED, "offload.fetch_unit_bytes": WIDE, "offload.prefetch_depth": 0,
    },
    "one-unit": {**STREAMED, "offload.fetch_unit_bytes": "1GiB"},
    "tight-budget": {
        **STREAMED, "offload.fetch_unit_bytes": WIDE, "offload.dram_weights": "1100KiB",
    },
    "half": "half",
    "half-depth-1": "half-depth-1",
    "small-kv-blocks": {**STREAMED, "kv.block_size": 3},
}  # fmt: skip


def _settings(way, folder, requests):
    if not isinstance(way, str):
        return way
    half = half_resident(folder, requests, fetch_unit_bytes=WIDE)
    return {**half, "offload.prefetch_depth": 1} if way == "half-depth-1" else half


@pytest.mark.parametrize("batch_invariant", ["off", "on"])
@pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        ("float32", "native"),
        ("bfloat16", "native"),
        ("bfloat16", "upcast"),
        ("float16", "upcast"),
        ("bfloat16", "fused"),
        ("float16", "fused"),
    ],
)
def test_same_bits(wide_llama, force_mode, dtype, mode, batch_invariant):
    force_mode(mode)
    folder, requests = wide_llama(dtype), greedy_requests(ROWS, max_tokens=NUM_NEW_TOKENS)
    fixed = {"compute.batch_invariant": batch_invariant}
    oracle = run_requests(folder, requests, {**PLAIN, **fixed})
    assert not oracle.plan.streamed
    ways = WAYS if batch_invariant == "off" else {k: WAYS[k] for k in ("small-units", "half")}
    for way in ways.values():
        run = run_requests(folder, requests, {**_settings(way, folder, requests), **fixed})
        assert_same_bits(run, oracle)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits_in_other_families(family_folder, family, dtype):
    folder, requests = family_folder(family, dtype), greedy_requests(ROWS, max_tokens=3)
    oracle = run_requests(folder, requests, PLAIN)
    for way in ("depth-0", "depth-1", "small-chunks", "small-units", "half"):
        run = run_requests(folder, requests, _settings(WAYS[way], folder, requests))
        assert_same_bits(run, oracle)


@pytest.mark.parametrize("mode", ["native", "upcast"])
def test_same_bits_with_torch_alone(wide_llama, force_mode, mode):
    force_mode(mode)
    folder, requests = wide_llama("bfloat16"), greedy_requests(ROWS, max_tokens=NUM_NEW_TOKENS)
    plain = {"compute.fused_kernels": "off"}
    oracle = run_requests(folder, requests, {**PLAIN, **plain})
    for way in ("small-units", "half", "small-kv-blocks"):
        settings = {**_settings(WAYS[way], folder, requests), **plain}
        assert_same_bits(run_requests(folder, requests, settings), oracle)


def test_ways_differ_where_they_should(wide_llama):
    """The ways above do stream, cut and keep what their names say."""
    folder, requests = wide_llama("bfloat16"), greedy_requests(ROWS, max_tokens=1)
    plans = {
        name: run_requests(folder, requests, _settings(way, folder, requests)).plan
        for name, way in WAYS.items()
    }
    assert not plans["resident"].streamed
    assert [plans[f"depth-{depth}"].prefetch_depth for depth in (0, 1, 2)] == [0, 1, 2]
    assert plans["depth-auto"].prefetch_depth > 2
    assert plans["half"].resident
    assert plans["half"].streamed
    assert any(part.row_start for unit in plans["small-units"].units for part in unit.parts), (
        "no matrix was cut"
    )
    assert len(plans["small-units"].units) > 3 * len(plans["one-unit"].units)


def test_two_threads_keep_bits_too(wide_llama):
    folder, requests = wide_llama("bfloat16"), greedy_requests(ROWS[:2], max_tokens=2)
    threads = {"compute.num_threads": 2}
    oracle = run_requests(folder, requests, {**PLAIN, **threads})
    for way in ("small-units", "half"):
        settings = {**_settings(WAYS[way], folder, requests), **threads}
        assert_same_bits(run_requests(folder, requests, settings), oracle)


def test_poison_would_show(wide_llama, monkeypatch):
    """A unit used after its release is NaN, so that the comparisons above can fail."""
    folder, requests = wide_llama("float32"), greedy_requests([[1, 2]], max_tokens=2)
    acquire = FetchCoordinator.acquire

    def acquire_released(self, unit_idx):
        landed = acquire(self, unit_idx)
        if unit_idx == self._plan.streamed[2]:
            self._homes[unit_idx].arena.poison(self._homes[unit_idx].offset, 4096)
        return landed

    monkeypatch.setattr(FetchCoordinator, "acquire", acquire_released)
    run = run_requests(folder, requests, STREAMED)
    assert "not finite" in run.finished[0].error
    assert run.finished[0].token_ids == ()
