import json

import pytest

from zeroinfer.errors import CheckpointError
from zeroinfer.tokenization.files import read_tokenizer_files


def write(folder, name, document):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document))


def test_an_empty_folder_has_nothing(tmp_path):
    files = read_tokenizer_files(tmp_path)
    assert not files.has_tokenizer_json
    assert not files.has_slow_files
    assert files.special_tokens == files.chat_templates == {}


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "vocab.txt"])
def test_vocabulary_files_are_seen(tmp_path, name):
    write(tmp_path, name, "x")
    assert read_tokenizer_files(tmp_path).has_slow_files


def test_templates_of_their_own_files_win(tmp_path):
    write(tmp_path, "chat_template.json", {"chat_template": "processor"})
    assert read_tokenizer_files(tmp_path).chat_templates == {"default": "processor"}
    write(tmp_path, "tokenizer_config.json", {"chat_template": "config"})
    assert read_tokenizer_files(tmp_path).chat_templates == {"default": "config"}
    write(tmp_path, "chat_template.jinja", "file")
    assert read_tokenizer_files(tmp_path).chat_templates == {"default": "file"}
    write(tmp_path, "additional_chat_templates/rag.jinja", "other")
    assert read_tokenizer_files(tmp_path).chat_templates == {"default": "file", "rag": "other"}


@pytest.mark.parametrize(
    "value",
    [[{"name": "default", "template": "a"}, {"name": "b", "template": "c"}],
     {"default": "a", "b": "c"}],
)  # fmt: skip
def test_named_templates_in_both_spellings(tmp_path, value):
    write(tmp_path, "tokenizer_config.json", {"chat_template": value})
    assert read_tokenizer_files(tmp_path).chat_templates == {"default": "a", "b": "c"}


@pytest.mark.parametrize("value", [3, ["a"], [{"name": "default"}], {"default": 1}])
def test_a_template_of_another_form_is_refused(tmp_path, value):
    write(tmp_path, "tokenizer_config.json", {"chat_template": value})
    with pytest.raises(CheckpointError, match=r"chat_template in .*tokenizer_config\.json"):
        read_tokenizer_files(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[]", "got list, need an object"),
        (b"\xff", "cannot be read"),
    ],
)
def test_a_config_that_is_no_json_object_is_refused(tmp_path, content, message):
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_tokenizer_files(tmp_path)
