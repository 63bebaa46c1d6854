import pytest

from zeroinfer.errors import CheckpointError, UnsupportedModelError
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


YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {**YARN, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
NO_NUMBERS = ["x", [1], True, -1, 0, float("nan"), float("inf"), 10**400]


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("key", ["rope_theta", "factor", "attention_factor", "beta_fast"])
def test_rotary_parameters_are_positive_numbers(key, value):
    with pytest.raises(CheckpointError, match=rf"{key} is .*, need a positive number"):
        build_model(LLAMA | {"rope_parameters": YARN | {key: value}})
    with pytest.raises(CheckpointError, match=rf"{key} is .*, need a positive number"):
        build_model(LLAMA | {"rope_scaling": YARN | {key: value}})


def test_a_base_that_is_null_is_refused():
    with pytest.raises(CheckpointError, match="rope_theta is None, need a positive number"):
        build_model(LLAMA | {"rope_parameters": YARN | {"rope_theta": None}})


@pytest.mark.parametrize("value", ["x", [1], -1, float("nan")])
def test_the_trained_length_and_the_share_are_positive_numbers(value):
    length = {"original_max_position_embeddings": value}
    with pytest.raises(
        CheckpointError, match=r"original_max_position_embeddings is .*, need a pos"
    ):
        build_model(LLAMA | {"rope_parameters": YARN | length})
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor is .*, need a positive"):
        build_model(LLAMA | {"partial_rotary_factor": value})


@pytest.mark.parametrize("factors", [5, "x", [1.0] * 3, [1.0] * 5, {"a": 1}])
@pytest.mark.parametrize("key", ["short_factor", "long_factor"])
def test_long_factors_are_one_for_each_pair(key, factors):
    with pytest.raises(CheckpointError, match=rf"{key} is .*, need a list of 4 numbers"):
        build_model(LLAMA | {"rope_parameters": LONG | {key: factors}})


def test_long_factors_are_numbers():
    with pytest.raises(CheckpointError, match=r"long_factor\[3\] is 0, need a positive number"):
        build_model(LLAMA | {"rope_parameters": LONG | {"long_factor": [1.0, 1.0, 1.0, 0]}})


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor is 1.0, need more than low_freq_f"),
        (YARN | {"rope_theta": 1}, "rope_theta is 1.0, need more than 1"),
        (LONG | {"original_max_position_embeddings": 1}, "embeddings is 1, need 2 or more"),
    ],
)
def test_numbers_that_would_divide_by_zero_are_refused(rope, message):
    with pytest.raises(CheckpointError, match=message):
        build_model(LLAMA | {"rope_parameters": rope})


def test_dynamic_scaling_of_a_single_pair_is_refused():
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 2}
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UnsupportedModelError, match="2 columns of a head rotate, dynamic scaling"):
        build_model(LLAMA | heads | {"rope_parameters": rope})


@pytest.mark.parametrize("value", [0.5, 4096.7])
def test_a_trained_length_is_whole(value):
    length = {"original_max_position_embeddings": value}
    with pytest.raises(CheckpointError, match=f"embeddings is {value}, need a whole number"):
        build_model(LLAMA | {"rope_parameters": YARN | length})


@pytest.mark.parametrize("value", ["true", 0, "no"])
def test_truncation_is_true_or_false(value):
    with pytest.raises(CheckpointError, match=f"truncate is {value!r}, need true or false"):
        build_model(LLAMA | {"rope_parameters": YARN | {"truncate": value}})


@pytest.mark.parametrize("scale", [None, 0, 0.7])
def test_a_scale_of_attention_may_be_zero(scale):
    build_model(LLAMA | {"rope_parameters": YARN | {"mscale": scale, "mscale_all_dim": scale}})


@pytest.mark.parametrize("types", [5, "full_attention", {"a": 1}])
def test_layer_types_are_a_list(types):
    with pytest.raises(CheckpointError, match=r"layer_types is .*, need a list"):
        layer_windows(WINDOWED | {"layer_types": types})


@pytest.mark.parametrize("model_type", [None, 5, ["llama"], {"a": 1}])
def test_a_model_type_of_another_kind_is_refused(model_type):
    with pytest.raises(UnsupportedModelError, match=r"model_type .* is not supported"):
        build_model(LLAMA | {"model_type": model_type})


@pytest.mark.parametrize("quantization", ["gptq", [1], {"quant_method": "awq"}])
def test_any_quantization_is_refused(quantization):
    with pytest.raises(UnsupportedModelError, match=r"quantization_config .* is not supported"):
        build_model(LLAMA | {"quantization_config": quantization})


@pytest.mark.parametrize(
    ("model_type", "key"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer")]
)
def test_layers_without_end_are_refused_at_once(model_type, key):
    with pytest.raises(CheckpointError, match=f"{key} is 2000000000, need at most 10000"):
        build_model(LLAMA | {"model_type": model_type, key: 2_000_000_000})
