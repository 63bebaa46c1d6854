"""A real model, streamed from disk, against transformers row by row."""

import pytest

from tests.helpers.checkpoints import load_oracle, oracle_greedy_ids
from tests.helpers.embedded import embedded_model_folder
from tests.helpers.engines import run_rows
from zeroinfer.tokenization import Tokenizer

pytestmark = pytest.mark.slow

SUBJECTS = (
    "the sea", "a red bicycle", "two hungry cats", "the year 1969", "green tea", "a broken clock",
    "the number 42", "winter mornings", "an old library", "prime numbers", "rain", "the moon",
    "a small village", "jazz", "coffee", "the colour blue", "honest mistakes", "long train rides",
    "volcanoes", "a chess game",
)  # fmt: skip


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    yield from embedded_model_folder(tmp_path_factory)


@pytest.mark.timeout(240)
def test_streamed_ids_equal_transformers_row_by_row(smollm2):
    tokenizer = Tokenizer.open(smollm2)
    rows = [tokenizer.encode(f"Once upon a time, {subject} made me think") for subject in SUBJECTS]
    settings = {"offload.weights": "nvme", "compute.num_threads": 2}
    run = run_rows(smollm2, rows, settings, max_tokens=24)
    oracle = load_oracle(smollm2)
    assert run.ids == [oracle_greedy_ids(oracle, row, 24) for row in rows]
    assert run.plan.resident_bytes == 0
    assert run.report["io"]["nvme"]["bytes_read"] >= 24 * run.plan.streamed_bytes
