"""Compiled kernels, their scalar references and the torch path against double precision."""

import pytest
import torch

from zeroinfer.errors import BackendUnavailableError
from zeroinfer.native import Activation, Rotation, RowKernels, half_to_bf16, has_fused_kernels
from zeroinfer.native import extension as extension_module
from zeroinfer.native import kernels as kernels_module
from zeroinfer.native.extension import extension

TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2**-7}
FUSED, TORCH = RowKernels(is_fused=True), RowKernels(is_fused=False)
WAYS = ["torch", "scalar", "fast"] if extension is not None else ["torch"]
ways = pytest.mark.parametrize("way", WAYS)
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
ROUNDED = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def kernels(way, monkeypatch):
    """The kernels of one way; the scalar reference is what the binding runs on no thread."""
    monkeypatch.setattr(kernels_module.torch, "get_num_threads", lambda: int(way == "fast"))
    if way == "torch":
        monkeypatch.setattr(kernels_module, "extension", None)
        return TORCH
    return FUSED


@pytest.fixture
def with_threads(monkeypatch):
    """Set the number of threads that compiled kernels are told to use."""
    return lambda count: monkeypatch.setattr(kernels_module.torch, "get_num_threads", lambda: count)


def _random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _assert_near(got, want, dtype):
    tolerance = TOLERANCES[dtype]
    scale = float(want.abs().max()) if want.numel() else 0.0
    torch.testing.assert_close(got.double(), want, atol=tolerance * max(scale, 1.0), rtol=tolerance)


def _norm_by_definition(x, weight, bias, *, eps, is_rms):
    x = x.double()
    centred = x if is_rms else x - x.mean(-1, keepdim=True)
    out = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return out if bias is None else out + bias.double()


@ways
@dtypes
@pytest.mark.parametrize("weight_dtype", ROUNDED, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 8), (5, 37), (2, 576)])
@pytest.mark.parametrize("is_rms", [True, False])
def test_norm(kernels, dtype, weight_dtype, shape, is_rms):
    x = _random(*shape, dtype=dtype) + 3
    weight, bias = (_random(shape[1], dtype=weight_dtype, seed=seed) for seed in (1, 2))
    for used in (None, bias):
        got = kernels.norm(x, weight, bias=used, eps=1e-3, is_rms=is_rms)
        want = _norm_by_definition(x, weight, used, eps=1e-3, is_rms=is_rms)
        assert got.dtype == dtype
        _assert_near(got, want, dtype)


@ways
@dtypes
def test_norm_adds_the_residual_first(kernels, dtype):
    x, residual, weight = _random(3, 37, dtype=dtype), _random(3, 37, dtype=dtype), _random(37)
    total = x + residual
    got = kernels.norm(x, weight, residual=residual, eps=1e-5, is_rms=True)
    assert torch.equal(x, total)
    want = _norm_by_definition(total, weight, None, eps=1e-5, is_rms=True)
    _assert_near(got, want, dtype)


@ways
def test_norm_of_rows_that_are_columns_of_more(kernels):
    wide, weight = _random(4, 50), _random(20)
    got = kernels.norm(wide[:, 7:27], weight, eps=1e-5, is_rms=False)
    want = kernels.norm(wide[:, 7:27].contiguous(), weight, eps=1e-5, is_rms=False)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


@ways
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_value_spoils_its_row_alone(kernels, value):
    x, weight = _random(3, 37), torch.ones(37)
    x[1, 5] = value
    out = kernels.norm(x, weight, eps=1e-5, is_rms=True)
    assert out[1].isnan().any()
    assert out[[0, 2]].isfinite().all()
    activated = kernels.activate(Activation.SILU, x.clone())
    assert not activated[1, 5].isfinite()


def _rotated_by_definition(x, cos, sin, *, is_interleaved):
    out, x, num_pairs = x.double().clone(), x.double(), cos.shape[1]
    for pair in range(num_pairs):
        first, second = (2 * pair, 2 * pair + 1) if is_interleaved else (pair, pair + num_pairs)
        c, s = cos[:, pair, None].double(), sin[:, pair, None].double()
        out[..., first] = x[..., first] * c - x[..., second] * s
        out[..., second] = x[..., second] * c + x[..., first] * s
    return out


@ways
@dtypes
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "num_pairs"), [(2, 1), (12, 6), (32, 16), (20, 3), (64, 24)])
def test_rotary(kernels, dtype, is_interleaved, head_dim, num_pairs):
    x = _random(5, 3, head_dim, dtype=dtype)
    angles = 10 * _random(5, num_pairs, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    want = _rotated_by_definition(x, cos, sin, is_interleaved=is_interleaved)
    kernels.rotate(x, Rotation(cos=cos, sin=sin, is_interleaved=is_interleaved))
    _assert_near(x, want, dtype)


@ways
def test_rotary_in_place_of_a_wider_row(kernels):
    fused, angles = _random(4, 3 * 2 * 16), _random(4, 8, seed=1)
    before = fused.clone()
    heads = fused.view(4, 3, 2, 16)[:, 1]
    want = _rotated_by_definition(heads, angles.cos(), angles.sin(), is_interleaved=False)
    kernels.rotate(heads, Rotation(cos=angles.cos(), sin=angles.sin()))
    _assert_near(heads, want, torch.float32)
    fused, before = fused.view(4, 3, 32), before.view(4, 3, 32)
    assert torch.equal(fused[:, [0, 2]], before[:, [0, 2]])


_BY_DEFINITION = {
    Activation.RELU: lambda x: x.clamp(min=0),
    Activation.SILU: lambda x: x * torch.sigmoid(x),
    Activation.GELU: torch.nn.functional.gelu,
    Activation.GELU_TANH: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


@ways
@dtypes
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("num_columns", [1, 8, 29])
def test_activations(kernels, dtype, activation, num_columns):
    x, up = 4 * _random(5, num_columns, dtype=dtype), _random(5, num_columns, dtype=dtype, seed=1)
    act = _BY_DEFINITION[activation]
    _assert_near(kernels.activate(activation, x.clone()), act(x.double()), dtype)
    got = kernels.activate(activation, x.clone(), up=up)
    _assert_near(got, act(x.double()) * up.double(), dtype)
    for bias_dtype in ROUNDED:
        bias = _random(num_columns, dtype=bias_dtype, seed=2)
        got = kernels.activate(activation, x.clone(), bias=bias)
        _assert_near(got, act(x.double() + bias.double()), dtype)


@ways
@pytest.mark.parametrize("activation", Activation)
def test_activations_of_extreme_values(kernels, activation):
    x = torch.tensor([[-1e4, -100.0, -88.5, -20.0, -0.0, 0.0, 20.0, 88.5, 100.0, 1e4]])
    got = kernels.activate(activation, x.clone())
    want = _BY_DEFINITION[activation](x.double())
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-6)


def test_activations_agree_with_double_precision_everywhere():
    x = torch.linspace(-12, 12, 40_001)[None]
    for activation in Activation:
        got = FUSED.activate(activation, x.clone())
        want = _BY_DEFINITION[activation](x.double())
        assert (got.double() - want).abs().max() < 2e-6, activation


BLOCKS = (6, 2, 5, 12)
"""Blocks, heads, tokens of a block, head_dim."""


@pytest.mark.parametrize("way", WAYS[1:])
@dtypes
@pytest.mark.parametrize("kv_dtype", TOLERANCES, ids=str)
def test_kv_write(kernels, dtype, kv_dtype):
    values = _random(7, 2, 12, dtype=dtype)
    values[2, 1, 3], values[4, 0, 0] = float("nan"), float("inf")
    slots = torch.tensor([0, 29, -1, 13, 5, 6, 20])
    plane = torch.full(BLOCKS, 7.0, dtype=kv_dtype)
    want = plane.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[slot // 5, :, slot % 5] = values[row].to(kv_dtype)
    kernels.write_kv(values, slots, plane)
    torch.testing.assert_close(plane, want, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("way", WAYS[1:])
@dtypes
@pytest.mark.parametrize("kv_dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("num_pairs", [2, 11, 35])
def test_rotation_on_the_way_gives_the_bits_of_a_rotation_first(
    kernels, dtype, kv_dtype, is_interleaved, num_pairs
):
    """Whole heads and parts, which leave columns behind, in vectors and beyond their end."""
    values, slots = _random(7, 2, 70, dtype=dtype), torch.tensor([0, 29, -1, 13, 5, 6, 20])
    values[3, 1, 1], values[4, 0, 0] = float("nan"), float("inf")
    angles = 10 * _random(7, num_pairs, seed=1)
    rotation = Rotation(
        cos=angles.cos().to(dtype), sin=angles.sin().to(dtype), is_interleaved=is_interleaved
    )
    got, want = (torch.full((6, 2, 5, 70), 7.0, dtype=kv_dtype) for _ in range(2))
    rotated, before = values.clone(), values.clone()
    kernels.rotate(rotated, rotation)
    kernels.write_kv(rotated, slots, want)
    kernels.write_kv(values, slots, got, rotation=rotation)
    torch.testing.assert_close(got, want, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(values, before, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("slots", [[0, 30], [6 * 5, 0]])
def test_kv_write_refuses_a_slot_outside_and_writes_nothing(slots):
    plane = torch.zeros(BLOCKS)
    with pytest.raises(ValueError, match="the kernel refused sizes, slots or block tables"):
        FUSED.write_kv(torch.ones(2, 2, 12), torch.tensor(slots), plane)
    assert not plane.any()


@ways
@pytest.mark.parametrize("num_elements", [0, 1, 15, 65536])
def test_half_to_bf16_in_place(kernels, num_elements):
    bits = torch.arange(num_elements, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.float16)
    want = values.to(torch.bfloat16)
    got = half_to_bf16(values)
    assert got.data_ptr() == values.data_ptr()
    torch.testing.assert_close(got, want, atol=0, rtol=0, equal_nan=True)


def test_half_to_bf16_agrees_with_its_reference_on_every_value():
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    outs = [torch.empty(65536, dtype=torch.bfloat16) for _ in range(2)]
    for num_threads, out in enumerate(outs):
        extension.half_to_bf16(source=values, target=out, num_threads=num_threads)
    assert torch.equal(outs[0].view(torch.int16), outs[1].view(torch.int16))


@dtypes
def test_neither_other_rows_nor_threads_change_a_bit(dtype, with_threads):
    """Enough rows for many chunks on two threads, against one row at a time."""
    x, up = _random(300, 517, dtype=dtype), _random(300, 517, dtype=dtype, seed=1)
    weight, angles = _random(517), _random(300, 8, seed=2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def compute(rows):
        heads = x[rows, :512].reshape(-1, 16, 32).clone()
        FUSED.rotate(heads, Rotation(cos=cos[rows], sin=sin[rows]))
        return (
            FUSED.norm(x[rows], weight, eps=1e-5, is_rms=True),
            FUSED.norm(x[rows], weight, eps=1e-5, is_rms=False),
            FUSED.activate(Activation.GELU, x[rows].clone(), up=up[rows]),
            heads.flatten(1),
        )

    with_threads(1)
    alone = [compute(slice(row, row + 1)) for row in (0, 1, 150, 299)]
    for num_threads in (1, 2, 3):
        with_threads(num_threads)
        together = compute(slice(0, 300))
        for row, single in zip((0, 1, 150, 299), alone, strict=True):
            for whole, part in zip(together, single, strict=True):
                assert torch.equal(whole[row], part[0])


def test_empty_inputs_are_no_work():
    empty, weight = torch.empty(0, 8), torch.ones(8)
    assert FUSED.norm(empty, weight, eps=1e-5, is_rms=True).shape == (0, 8)
    assert FUSED.activate(Activation.RELU, empty).shape == (0, 8)
    none = Rotation(cos=torch.empty(0, 2), sin=torch.empty(0, 2))
    FUSED.rotate(torch.empty(0, 2, 4), none)
    FUSED.write_kv(torch.empty(0, 2, 12), SLOTS[:0], torch.empty(BLOCKS), rotation=none)


def test_mode_on_is_refused_where_there_are_no_kernels(monkeypatch):
    monkeypatch.setattr(extension_module, "extension", None)
    monkeypatch.setattr(kernels_module, "extension_error", "it was not built")
    assert not has_fused_kernels()
    assert not RowKernels.resolve("auto").is_fused
    with pytest.raises(
        BackendUnavailableError, match=r"fused_kernels is on, .* not built; set it to auto"
    ):
        RowKernels.resolve("on")


def test_modes():
    assert RowKernels.resolve().is_fused == has_fused_kernels()
    assert not RowKernels.resolve("off").is_fused


def test_what_the_kernels_do_not_take_goes_to_torch():
    assert not TORCH.can_fuse(torch.ones(1))
    assert not FUSED.can_fuse(torch.ones(1, dtype=torch.float16))
    assert not FUSED.can_fuse(torch.ones(1, device="meta"))
    half = _random(2, 8, dtype=torch.float16)
    assert FUSED.norm(half, torch.ones(8), eps=1e-5, is_rms=True).dtype == torch.float16


X, ROWS3 = torch.ones(2, 8), torch.ones(2, 2, 4)
PLANE = torch.ones(3, 2, 4, 4)
SLOTS, WIDE = torch.zeros(2, dtype=torch.int64), torch.ones(2, 8, dtype=torch.float64)
CALLS = {
    "norm": {"x": X, "out": X.clone(), "weight": torch.ones(8), "bias": torch.ones(8),
             "residual": X, "eps": 1e-5, "is_rms": True, "num_threads": 1},
    "rotary": {"x": ROWS3, "cos": torch.ones(2, 2), "sin": torch.ones(2, 2),
               "is_interleaved": False, "num_threads": 1},
    "activate": {"activation": 1, "x": X, "bias": torch.ones(8), "up": X, "out": X.clone(),
                 "num_threads": 1},
    "kv_write": {"values": ROWS3, "slots": SLOTS, "plane": PLANE, "cos": torch.ones(2, 2),
                 "sin": torch.ones(2, 2), "is_interleaved": False, "num_threads": 1},
    "attention": {"query": ROWS3, "out": ROWS3.clone(), "key": PLANE, "value": PLANE,
                  "sequences": torch.tensor([[0, 2, 0]]), "tables": torch.tensor([[1]]),
                  "bias": torch.ones(2, 2), "scale": 1.0, "window": 0, "num_threads": 1},
    "half_to_bf16": {"source": X[0].half(), "target": X[0].bfloat16(), "num_threads": 1},
}  # fmt: skip
ARRAYS = [
    (name, argument)
    for name, arguments in CALLS.items()
    for argument, value in arguments.items()
    if isinstance(value, torch.Tensor)
]


def _call(name, **changes):
    arguments = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in CALLS[name].items()
    }
    getattr(extension, name)(**{**arguments, **changes})


@pytest.mark.parametrize("name", CALLS)
def test_calls_below_are_right_but_for_one_argument(name):
    _call(name)


@pytest.mark.parametrize(("name", "argument"), ARRAYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32], ids=str)
def test_wrong_dtype_is_refused_not_converted(name, argument, dtype):
    with pytest.raises(TypeError):
        _call(name, **{argument: CALLS[name][argument].to(dtype)})


@pytest.mark.parametrize(("name", "argument"), ARRAYS)
def test_wrong_shape_is_refused(name, argument):
    value = CALLS[name][argument]
    with pytest.raises((TypeError, ValueError)):
        _call(name, **{argument: value[None]})


@pytest.mark.parametrize(("name", "argument"), ARRAYS)
def test_strided_columns_are_refused(name, argument):
    value = CALLS[name][argument]
    spread = torch.stack([value, value], dim=-1)[..., 0]
    if spread.is_contiguous():
        return
    with pytest.raises((TypeError, ValueError)):
        _call(name, **{argument: spread})


def test_message_of_a_wrong_shape():
    with pytest.raises(ValueError, match=r"weight: got shape \(9\), need \(8\)"):
        _call("norm", weight=torch.ones(9))


def test_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="the kernel refused"):
        _call("activate", activation=9)


@pytest.mark.parametrize("missing", ["cos", "sin"])
def test_cosines_without_sines_are_refused(missing):
    with pytest.raises(ValueError, match="cos and sin: need both or neither"):
        _call("kv_write", **{missing: None})


@pytest.mark.parametrize("name", ["rotary", "kv_write"])
def test_more_pairs_than_a_head_has_are_refused(name):
    with pytest.raises(ValueError, match="cos: more pairs than a head has"):
        _call(name, cos=torch.ones(2, 3), sin=torch.ones(2, 3))
