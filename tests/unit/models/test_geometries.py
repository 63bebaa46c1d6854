"""The tensors of named checkpoints are those that the models ask for, by name and shape."""

import importlib
from pathlib import Path

import pytest

from zeroinfer.dtypes import DType
from zeroinfer.models import bind, build_model

TOOLS = Path(__file__).resolve().parents[3] / "tools"
NUM_PARAMETERS = {
    "llama-7b": 6_738_415_616,
    "bloom-176b": 176_247_271_424,
    "opt-350m": 331_196_416,
    "opt-30b": 29_974_540_288,
    "opt-175b": 174_604_468_224,
    "gpt-neox-20b": 20_554_567_680,
    "gpt-j-6b": 6_050_882_784,
    "mistral-7b": 7_241_732_096,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "falcon-rw-1b": 1_311_625_216,
}


@pytest.fixture
def geometries(monkeypatch):
    """The module of tools/, which is no package."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("geometries")


def test_every_geometry_binds_without_a_tensor_left_over(geometries):
    for name, geometry in geometries.GEOMETRIES.items():
        config = geometries.resolve_config(geometry.family, geometry.sizes, None)
        model = build_model(config)
        tensors = {spec.name: spec.shape for spec in geometries.tensor_specs(config, DType.BF16)}
        assert bind(model, tensors).unused == (), name
        assert len(tensors) == len(model.params), name
        if name in NUM_PARAMETERS:
            assert model.num_parameters == NUM_PARAMETERS[name], name
