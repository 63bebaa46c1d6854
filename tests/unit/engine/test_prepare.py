import pytest
import torch

from tests.helpers.checkpoints import rewrite_tensors, tiny_bloom, tiny_llama
from tests.helpers.engines import engine_config
from zeroinfer.diskformat import open_checkpoint
from zeroinfer.engine import Workload, make_plan
from zeroinfer.errors import UnsupportedModelError
from zeroinfer.native import has_fused_kernels


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


def test_attention_in_the_kernel_needs_no_mask_for_every_row(tmp_path):
    """ALiBi with torch keeps a bias of every head for every row of a step."""
    checkpoint = open_checkpoint(tiny_bloom(tmp_path))
    workload = Workload(num_requests=8, max_prompt_tokens=4000, total_prompt_tokens=32_000)
    fused, plain = (
        make_plan(engine_config({"compute.fused_kernels": mode}), checkpoint, workload)
        for mode in ("auto", "off")
    )
    rows = min(fused.max_num_batched_tokens, plain.max_num_batched_tokens)
    saved_bytes = plain.workspace_bytes - fused.workspace_bytes
    assert saved_bytes > 4 * rows * 4000 if has_fused_kernels() else saved_bytes == 0
