"""Refusals of configs and checkpoints, each by its message, and what a model says of itself."""

import logging

import pytest

from zeroinfer.dtypes import DType
from zeroinfer.errors import CheckpointError, ConfigError, UnsupportedModelError
from zeroinfer.layers import Activate, Linear
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
OPT = {
    "model_type": "opt", "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 97, "max_position_embeddings": 64,
}  # fmt: skip
OPT350 = OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False}
GPT_NEOX = {
    "model_type": "gpt_neox", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 97, "max_position_embeddings": 64,
}  # fmt: skip
GPTJ = {
    "model_type": "gptj", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "rotary_dim": 4, "vocab_size": 97,
}  # fmt: skip
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 8}
QWEN2 = LLAMA | {"model_type": "qwen2"}
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 16}
FALCON = {
    "model_type": "falcon", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 97,
}  # fmt: skip
FALCON_NEW = FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
FALCON_ALIBI = FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
STARCODER2 = LLAMA | {"model_type": "starcoder2"}
FAMILIES = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "bloom": BLOOM,
    "opt": OPT,
    "opt-350m": OPT350,
    "gpt_neox": GPT_NEOX,
    "gptj": GPTJ,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "falcon": FALCON,
    "falcon-new": FALCON_NEW,
    "falcon-alibi": FALCON_ALIBI,
    "starcoder2": STARCODER2,
}


def _without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def _shapes(model):
    return {param.name: param.shape for param in model.params.values()}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type None is not supported; supported: bloom, "),
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
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, only 1.0 is supp"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is Tr"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention is True"),
        (GPT2 | {"activation_function": "swoosh"}, "activation 'swoosh'"),
        (BLOOM | {"slow_but_exact": True}, "slow_but_exact is True, only False"),
        (BLOOM | {"tie_word_embeddings": False}, "tie_word_embeddings is False, only True"),
        (OPT | {"layer_norm_elementwise_affine": False}, "elementwise_affine is False, only True"),
        (OPT | {"activation_function": "swoosh"}, "activation 'swoosh'"),
        (GPT_NEOX | {"hidden_act": "swoosh"}, "activation 'swoosh'"),
        (GPT_NEOX | {"rotary_pct": 0.4}, "3 columns of a head of 8 would rotate"),
        (GPT_NEOX | {"rotary_pct": 2.0}, "16 columns of a head of 8 would rotate"),
        (GPT_NEOX | {"rope_scaling": {"type": "spiral"}}, "rope scaling 'spiral'"),
        (GPTJ | {"rotary_dim": 10}, "10 columns of a head of 8 would rotate"),
        (GPTJ | {"rotary": False}, "rotary is False, only True"),
        (GPTJ | {"scale_attn_weights": False}, "scale_attn_weights is False, only True"),
        (GPTJ | {"activation_function": "swoosh"}, "activation 'swoosh'"),
        (
            MISTRAL | {"layer_types": ["full_attention"]},
            "['full_attention'], only None is supported",
        ),
        (
            QWEN2 | {"layer_types": ["full_attention", "odd"]},
            "layer_types holds 'odd', only 'full_",
        ),
        (QWEN3 | {"hidden_act": "swoosh"}, "activation 'swoosh'"),
        (
            FALCON | {"num_ln_in_parallel_attn": 2},
            "parallel_attn is 2, only None or 1 is supported",
        ),
        (FALCON_NEW | {"num_ln_in_parallel_attn": 3}, "parallel_attn is 3, only None or 1 or 2 is"),
        (FALCON_NEW | {"parallel_attn": False}, "parallel_attn is False, only True is supported"),
        (
            FALCON | {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm is True, only False is supported",
        ),
        (FALCON | {"activation": "swoosh"}, "activation 'swoosh'"),
        (FALCON | {"rope_scaling": {"type": "spiral"}}, "rope scaling 'spiral'"),
        (STARCODER2 | {"norm_type": "rms_norm"}, "norm_type is 'rms_norm', only 'layer_norm' is"),
        (STARCODER2 | {"mlp_type": "gated"}, "mlp_type is 'gated', only 'default' is supported"),
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
        (_without(OPT, "ffn_dim"), "config.json lacks 'ffn_dim'"),
        (_without(GPT_NEOX, "intermediate_size"), "config.json lacks 'intermediate_size'"),
        (_without(GPTJ, "rotary_dim"), "config.json lacks 'rotary_dim'"),
        (GPTJ | {"rotary_dim": None}, "config.json lacks 'rotary_dim'"),
        (GPT2 | {"n_head": 3}, "hidden size 32 is no multiple of its 3 heads"),
        (OPT | {"num_attention_heads": 5}, "hidden size 32 is no multiple of its 5 heads"),
        (GPT_NEOX | {"num_attention_heads": 6}, "hidden size 32 is no multiple of its 6 heads"),
        (GPTJ | {"n_head": 7}, "hidden size 32 is no multiple of its 7 heads"),
        (MISTRAL | {"num_attention_heads": 6}, "hidden size 32 is no multiple of its 6 heads"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window is 0, need a positive integer"),
        (QWEN2 | {"max_window_layers": "x"}, "max_window_layers is 'x', need a positive integer"),
        (QWEN2 | {"layer_types": ["full_attention"]}, "names 1 layers, num_hidden_layers is 2"),
        (
            QWEN3 | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
            "use_sliding_window is False and sliding_window 4",
        ),
        (FALCON_NEW | {"num_kv_heads": 3}, "num_kv_heads 3 does not go with num_attention_heads 4"),
        (FALCON_ALIBI | {"num_kv_heads": 2}, "4 and new_decoder_architecture False"),
        (FALCON | {"num_attention_heads": 5}, "hidden size 32 is no multiple of its 5 heads"),
        (_without(FALCON, "num_hidden_layers"), "config.json lacks 'num_hidden_layers'"),
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
    [
        (LLAMA, "model."),
        (GPT2, "transformer."),
        (BLOOM, "transformer."),
        (OPT, "model."),
        (OPT350, "model.decoder."),
        (GPT_NEOX, "gpt_neox."),
        (GPTJ, "transformer."),
        (MISTRAL, "model."),
        (QWEN3, "model."),
        (FALCON, "transformer."),
    ],
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
    assert "(looked for model.norm.weight, norm.weight)" in message


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
        (OPT350, {"lm_head.weight": (97, 16), "decoder.version": (1,)}),
        (GPT_NEOX | {"tie_word_embeddings": True}, {"embed_out.weight": (97, 32)}),
        (GPT_NEOX | {"tie_word_embeddings": True}, {"lm_head.weight": (97, 32)}),
        (
            GPT_NEOX,
            {
                "gpt_neox.layers.0.attention.bias": (1, 1, 64, 64),
                "layers.1.attention.masked_bias": (),
                "gpt_neox.layers.1.attention.rotary_emb.inv_freq": (1,),
            },
        ),
        (GPTJ | {"tie_word_embeddings": True}, {"lm_head.weight": (97, 32)}),
        (GPTJ, {"h.0.attn.bias": (1, 1, 64, 64), "transformer.h.1.attn.masked_bias": ()}),
        (QWEN2 | {"tie_word_embeddings": True}, {"lm_head.weight": (97, 32)}),
        (MISTRAL, {"model.layers.1.self_attn.rotary_emb.inv_freq": (4,)}),
        (FALCON, {"h.0.self_attention.maybe_rotary.inv_freq": (4,), "lm_head.weight": (97, 32)}),
    ],
)
def test_bind_knows_old_buffers_and_saved_tied_heads(config, extra, caplog):
    model = build_model(config)
    with caplog.at_level(logging.WARNING):
        binding = bind(model, _shapes(model) | extra)
    assert binding.unused == ()
    assert not caplog.records


@pytest.mark.parametrize("name", ["embed_out.weight", "lm_head.weight", "gpt_neox.lm_head.weight"])
def test_bind_knows_both_names_of_the_gpt_neox_head(name):
    model = build_model(GPT_NEOX)
    shapes = _without(_shapes(model), "embed_out.weight") | {name: (97, 32)}
    binding = bind(model, shapes)
    assert binding.names["embed_out.weight"] == name
    assert binding.unused == ()


def test_bias_of_a_layer_is_no_buffer():
    model = build_model(GPT_NEOX | {"attention_bias": False})
    name = "gpt_neox.layers.0.attention.dense.bias"
    assert bind(model, _shapes(model) | {name: (32,)}).unused == (name,)


def test_gpt2_may_have_a_head_of_its_own():
    own, tied = build_model(GPT2 | {"tie_word_embeddings": False}), build_model(GPT2)
    assert set(own.params) - set(tied.params) == {"lm_head.weight"}
    assert bind(own, _shapes(own)).names["lm_head.weight"] == "lm_head.weight"


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
        (OPT, 64),
        (GPT_NEOX, 64),
        (GPT_NEOX | {"rope_scaling": {"type": "linear", "factor": 2.0}}, 128),
        (GPTJ, 64),
        (MISTRAL, 64),
        (FALCON, 2048),
        (
            FALCON
            | {"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 2}},
            128,
        ),
        (FALCON_ALIBI, 2048),
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


@pytest.mark.parametrize(
    ("config", "kept"),
    [(GPT_NEOX, "mlp_input"), (GPTJ, "x"), (FALCON, "x"), (FALCON_NEW, "mlp_input")],
)
def test_parallel_halves_of_a_layer_read_what_came_into_it(config, kept):
    stages = build_model(config).stages[1:-1]
    assert [kept in stage.kept for stage in stages] == [True, False] * 2


@pytest.mark.parametrize("config", [GPT_NEOX | {"use_parallel_residual": False}, FALCON_ALIBI])
def test_halves_in_sequence_hand_on_the_hidden_state_alone(config):
    assert all(stage.kept == {"hidden"} for stage in build_model(config).stages[:-1])


@pytest.mark.parametrize(
    ("config", "bias"),
    [
        (LLAMA, None),
        (LLAMA | {"mlp_bias": True}, "model.layers.0.mlp.gate_proj.bias"),
        (GPT2, "transformer.h.0.mlp.c_fc.bias"),
        (BLOOM, "transformer.h.0.mlp.dense_h_to_4h.bias"),
        (OPT, "model.decoder.layers.0.fc1.bias"),
        (OPT350 | {"enable_bias": False}, None),
        (GPT_NEOX, "gpt_neox.layers.0.mlp.dense_h_to_4h.bias"),
        (GPTJ, "transformer.h.0.mlp.fc_in.bias"),
        (FALCON, None),
        (FALCON_ALIBI, "transformer.h.0.mlp.dense_h_to_4h.bias"),
        (STARCODER2, "model.layers.0.mlp.c_fc.bias"),
    ],
)
def test_the_activation_adds_the_bias_of_the_product_before_it(config, bias):
    ops = build_model(config).stages[2].ops
    (activate,) = [op for op in ops if isinstance(op, Activate)]
    assert [param.name for param in activate.params] == [name for name in (bias,) if name]
    (product,) = [op for op in ops if isinstance(op, Linear) and op.dst == activate.dst]
    assert product.bias is None


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (
            GPTJ,
            {
                "n_embd": "hidden_size", "n_layer": "num_hidden_layers",
                "n_head": "num_attention_heads", "n_positions": "max_position_embeddings",
            },
        ),
        (
            FALCON_NEW,
            {
                "hidden_size": "n_embed", "num_hidden_layers": "n_layer",
                "num_attention_heads": "n_head", "num_kv_heads": "n_head_kv",
            },
        ),
    ],
)  # fmt: skip
def test_other_spellings_of_sizes(config, names):
    other = {names.get(key, key): value for key, value in config.items()}
    assert _shapes(build_model(other)) == _shapes(build_model(config))


@pytest.mark.parametrize(
    ("config", "num_masks"),
    [
        (LLAMA, 1),
        (MISTRAL, 1),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 1}, 2),
        (BLOOM, 4),
        (FALCON, 1),
        (FALCON_ALIBI, 4),
    ],
)
def test_masks_that_a_row_keeps(config, num_masks):
    assert build_model(config).num_bias_heads == num_masks


@pytest.mark.parametrize(
    ("config", "num_kv_heads"), [(FALCON, 1), (FALCON_NEW, 2), (FALCON_ALIBI, 4)]
)
def test_key_value_heads_of_the_falcon_forms(config, num_kv_heads):
    assert {plane.num_heads for plane in build_model(config).kv_planes} == {num_kv_heads}
    # Saved configs may hold a count that a multi-query model has no use for.
    assert build_model(FALCON | {"num_kv_heads": 4}).kv_planes[0].num_heads == 1
