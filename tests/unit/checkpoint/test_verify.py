"""A flipped byte anywhere in a store is found and named."""

import hashlib
import json

import pytest

from tests.helpers.gguf_files import write_llama_gguf
from zeroinfer.checkpoint import convert_gguf, verify_store
from zeroinfer.errors import CheckpointError


@pytest.fixture
def store(tmp_path):
    write_llama_gguf(tmp_path / "m.gguf", tokenizer="smollm")
    return convert_gguf(tmp_path / "m.gguf", tmp_path)


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def test_an_intact_store_passes_in_silence(store, capfd):
    sizes = []
    verify_store(store, progress=lambda done, total: sizes.append((done, total)))
    assert sizes[-1][0] == sizes[-1][1] > 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json",
                                  "tokenizer_config.json", "model.safetensors.index.json",
                                  "model-00001-of-00001.safetensors"])  # fmt: skip
@pytest.mark.parametrize("position", [0, -1])
def test_a_flipped_byte_is_named_with_both_checksums(store, name, position):
    recorded = hashlib.sha256((store / name).read_bytes()).hexdigest()
    flip(store / name, position)
    found = hashlib.sha256((store / name).read_bytes()).hexdigest()
    with pytest.raises(CheckpointError) as caught:
        verify_store(store)
    assert f"{store / name} is damaged: sha256 is {found}, recorded {recorded}" in str(caught.value)


def test_a_changed_manifest_is_found(store):
    path = store / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["weight_bytes"] += 1
    path.write_text(json.dumps(manifest))
    with pytest.raises(
        CheckpointError, match=r"manifest\.json is damaged: sha256 is \w+, recorded"
    ):
        verify_store(store)


def test_any_flipped_byte_of_the_manifest_is_found(store):
    path = store / "manifest.json"
    good = path.read_bytes()
    for position in range(0, len(good) - 1, 41):
        flip(path, position)
        # White space may change into another kind of it without any meaning lost.
        if path.read_bytes().split() != good.split():
            with pytest.raises(CheckpointError, match=r"manifest\.json"):
                verify_store(store)
        path.write_bytes(good)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "not valid JSON"), (b"[]", "format_version None, need 1 or 2"),
     (b'{"format_version": 3}', "format_version 3, need 1 or 2")],
)  # fmt: skip
def test_a_strange_manifest_is_refused(store, content, message):
    (store / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        verify_store(store)


def test_other_folders_are_no_stores(tmp_path):
    with pytest.raises(CheckpointError, match=r"is no store: manifest\.json is missing"):
        verify_store(tmp_path)
    with pytest.raises(CheckpointError, match="is no store"):
        verify_store(tmp_path / "none")


def test_a_store_of_the_first_version_is_still_read(store, tmp_path):
    path = store / "manifest.json"
    body = json.loads(path.read_text())
    del body["sha256"], body["stripes"]
    body["format_version"] = 1
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    body["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(body, indent=2))
    verify_store(store)
    assert convert_gguf(tmp_path / "m.gguf", tmp_path) == store
