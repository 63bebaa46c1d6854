"""Config and tensor table of the llama architecture, and what of it is refused."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.helpers.gguf_files import HIDDEN, write_llama_gguf
from zeroinfer.checkpoint.gguf_config import gguf_shape
from zeroinfer.checkpoint.gguf_reader import open_gguf
from zeroinfer.checkpoint.gguf_tensors import map_tensors
from zeroinfer.errors import CheckpointError, UnsupportedModelError


def config_of(tmp_path, **options):
    write_llama_gguf(tmp_path / "m.gguf", **options)
    file = open_gguf(tmp_path / "m.gguf")
    shape = gguf_shape(file)
    map_tensors(file, shape.config, sizes=shape.sizes)
    return shape.config


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "phi3"}, "general.architecture 'phi3', need one of 'llama'"),
        ({"llama.expert_count": 8}, "llama.expert_count 8"),
        ({"split.count": 3}, "is one part of 3, need the whole model; join the parts"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8, need .* 16"),
        ({"llama.attention.value_length": 8}, "value_length is 8, need .* 16"),
        ({"llama.rope.scaling.type": "longrope"}, "scaling.type is 'longrope'"),
        (
            {"llama.rope.scaling.attn_factor": 2.0},
            "llama.rope.scaling.attn_factor 2.0, need 1.0",
        ),
    ],
)
def test_unsupported_metadata_is_refused_by_name(tmp_path, metadata, message):
    with pytest.raises(UnsupportedModelError, match=message):
        config_of(tmp_path, metadata=metadata)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 0}, "llama.block_count is 0"),
        ({"llama.block_count": 3}, r"blk\.2\.attn_norm\.weight is missing"),
        ({"llama.feed_forward_length": 128}, r"ffn_gate\.weight has shape \[96, 64\], need \[128"),
        ({"llama.feed_forward_length": [96, 96]}, "feed_forward_length is .* need int"),
        ({"llama.attention.head_count_kv": 3}, "head_count 4 is no multiple of head_count_kv 3"),
        ({"llama.attention.key_length": 15, "llama.attention.value_length": 15,
          "llama.rope.dimension_count": 15}, "head size is 15, need an even"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "rms_epsilon is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": "no"}, "rms_epsilon is 'no', need float"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_by_name(tmp_path, metadata, message):
    with pytest.raises(CheckpointError, match=message):
        config_of(tmp_path, metadata=metadata)


@pytest.mark.parametrize(
    "name",
    ["token_embd.weight", "blk.1.attn_v.weight", "output_norm.weight", "blk.0.ffn_down.weight"],
)
def test_missing_tensor_is_refused_by_name(tmp_path, name):
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        config_of(tmp_path, drop=[name])


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "blk.2.attn_v.weight"])
def test_tensor_without_a_place_is_refused_by_name(tmp_path, name):
    with pytest.raises(UnsupportedModelError, match=name):
        config_of(tmp_path, tensors={name: np.ones(16, np.float32)})


def test_biases_on_some_projections_are_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="biases on attn_q, attn_k, attn_v alone"):
        config_of(tmp_path, biases=True, drop=["blk.0.attn_output.bias"])


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({}, None),
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scale_linear": 1.0}, None),
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5},
         {"rope_type": "linear", "factor": 2.5}),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
          "llama.rope.scaling.original_context_length": 32},
         {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
    ],
)  # fmt: skip
def test_rope_scaling(tmp_path, metadata, scaling):
    assert config_of(tmp_path, metadata=metadata)["rope_scaling"] == scaling


def llama3_divisors(scaling, *, base, head_dim):
    """What a converter puts into rope_freqs.weight, by transformers' own frequencies."""
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim,
                         max_position_embeddings=131072,
                         rope_parameters={"rope_theta": base, **scaling})  # fmt: skip
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return (plain / scaled).numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama3_scaling_is_found_from_the_divisors(tmp_path, factor, head_dim):
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    divisors = llama3_divisors(scaling, base=500000.0, head_dim=head_dim)
    config = config_of(tmp_path, head_dim=head_dim, tensors={"rope_freqs.weight": divisors},
                       metadata={"llama.rope.freq_base": 500000.0})  # fmt: skip
    found = config["rope_scaling"]
    assert found.pop("rope_type") == scaling.pop("rope_type")
    assert found == pytest.approx(scaling, rel=1e-3)


def test_divisors_of_one_mean_no_scaling(tmp_path):
    ones = np.ones(8, np.float32)
    assert config_of(tmp_path, tensors={"rope_freqs.weight": ones})["rope_scaling"] is None


def test_other_divisors_are_refused(tmp_path):
    odd = np.linspace(1, 5, 8, dtype=np.float32)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight follow no known"):
        config_of(tmp_path, tensors={"rope_freqs.weight": odd})


def test_divisors_of_another_length_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has shape \[7\], need \[8\]"):
        config_of(tmp_path, tensors={"rope_freqs.weight": np.ones(7, np.float32)})


def test_head_is_tied_only_without_an_output_matrix(tmp_path):
    assert config_of(tmp_path, tied=True)["tie_word_embeddings"] is True
    assert config_of(tmp_path, tied=False)["tie_word_embeddings"] is False
    assert config_of(tmp_path)["hidden_size"] == HIDDEN
