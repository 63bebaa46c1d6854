import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.helpers.tokenizers import (
    BEGIN_TEMPLATE,
    BOS_ID,
    EOS_ID,
    EOT_ID,
    gpt2_like_tok,
    metaspace_tok,
    s_tok,
    write_tokenizer,
)
from zeroinfer.errors import CheckpointError, RequestError
from zeroinfer.tokenization import Tokenizer

HI = [74, 75]


def open_tokenizer(folder, **options):
    return Tokenizer.open(write_tokenizer(folder, **options))


def chat(content):
    return [{"role": "user", "content": content}]


def test_a_folder_without_tokenizer_files_gives_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.open(tmp_path) is None


@pytest.mark.parametrize("text", ["not json", "{}", '{"model": {"type": "Nothing"}}'])
def test_a_broken_tokenizer_json_is_named(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no tokenizer"):
        Tokenizer.open(tmp_path)


def test_ids_names_and_size(tmp_path):
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.encode("hi") == HI
    assert tokenizer.decode([BOS_ID, *HI, EOT_ID]) == "hi"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS_ID, EOS_ID)
    assert tokenizer.vocab_size == 260
    assert tokenizer.id_to_token(EOT_ID) == "<eot>"
    assert tokenizer.token_to_id("<eot>") == EOT_ID


def test_ids_outside_the_vocabulary_have_no_text(tmp_path):
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.decode([263, *HI]) == "hi"
    assert tokenizer.id_to_token(263) is None
    assert tokenizer.id_to_token(-1) is None
    assert tokenizer.token_to_id("nothing") is None


def test_an_empty_prompt_has_no_ids_without_begin_token(tmp_path):
    """Source: vllm-project/vllm#7283."""
    assert open_tokenizer(tmp_path).encode("") == []
    assert open_tokenizer(tmp_path, begin=True).encode("") == [BOS_ID]


@pytest.mark.parametrize("text", ["hi", "<s>hi", "<s><s>hi"])
def test_a_prompt_has_one_begin_token(tmp_path, text):
    """Source: vllm-project/vllm#9519."""
    assert open_tokenizer(tmp_path, begin=True).encode(text) == [BOS_ID, *HI]


@pytest.mark.parametrize("content", ["hi", "<s>hi"])
@pytest.mark.parametrize("begin", [True, False])
def test_a_chat_has_one_begin_token(tmp_path, content, begin):
    """Source: vllm-project/vllm#9519."""
    tokenizer = open_tokenizer(tmp_path, begin=begin, chat_template=BEGIN_TEMPLATE)
    assert tokenizer.encode_chat(chat(content)) == [BOS_ID, *HI]


def test_a_chat_template_without_begin_token_adds_none(tmp_path):
    template = "{{ messages[0]['content'] }}"
    tokenizer = open_tokenizer(tmp_path, begin=True, chat_template=template)
    assert tokenizer.encode_chat(chat("hi")) == HI
    assert tokenizer.encode_chat(chat("<s>hi")) == [BOS_ID, *HI]


def test_begin_tokens_inside_a_prompt_stay(tmp_path):
    tokenizer = open_tokenizer(tmp_path, begin=True)
    assert tokenizer.encode("hi<s><s>") == [BOS_ID, *HI, BOS_ID, BOS_ID]


def test_without_special_tokens_the_text_is_taken_as_written(tmp_path):
    tokenizer = open_tokenizer(tmp_path, begin=True)
    assert tokenizer.encode("hi", add_special_tokens=False) == HI
    assert tokenizer.encode("<s><s>hi", add_special_tokens=False) == [BOS_ID, BOS_ID, *HI]


def test_the_begin_token_is_found_without_tokenizer_config(tmp_path):
    s_tok(begin=True).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.open(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS_ID, None)
    assert tokenizer.encode("<s>hi") == [BOS_ID, *HI]


def test_special_tokens_are_read_from_the_old_map_and_in_both_spellings(tmp_path):
    s_tok().save(str(tmp_path / "tokenizer.json"))
    old = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "<eot>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(old))
    tokenizer = Tokenizer.open(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS_ID, EOT_ID)


def test_a_named_special_token_has_no_text_even_if_the_vocabulary_forgot(tmp_path):
    inner = s_tok(merges=[(b"e", b"n")])
    special = {"eos_token": "en", "pad_token": "absent from the vocabulary"}
    tokenizer = open_tokenizer(tmp_path, tokenizer=inner, special_tokens=special)
    assert tokenizer.eos_token_id == 260
    assert tokenizer.decode([*HI, 260]) == "hi"
    assert tokenizer.vocab_size == 261


def test_stored_truncation_and_padding_are_switched_off(tmp_path):
    inner = s_tok()
    inner.enable_truncation(2)
    inner.enable_padding(length=8, pad_token="<pad>")
    tokenizer = open_tokenizer(tmp_path, tokenizer=inner)
    assert tokenizer.encode("h") == HI[:1]
    assert len(tokenizer.encode("hihihi")) == 6


def test_a_lone_surrogate_is_an_error_of_its_row(tmp_path):
    tokenizer = open_tokenizer(tmp_path)
    with pytest.raises(RequestError, match=r"got '\\ud800' at character 2"):
        tokenizer.encode("hi\ud800")


@pytest.mark.parametrize("make", [s_tok, gpt2_like_tok])
@given(text=st.text(max_size=40))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_byte_level_text_survives(tmp_path_factory, make, text):
    tokenizer = open_tokenizer(tmp_path_factory.mktemp("tok"), tokenizer=make())
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("make", [gpt2_like_tok, metaspace_tok])
@pytest.mark.parametrize("text", ["hello world.", "  two  spaces", "\u00e9\u4f60\U0001f600 hello"])
def test_ids_equal_transformers(tmp_path, make, text):
    tokenizer = open_tokenizer(tmp_path, tokenizer=make())
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode(text)
    assert ids == oracle.encode(text)
    assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def write_slow(folder, tokenizer_class, last_merge="h i"):
    vocab = {"<unk>": 0, "h": 1, "i": 2, "hi": 3, "hi</w>": 4, "<|endoftext|>": 5}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text(f"#version: 0.2\n{last_merge}\n")
    document = {"tokenizer_class": tokenizer_class}
    (folder / "tokenizer_config.json").write_text(json.dumps(document))


def test_vocabulary_files_without_tokenizer_json_are_converted(tmp_path):
    write_slow(tmp_path, "GPT2Tokenizer")
    tokenizer = Tokenizer.open(tmp_path)
    assert type(tokenizer._backend).__name__ == "FastBackend"
    assert tokenizer.encode("hi") == [3]
    assert tokenizer.decode([3, 5]) == "hi"
    assert tokenizer.token_to_id("<|endoftext|>") == tokenizer.eos_token_id == 5


def test_a_tokenizer_that_only_transformers_has_serves_too(tmp_path):
    write_slow(tmp_path, "CTRLTokenizer", "h i</w>")
    tokenizer = Tokenizer.open(tmp_path)
    assert type(tokenizer._backend).__name__ == "SlowBackend"
    ids = tokenizer.encode("hi")
    assert ids
    assert tokenizer.decode([*ids, 99]) == "hi"
    assert tokenizer.special_ids <= {0}
    assert tokenizer.id_to_token(99) is None
    assert tokenizer.id_to_token(3) == "hi"
    assert tokenizer.token_to_id("h") == 1
    assert tokenizer.token_to_id("absent") is None
    assert tokenizer.vocab_size == 6


def test_merges_outside_the_vocabulary_are_refused(tmp_path):
    write_slow(tmp_path, "GPT2Tokenizer", "h j")
    with pytest.raises(CheckpointError, match="cannot be converted"):
        Tokenizer.open(tmp_path)


def test_vocabulary_files_that_cannot_be_converted_are_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"no sentencepiece model")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(CheckpointError, match="cannot be converted"):
        Tokenizer.open(tmp_path)


def test_opening_loads_neither_torch_nor_transformers(tmp_path):
    write_tokenizer(tmp_path, chat_template=BEGIN_TEMPLATE)
    program = (
        "import sys; from pathlib import Path; from zeroinfer.tokenization import *;"
        "tokenizer = Tokenizer.open(Path(sys.argv[1]));"
        "assert 'jinja2' not in sys.modules;"
        "tokenizer.encode_chat([{'role': 'user', 'content': 'hi'}]);"
        "TextStream(tokenizer).push(74);"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
