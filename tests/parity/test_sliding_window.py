"""Windows against transformers at every length around them, however the prompts are cut.

Source: huggingface/transformers#37574 (the cache goes wrong at the step that fills the window).
"""

import json
from functools import partial

import pytest
import torch

from tests.helpers.checkpoints import load_oracle, oracle_greedy_ids, tiny_mistral, tiny_qwen2
from tests.helpers.engines import run_rows

WINDOW = 8
NUM_NEW_TOKENS = 16
MODELS = {
    "every-layer": tiny_mistral,
    "last-layer": partial(
        tiny_qwen2, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
}
SCHEDULES = {
    "together": {},
    "one-by-one": {"scheduler.max_num_seqs": 1, "kv.block_size": 1},
    "cut": {
        "scheduler.prompt_chunk_tokens": 4, "scheduler.max_num_batched_tokens": 9,
        "scheduler.max_num_seqs": 3, "kv.block_size": 5,
    },
}  # fmt: skip


def _rows():
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(97, (n,), generator=generator).tolist() for n in range(1, 13)]


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    """A folder, and what transformers makes of prompts of 1 to 12 tokens."""
    folder = MODELS[request.param](tmp_path_factory.mktemp("window") / "model")
    torch.set_num_threads(1)
    model = load_oracle(folder)
    return folder, [oracle_greedy_ids(model, row, NUM_NEW_TOKENS) for row in _rows()]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_length_matches_transformers(case, schedule):
    folder, expected = case
    run = run_rows(folder, _rows(), SCHEDULES[schedule], max_tokens=NUM_NEW_TOKENS)
    assert run.ids == expected


@pytest.mark.parametrize("window", [None, WINDOW - 1, WINDOW + 1])
def test_another_window_would_show(case, window):
    """One key more or less changes the texts, so that the comparison above can fail."""
    folder, expected = case
    path = folder / "config.json"
    text = path.read_text()
    try:
        changes = {"sliding_window": window, "layer_types": None}
        path.write_text(json.dumps(json.loads(text) | changes))
        run = run_rows(folder, _rows(), max_tokens=NUM_NEW_TOKENS)
    finally:
        path.write_text(text)
    assert run.ids != expected
