import os
import shutil
import subprocess
import sys

import pytest

import zeroinfer.engine.placing
from zeroinfer.cli import main
from zeroinfer.cli.model import open_model
from zeroinfer.cli.options import EngineOptions
from zeroinfer.errors import ConfigError, StorageError


def test_default_model_needs_a_folder():
    with pytest.raises(ConfigError, match="got no --nvme"):
        open_model(EngineOptions())


@pytest.fixture
def embedded(monkeypatch, scripted_folder):
    monkeypatch.setattr(
        zeroinfer.engine.placing,
        "prepare_embedded_model",
        lambda folder, **options: scripted_folder,
    )


def test_default_model_keeps_two_fifths_in_memory(embedded, tmp_path):
    opened = open_model(EngineOptions(nvme=[tmp_path]))
    assert opened.is_embedded
    assert opened.config.offload.dram_weights == int(opened.checkpoint.total_bytes * 0.4)


@pytest.mark.parametrize("extra", [{"weights": "nvme"}, {"dram_weights": "1GiB"}])
def test_default_model_obeys_the_user(embedded, tmp_path, extra):
    config = open_model(EngineOptions(nvme=[tmp_path], **extra)).config
    assert config.offload.dram_weights == (1 << 30 if "dram_weights" in extra else None)


def test_own_model_takes_the_default_folder(monkeypatch, tmp_path, scripted_folder):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = open_model(EngineOptions(model=str(scripted_folder))).config
    assert config.io.nvme == (tmp_path / ".cache" / "zeroinfer",)
    assert config.offload.dram_weights is None


def test_several_folders(tmp_path, scripted_folder):
    names = ("a, b", "[c]", "it's", "\u00e9\U0001f600", "a\nb", "\udcff", "x" * 200 + " y")
    folders = [tmp_path / name for name in names]
    config = open_model(EngineOptions(model=str(scripted_folder), nvme=folders)).config
    assert config.io.nvme == tuple(folders)


def test_full_file_system_is_named(monkeypatch, tmp_path, scripted_folder):
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(StorageError, match=r"file system of .* is full: got 1\.0 MiB free"):
        open_model(EngineOptions(model=str(scripted_folder), nvme=[tmp_path]))


def without_roots_rights():
    """Return the words before a command that make file modes count; none for a plain user."""
    if os.geteuid() != 0:
        return []
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    probe = [*user, sys.executable, "-c", "import zeroinfer.cli"]
    if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        return user
    # The program lies where only root may read; then root goes without the right to ignore modes.
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]


def test_folder_without_permission_is_refused_at_once(tmp_path, scripted_folder):
    """Source: huggingface/transformers#16616."""
    tmp_path.chmod(0o755)
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    code = "import sys; from zeroinfer.cli import main; sys.exit(main(sys.argv[1:]))"
    args = ["--model", str(scripted_folder), "--nvme", str(folder / "store")]
    done = subprocess.run(
        [*without_roots_rights(), sys.executable, "-c", code, *args, "--input", "none.jsonl"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert f"cannot write to {folder}" in done.stderr
    assert "as user " in done.stderr
    assert done.stderr.count("\n") == 1


def test_no_torch_before_the_folders_are_checked(tmp_path, scripted_folder):
    """What makes the refusal quick: importing torch alone takes about two seconds."""
    file = tmp_path / "file"
    file.touch()
    code = """
import sys
from zeroinfer.cli import main
code = main(sys.argv[1:])
sys.exit(99 if "torch" in sys.modules else code)
"""
    args = ["--model", str(scripted_folder), "--nvme", str(file)]
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, check=False
    )
    assert done.returncode == 4, done.stderr
    assert f"cannot write to {file}" in done.stderr


def test_missing_model_is_named(tmp_path, capsys):
    assert main(["--model", str(tmp_path / "none"), "--nvme", str(tmp_path)]) == 4
    assert str(tmp_path / "none") in capsys.readouterr().err
