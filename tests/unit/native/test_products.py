"""Products against a double-precision reference, and the grid that keeps bits."""

from dataclasses import replace

import pytest
import torch

from zeroinfer.dtypes import DType
from zeroinfer.native import ProductKernel, products, torch_dtype

MODES = [
    (torch.float32, "native", 1e-5),
    (torch.float32, "upcast", 1e-5),
    (torch.bfloat16, "native", 2e-2),
    (torch.bfloat16, "upcast", 1e-2),
    (torch.float16, "upcast", 1e-5),
    (torch.float32, "fused", 1e-5),
    (torch.bfloat16, "fused", 1e-5),
    (torch.float16, "fused", 1e-5),
]
TILED = [row for row in MODES if row[1] != "fused"]
modes = pytest.mark.parametrize(("dtype", "mode", "tolerance"), MODES)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """64-row tiles for the shapes here."""
    monkeypatch.setattr("zeroinfer.native.products._UPCAST_TILE_BYTES", 32 * 1024)
    monkeypatch.setattr("zeroinfer.native.products._NATIVE_TILE_BYTES", 16 * 1024)


def _kernel(dtype, mode, **kwargs):
    return ProductKernel.resolve(dtype, mode=mode, num_threads=1, **kwargs)


def _random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _product(kernel, x, weight):
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=kernel.activation_dtype)
    kernel.linear(x, weight, out)
    return out


def _assert_near(got, want, tolerance):
    torch.testing.assert_close(got.double(), want, atol=tolerance * float(want.abs().max()), rtol=0)


@modes
@pytest.mark.parametrize("num_rows", [1, 2, 33])
def test_linear_is_the_product(dtype, mode, tolerance, num_rows):
    kernel = _kernel(dtype, mode)
    x = _random(num_rows, 96, dtype=kernel.activation_dtype)
    weight = _random(200, 96, dtype=dtype, seed=1)
    _assert_near(_product(kernel, x, weight), x.double() @ weight.double().T, tolerance)


@modes
def test_linear_transposed_is_the_product(dtype, mode, tolerance):
    kernel = _kernel(dtype, mode)
    x = _random(5, 96, dtype=kernel.activation_dtype)
    weight = _random(96, 200, dtype=dtype, seed=1)
    out = torch.empty((5, 200), dtype=kernel.activation_dtype)
    kernel.linear_transposed(x, weight, out)
    _assert_near(out, x.double() @ weight.double(), tolerance)
    kernel.linear_transposed(x, weight, out, is_accumulated=True)
    _assert_near(out, 2 * (x.double() @ weight.double()), tolerance)


@modes
def test_accumulate_adds(dtype, mode, tolerance):
    kernel = _kernel(dtype, mode)
    x = _random(5, 96, dtype=kernel.activation_dtype)
    weight = _random(200, 96, dtype=dtype, seed=1)
    before = _random(5, 200, dtype=kernel.activation_dtype, seed=2)
    out = before.clone()
    kernel.linear(x, weight, out, is_accumulated=True)
    _assert_near(out, before.double() + x.double() @ weight.double().T, tolerance)


@modes
def test_strided_out_fills_its_columns_alone(dtype, mode, tolerance):
    kernel = _kernel(dtype, mode)
    x = _random(5, 96, dtype=kernel.activation_dtype)
    weight = _random(130, 96, dtype=dtype, seed=1)
    wide = torch.full((5, 300), 7.0, dtype=kernel.activation_dtype)
    kernel.linear(x, weight, wide[:, 100:230])
    assert torch.equal(wide[:, 100:230], _product(kernel, x, weight))
    assert (wide[:, :100] == 7).all()
    assert (wide[:, 230:] == 7).all()


@modes
@pytest.mark.parametrize("num_rows", [1, 3, 64])
def test_pieces_on_the_grid_give_the_bits_of_the_whole(dtype, mode, tolerance, num_rows):
    kernel = _kernel(dtype, mode)
    x = _random(num_rows, 96, dtype=kernel.activation_dtype)
    weight = _random(300, 96, dtype=dtype, seed=1)
    tile = kernel.tile_rows(96)
    assert 64 <= tile < 200
    whole = _product(kernel, x, weight)
    pieces = torch.empty_like(whole)
    for start in range(0, 300, tile):
        kernel.linear(x, weight[start : start + tile], pieces[:, start : start + tile])
    assert torch.equal(pieces, whole)


@modes
@pytest.mark.parametrize("offset_bytes", [2, 4, 10, 30])
def test_address_of_a_weight_changes_no_bit(dtype, mode, tolerance, offset_bytes):
    kernel = _kernel(dtype, mode)
    x, weight = _random(3, 96, dtype=kernel.activation_dtype), _random(130, 96, dtype=dtype)
    offset = max(1, offset_bytes // weight.element_size())
    memory = torch.empty(offset + weight.numel(), dtype=dtype)
    moved = memory[offset:].view(weight.shape)
    moved.copy_(weight)
    assert torch.equal(_product(kernel, x, moved), _product(kernel, x, weight))


@modes
@pytest.mark.parametrize("position", [0, 1, 40, 63, 64, 200])
def test_padded_row_has_the_same_bits_at_any_position(dtype, mode, tolerance, position):
    kernel = _kernel(dtype, mode, is_batch_invariant=True)
    row, weight = _random(96, dtype=kernel.activation_dtype), _random(130, 96, dtype=dtype, seed=1)
    alone = torch.zeros((kernel.padded_rows(1), 96), dtype=kernel.activation_dtype)
    alone[0] = row
    batch = _random(kernel.padded_rows(256), 96, dtype=kernel.activation_dtype, seed=2)
    batch[position] = row
    assert torch.equal(
        _product(kernel, batch, weight)[position], _product(kernel, alone, weight)[0]
    )


@pytest.mark.parametrize(("dtype", "mode", "tolerance"), TILED)
def test_invariant_products_see_row_tiles_alone(dtype, mode, tolerance, monkeypatch):
    """Larger products may round otherwise on another CPU, even where they do not on this one."""
    kernel = _kernel(dtype, mode, is_batch_invariant=True)
    mm, seen = torch.mm, []

    def recording(rows, operand, *, out):
        seen.append((rows.shape[0], operand.shape[1]))
        return mm(rows, operand, out=out)

    monkeypatch.setattr(torch, "mm", recording)
    x = _random(3 * kernel.row_tile, 96, dtype=kernel.activation_dtype)
    _product(kernel, x, _random(130, 96, dtype=dtype))
    tile = kernel.tile_rows(96)
    expected_tiles = {tile, 130 % tile}
    assert {rows for rows, _ in seen} == {kernel.row_tile}
    assert {columns for _, columns in seen} == expected_tiles


def test_padding_is_whole_row_tiles():
    kernel = _kernel(torch.float32, "native", is_batch_invariant=True)
    tile = kernel.row_tile
    assert [kernel.padded_rows(n) for n in (1, tile, tile + 1)] == [tile, tile, 2 * tile]
    assert replace(kernel, is_batch_invariant=False).padded_rows(5) == 5


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_each_thread_gets_whole_vectors_of_a_row_tile(num_threads):
    for dtype in (torch.float32, torch.bfloat16):
        for mode in ("native", "upcast"):
            kernel = ProductKernel.resolve(dtype, mode=mode, num_threads=num_threads)
            assert kernel.row_tile % (16 * num_threads) == 0


@pytest.mark.parametrize(
    ("has_bf16_units", "has_fused", "expected"),
    [
        (False, True, {"fp32": "fused", "bf16": "fused", "fp16": "fused"}),
        (False, False, {"fp32": "native", "bf16": "upcast", "fp16": "upcast"}),
        (True, True, {"fp32": "fused", "bf16": "native", "fp16": "fused"}),
        (True, False, {"fp32": "native", "bf16": "native", "fp16": "upcast"}),
    ],
)
def test_auto_mode_follows_the_cpu(has_bf16_units, has_fused, expected, monkeypatch):
    monkeypatch.setattr(products, "has_fast_bf16", lambda: has_bf16_units)
    monkeypatch.setattr(products, "has_fused_products", lambda: has_fused)
    for name, mode in expected.items():
        kernel = ProductKernel.resolve(torch_dtype(DType.from_name(name)))
        assert kernel.mode == mode
        is_wide = mode != "native"
        assert kernel.activation_dtype == (torch.float32 if is_wide else kernel.weight_dtype)


def test_without_the_extension_torch_does_it(monkeypatch):
    monkeypatch.setattr(products, "has_fused_kernels", lambda: False)
    assert not products.has_fused_products()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_fused_rows_do_not_depend_on_batch_or_threads(dtype, num_threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    kernel = _kernel(dtype, "fused")
    x, weight = _random(101, 600), _random(70, 600, dtype=dtype, seed=1)
    whole = _product(kernel, x, weight)
    reference = torch.empty_like(whole)
    products.extension.linear_reference(x=x, weight=weight, out=reference, is_accumulated=False)
    assert torch.equal(whole, reference)
    for row in (0, 1, 47, 48, 100):
        assert torch.equal(_product(kernel, x[row : row + 1], weight)[0], whole[row])


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"x": torch.ones(2, 4, dtype=torch.float64)}, TypeError),
        ({"x": torch.ones(2, 4, dtype=torch.bfloat16)}, TypeError),
        ({"out": torch.ones(2, 3, dtype=torch.bfloat16)}, TypeError),
        ({"weight": torch.ones(3, 4, dtype=torch.int8)}, TypeError),
        ({"scratch": torch.ones(64, dtype=torch.float64)}, TypeError),
        ({"scratch": torch.ones(3)}, ValueError),
        ({"weight": torch.ones(3, 5)}, ValueError),
        ({"out": torch.ones(3, 2)}, ValueError),
        ({"x": torch.ones(4, 2).T}, ValueError),
        ({"num_threads": 0}, ValueError),
    ],
)
def test_the_binding_refuses_what_it_would_have_to_convert(changed, error):
    call = {
        "x": torch.ones(2, 4),
        "weight": torch.ones(3, 4),
        "out": torch.ones(2, 3),
        "scratch": torch.ones(64),
        "num_threads": 1,
        "is_accumulated": False,
    }
    products.extension.linear(**call)
    with pytest.raises(error):
        products.extension.linear(**{**call, **changed})


def test_tile_rows_do_not_follow_batch_or_threads():
    for dtype, mode, _ in MODES:
        rows = {
            ProductKernel.resolve(dtype, mode=mode, num_threads=n, is_batch_invariant=b).tile_rows(
                96
            )
            for n in (1, 2, 7)
            for b in (False, True)
        }
        assert len(rows) == 1


def test_wide_matrix_still_has_whole_grains():
    assert ProductKernel.weight_tile_rows(10**9, mode="upcast") == 64
    assert ProductKernel.weight_tile_rows(100, mode="upcast") % 64 == 0


@pytest.mark.parametrize("stored", [torch.float32, torch.float16], ids=str)
def test_other_stored_dtypes_are_rounded_to_the_models(stored):
    """fp32 and fp16 tensors in a bf16 model give what bf16 ones would."""
    for mode in ("native", "upcast", "fused"):
        kernel = _kernel(torch.bfloat16, mode)
        x = _random(3, 96, dtype=kernel.activation_dtype)
        weight = _random(70, 96, dtype=stored, seed=1)
        rounded = weight.to(torch.bfloat16)
        assert torch.equal(_product(kernel, x, weight), _product(kernel, x, rounded))
        vector = kernel.vector(weight[0])
        assert vector.dtype == kernel.activation_dtype
        assert torch.equal(vector, rounded[0].to(kernel.activation_dtype))
