"""Sentencepiece tokenizers of GGUF files against sentencepiece's own way of joining pieces."""

import itertools
import json
import random

import gguf
import pytest
from tokenizers import Tokenizer

from zeroinfer.checkpoint.gguf_reader import open_gguf
from zeroinfer.checkpoint.gguf_tokenizer import tokenizer_documents
from zeroinfer.errors import CheckpointError

MARK = "\u2581"
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["he", "ll", "llo", "hello", f"{MARK}w", f"{MARK}wo", "rld", f"{MARK}world", "or", "ld",
         f"{MARK}he", f"{MARK}hello", MARK + MARK, "el", "lo", "o" + MARK]  # fmt: skip
LETTERS = [MARK, *"helowrd123."]
USER = ["[INST]", MARK * 4]
TOKENS = [*SPECIAL, *BYTES, *WORDS, *USER, *LETTERS]
SCORES = [0.0] * 259 + [-float(rank) for rank in range(len(WORDS) + len(USER) + len(LETTERS))]
KINDS = [2, 3, 3] + [6] * 256 + [1] * len(WORDS) + [4] * len(USER) + [1] * len(LETTERS)


def documents(tmp_path, **changes):
    values = {
        "model": "llama", "tokens": TOKENS, "scores": SCORES, "token_type": KINDS,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **changes,
    }  # fmt: skip
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint32("llama.context_length", 64)
    for key, value in values.items():
        kinds = {str: writer.add_string, list: writer.add_array, int: writer.add_uint32,
                 bool: writer.add_bool}  # fmt: skip
        if value is not None:
            kinds[type(value)](f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokenizer_documents(open_gguf(tmp_path / "m.gguf"))


def build(tmp_path, **changes):
    found = documents(tmp_path, **changes)
    config = json.loads(found["tokenizer_config.json"])
    return Tokenizer.from_str(found["tokenizer.json"].decode()), config


def joined(text):
    """Join neighbours with the best score until none is left; spell the rest in bytes."""
    score = {t: s for t, s, k in zip(TOKENS, SCORES, KINDS, strict=True) if k in (1, 4)}
    pieces = list((" " + text).replace(" ", MARK)) if text else []
    while True:
        unions = [(score.get(a + b), -i) for i, (a, b) in enumerate(itertools.pairwise(pieces))]
        best = max((u for u in unions if u[0] is not None), default=None)
        if best is None:
            break
        at = -best[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    ids = []
    for piece in pieces:
        known = piece in score
        ids += [TOKENS.index(piece)] if known else [3 + byte for byte in piece.encode()]
    return ids


def test_ids_are_those_of_sentencepiece(tmp_path):
    tokenizer, _ = build(tmp_path, add_bos_token=False)
    source = random.Random(0)
    texts = ["", " ", "hello world", "  hello", "h\u00e9llo \U0001f600", "123.o"]
    texts += ["".join(source.choices("helowrd  123.\u00e9", k=12)) for _ in range(300)]
    for text in texts:
        if MARK * 4 in (" " + text).replace(" ", MARK):
            continue
        assert tokenizer.encode(text).ids == joined(text), text


@pytest.mark.parametrize("text", ["hello world", "h\u00e9llo \U0001f600\n\tx", "a  b   c", " x"])
@pytest.mark.parametrize("prefix", [True, False])
def test_text_comes_back(tmp_path, text, prefix):
    tokenizer, _ = build(tmp_path, add_space_prefix=prefix)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_begin_token_is_added_unless_the_file_says_no(tmp_path):
    tokenizer, config = build(tmp_path)
    assert tokenizer.encode("hello").tokens == ["<s>", f"{MARK}hello"]
    assert (config["add_bos_token"], config["bos_token"]) == (True, "<s>")
    tokenizer, _ = build(tmp_path, add_bos_token=False)
    assert tokenizer.encode("hello").tokens == [f"{MARK}hello"]


def test_control_tokens_are_special_and_user_tokens_are_text(tmp_path):
    tokenizer, _ = build(tmp_path)
    encoding = tokenizer.encode("[INST]hello</s>")
    assert encoding.tokens == ["<s>", "[INST]", f"{MARK}hello", "</s>"]
    assert tokenizer.decode(encoding.ids) == "[INST] hello"


def test_user_tokens_of_spaces_are_found_in_a_text(tmp_path):
    tokenizer, _ = build(tmp_path, add_space_prefix=False)
    assert MARK * 4 in tokenizer.encode("hello    hello").tokens


def test_what_bytes_cannot_spell_is_unknown(tmp_path):
    kinds = [1 if kind == 6 else kind for kind in KINDS]
    tokenizer, _ = build(tmp_path, token_type=kinds, add_bos_token=False)
    assert tokenizer.encode("\u00e9").tokens == [MARK, "<unk>"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "tokenizer.ggml.scores is missing"),
        ({"scores": [0.0, 1.0]}, "tokenizer.ggml.scores has 2 entries, need"),
        ({"scores": ["a"] * len(TOKENS)}, "tokenizer.ggml.scores holds str, need float alone"),
        ({"scores": [*SCORES[1:], float("nan")]}, "tokenizer.ggml.scores holds a NaN"),
        ({"token_type": [6, *KINDS[1:]]}, "marks 257 tokens as bytes, need 256 or none"),
    ],
)
def test_contradictions_are_refused(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        documents(tmp_path, **changes)
