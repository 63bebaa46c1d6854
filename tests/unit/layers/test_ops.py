"""Operators on a small frame; what is neither attention nor rotary."""

import pytest
import torch
from torch.nn import functional

from zeroinfer.errors import UnsupportedModelError
from zeroinfer.layers import (
    Activate,
    Embed,
    Frame,
    Linear,
    Norm,
    PackedBatch,
    Param,
    PlainWeights,
    Rows,
    SelectLogits,
    activation,
)
from zeroinfer.native import ProductKernel

WEIGHTS = {
    "w": torch.randn(6, 4, generator=torch.Generator().manual_seed(1)),
    "b": torch.randn(6, generator=torch.Generator().manual_seed(2)),
    "n": torch.randn(4, generator=torch.Generator().manual_seed(3)),
    "m": torch.randn(4, generator=torch.Generator().manual_seed(4)),
}
LANDED = PlainWeights(WEIGHTS)


def _param(name):
    return Param(name=name, shape=tuple(WEIGHTS[name].shape))


@pytest.fixture
def frame():
    batch = PackedBatch(
        input_ids=torch.tensor([5, 0, 2]), positions=torch.tensor([0, 1, 2]),
        rope_lengths=torch.tensor([3, 3, 3]), logits_indices=torch.tensor([2]), num_rows=3,
        sequences=(),
    )  # fmt: skip
    kernel = ProductKernel.resolve(torch.float32, num_threads=1)
    frame = Frame(batch=batch, kernel=kernel, kv=None, prompt_chunk_tokens=4)
    frame["x"] = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    return frame


def _near(got, want):
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_linear_with_bias(frame):
    op = Linear(weight=_param("w"), bias=_param("b"), src="x", dst="y")
    op.run(frame, LANDED, None)
    _near(frame["y"], functional.linear(frame["x"], WEIGHTS["w"], WEIGHTS["b"]))
    assert [param.name for param in op.params] == ["w", "b"]
    assert op.num_output_columns == 6
    assert op.flops_per_row == 2 * 6 * 4


def test_linear_in_pieces_fills_its_own_columns(frame):
    op = Linear(weight=_param("w"), bias=_param("b"), src="x", dst="y")
    for start, stop in ((0, 2), (2, 6)):
        piece = PlainWeights({name: WEIGHTS[name][start:stop] for name in ("w", "b")})
        op.run(frame, piece, Rows(start=start, stop=stop))
    _near(frame["y"], functional.linear(frame["x"], WEIGHTS["w"], WEIGHTS["b"]))


def test_accumulated_linear_adds_product_and_bias(frame):
    before = torch.ones(3, 6)
    frame["y"] = before.clone()
    op = Linear(weight=_param("w"), bias=_param("b"), src="x", dst="y", is_accumulated=True)
    op.run(frame, LANDED, None)
    _near(frame["y"], before + functional.linear(frame["x"], WEIGHTS["w"], WEIGHTS["b"]))
    assert op.num_output_columns == 0


def test_transposed_linear(frame):
    weight = Param(name="w", shape=(4, 6))
    op = Linear(weight=weight, src="x", dst="y", is_transposed=True)
    op.run(frame, PlainWeights({"w": WEIGHTS["w"].T.contiguous()}), None)
    _near(frame["y"], frame["x"] @ WEIGHTS["w"].T)
    assert not op.is_splittable
    assert op.num_output_columns == 6


def test_rms_norm(frame):
    Norm(weight=_param("n"), eps=1e-3, src="x", dst="y", is_rms=True).run(frame, LANDED, None)
    _near(frame["y"], functional.rms_norm(frame["x"], (4,), WEIGHTS["n"], 1e-3))


def test_layer_norm(frame):
    op = Norm(weight=_param("n"), bias=_param("m"), eps=1e-3, src="x", dst="y")
    op.run(frame, LANDED, None)
    _near(frame["y"], functional.layer_norm(frame["x"], (4,), WEIGHTS["n"], WEIGHTS["m"], 1e-3))


@pytest.mark.parametrize("is_rms", [True, False])
def test_heads_of_a_row_are_normalised_each_by_itself(frame, is_rms):
    frame["x"] = torch.randn(3, 12, generator=torch.Generator().manual_seed(5))
    op = Norm(weight=_param("n"), eps=1e-3, src="x", dst="x", is_rms=is_rms, num_heads=3)
    norm = functional.rms_norm if is_rms else functional.layer_norm
    heads = [norm(head, (4,), WEIGHTS["n"], eps=1e-3) for head in frame["x"].split(4, dim=1)]
    op.run(frame, LANDED, None)
    _near(frame["x"], torch.cat(heads, dim=1))
    assert op.num_output_columns == 12


def test_norm_runs_whole_or_not_at_all(frame):
    op = Norm(weight=_param("n"), eps=1e-3, src="x", dst="y", is_rms=True)
    with pytest.raises(AssertionError, match="norm n cannot run on a piece"):
        op.run(frame, LANDED, Rows(start=0, stop=2))


def test_embedding_by_token_then_by_position(frame):
    Embed(weight=_param("w"), dst="hidden").run(frame, LANDED, None)
    assert torch.equal(frame["hidden"], WEIGHTS["w"][[5, 0, 2]])
    op = Embed(weight=_param("w"), dst="hidden", is_positional=True, is_accumulated=True)
    op.run(frame, LANDED, None)
    assert torch.equal(frame["hidden"], WEIGHTS["w"][[5, 0, 2]] + WEIGHTS["w"][[0, 1, 2]])
    assert op.gathered == (_param("w"),)
    assert op.params == ()


def test_positions_may_start_further_down_the_table(frame):
    op = Embed(weight=_param("w"), dst="hidden", is_positional=True, position_offset=2)
    op.run(frame, LANDED, None)
    assert torch.equal(frame["hidden"], WEIGHTS["w"][[2, 3, 4]])


def test_embedding_runs_whole_or_not_at_all(frame):
    with pytest.raises(AssertionError, match="embedding w cannot run on a piece"):
        Embed(weight=_param("w"), dst="y").run(frame, LANDED, Rows(start=0, stop=2))


@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_select_logits_pads_to_the_row_tile(frame, is_batch_invariant):
    frame.kernel = ProductKernel.resolve(
        torch.float32, num_threads=1, is_batch_invariant=is_batch_invariant
    )
    SelectLogits(src="x", dst="last", num_output_columns=4).run(frame, LANDED, None)
    assert frame["last"].shape[0] == (frame.kernel.row_tile if is_batch_invariant else 1)
    assert torch.equal(frame["last"][0], frame["x"][2])
    assert not frame["last"][1:].any()


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu", functional.silu),
        ("swish", functional.silu),
        ("gelu", functional.gelu),
        ("gelu_new", lambda x: functional.gelu(x, approximate="tanh")),
        ("gelu_fast", lambda x: functional.gelu(x, approximate="tanh")),
        ("gelu_pytorch_tanh", lambda x: functional.gelu(x, approximate="tanh")),
        ("relu", functional.relu),
    ],
)
def test_activations(frame, name, function):
    values, up = frame["x"].clone(), torch.full((3, 4), 2.0)
    Activate(function=activation(name), dst="x", num_columns=4).run(frame, LANDED, None)
    _near(frame["x"], function(values))
    frame["gate"], frame["up"] = values.clone(), up
    op = Activate(function=activation(name), dst="gate", num_columns=4, bias=_param("m"), up="up")
    op.run(frame, LANDED, None)
    _near(frame["gate"], function(values + WEIGHTS["m"]) * up)
    assert op.params == (_param("m"),)


@pytest.mark.parametrize("stored", [torch.float16, torch.float32], ids=str)
def test_a_bias_stored_in_another_dtype_is_rounded_to_the_models(frame, stored):
    frame.kernel = ProductKernel.resolve(torch.bfloat16, mode="upcast", num_threads=1)
    values, bias = frame["x"].clone(), WEIGHTS["m"].to(stored)
    op = Activate(function=activation("relu"), dst="x", num_columns=4, bias=_param("m"))
    op.run(frame, PlainWeights({"m": bias}), None)
    assert torch.equal(frame["x"], (values + bias.bfloat16().float()).relu())


@pytest.mark.parametrize(("name", "num_columns"), [("relu", 0), ("silu", 0), ("gelu", 4)])
def test_only_what_torch_cannot_do_in_place_needs_columns(name, num_columns):
    op = Activate(function=activation(name), dst="x", num_columns=4)
    assert op.num_output_columns == num_columns


def test_an_activation_runs_whole_or_not_at_all(frame):
    op = Activate(function=activation("relu"), dst="x", num_columns=4)
    with pytest.raises(AssertionError, match="activation of x cannot run on a piece"):
        op.run(frame, LANDED, Rows(start=0, stop=2))


def test_unknown_activation_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"activation 'swoosh' .* known: gelu"):
        activation("swoosh")


def test_temporaries_are_dropped_and_the_rest_is_kept(frame):
    frame["hidden"] = frame["x"]
    frame.drop_temporaries(frozenset({"hidden"}))
    assert list(frame.tensors) == ["hidden"]
