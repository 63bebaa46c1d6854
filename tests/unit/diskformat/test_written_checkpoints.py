"""Folders as transformers writes them: the bytes at each extent are the library's tensors."""

import json

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from tests.helpers.checkpoints import (
    load_oracle,
    oracle_logits,
    sharded_llama,
    spell_config_old,
    strip_prefix,
    tiny_bloom,
    tiny_gpt2,
    tiny_llama,
)
from zeroinfer.diskformat import Extent, open_checkpoint, plan_runs
from zeroinfer.errors import CheckpointError


def read_tensor(extent):
    with extent.path.open("rb") as file:
        file.seek(extent.offset)
        return file.read(extent.spec.nbytes)


def assert_same_as_library(folder):
    checkpoint = open_checkpoint(folder)
    expected = {}
    for path in checkpoint.files:
        expected.update(load_file(path))
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        extent = checkpoint.tensors[name]
        assert extent.spec.shape == tuple(tensor.shape)
        assert read_tensor(extent) == tensor.flatten().view(torch.uint8).numpy().tobytes()
    return checkpoint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, tiny_bloom])
def test_one_file(tmp_path, make, dtype):
    """Source: airllm#185 (2.06)."""
    assert_same_as_library(make(tmp_path / "m", dtype=dtype))


def test_layers_spread_over_shards(tmp_path):
    """Source: transformers-bloom-inference#24 (2.10)."""
    checkpoint = assert_same_as_library(sharded_llama(tmp_path / "m"))
    assert len(checkpoint.files) == 7
    layer = [e for name, e in checkpoint.tensors.items() if ".layers.1." in name]
    extents = [Extent(path=e.path, offset=e.offset, length=e.spec.nbytes) for e in layer]
    runs = plan_runs(extents, alignment=4096, max_gap_bytes=0)
    assert len({run.path for run in runs}) == 3
    assert sum(run.needed_bytes for run in runs) == sum(e.spec.nbytes for e in layer)


@pytest.mark.parametrize("extra", [b"1234", None], ids=["trailing", "cut"])
def test_the_library_refuses_what_we_refuse(tmp_path, extra):
    """Source: ComfyUI#15602 (2.19), airllm#137 (2.04)."""
    folder = tiny_llama(tmp_path / "m")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data + extra if extra else data[:-1000])
    with pytest.raises(CheckpointError):
        open_checkpoint(folder)
    with pytest.raises(SafetensorError), safe_open(path, "pt"):
        pass


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, tiny_bloom])
def test_old_spelling_means_the_same_model(tmp_path, make):
    """Source: DeepSpeed#8345 (1.21), onnxruntime/mobius#113 (2.08): the helpers are sound."""
    token_ids = [5, 6, 7, 80, 3]
    folder = make(tmp_path / "m")
    new = oracle_logits(load_oracle(folder), token_ids)
    spell_config_old(folder)
    strip_prefix(folder, "transformer.")
    config = json.loads((folder / "config.json").read_text())
    assert config.keys().isdisjoint({"dtype", "rope_parameters"})
    assert not any(name.startswith("transformer.") for name in open_checkpoint(folder).tensors)
    assert torch.equal(oracle_logits(load_oracle(folder), token_ids), new)
