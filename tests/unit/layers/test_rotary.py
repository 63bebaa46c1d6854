"""Frequencies of every scaling against transformers' own functions, at several lengths."""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from zeroinfer.errors import UnsupportedModelError
from zeroinfer.layers import Frame, PackedBatch, RopeConfig
from zeroinfer.layers.rotary import _attention_scaling, _row_inv_freq, step_rotation
from zeroinfer.native import ProductKernel

HEAD_DIM = 16
MAX_POSITIONS = 64
FACTORS = tuple(1.0 + 0.3 * idx for idx in range(HEAD_DIM // 2))
KINDS = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-mscale": {
        "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.9,
    },
    "yarn-attention": {
        "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.7,
        "beta_fast": 16.0, "beta_slow": 2.0,
    },
    "yarn-exact": {"factor": 4.0, "original_max_position_embeddings": 16, "truncate": False},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "factor": 4.0, "original_max_position_embeddings": 16, "short_factor": FACTORS,
        "long_factor": tuple(2 * f for f in FACTORS),
    },
}  # fmt: skip


def _rope(rope_type="default", **params):
    return RopeConfig(
        head_dim=HEAD_DIM, rope_theta=10000.0, max_position_embeddings=MAX_POSITIONS,
        rope_type=rope_type, **params,
    )  # fmt: skip


def _reference(kind, params, seq_len):
    config = transformers.LlamaConfig(
        hidden_size=2 * HEAD_DIM, num_attention_heads=2, max_position_embeddings=MAX_POSITIONS,
        rope_parameters={
            "rope_type": kind, "rope_theta": 10000.0,
            **{k: list(v) if isinstance(v, tuple) else v for k, v in params.items()},
        },
    )  # fmt: skip
    return ROPE_INIT_FUNCTIONS[kind](config, device="cpu", seq_len=seq_len)


@pytest.mark.parametrize("seq_len", [5, 64, 65, 200])
@pytest.mark.parametrize("name", KINDS)
def test_frequencies_and_scaling(name, seq_len):
    kind, params = name.split("-")[0], KINDS[name]
    rope = _rope(kind, **params)
    want, want_scaling = _reference(kind, params, seq_len)
    got = torch.atleast_2d(_row_inv_freq(rope, torch.tensor([seq_len])))[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    assert _attention_scaling(rope) == pytest.approx(want_scaling)


@pytest.mark.parametrize("name", KINDS)
def test_frequencies_of_a_part_of_the_head(name):
    kind, params = name.split("-")[0], dict(KINDS[name])
    for key in ("short_factor", "long_factor"):
        if key in params:
            params[key] = params[key][: HEAD_DIM // 4]
    rope = _rope(kind, **params, rotary_dim=HEAD_DIM // 2)
    want, _ = _reference(kind, {**params, "partial_rotary_factor": 0.5}, 200)
    got = torch.atleast_2d(_row_inv_freq(rope, torch.tensor([200])))[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


def test_length_of_one_row_does_not_touch_another():
    rope = _rope("dynamic", factor=4.0)
    together = _row_inv_freq(rope, torch.tensor([10, 200, 64]))
    for idx, length in enumerate((10, 200, 64)):
        assert torch.equal(together[idx], _row_inv_freq(rope, torch.tensor([length]))[0])
    assert not torch.equal(together[0], together[1])


def test_unknown_kind_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"rope scaling 'spiral' .* known: default"):
        _rope("spiral")


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("linear", "factor"),
        ("dynamic", "factor"),
        ("yarn", "factor"),
        ("longrope", "short_factor"),
        ("longrope", "long_factor"),
        ("llama3", "factor"),
        ("llama3", "low_freq_factor"),
        ("llama3", "high_freq_factor"),
    ],
)
def test_missing_parameter_is_refused_by_name(kind, missing):
    params = {name: value for name, value in KINDS[kind].items() if name != missing}
    with pytest.raises(UnsupportedModelError, match=f"'{kind}' of config.json lacks {missing}"):
        _rope(kind, **params)


@pytest.mark.parametrize("rotary_dim", [0, -2, 3, HEAD_DIM + 2])
def test_part_that_cannot_rotate_is_refused(rotary_dim):
    message = f"{rotary_dim} columns of a head of {HEAD_DIM} would rotate, need an even number"
    with pytest.raises(UnsupportedModelError, match=message):
        _rope(rotary_dim=rotary_dim)


@pytest.mark.parametrize(
    ("kind", "longest"),
    [("linear", 3 * MAX_POSITIONS), ("dynamic", 4 * MAX_POSITIONS), ("yarn", MAX_POSITIONS)],
)
def test_longest_sequence(kind, longest):
    assert _rope(kind, **KINDS[kind]).max_model_len == longest


def _frame(positions):
    positions = torch.tensor(positions)
    batch = PackedBatch(
        input_ids=torch.zeros_like(positions), positions=positions, rope_lengths=positions + 1,
        logits_indices=torch.tensor([0]), num_rows=len(positions), sequences=(),
    )  # fmt: skip
    kernel = ProductKernel.resolve(torch.float32, num_threads=1)
    return Frame(batch=batch, kernel=kernel, kv=None, prompt_chunk_tokens=16)


def _rotate(values, positions, **rope):
    frame, values = _frame(positions), values.clone()
    heads = values.view(len(positions), -1, HEAD_DIM)
    frame.kernels.rotate(heads, step_rotation(_rope(**rope), frame))
    return values


def test_angles_are_computed_once_a_step():
    frame = _frame([3, 1])
    first, second = (step_rotation(_rope(), frame) for _ in range(2))
    assert first.cos is second.cos
    assert first.sin is second.sin


def test_position_0_changes_nothing():
    values = torch.randn(1, 2 * HEAD_DIM)
    assert torch.equal(_rotate(values, [0]), values)


def test_scores_depend_on_distance_alone():
    query, key = torch.randn(1, HEAD_DIM), torch.randn(1, HEAD_DIM)

    def score(query_position, key_position):
        return (_rotate(query, [query_position]) * _rotate(key, [key_position])).sum()

    torch.testing.assert_close(score(9, 4), score(29, 24), rtol=1e-4, atol=1e-5)
    assert (score(9, 4) - score(9, 5)).abs() > 1e-3


def test_rotation_is_that_of_transformers():
    from transformers.models.llama import modeling_llama  # noqa: PLC0415 - heavy

    values, positions = torch.randn(3, 2 * HEAD_DIM), [7, 0, 31]
    inv_freq, _ = _reference("linear", {"factor": 1.0}, None)
    angles = torch.tensor(positions)[:, None] * inv_freq
    angles = torch.cat([angles, angles], dim=-1)[None]
    heads = values.view(1, 3, 2, HEAD_DIM).transpose(1, 2)
    want, _ = modeling_llama.apply_rotary_pos_emb(heads, heads, angles.cos(), angles.sin())
    got = _rotate(values, positions).view(3, 2, HEAD_DIM)
    torch.testing.assert_close(got, want[0].transpose(0, 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_columns_beyond_the_rotary_dim_stay(is_interleaved):
    values, positions, part = torch.randn(3, 2 * HEAD_DIM), [7, 1, 31], HEAD_DIM // 2
    got = _rotate(values, positions, rotary_dim=part, is_interleaved=is_interleaved)
    heads, rotated = values.view(3, 2, HEAD_DIM), got.view(3, 2, HEAD_DIM)
    assert torch.equal(rotated[..., part:], heads[..., part:])
    assert (rotated[..., :part] - heads[..., :part]).abs().amin(-1).gt(0).all()


def test_rotation_of_neighbours_is_that_of_transformers():
    from transformers.models.gptj import modeling_gptj  # noqa: PLC0415 - heavy

    values, positions, part = torch.randn(3, 2 * HEAD_DIM), [7, 0, 31], HEAD_DIM // 2
    sines, cosines = modeling_gptj.create_sinusoidal_positions(64, part)[positions].chunk(2, -1)
    heads = values.view(1, 3, 2, HEAD_DIM)[..., :part]
    want = modeling_gptj.apply_rotary_pos_emb(heads, sines[None], cosines[None])[0]
    got = _rotate(values, positions, rotary_dim=part, is_interleaved=True)
    torch.testing.assert_close(got.view(3, 2, HEAD_DIM)[..., :part], want, atol=1e-5, rtol=0)
