"""Model names: paths first, then the hub's cache, then the hub; no network here."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.raw_checkpoints import make_hub_cache, write_folder
from zeroinfer.checkpoint import resolve_model
from zeroinfer.errors import CheckpointError, StorageError

huggingface_hub = pytest.importorskip("huggingface_hub")
NAME = "org/name"


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "m", {"model.safetensors": {"a": ("F32", (4,))}})


@pytest.fixture
def hub(monkeypatch):
    """Let only the network half of snapshot_download be played by the test."""
    real = huggingface_hub.snapshot_download
    state = {"calls": 0, "answer": OSError("no route to host\nsecond line")}

    def fake(model, **kwargs):
        if kwargs["local_files_only"]:
            return real(model, **kwargs)
        state["calls"] += 1
        state["kwargs"] = kwargs
        if isinstance(state["answer"], Exception):
            raise state["answer"]
        return str(state["answer"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return state


def test_existing_path_wins(folder, tmp_path, monkeypatch, hub):
    monkeypatch.chdir(tmp_path)
    assert resolve_model(str(folder)) == folder
    assert resolve_model("m") == folder
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_model(NAME) == tmp_path / "org" / "name"
    assert hub["calls"] == 0


def test_home_is_expanded(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/m") == folder


def test_a_path_that_may_not_be_searched_is_a_storage_error(monkeypatch):
    def deny(_self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", deny)
    with pytest.raises(StorageError, match="'/x/y' cannot be looked at: Permission denied"):
        resolve_model("/x/y")


def test_file_is_returned_for_the_caller_to_judge(tmp_path):
    path = tmp_path / "x.gguf"
    path.touch()
    assert resolve_model(str(path)) == path


def test_dangling_link_is_left_to_the_opening(tmp_path):
    (tmp_path / "m").symlink_to("gone")
    assert resolve_model(str(tmp_path / "m")) == tmp_path / "m"


@pytest.mark.parametrize(
    "model", ["/no/such", "a/b/c", "./x", "", "no.gguf", "x y", "~no-such-user/x"]
)
def test_what_is_neither_path_nor_id(model, hub):
    with pytest.raises(CheckpointError, match="does not exist and is no hub id") as info:
        resolve_model(model)
    assert repr(model) in str(info.value)
    assert hub["calls"] == 0


def test_cached_snapshot_needs_no_network(folder, tmp_path, hub):
    snapshot = make_hub_cache(tmp_path / "hub", NAME, folder)
    assert resolve_model(NAME, cache_dir=tmp_path / "hub") == snapshot
    assert hub["calls"] == 0


def test_cache_of_the_environment_is_used(folder, tmp_path):
    snapshot = make_hub_cache(tmp_path / "hub", NAME, folder)
    code = f"from zeroinfer.checkpoint import resolve_model; print(resolve_model({NAME!r}))"
    output = subprocess.run(
        [sys.executable, "-c", code],
        env={"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "PATH": ""},
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert Path(output.strip()) == snapshot


def test_nothing_cached_is_fetched(folder, tmp_path, hub):
    hub["answer"] = folder
    assert resolve_model(NAME, cache_dir=tmp_path / "hub") == folder
    assert "*.safetensors" in hub["kwargs"]["allow_patterns"]
    assert "*.bin" not in hub["kwargs"]["allow_patterns"]


def test_interrupted_fetch_is_continued(folder, tmp_path, hub):
    snapshot = make_hub_cache(tmp_path / "hub", NAME, folder)
    (snapshot / "model.safetensors").unlink()
    hub["answer"] = folder
    assert resolve_model(NAME, cache_dir=tmp_path / "hub") == folder
    assert hub["calls"] == 1


def test_unreachable_hub_is_one_line(tmp_path, hub):
    with pytest.raises(CheckpointError) as info:
        resolve_model(NAME, cache_dir=tmp_path / "hub")
    message = str(info.value)
    assert f"model {NAME!r} is neither a folder nor reachable on the hub" in message
    assert "no route to host" in message
    assert "second line" not in message
    assert info.value.exit_code == 4


def test_unreachable_hub_and_half_a_model(folder, tmp_path, hub):
    snapshot = make_hub_cache(tmp_path / "hub", NAME, folder)
    (snapshot / "model.safetensors").resolve().unlink()
    with pytest.raises(CheckpointError, match="incomplete in the hub's cache") as info:
        resolve_model(NAME, cache_dir=tmp_path / "hub")
    assert "which does not exist" in str(info.value)


def test_cached_weights_are_enough_when_the_hub_is_away(folder, tmp_path, hub, caplog, monkeypatch):
    """The hub's own check asks for every wanted file, though a model may run without some."""
    snapshot = make_hub_cache(tmp_path / "hub", NAME, folder)
    fake = huggingface_hub.snapshot_download

    def strict(model, **kwargs):
        if kwargs["local_files_only"] and kwargs["allow_patterns"] != ["config.json"]:
            raise huggingface_hub.errors.LocalEntryNotFoundError("files are missing")
        return fake(model, **kwargs)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", strict)
    caplog.set_level(logging.WARNING)
    assert resolve_model(NAME, cache_dir=tmp_path / "hub") == snapshot
    assert "no route to host" in caplog.text


def test_errors_of_the_http_library_are_mapped(tmp_path, hub):
    base = huggingface_hub.errors.HfHubHTTPError.__bases__[0]
    hub["answer"] = base("connection reset")
    with pytest.raises(CheckpointError, match="connection reset"):
        resolve_model(NAME, cache_dir=tmp_path / "hub")


def test_a_name_the_hub_refuses_is_mapped(tmp_path):
    with pytest.raises(CheckpointError, match="neither a folder nor reachable"):
        resolve_model("org/na..me", cache_dir=tmp_path / "hub")


def test_hub_is_imported_for_ids_only(folder):
    code = (
        "import sys; from zeroinfer.checkpoint import resolve_model; "
        f"resolve_model({str(folder)!r}); sys.exit('huggingface_hub' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def pickles(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    return folder


def test_cached_pickles_are_taken_by_who_can_use_them(pickles, tmp_path, hub):
    snapshot = make_hub_cache(tmp_path / "hub", NAME, pickles)
    assert resolve_model(NAME, cache_dir=tmp_path / "hub", with_pickles=True) == snapshot
    assert hub["calls"] == 0
    with pytest.raises(CheckpointError, match="zeroinfer convert --model"):
        resolve_model(NAME, cache_dir=tmp_path / "hub")


def test_pickles_are_fetched_only_where_there_is_nothing_better(folder, pickles, tmp_path, hub):
    hub["answer"] = folder
    assert resolve_model(NAME, cache_dir=tmp_path / "hub", with_pickles=True) == folder
    assert (hub["calls"], "pytorch_model*.bin" in hub["kwargs"]["allow_patterns"]) == (1, False)
    hub["answer"] = pickles
    assert resolve_model(NAME, cache_dir=tmp_path / "hub", with_pickles=True) == pickles
    assert (hub["calls"], "pytorch_model*.bin" in hub["kwargs"]["allow_patterns"]) == (3, True)


def test_half_a_set_of_cached_pickles_is_refused(pickles, tmp_path, hub):
    weight_map = {"a": "pytorch_model.bin", "b": "pytorch_model-2.bin"}
    index = pickles / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    make_hub_cache(tmp_path / "hub", NAME, pickles)
    with pytest.raises(CheckpointError, match=r"incomplete .*missing pytorch_model-2\.bin"):
        resolve_model(NAME, cache_dir=tmp_path / "hub", with_pickles=True)
