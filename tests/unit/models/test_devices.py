"""Operators keep to the device of the activations, in every family; no GPU is needed to see it.

What would mix devices, or a factory that forgets its own, fails as it would with a GPU.
"""

import pytest
import torch

from tests.helpers.checkpoints import tiny_config
from tests.helpers.fake_gpu import FAKE_GPU as CUDA
from tests.helpers.fake_gpu import fake_gpu
from zeroinfer.kvcache import KVCache
from zeroinfer.layers import Frame, PackedBatch, SequenceSlice
from zeroinfer.models import build_model
from zeroinfer.models.registry import MODEL_TYPES
from zeroinfer.native import ProductKernel, RowKernels

FALCON_FORMS = {
    "falcon-new": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-alibi": {"alibi": True, "multi_query": False},
}
FORMS = {**{name: {} for name in MODEL_TYPES}, **FALCON_FORMS}
BLOCK_SIZE = 8


class _Weights:
    """Weights of a model, all on the GPU; rows are gathered from host memory and go there too."""

    def __init__(self, model, dtype):
        self.params, self.dtype = model.params, dtype

    def __getitem__(self, name):
        return torch.empty(self.params[name].shape, dtype=self.dtype, device=CUDA)

    def gather(self, name, ids):
        assert ids.device.type == "cpu", "rows are gathered in host memory"
        rows = torch.empty((len(ids), *self.params[name].shape[1:]), dtype=self.dtype)
        return rows.to(CUDA)


def make_frame(model, dtype, *, device, kernels):
    """A prompt of 20 rows in two chunks and one generated row behind nine others."""
    kernel = ProductKernel.resolve(dtype, mode="native")
    num_rows, padding = 21, kernel.row_tile - 21
    slices = (
        SequenceSlice(
            row_start=0, num_rows=20, num_computed_tokens=0, num_prompt_tokens=20,
            block_table=(0, 1, 2),
        ),
        SequenceSlice(
            row_start=20, num_rows=1, num_computed_tokens=9, num_prompt_tokens=4,
            block_table=(3, 4),
        ),
    )  # fmt: skip
    positions = [*range(20), 9, *[0] * padding]
    return Frame(
        batch=PackedBatch(
            input_ids=torch.zeros(num_rows + padding, dtype=torch.int64),
            positions=torch.tensor(positions),
            rope_lengths=torch.tensor([20] * 20 + [10] + [1] * padding),
            logits_indices=torch.tensor([19, 20]),
            num_rows=num_rows,
            sequences=slices,
        ),
        kernel=kernel,
        kv=KVCache.create(
            model.kv_planes,
            num_layers=model.num_layers,
            num_blocks=5,
            block_size=BLOCK_SIZE,
            dtype=torch.bfloat16,
            torch_device=CUDA,
        ),
        prompt_chunk_tokens=16,
        device=device,
        kernels=RowKernels.resolve(kernels),
    )


def run_stages(form, dtype, *, stored=None, device=CUDA, kernels="auto"):
    family = form.partition("-")[0]
    config = tiny_config(family, **FORMS[form]).to_dict()
    model = build_model(config)
    with fake_gpu():
        frame = make_frame(model, dtype, device=device, kernels=kernels)
        weights = _Weights(model, stored or dtype)
        for stage in model.stages:
            frame.layer_idx = stage.layer_idx
            for op in stage.ops:
                op.run(frame, weights, None)
            frame.drop_temporaries(stage.kept)
            assert all(value.device == CUDA for value in frame.tensors.values()), stage.name
        return frame["logits"]


@pytest.mark.parametrize(
    ("form", "dtype"),
    [*((form, torch.bfloat16) for form in FORMS), ("llama", torch.float32), ("bloom", torch.half)],
)
def test_every_stage_computes_on_the_device_of_its_activations(form, dtype):
    logits = run_stages(form, dtype)
    assert logits.device == CUDA
    assert logits.shape == (2, 97)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.bfloat16, torch.half), (torch.bfloat16, torch.float32),
        (torch.half, torch.bfloat16), (torch.float32, torch.half),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["llama", "gpt2"])
def test_weights_stored_in_another_dtype_are_rounded_on_the_device(form, dtype, stored):
    logits = run_stages(form, dtype, stored=stored)
    assert (logits.device, logits.dtype) == (CUDA, dtype)


def test_a_mixture_of_devices_would_show():
    with pytest.raises(RuntimeError, match="same device"):
        # Compiled kernels would look for the memory that fake tensors on the CPU lack.
        run_stages("llama", torch.float32, device=torch.device("cpu"), kernels="off")


def test_every_family_is_among_the_forms():
    assert {form.partition("-")[0] for form in FORMS} == set(MODEL_TYPES)
