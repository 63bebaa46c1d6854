"""Models wide enough for several weight tiles and row pieces."""

from functools import partial

import pytest

from tests.helpers.checkpoints import (
    tiny_falcon,
    tiny_falcon_alibi,
    tiny_falcon_new,
    tiny_gpt_neox,
    tiny_gptj,
    tiny_llama,
    tiny_mistral,
    tiny_opt350,
    tiny_qwen2,
    tiny_qwen3,
)
from zeroinfer.native import ProductKernel

KIB = 1024

FAMILIES = {
    "gpt_neox": partial(tiny_gpt_neox, hidden_size=128, intermediate_size=512),
    "gpt_neox-sequential": partial(
        tiny_gpt_neox, hidden_size=128, intermediate_size=512, use_parallel_residual=False
    ),
    "gptj": partial(tiny_gptj, n_embd=128, n_inner=512),
    "opt-350m-form": partial(tiny_opt350, hidden_size=128, ffn_dim=512, word_embed_proj_dim=64),
    "mistral": partial(tiny_mistral, hidden_size=128, intermediate_size=512),
    "qwen2-window": partial(
        tiny_qwen2, hidden_size=128, intermediate_size=512, use_sliding_window=True,
        sliding_window=6, max_window_layers=1,
    ),
    "qwen3": partial(tiny_qwen3, hidden_size=128, intermediate_size=512),
    "falcon": partial(tiny_falcon, hidden_size=128),
    "falcon-new": partial(tiny_falcon_new, hidden_size=128),
    "falcon-alibi": partial(tiny_falcon_alibi, hidden_size=128),
}  # fmt: skip
"""Families beside llama that bring operators or arrangements; matrices of several tiles."""


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


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory):
    """Makers of a model of `FAMILIES` by dtype, saved once each."""
    folders = {}

    def make(family, dtype):
        key = f"{family}-{dtype}"
        if key not in folders:
            folder = tmp_path_factory.mktemp("family") / key
            folders[key] = FAMILIES[family](folder, dtype=dtype, vocab_size=2000)
        return folders[key]

    return make


@pytest.fixture(params=FAMILIES)
def family(request):
    """Name of a model of `FAMILIES`."""
    return request.param
