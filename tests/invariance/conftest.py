"""Models wide enough for several weight tiles and row pieces."""

import pytest

from tests.helpers.checkpoints import tiny_llama
from zeroinfer.native import ProductKernel

KIB = 1024


@pytest.fixture(autouse=True)
def many_tiles(monkeypatch):
    """Tiles of few rows, so that a small matrix has as many tiles and pieces as a large one."""
    monkeypatch.setattr("zeroinfer.native.products._UPCAST_TILE_BYTES", 128 * KIB)
    monkeypatch.setattr("zeroinfer.native.products._NATIVE_TILE_BYTES", 64 * KIB)


@pytest.fixture
def force_mode(monkeypatch):
    """Fix the way of multiplying, whatever this CPU would choose."""
    resolve = ProductKernel.resolve

    def force(mode):
        monkeypatch.setattr(
            ProductKernel,
            "resolve",
            staticmethod(lambda dtype, **kwargs: resolve(dtype, **{**kwargs, "mode": mode})),
        )

    return force


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory):
    """A bf16 llama of two layers that still has several tiles a matrix."""
    return tiny_llama(
        tmp_path_factory.mktemp("small") / "llama", dtype="bfloat16", hidden_size=128,
        intermediate_size=512, vocab_size=500, num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip


@pytest.fixture(scope="session")
def wide_llama(tmp_path_factory):
    """Makers of wide llamas by dtype: three layers, matrices of several tiles, saved once each."""
    folders = {}

    def make(dtype):
        if dtype not in folders:
            folders[dtype] = tiny_llama(
                tmp_path_factory.mktemp("wide") / dtype, dtype=dtype, hidden_size=256,
                intermediate_size=1024, num_hidden_layers=3, vocab_size=2000,
                num_attention_heads=8, num_key_value_heads=4,
            )  # fmt: skip
        return folders[dtype]

    return make
