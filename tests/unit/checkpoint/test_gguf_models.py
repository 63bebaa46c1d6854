"""Every architecture and every encoding: the store holds what went into the GGUF file."""

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import save_tiny
from tests.helpers.gguf_models import write_mixed_gguf, write_model_gguf
from zeroinfer.checkpoint import convert_gguf
from zeroinfer.checkpoint.gguf_config import gguf_shape
from zeroinfer.checkpoint.gguf_reader import open_gguf
from zeroinfer.checkpoint.gguf_tensors import map_tensors
from zeroinfer.diskformat import open_checkpoint
from zeroinfer.errors import CheckpointError, UnsupportedModelError

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gpt2"]


def decodable():
    """Encodings that the package decodes, found without the code under test."""
    names = []
    for kind, (_, group_bytes) in gguf.GGML_QUANT_SIZES.items():
        try:
            dequantize(np.zeros((1, group_bytes), np.uint8), kind)
        except NotImplementedError:
            continue
        names.append(kind.name)
    return names


def read_store(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= {name: tensor.numpy() for name, tensor in load_file(path).items()}
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_tensors_come_back_under_their_names(tmp_path, family, tied):
    folder = save_tiny(tmp_path / "hf", family, tie_word_embeddings=tied)
    write_model_gguf(tmp_path / "m.gguf", folder)
    store = convert_gguf(tmp_path / "m.gguf", tmp_path)
    expected, found = read_store(folder), read_store(store)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    config = open_checkpoint(store).config
    assert config["model_type"] == family
    assert config["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in found) is not tied


@pytest.mark.parametrize("family", FAMILIES)
def test_config_says_what_the_model_is(tmp_path, family):
    folder = save_tiny(tmp_path / "hf", family)
    write_model_gguf(tmp_path / "m.gguf", folder)
    found = open_checkpoint(convert_gguf(tmp_path / "m.gguf", tmp_path)).config
    published = open_checkpoint(folder).config
    for key in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "sliding_window", "head_dim",
                "max_position_embeddings", "n_embd", "n_positions", "layer_norm_epsilon",
                "activation_function", "architectures"):  # fmt: skip
        if key in published and key in found and published[key] is not None:
            assert found[key] == published[key], key
    assert found.get("sliding_window") == (8 if family == "mistral" else None)


def test_every_encoding_the_package_decodes_is_converted(tmp_path):
    kinds = decodable()
    assert len(kinds) >= 20
    assert {"F32", "F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q6_K", "IQ1_S", "IQ4_XS"} <= set(
        kinds
    )
    expected = write_mixed_gguf(tmp_path / "m.gguf", kinds)
    found = read_store(convert_gguf(tmp_path / "m.gguf", tmp_path))
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_gpt2_head_written_twice_is_tied(tmp_path):
    folder = save_tiny(tmp_path / "hf", "gpt2")
    write_model_gguf(tmp_path / "m.gguf", folder, repeats_embedding=True)
    store = convert_gguf(tmp_path / "m.gguf", tmp_path)
    assert open_checkpoint(store).config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in read_store(store)


def test_gpt2_head_of_its_own_is_kept(tmp_path):
    folder = save_tiny(tmp_path / "hf", "gpt2")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = 2 * tensors["transformer.wte.weight"]
    save_file(tensors, folder / "model.safetensors")
    write_model_gguf(tmp_path / "m.gguf", folder)
    store = convert_gguf(tmp_path / "m.gguf", tmp_path)
    assert open_checkpoint(store).config["tie_word_embeddings"] is False
    np.testing.assert_array_equal(
        read_store(store)["lm_head.weight"], tensors["lm_head.weight"].numpy()
    )


def shape_of(tmp_path, family, **options):
    folder = save_tiny(tmp_path / "hf", family)
    write_model_gguf(tmp_path / "m.gguf", folder, **options)
    file = open_gguf(tmp_path / "m.gguf")
    shape = gguf_shape(file)
    map_tensors(file, shape.config, sizes=shape.sizes)
    return shape.config


@pytest.mark.parametrize(
    ("family", "metadata", "message"),
    [
        ("qwen2", {"attention.sliding_window": 8}, r"qwen2\.attention\.sliding_window 8, need 0"),
        ("qwen3", {"expert_count": 4}, r"qwen3\.expert_count 4, need 0"),
        ("llama", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping 30\.0, need 0\.0"),
    ],
)
def test_what_changes_the_mathematics_is_refused(tmp_path, family, metadata, message):
    with pytest.raises(UnsupportedModelError, match=message):
        shape_of(tmp_path, family, metadata=metadata)


@pytest.mark.parametrize(
    ("family", "metadata", "message"),
    [
        ("gpt2", {"attention.head_count": 5}, "embedding_length 32 is no multiple of .* 5"),
        ("gpt2", {"context_length": 64}, r"position_embd\.weight has shape \[128, 32\], need"),
        ("qwen3", {"attention.head_count": 3}, "head_count 3 is no multiple of head_count_kv 2"),
        ("qwen2", {"feed_forward_length": 32}, r"ffn_gate\.weight has shape \[64, 32\], need"),
    ],
)
def test_contradictions_are_refused(tmp_path, family, metadata, message):
    with pytest.raises(CheckpointError, match=message):
        shape_of(tmp_path, family, metadata=metadata)


def test_yarn_of_qwen2(tmp_path):
    folder = save_tiny(tmp_path / "hf", "qwen2")
    metadata = {"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    write_model_gguf(tmp_path / "m.gguf", folder, metadata=metadata)
    file = open_gguf(tmp_path / "m.gguf")
    metadata = {**file.metadata, "qwen2.rope.scaling.type": "yarn"}
    config = gguf_shape(type(file)(path=file.path, metadata=metadata, tensors=file.tensors)).config
    assert config["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
