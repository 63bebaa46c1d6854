from types import SimpleNamespace

import pytest

from zeroinfer.errors import CheckpointError
from zeroinfer.tokenization import eos_token_ids

TOKENIZER = SimpleNamespace(eos_token_id=7)


@pytest.mark.parametrize(
    ("config", "generation_config", "tokenizer", "expected"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": [2, 259]}, TOKENIZER, {2, 259}),
        ({"eos_token_id": 2}, {"eos_token_id": 3}, TOKENIZER, {3}),
        ({"eos_token_id": 2}, {}, TOKENIZER, {2}),
        ({"eos_token_id": [2, 0]}, {"eos_token_id": None}, None, {2, 0}),
        ({"text_config": {"eos_token_id": 4}}, {}, TOKENIZER, {4}),
        ({"eos_token_id": None}, {}, TOKENIZER, {7}),
        ({}, {}, SimpleNamespace(eos_token_id=None), set()),
        ({}, {}, None, set()),
    ],
)
def test_the_first_source_that_names_ids_counts(config, generation_config, tokenizer, expected):
    """Source: vllm-project/vllm#4180."""
    assert eos_token_ids(config, generation_config, tokenizer) == expected


@pytest.mark.parametrize("value", ["</s>", [2, "3"], -1, True, 2.0])
def test_an_entry_that_is_no_id_is_refused(value):
    with pytest.raises(CheckpointError, match=r"eos_token_id of generation_config\.json"):
        eos_token_ids({}, {"eos_token_id": value}, None)
