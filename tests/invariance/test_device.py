"""Where weights lie on the way to a device never changes a bit; bytes and budgets are as planned.

The device is the double: the CPU's products on memory of its own, over a link of some speed.
Oracle: the CPU with everything resident.
"""

import re

import pytest
import torch

from tests.helpers.checkpoints import tiny_gpt2, tiny_llama
from tests.helpers.engines import (
    assert_same_bits,
    drive,
    greedy_requests,
    open_engine,
    plan_of,
    run_requests,
    stop_after,
    take_back_stop,
)
from tests.helpers.fake_cuda import install_fake_cuda
from zeroinfer.counters import Trace
from zeroinfer.engine import StepInterrupted
from zeroinfer.errors import CapacityError, StorageError
from zeroinfer.memory import CudaDevice, DoubleDevice
from zeroinfer.planner import MatmulRate
from zeroinfer.units import MIB, parse_bytes

ROWS = [[5, 9, 17, 33, 80], [7], list(range(40, 61))]
UNITS = {"offload.fetch_unit_bytes": "8KiB"}
PLAIN = {"offload.weights": "dram", "offload.prefetch_depth": 0}
WAYS = {
    "gpu": {"offload.weights": "gpu"},
    "dram": {"offload.weights": "dram"},
    "dram-depth-0": {"offload.weights": "dram", "offload.prefetch_depth": 0},
    "dram-depth-1": {"offload.weights": "dram", "offload.prefetch_depth": 1},
    "nvme": {"offload.weights": "nvme"},
    "nvme-depth-0": {"offload.weights": "nvme", "offload.prefetch_depth": 0},
    "half": {"offload.dram_weights": "120KiB"},
    "half-depth-2": {"offload.dram_weights": "120KiB", "offload.prefetch_depth": 2},
}
FAMILIES = {
    "llama": tiny_llama,
    "llama-tied": lambda folder: tiny_llama(folder, tie_word_embeddings=True),
    "gpt2": tiny_gpt2,
}


def open_double(**options):
    return DoubleDevice.open(**{"bytes_per_s": 2e9, "latency_s": 1e-4, **options})


def settings_of(way, folder, requests):
    """Return the settings of a way; a half keeps about half of the weights on the device."""
    settings = {**UNITS, **WAYS[way]}
    if not way.startswith("half"):
        return settings
    nothing = plan_of(folder, requests, {**settings, "offload.weights": "nvme"},
                      device=open_double())  # fmt: skip
    own_bytes = nothing.total_gpu_bytes - nothing.ring.num_bytes
    weights = sum(nothing.gpu.footprints[idx] for idx in nothing.streamed)
    return {**settings, "offload.gpu_memory": own_bytes + weights * 3 // 5}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """A tiny model, its requests, and what the CPU makes of them."""
    folder = FAMILIES[request.param](tmp_path_factory.mktemp("device") / request.param)
    requests = greedy_requests(ROWS, max_tokens=3)
    return folder, requests, run_requests(folder, requests, PLAIN)


@pytest.mark.parametrize("way", WAYS)
def test_same_bits_and_planned_bytes(model, way):
    folder, requests, oracle = model
    run = run_requests(folder, requests, settings_of(way, folder, requests), device=open_double())
    assert_same_bits(run, oracle)
    plan, num_steps = run.plan, len(run.steps)
    assert bool(plan.resident) or way not in ("gpu", "half")
    assert bool(plan.streamed) == (way != "gpu")
    once = sum(plan.units[idx].num_bytes for idx in plan.resident)
    io, memory = run.report["io"], run.report["memory"]
    assert io["h2d"]["bytes"] == once + num_steps * plan.h2d_bytes
    assert io["h2d"]["busy_s"] > 0
    assert io["nvme"]["bytes_read"] >= num_steps * plan.streamed_bytes
    assert memory["gpu_peak_bytes"] == plan.gpu_resident_bytes + plan.ring.num_bytes
    assert memory["gpu_peak_bytes"] <= plan.total_gpu_bytes <= memory["gpu_budget_bytes"]
    assert run.report["roofline"]["h2d_s"] > 0


@pytest.mark.parametrize("depth", ["auto", 0])
def test_rows_of_a_tied_head_come_from_the_device(tmp_path, depth):
    """What is on the device is read from storage once, its rows with it."""
    folder = tiny_llama(tmp_path / "m", tie_word_embeddings=True)
    settings = {**UNITS, **WAYS["gpu"], "offload.prefetch_depth": depth}
    requests = greedy_requests(ROWS, max_tokens=3)
    run = run_requests(folder, requests, settings, device=open_double())
    needed = run.report["io"]["nvme"]["bytes_needed"]
    assert needed == sum(unit.num_bytes for unit in run.plan.units)


def test_ways_reach_all_three_tiers(model):
    folder, requests, _ = model
    plan = plan_of(folder, requests, settings_of("half", folder, requests), device=open_double())
    weights = plan.to_dict()["weights"]
    assert all(weights[tier] > 0 for tier in ("gpu", "dram", "nvme")), weights


def test_late_copies_change_no_bit(model):
    folder, requests, oracle = model
    for latency_s in (0.0, 2e-3):
        settings = {**UNITS, **WAYS["nvme"], "offload.prefetch_depth": 2}
        device = open_double(latency_s=latency_s, unit_compute_s=5e-4)
        run = run_requests(folder, requests, settings, device=device)
        assert_same_bits(run, oracle)
        assert run.report["time"]["compute_s"] > 0


@pytest.mark.parametrize("way", ["dram", "nvme", "half"])
def test_interrupted_step_is_computed_again(model, way):
    folder, requests, oracle = model
    settings = settings_of(way, folder, requests)
    with open_engine(folder, requests, settings, device=open_double()) as engine:
        stop_after(engine, 5)
        for request in requests:
            engine.add_request(request)
        with pytest.raises(StepInterrupted):
            engine.step()
        take_back_stop(engine)
        finished = {}
        while engine.has_unfinished_requests():
            finished |= {request.request_id: request for request in engine.step().finished}
    assert [list(finished[idx].token_ids) for idx in range(len(ROWS))] == oracle.ids


@pytest.mark.parametrize(("way", "num_copies"), [("dram", 1), ("nvme", 0)])
def test_memory_of_weights_follows_the_setting(tmp_path, way, num_copies):
    """Source: deepspeedai/DeepSpeed#2869. Rings of 2, 4 and 8 units, each as large as it says."""
    folder = tiny_llama(tmp_path / "m", num_hidden_layers=12, hidden_size=64, intermediate_size=64)
    requests = greedy_requests(ROWS, max_tokens=2)
    peaks = []
    for depth in (1, 3, 7):
        settings = {
            "offload.weights": way,
            "offload.fetch_unit_bytes": "1MiB",
            "offload.prefetch_depth": depth,
        }
        run = run_requests(folder, requests, settings, device=open_double())
        largest = max(run.plan.gpu.footprints[idx] for idx in run.plan.streamed)
        peak = run.report["memory"]["gpu_peak_bytes"]
        assert abs(peak - (depth + 1) * largest) <= largest
        assert run.plan.prefetch_depth == depth
        peaks.append(peak)
        everything = sum(run.plan.footprints[idx] for idx in run.plan.streamed)
        assert (run.plan.resident_bytes >= everything) == (num_copies == 1)
    assert peaks == sorted(set(peaks))


def test_host_memory_is_in_the_plan_before_it_is_taken(tmp_path):
    """Source: deepspeedai/DeepSpeed#2918. Pins are exact: what is planned is what is locked."""
    folder = tiny_llama(tmp_path / "m", num_hidden_layers=4, hidden_size=512, intermediate_size=512)
    requests = greedy_requests(ROWS, max_tokens=2)
    settings = {"offload.weights": "dram", "offload.fetch_unit_bytes": "1MiB"}
    pinner = _ExactPinner()
    run = run_requests(folder, requests, settings, device=open_double(pinner=pinner))
    plan = run.plan
    weights = sum(unit.num_bytes for unit in plan.units)
    assert pinner.most_bytes == plan.pinned_bytes
    assert weights <= plan.pinned_bytes <= 1.1 * weights
    assert run.report["plan"]["pinned_bytes"] == plan.pinned_bytes
    assert any("of DRAM is locked for copies to the gpu" in note for note in plan.notes)
    dram = plan.total_dram_bytes - plan.resident_bytes // 2
    with pytest.raises(CapacityError, match="DRAM budget") as caught:
        plan_of(folder, requests, {**settings, "offload.dram": dram}, device=open_double())
    suggested = parse_bytes(re.search(r"set --dram (\d+MiB)", str(caught.value)).group(1))
    assert abs(suggested - plan.total_dram_bytes) < 48 * MIB, "the base differs between runs"


class _ExactPinner:
    """Grants everything and remembers the most that was locked at once."""

    def __init__(self):
        self.num_bytes = self.most_bytes = 0

    def pin(self, address, num_bytes):
        self.num_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.num_bytes)

    def unpin(self, address, num_bytes):
        self.num_bytes -= num_bytes


def test_logits_are_in_host_memory(model):
    folder, requests, _ = model
    with open_engine(folder, requests, WAYS["gpu"], device=open_double()) as engine:
        run = drive(engine, requests)
    assert all(logits.device == torch.device("cpu") for logits in run.logits)


@pytest.fixture
def cuda(monkeypatch):
    """A CUDA device over fakes, with products that are not measured."""
    install_fake_cuda(monkeypatch)
    rate = MatmulRate("fp32", "cuda", 64, 1e9)
    monkeypatch.setattr(
        "zeroinfer.engine.devices.measure_device_products", lambda *_, **__: (rate,)
    )
    monkeypatch.setattr("zeroinfer.engine.devices._LINK_PROBE_BYTES", 1 << 16)
    return lambda: CudaDevice(torch.device("cpu"), trace=Trace())


def test_code_of_a_gpu_runs_to_the_same_bits_over_fakes(model, cuda):
    """Native products, its own rates, times from events: all but the driver."""
    folder, requests, cpu = model
    resident = run_requests(folder, requests, {**UNITS, **WAYS["gpu"]}, device=cuda())
    assert resident.ids == cpu.ids
    for way in ("dram", "nvme", "half"):
        run = run_requests(folder, requests, settings_of(way, folder, requests), device=cuda())
        assert_same_bits(run, resident)
        assert run.report["profile"]["matmul_flops_per_s"] <= 1e9
        assert 0 < run.report["time"]["compute_s"] <= run.report["totals"]["wall_s"]
        assert run.report["io"]["h2d"]["bytes"] >= len(run.steps) * run.plan.h2d_bytes
    assert resident.report["memory"]["gpu_peak_bytes"] == 12345


@pytest.fixture(params=["float16", "bfloat16"])
def short_model(request, tmp_path):
    """Made before anything stands in for torch.cuda, and the dtype it is in."""
    return tiny_llama(tmp_path / "m", dtype=request.param), getattr(torch, request.param)


def test_keys_and_values_on_a_gpu_are_as_precise_as_its_activations(short_model, cuda, monkeypatch):
    folder, dtype = short_model
    rates = [MatmulRate(name, "cuda", 64, 1e9) for name in ("fp16", "bf16")]
    monkeypatch.setattr("zeroinfer.engine.devices.measure_device_products", lambda *_, **__: rates)
    with open_engine(folder, greedy_requests(ROWS), {}, device=cuda()) as engine:
        assert engine._kv.plane(0, "key").dtype == dtype


@pytest.mark.parametrize(
    ("way", "what"), [("dram", "copied to the gpu"), ("nvme", "read from nvme")]
)
def test_bytes_that_were_planned_and_not_moved_are_an_error(model, way, what):
    folder, requests, _ = model
    with open_engine(folder, requests, {**UNITS, **WAYS[way]}, device=open_double()) as engine:
        run = drive(engine, requests)
        with pytest.raises(StorageError, match=rf"bytes {what} in 99 step\(s\), only \d+ were"):
            engine._streaming.check_moved(run.plan, num_steps=99)
