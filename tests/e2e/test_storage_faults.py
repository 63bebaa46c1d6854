"""Disks that are slow, fail or lose their file under a running engine.

Source: case 1.30 (vllm-project/vllm#47282), the part of the weights: bytes that land in a place
whose last user is still computing.
"""

import os
import shutil

import pytest

from tests.helpers.checkpoints import tiny_llama
from tests.helpers.engines import greedy_requests, open_engine, run_requests
from tests.helpers.io_shim import PreadvShim, random_latency
from zeroinfer.errors import CheckpointError, StorageError
from zeroinfer.native import ThreadReader

REQUESTS = greedy_requests([(5, 6, 7, 8, 9), (11, 12), (40, 41, 42)], max_tokens=4)
STREAMED = {"offload.weights": "nvme", "offload.fetch_unit_bytes": "8KiB"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model") / "llama", num_hidden_layers=8)


@pytest.fixture(scope="module")
def expected(folder):
    """Ids of the resident model on a disk without faults."""
    return run_requests(folder, REQUESTS, {"offload.weights": "dram"}).ids


def disk(shim):
    """Return a reader over a shim; the engine closes it."""
    return ThreadReader.open(io_chunk_bytes=8192, queue_depth=2, preadv=shim)


def add_all(engine):
    for request in REQUESTS:
        engine.add_request(request)


def run_to_end(engine):
    """Step until all rows have ended and return their ids in order."""
    finished = []
    while engine.has_unfinished_requests():
        finished += engine.step().finished
    return [list(row.token_ids) for row in sorted(finished, key=lambda row: row.request_id)]


@pytest.mark.slow
def test_random_delays_change_no_token_in_50_runs(folder, expected):
    # Poison is off: bytes that came too early would be those of another layer, not NaN.
    settings = {**STREAMED, "offload.prefetch_depth": 1, "offload.debug_poison": "false"}
    for run in range(50):
        shim = PreadvShim(latency_s=random_latency(max_s=2e-4, seed=run))
        assert run_requests(folder, REQUESTS, settings, reader=disk(shim)).ids == expected, run
        assert shim.calls


def test_failed_read_ends_the_step_with_the_place_and_the_engine_closes(folder):
    shim = PreadvShim()
    with open_engine(folder, REQUESTS, STREAMED, reader=disk(shim)) as engine:
        add_all(engine)
        engine.step()
        shim.fails_at = lambda call: call.offset >= 8192
        place = r"read of \d+ bytes at \d+ of .*model\.safetensors failed: .* \(EIO\); got 0 bytes"
        with pytest.raises(StorageError, match=place):
            engine.step()
        engine.close()


def test_step_that_failed_can_be_tried_again_and_changes_no_token(folder, expected):
    shim = PreadvShim()
    with open_engine(folder, REQUESTS, STREAMED, reader=disk(shim)) as engine:
        add_all(engine)
        engine.step()
        shim.fails_at = lambda call: True
        for _ in range(2):
            with pytest.raises(StorageError, match="EIO"):
                engine.step()
        shim.fails_at = lambda call: False
        assert run_to_end(engine) == expected


def test_failure_in_the_first_step_leaves_resident_weights_whole(folder, expected):
    settings = {"offload.dram_weights": "200KiB", "offload.fetch_unit_bytes": "8KiB"}
    shim = PreadvShim(fails_at=lambda call: call.offset > 60_000)
    with open_engine(folder, REQUESTS, settings, reader=disk(shim)) as engine:
        add_all(engine)
        assert engine.plan.resident
        assert engine.plan.streamed
        with pytest.raises(StorageError, match="EIO"):
            engine.step()
        shim.fails_at = lambda call: False
        assert run_to_end(engine) == expected


def test_file_cut_during_a_step_names_expected_and_read_bytes(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "model")
    weights, shim = copy / "model.safetensors", PreadvShim()

    def cut(call):
        os.truncate(weights, 20_000)
        return False

    with open_engine(copy, REQUESTS, STREAMED, reader=disk(shim)) as engine:
        add_all(engine)
        engine.step()
        shim.fails_at = cut
        message = r"came short: got \d+ bytes, need \d+; the file had \d+ bytes when it was opened"
        with pytest.raises(StorageError, match=message):
            run_to_end(engine)


def test_file_cut_between_steps_is_never_read_again(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "model")
    with open_engine(copy, REQUESTS, STREAMED) as engine:
        add_all(engine)
        engine.step()
        os.truncate(copy / "model.safetensors", 20_000)
        with pytest.raises(CheckpointError, match="changed since it was opened: got size 20000"):
            run_to_end(engine)


def test_short_reads_change_no_token(folder, expected):
    shim = PreadvShim(max_bytes_at=lambda call: 4103 if call.num_bytes > 4096 else None)
    assert run_requests(folder, REQUESTS, STREAMED, reader=disk(shim)).ids == expected
