import pytest

from zeroinfer.errors import CheckpointError
from zeroinfer.models import build_model

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("eps", ["x", [1], True, -1e-5, 0, float("nan"), float("inf")])
def test_an_epsilon_is_a_positive_number(eps):
    with pytest.raises(CheckpointError, match=r"rms_norm_eps is .*, need a positive number"):
        build_model(LLAMA | {"rms_norm_eps": eps})
