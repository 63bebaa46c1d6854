"""Readers through the command line: one that cannot be had, and several disks in one trace."""

import json
import sys

import pytest

from tests.helpers.checkpoints import save_tiny
from zeroinfer.cli import main
from zeroinfer.log import warn_once
from zeroinfer.native import extension, reader_choice, striped_reader, uring_reader

ROWS = [{"prompt_token_ids": ids, "max_tokens": 3} for ids in ([5, 6, 7], [11, 12])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in several shards."""
    return save_tiny(tmp_path_factory.mktemp("model") / "llama", "llama", max_shard_size="20KB")


@pytest.fixture
def run(folder, tmp_path):
    """Stream the model over two prompts; return the exit code and the ids of the answers."""
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    output = tmp_path / "out.jsonl"
    files = ["--model", folder, "--nvme", tmp_path, "--input", tmp_path / "in.jsonl"]
    options = ["--weights", "nvme", "--ignore-eos", "--set", "compute.num_threads=1", "--overwrite"]

    def run_once(*extra):
        code = main([*map(str, (*files, "--output", output, *options, *extra))])
        lines = output.read_text().splitlines() if output.exists() else []
        records = sorted(map(json.loads, lines), key=lambda record: record["index"])
        return code, [record["token_ids"] for record in records]

    return run_once


@pytest.fixture
def reason(monkeypatch):
    """Hide the compiled library from the reader; return what is said of it."""
    monkeypatch.setitem(sys.modules, "zeroinfer._C", None)
    _, error = extension._load()
    monkeypatch.setattr(uring_reader, "extension", None)
    monkeypatch.setattr(uring_reader, "extension_error", error)
    warn_once.cache_clear()
    return error


def test_auto_falls_back_to_threads_with_one_line(run, reason, monkeypatch, capsys):
    # Source: DeepSpeed#1037.
    monkeypatch.setattr(reader_choice, "_PREFERENCE", ("io_uring", "threads"))
    code, ids = run()
    out, err = capsys.readouterr()
    assert code == 0
    assert "in flight by threads" in out
    assert [line for line in err.splitlines() if "io_uring" in line] == [
        f"WARNING zeroinfer.native.reader_choice: --reader auto passes over io_uring: {reason}"
    ]
    assert run("--reader", "threads") == (0, ids)
    assert "io_uring" not in capsys.readouterr().err


def test_io_uring_by_name_is_refused_with_the_packages_to_install(run, reason, capsys):
    # Source: DeepSpeed#1037.
    assert run("--reader", "io_uring") == (2, [])
    message = f"error: the reader io_uring is not available: {reason}; or use --reader threads\n"
    assert capsys.readouterr().err == message
    assert "install gcc and g++" in reason


def test_each_disk_has_lanes_of_its_own_in_the_trace(run, tmp_path, monkeypatch):
    # Shards with odd and even numbers lie on two disks; numbers 0:0 and 0:1 name them.
    monkeypatch.setattr(striped_reader, "_device", lambda path: int(path.name[6:11]) % 2)
    assert run("--trace", tmp_path / "trace.json")[0] == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["ph"] == "M"}
    disks = {lane.partition(" read ")[0] for lane in lanes if "read " in lane}
    assert disks == {"0:0", "0:1"}
