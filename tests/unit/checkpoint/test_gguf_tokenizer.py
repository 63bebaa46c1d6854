"""Tokenizers built from metadata: splits, special tokens, templates, refusals."""

import json
import logging

import pytest
from tokenizers import Tokenizer

from tests.helpers.gguf_files import byte_vocabulary, write_llama_gguf
from zeroinfer.checkpoint.gguf_bpe import _SPLITS
from zeroinfer.checkpoint.gguf_reader import open_gguf
from zeroinfer.checkpoint.gguf_tokenizer import special_token_ids, tokenizer_documents
from zeroinfer.errors import CheckpointError, UnsupportedModelError

TOKENS = byte_vocabulary()[0]


def documents_of(tmp_path, *, tokenizer="smollm", **metadata):
    metadata = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    write_llama_gguf(tmp_path / "m.gguf", tokenizer=tokenizer, metadata=metadata)
    return tokenizer_documents(open_gguf(tmp_path / "m.gguf"))


def build(tmp_path, **options):
    documents = documents_of(tmp_path, **options)
    config = json.loads(documents["tokenizer_config.json"])
    return Tokenizer.from_str(documents["tokenizer.json"].decode()), config


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("smollm", ["hello", "\u0120wo", "1", "2", "3"]),
        ("gpt-2", ["hello", "\u0120wo", "12", "3"]),
        ("llama-bpe", ["hello", "\u0120wo", "12", "3"]),
        ("qwen2", ["hello", "\u0120wo", "1", "2", "3"]),
        ("default", ["hello", "\u0120wo", "12", "3"]),
        ("tekken", ["hello", "\u0120wo", "1", "2", "3"]),
        ("deepseek-coder", ["hello", "\u0120wo", "1", "2", "3"]),
        ("falcon", ["hello", "\u0120wo", "12", "3"]),
        ("smaug-bpe", ["hello", "\u0120wo", "12", "3"]),
    ],
)
def test_digits_split_as_the_name_says(tmp_path, pre, tokens):
    tokenizer, _ = build(tmp_path, tokenizer=pre, add_bos_token=False)
    assert tokenizer.encode("hello wo123").tokens == tokens
    assert tokenizer.decode(tokenizer.encode("hello wo123").ids) == "hello wo123"


@pytest.mark.parametrize("pre", sorted(_SPLITS))
@pytest.mark.parametrize(
    "text", ["", " ", "h\u00e9llo \U0001f600\n\n\tx = {1: 'a'}  # 42", "  a  b\r\n"]
)
def test_text_comes_back(tmp_path, pre, text):
    tokenizer, _ = build(tmp_path, tokenizer=pre, add_bos_token=False)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_control_tokens_are_special_and_keep_their_ids(tmp_path):
    tokenizer, config = build(tmp_path)
    encoding = tokenizer.encode("<|im_start|>hello<|im_end|>")
    assert encoding.ids == [1, TOKENS.index("hello"), 2]
    assert tokenizer.decode(encoding.ids) == "hello"
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.get_vocab_size() == len(TOKENS)


def test_user_defined_tokens_stay_in_the_text(tmp_path):
    types = [3, 3, 4] + [1] * (len(TOKENS) - 3)
    tokenizer, _ = build(tmp_path, token_type=types)
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>").ids) == "a<|im_end|>"
    assert tokenizer.encode("a<|im_end|>").ids[-1] == 2


@pytest.mark.parametrize(
    ("metadata", "first", "last"),
    [
        ({"tokenizer": "smollm"}, [], []),
        ({"tokenizer": "llama-bpe"}, [1], []),
        ({"tokenizer": "llama-bpe", "add_bos_token": False}, [], []),
        ({"tokenizer": "smollm", "add_bos_token": True, "add_eos_token": True}, [1], [2]),
        ({"tokenizer": "smollm", "add_eos_token": True}, [], [2]),
    ],
)
def test_begin_and_end_tokens(tmp_path, metadata, first, last):
    tokenizer, config = build(tmp_path, **metadata)
    assert tokenizer.encode("hello").ids == [*first, TOKENS.index("hello"), *last]
    assert (config["add_bos_token"], config["add_eos_token"]) == (bool(first), bool(last))


def test_chat_template_is_handed_on(tmp_path):
    metadata = {"tokenizer.chat_template": "{{ messages[0].content }}"}
    write_llama_gguf(tmp_path / "m.gguf", tokenizer="smollm", metadata=metadata)
    documents = tokenizer_documents(open_gguf(tmp_path / "m.gguf"))
    config = json.loads(documents["tokenizer_config.json"])
    assert config["chat_template"] == "{{ messages[0].content }}"


def test_without_a_tokenizer_there_are_no_files(tmp_path):
    assert documents_of(tmp_path, tokenizer=None) == {}


def test_missing_split_is_said_and_taken_as_default(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "zeroinfer"):
        tokenizer, _ = build(tmp_path, pre=None)
    assert "does not say how text is split" in caplog.text
    assert tokenizer.encode("123").tokens == ["12", "3"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"pre": "mystery"}, "tokenizer.ggml.pre 'mystery', need one of .*smollm"),
        ({"model": "bert"}, "tokenizer.ggml.model 'bert', need 'gpt2'"),
    ],
)
def test_unknown_kinds_are_refused_by_name(tmp_path, metadata, message):
    with pytest.raises(UnsupportedModelError, match=message):
        documents_of(tmp_path, **metadata)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokens": [*TOKENS[:-1], "a"]}, "1 tokens twice"),
        ({"token_type": [1, 1]}, "token_type has 2 entries, need 266"),
        ({"merges": ["he"]}, "merges holds 'he', need two parts"),
        ({"merges": ["x y"]}, "tokenizer.ggml.merges: .*xy"),
        ({"eos_token_id": 9999}, "eos_token_id is 9999, need an id below 266"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens holds int, need str alone"),
        ({"merges": [1, 2]}, "tokenizer.ggml.merges holds int, need str alone"),
        ({"token_type": ["a"] * len(TOKENS)}, "token_type holds str, need int alone"),
    ],
)
def test_contradictions_are_refused(tmp_path, metadata, message):
    with pytest.raises(CheckpointError, match=message):
        documents_of(tmp_path, **metadata)


def test_special_ids(tmp_path):
    write_llama_gguf(tmp_path / "m.gguf", tokenizer="smollm",
                     metadata={"tokenizer.ggml.eom_token_id": 2})  # fmt: skip
    ids = special_token_ids(open_gguf(tmp_path / "m.gguf"))
    assert ids == {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": 2}
