import pytest
import torch

from tests.helpers.checkpoints import rewrite_tensors, tiny_llama
from tests.helpers.engines import engine_config
from zeroinfer.diskformat import open_checkpoint
from zeroinfer.engine import Workload, make_plan
from zeroinfer.errors import UnsupportedModelError


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
def test_integer_weights_are_refused_whatever_dtype_is_asked_for(tmp_path, dtype):
    tiny_llama(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite_tensors(tmp_path, lambda tensors: {**tensors, name: tensors[name].to(torch.int8)})
    with pytest.raises(UnsupportedModelError, match=f"tensor {name} has dtype I8, need a float"):
        make_plan(engine_config({"model.dtype": dtype}), open_checkpoint(tmp_path), Workload())


def test_the_plan_names_the_disk_rate_and_that_nobody_measured_it(tmp_path):
    plan = make_plan(engine_config(), open_checkpoint(tiny_llama(tmp_path)), Workload())
    (note,) = [note for note in plan.notes if note.startswith("nvme rate")]
    assert "(assumed)" in note
    assert note.endswith("run: zeroinfer profile")
