"""Stores run: every family of GGUF file, pickles, copies and stripes give the folder's own ids."""

import pytest

from tests.helpers.checkpoints import load_oracle, oracle_greedy_ids, save_tiny, write_bin
from tests.helpers.engines import run_rows
from tests.helpers.gguf_models import write_model_gguf
from zeroinfer.checkpoint import convert_folder, convert_gguf
from zeroinfer.engine import order_of_use

ROWS = [[5, 17, 3, 40, 8, 11, 29, 2, 60, 33, 71, 9], [7, 7, 42]]
SETTINGS = {"offload.weights": "nvme"}


def ids_of(folder):
    return run_rows(folder, ROWS, SETTINGS, max_tokens=8).ids


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_gguf_files_give_the_ids_of_the_same_weights(tmp_path, family):
    folder = save_tiny(tmp_path / "hf", family)
    write_model_gguf(tmp_path / "m.gguf", folder)
    ids = ids_of(convert_gguf(tmp_path / "m.gguf", tmp_path))
    assert ids == ids_of(folder)
    oracle = load_oracle(folder)
    assert ids == [oracle_greedy_ids(oracle, row, 8) for row in ROWS]


def test_gpt2_with_a_head_of_its_own(tmp_path):
    folder = save_tiny(tmp_path / "hf", "gpt2", tie_word_embeddings=False)
    write_model_gguf(tmp_path / "m.gguf", folder)
    oracle = load_oracle(folder)
    ids = ids_of(convert_gguf(tmp_path / "m.gguf", tmp_path))
    assert ids == [oracle_greedy_ids(oracle, row, 8) for row in ROWS]


@pytest.mark.parametrize("num_shards", [1, 2])
def test_pickles_with_a_tied_pair(tmp_path, num_shards):
    # Source: vllm-project/vllm#947
    folder = save_tiny(tmp_path / "hf", "opt")
    oracle = load_oracle(folder)
    pickles = write_bin(tmp_path / "bin", oracle, num_shards=num_shards)
    ids = ids_of(convert_folder(pickles, tmp_path, order=order_of_use))
    assert ids == [oracle_greedy_ids(oracle, row, 8) for row in ROWS]


@pytest.mark.parametrize("num_stripes", [0, 2])
def test_copies_and_stripes(tmp_path, num_stripes):
    folder = save_tiny(tmp_path / "hf", "llama", max_shard_size="20KB")
    dirs = [tmp_path / str(idx) for idx in range(1 + num_stripes)]
    for path in dirs:
        path.mkdir()
    store = convert_folder(folder, dirs[0], stripes=dirs[1:], order=order_of_use)
    assert ids_of(store) == ids_of(folder)
