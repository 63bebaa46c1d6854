import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.scripted_model import SCRIPT, SCRIPT_PROMPT, script_ids, write_scripted_model
from tests.helpers.tokenizers import EOT_ID, byte_ids, s_tok
from zeroinfer.tokenization import Tokenizer


def test_the_oracle_follows_the_script_to_its_end_id(tmp_path):
    """Source: vllm-project/vllm#4180."""
    folder = write_scripted_model(tmp_path)
    tokenizer = Tokenizer.open(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([tokenizer.encode(SCRIPT_PROMPT)])
    ids = model.generate(prompt, max_new_tokens=40, do_sample=False)[0, 1:].tolist()
    assert ids == script_ids()
    assert ids[-1] == EOT_ID
    assert tokenizer.decode(ids) == SCRIPT


def test_a_chain_may_use_merged_tokens(tmp_path):
    chain = [*byte_ids("Qa"), 260, EOT_ID]
    options = {"chain": chain, "tokenizer": s_tok(merges=[(b"c", b"d")])}
    folder = write_scripted_model(tmp_path, **options, generation_eos=None)
    assert not (folder / "generation_config.json").exists()
    assert Tokenizer.open(folder).decode(chain) == "Qacd"


def test_a_chain_that_repeats_an_id_is_refused(tmp_path):
    with pytest.raises(ValueError, match="chain repeats an id"):
        write_scripted_model(tmp_path, chain=byte_ids("aba"))
