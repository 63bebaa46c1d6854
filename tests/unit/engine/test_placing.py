"""Names in order of use, and a model that is not there."""

import pytest

from tests.helpers.checkpoints import tiny_llama
from zeroinfer.config import load_config
from zeroinfer.diskformat import open_checkpoint
from zeroinfer.engine import order_of_use
from zeroinfer.engine.placing import find_folder
from zeroinfer.errors import CheckpointError


@pytest.fixture
def llama(tmp_path):
    checkpoint = open_checkpoint(tiny_llama(tmp_path / "m", tie_word_embeddings=False))
    return checkpoint.config, {name: e.spec.shape for name, e in checkpoint.tensors.items()}


def test_names_come_in_the_order_of_a_pass(llama):
    names = order_of_use(*llama)
    assert names[0] == "model.embed_tokens.weight"
    assert names[-1] == "lm_head.weight"
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)
    assert sorted(names) == sorted(llama[1])


def test_a_model_that_cannot_be_run_has_no_order(llama):
    config, shapes = llama
    assert order_of_use({**config, "model_type": "unheard_of"}, shapes) == ()


def test_weights_of_another_model_are_refused(llama):
    config, shapes = llama
    with pytest.raises(CheckpointError, match="belong to different models"):
        order_of_use({**config, "intermediate_size": 96}, shapes)


def test_a_missing_gguf_file_is_named(tmp_path):
    path = tmp_path / "none.gguf"
    config = load_config(None, [f"model.path={path}", f"io.nvme={tmp_path}"])
    with pytest.raises(CheckpointError, match=rf"{path} is not there; run: zeroinfer convert"):
        find_folder(config)
