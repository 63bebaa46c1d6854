"""A conversion killed at ten random moments, then resumed: never a half store, no left-overs."""

import shutil
import subprocess
import sys

from tests.helpers.gguf_files import write_llama_gguf
from zeroinfer.checkpoint import convert_gguf, find_store, verify_store

_KILLED_TEN_TIMES = """
import os, random, signal, sys
from pathlib import Path
from zeroinfer.checkpoint import convert_gguf, find_store, verify_store

source, nvme = Path(sys.argv[1]), Path(sys.argv[2])
def convert(deadline):
    "Die at the so-many-th call that changes the disk."
    count = 0
    def watch(event, args):
        nonlocal count
        if event in ("open", "os.rename", "os.remove", "os.symlink", "os.mkdir"):
            count += 1
            if count == deadline:
                os.kill(os.getpid(), signal.SIGKILL)
    if deadline:
        sys.addaudithook(watch)
    convert_gguf(source, nvme, stripes=[nvme.parent / "second"], shard_bytes=20_000)

random.seed(int(sys.argv[3]))
statuses = []
for _ in range(10):
    pid = os.fork()
    if pid == 0:
        convert(random.randrange(1, 120))
        os._exit(0)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    found = find_store(nvme, source, dtype=None)
    if found is not None:
        verify_store(found)
assert statuses.count(-signal.SIGKILL) >= 5, statuses
convert(0)
"""


def folder_bytes(*folders):
    files = [p for folder in folders for p in folder.rglob("*") if p.is_file()]
    return {p.name: p.stat().st_size for p in files if p.suffix != ".lock"}


def test_ten_kills_then_a_whole_store_and_nothing_else(tmp_path):
    # Source: deepspeedai/DeepSpeed#4416
    source, nvme, second = tmp_path / "m.gguf", tmp_path / "nvme", tmp_path / "second"
    write_llama_gguf(source, quant="Q8_0", tokenizer="smollm")
    second.mkdir()
    command = [sys.executable, "-c", _KILLED_TEN_TIMES, str(source), str(nvme), "7"]
    subprocess.run(command, check=True)
    store = find_store(nvme, source, dtype=None)
    verify_store(store)
    found = folder_bytes(nvme, second)
    shutil.rmtree(nvme)
    shutil.rmtree(second / "models")
    assert convert_gguf(source, nvme, stripes=[second], shard_bytes=20_000) == store
    assert folder_bytes(nvme, second) == found
