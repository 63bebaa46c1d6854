"""The engine on a GPU: same bits wherever weights lie, the CPU's answers, planned memory."""

import pytest
import torch

from tests.helpers.checkpoints import tiny_bloom, tiny_gpt2, tiny_llama
from tests.helpers.engines import assert_same_bits, greedy_requests, run_requests
from zeroinfer.memory import CudaDevice

pytestmark = pytest.mark.gpu

ROWS = [[5, 9, 17, 33, 80], [7], list(range(40, 61))]
DRAM = {"offload.dram": "48GiB"}
"""More than the driver and its libraries can take of this process."""
UNITS = {**DRAM, "offload.fetch_unit_bytes": "8KiB", "compute.device": "cuda"}
FAMILIES = {
    "llama": tiny_llama,
    "llama-tied": lambda folder: tiny_llama(folder, tie_word_embeddings=True),
    "gpt2": tiny_gpt2,
    "bloom": tiny_bloom,
}
WAYS = {
    "dram": {"offload.weights": "dram"},
    "dram-depth-0": {"offload.weights": "dram", "offload.prefetch_depth": 0},
    "nvme": {"offload.weights": "nvme"},
    "nvme-depth-1": {"offload.weights": "nvme", "offload.prefetch_depth": 1},
}


@pytest.fixture(scope="module", params=[*FAMILIES])
def folder(request, tmp_path_factory):
    return FAMILIES[request.param](tmp_path_factory.mktemp("gpu") / request.param)


@pytest.fixture(scope="module")
def requests():
    return greedy_requests(ROWS, max_tokens=6)


@pytest.fixture(scope="module")
def resident(folder, requests):
    """Everything on the GPU."""
    return run_requests(folder, requests, {**UNITS, "offload.weights": "gpu"})


@pytest.mark.parametrize("way", WAYS)
def test_placement_changes_no_bit(folder, requests, resident, way):
    run = run_requests(folder, requests, {**UNITS, **WAYS[way]})
    assert_same_bits(run, resident)
    assert run.report["io"]["h2d"]["bytes"] >= len(run.steps) * run.plan.h2d_bytes > 0


def test_gpu_gives_the_answers_of_the_cpu(folder, requests, resident):
    cpu = run_requests(folder, requests, {**DRAM, "compute.device": "cpu"})
    assert resident.ids == cpu.ids
    for got, want in zip(resident.logits, cpu.logits, strict=True):
        assert torch.allclose(got, want, atol=2e-3, rtol=1e-3), (got - want).abs().max()


def test_memory_and_time_are_reported(resident):
    memory, time = resident.report["memory"], resident.report["time"]
    assert 0 < memory["gpu_peak_bytes"] <= resident.plan.total_gpu_bytes
    assert resident.plan.total_gpu_bytes <= memory["gpu_budget_bytes"]
    assert time["compute_s"] > 0
    assert resident.report["profile"]["h2d_bytes_per_s"] > 1e8


def test_half_precision_streams_to_the_same_bits(tmp_path, requests):
    folder = tiny_llama(tmp_path / "bf16", dtype="bfloat16")
    resident = run_requests(folder, requests, {**UNITS, "offload.weights": "gpu"})
    streamed = run_requests(folder, requests, {**UNITS, "offload.weights": "dram"})
    assert_same_bits(streamed, resident)


def test_weights_are_rounded_to_the_dtype_asked_for(tmp_path, requests):
    folder = tiny_llama(tmp_path / "fp16", dtype="float16")
    settings = {**UNITS, "model.dtype": "bf16"}
    resident = run_requests(folder, requests, {**settings, "offload.weights": "gpu"})
    streamed = run_requests(folder, requests, {**settings, "offload.weights": "nvme"})
    assert_same_bits(streamed, resident)
    assert resident.logits[0].dtype == torch.bfloat16


def test_batch_changes_no_bit_where_it_is_invariant(folder):
    settings = {**UNITS, "offload.weights": "dram", "compute.batch_invariant": "on"}
    alone = run_requests(folder, greedy_requests(ROWS[:1], max_tokens=4), settings)
    beside = run_requests(folder, greedy_requests(ROWS, max_tokens=4), settings)
    assert beside.ids[0] == alone.ids[0]
    assert torch.equal(beside.logits[0], alone.logits[0])


def test_gpu_is_what_auto_takes(tmp_path, requests):
    folder = tiny_llama(tmp_path / "auto")
    settings = {**DRAM, "offload.weights": "auto"}
    run = run_requests(folder, requests, settings, device=CudaDevice.open())
    assert run.plan.gpu is not None
    assert not run.plan.streamed
