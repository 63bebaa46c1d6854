import pytest

from zeroinfer.errors import CheckpointError
from zeroinfer.layers import RopeConfig
from zeroinfer.models import build_model, gpt_neox
from zeroinfer.models.hf_config import layer_windows, sliding_window

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("eps", ["x", [1], True, -1e-5, 0, float("nan"), float("inf")])
def test_an_epsilon_is_a_positive_number(eps):
    with pytest.raises(CheckpointError, match=r"rms_norm_eps is .*, need a positive number"):
        build_model(LLAMA | {"rms_norm_eps": eps})


GPT_NEOX = {
    "model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
NEW_SPELLING = {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_type": "default"}
OLD_SPELLING = {"rotary_emb_base": 500000, "rotary_pct": 0.5}


@pytest.mark.parametrize(
    "spelling",
    [
        OLD_SPELLING,
        {**OLD_SPELLING, "rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_scaling": None},
        {"rope_parameters": NEW_SPELLING},
        {"rope_parameters": NEW_SPELLING, **OLD_SPELLING},
    ],
    ids=["first", "4.48", "5", "both"],
)
def test_gpt_neox_spells_its_rotary_parameters_in_many_ways(spelling, caplog):
    rope = gpt_neox._rope(GPT_NEOX | spelling, 16)
    assert rope == RopeConfig(head_dim=16, rope_theta=5e5, max_position_embeddings=64, rotary_dim=8)
    assert not caplog.records


def test_a_quarter_of_a_gpt_neox_head_rotates_unless_it_says_otherwise():
    assert gpt_neox._rope(GPT_NEOX, 16).rotary_dim == 4
    linear = GPT_NEOX | {"rope_scaling": {"type": "linear", "factor": 2.0}, "rotary_pct": 1.0}
    assert gpt_neox._rope(linear, 16).rotary_dim == 16
    assert gpt_neox._rope(linear, 16).rope_type == "linear"


@pytest.mark.parametrize("old", [{"rotary_pct": 0.25}, {"rotary_emb_base": 10000}])
def test_contradicting_shares_and_bases_warn_and_the_newer_wins(old, caplog):
    rope = gpt_neox._rope(GPT_NEOX | {"rope_parameters": NEW_SPELLING} | old, 16)
    assert (rope.rotary_dim, rope.rope_theta) == (8, 5e5)
    assert "the newer is used" in caplog.text


WINDOWED = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"num_hidden_layers": 2}, (None, None)),
        (WINDOWED, (None, None, None)),
        (WINDOWED | {"max_window_layers": 0}, (5, 5, 5)),
        (WINDOWED | {"max_window_layers": 2}, (None, None, 5)),
        (WINDOWED | {"max_window_layers": 0, "use_sliding_window": False}, (None, None, None)),
        (WINDOWED | {"max_window_layers": 0, "sliding_window": None}, (None, None, None)),
        (WINDOWED | {"layer_types": [SLIDING, FULL, SLIDING]}, (5, None, 5)),
        (WINDOWED | {"layer_types": [FULL] * 3, "max_window_layers": 0}, (None, None, None)),
        (
            {"num_hidden_layers": 30, "use_sliding_window": True},
            (*[None] * 28, 4096, 4096),
        ),
    ],
)
def test_windows_layer_by_layer(config, windows):
    assert layer_windows(config) == windows


@pytest.mark.parametrize(
    ("config", "window"),
    [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 7}, 7)],
)
def test_null_is_no_window_and_silence_the_default(config, window):
    assert sliding_window(config, default=4096) == window


def test_no_default_is_no_window():
    assert sliding_window({}) is None
