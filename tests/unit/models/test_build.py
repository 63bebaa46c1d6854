"""Refusals of configs and checkpoints, each by its message, and what a model says of itself."""

import logging

import pytest

from zeroinfer.dtypes import DType
from zeroinfer.errors import CheckpointError, ConfigError, UnsupportedModelError
from zeroinfer.models import bind, build_model, config_dtype

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97,
    "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "vocab_size": 97,
}  # fmt: skip
BLOOM = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97}
FAMILIES = {"llama": LLAMA, "gpt2": GPT2, "bloom": BLOOM}


def _without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def _shapes(model):
    return {param.name: param.shape for param in model.params.values()}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type None is not supported; supported: bloom, gpt2, llama"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "'gptq' is not supported"),
        (LLAMA | {"pretraining_tp": 4}, "pretraining_tp is 4, only 1 or None is supported"),
        (LLAMA | {"hidden_act": "swoosh"}, "activation 'swoosh'"),
        (LLAMA | {"rope_scaling": {"type": "spiral", "factor": 2}}, "rope scaling 'spiral'"),
        (LLAMA | {"rope_scaling": {"type": "yarn"}}, "'yarn' of config.json lacks factor"),
        (
            LLAMA | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5, only 1.0 is supported",
        ),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is Tr"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention is True"),
        (GPT2 | {"tie_word_embeddings": False}, "tie_word_embeddings is False, only True"),
        (GPT2 | {"activation_function": "swoosh"}, "activation 'swoosh'"),
        (BLOOM | {"slow_but_exact": True}, "slow_but_exact is True, only False"),
        (BLOOM | {"tie_word_embeddings": False}, "tie_word_embeddings is False, only True"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(config, message):
    with pytest.raises(UnsupportedModelError) as caught:
        build_model(config)
    assert message in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (_without(LLAMA, "hidden_size"), "config.json lacks 'hidden_size'"),
        (_without(LLAMA, "vocab_size"), "config.json lacks 'vocab_size'"),
        (_without(LLAMA, "max_position_embeddings"), "lacks 'max_position_embeddings'"),
        (_without(GPT2, "n_layer"), "config.json lacks 'n_layer'"),
        (_without(BLOOM, "n_head"), "config.json lacks 'n_head'"),
        (LLAMA | {"hidden_size": "32"}, "hidden_size is '32', need a positive integer"),
        (LLAMA | {"hidden_size": 0}, "hidden_size is 0, need a positive integer"),
        (LLAMA | {"vocab_size": True}, "vocab_size is True, need a positive integer"),
        (LLAMA | {"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of"),
        (LLAMA | {"rope_scaling": "linear"}, "rope_scaling is 'linear', need an object"),
        (LLAMA | {"rope_parameters": [1]}, "rope_parameters is [1], need an object"),
    ],
)
def test_what_is_missing_or_malformed_is_named(config, message):
    with pytest.raises(CheckpointError) as caught:
        build_model(config)
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_in_both_spellings(key):
    assert config_dtype({key: "bfloat16"}) is DType.BF16
    assert config_dtype({key: "torch.float32"}) is DType.F32
    assert config_dtype({key: "auto"}) is None
    assert config_dtype({}) is None


def test_dtype_nobody_knows_is_refused():
    with pytest.raises((CheckpointError, ConfigError), match="float7"):
        config_dtype({"dtype": "float7"})


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_bind_finds_every_parameter(config):
    model = build_model(config)
    binding = bind(model, _shapes(model))
    assert binding.names == {name: name for name in model.params}
    assert binding.unused == ()


@pytest.mark.parametrize(
    ("config", "prefix"),
    [(LLAMA, "model."), (GPT2, "transformer."), (BLOOM, "transformer.")],
    ids=FAMILIES,
)
def test_bind_takes_names_without_the_prefix(config, prefix):
    model = build_model(config)
    bare = {name.removeprefix(prefix): shape for name, shape in _shapes(model).items()}
    binding = bind(model, bare)
    assert set(binding.names.values()) == set(bare)
    assert binding.unused == ()


def test_bind_refuses_a_missing_tensor():
    model = build_model(LLAMA)
    shapes = _without(_shapes(model), "model.norm.weight")
    with pytest.raises(CheckpointError) as caught:
        bind(model, shapes)
    message = str(caught.value)
    assert "tensor model.norm.weight is missing from the checkpoint" in message
    assert "looked for model.norm.weight, model.model.norm.weight, norm.weight" in message


def test_bind_refuses_another_shape():
    model = build_model(LLAMA)
    shapes = _shapes(model) | {"model.norm.weight": (33,)}
    with pytest.raises(CheckpointError) as caught:
        bind(model, shapes)
    assert "model.norm.weight has shape [33], config.json asks for [32]" in str(caught.value)


def test_bind_lists_what_nothing_uses_in_one_warning(caplog):
    model = build_model(LLAMA)
    with caplog.at_level(logging.WARNING):
        binding = bind(model, _shapes(model) | {"model.layers.7.x": (1,), "a": (2,)})
    assert binding.unused == ("a", "model.layers.7.x")
    (record,) = caplog.records
    assert record.getMessage().startswith("2 tensor(s) of the checkpoint are not used")
    assert "model.layers.7.x" in record.getMessage()


@pytest.mark.parametrize(
    ("config", "extra"),
    [
        (LLAMA, {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}),
        (LLAMA | {"tie_word_embeddings": True}, {"lm_head.weight": (97, 32)}),
        (GPT2, {"h.0.attn.bias": (1,), "transformer.h.1.attn.masked_bias": ()}),
        (GPT2, {"lm_head.weight": (97, 32)}),
        (BLOOM, {"lm_head.weight": (97, 32)}),
    ],
)
def test_bind_knows_old_buffers_and_saved_tied_heads(config, extra, caplog):
    model = build_model(config)
    with caplog.at_level(logging.WARNING):
        binding = bind(model, _shapes(model) | extra)
    assert binding.unused == ()
    assert not caplog.records


def test_tied_head_is_no_parameter_of_its_own():
    own, tied = build_model(LLAMA), build_model(LLAMA | {"tie_word_embeddings": True})
    assert own.num_parameters - tied.num_parameters == 97 * 32
    assert "lm_head.weight" not in tied.params


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, 64),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 256),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}, 128),
        (GPT2, 64),
        (BLOOM, 1 << 20),
        (BLOOM | {"seq_length": 2048}, 2048),
    ],
)
def test_longest_sequence(config, expected):
    assert build_model(config).max_model_len == expected


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_stages_say_what_the_engine_needs(config):
    model = build_model(config)
    assert [stage.layer_idx for stage in model.stages] == [-1, 0, 0, 1, 1, -1]
    assert [plane.name for plane in model.kv_planes] == ["key", "value"]
    assert model.stages[-1].kept == {"logits"}
    assert all("hidden" in stage.kept for stage in model.stages[:-1])
