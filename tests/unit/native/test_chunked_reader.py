"""What both readers take of the system, and give back: threads, descriptors, a program's end."""

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from tests.helpers.io_shim import aligned_memory
from tests.helpers.rings import PreadvRing, open_uring_reader
from zeroinfer.errors import StorageError
from zeroinfer.native import ThreadReader, UringReader, open_reader, uring_error

CHUNK = 16384
NAMES = ["threads"] if uring_error() else ["threads", "io_uring"]


def test_reads_in_flight_take_a_thread_each_and_io_uring_takes_one():
    before = set(threading.enumerate())
    with ThreadReader.open(io_chunk_bytes=CHUNK, queue_depth=5):
        assert len(set(threading.enumerate()) - before) == 5
    with UringReader.open(io_chunk_bytes=CHUNK, queue_depth=5, open_ring=PreadvRing):
        assert len(set(threading.enumerate()) - before) == 1


@pytest.mark.parametrize(
    ("open_reader", "num_allowed", "message"),
    [
        (ThreadReader.open, 2, "got 2, need 4; lower the queue depth"),
        (open_uring_reader, 0, "got 0, need 1; lower the queue depth"),
    ],
    ids=["threads", "io_uring"],
)
def test_threads_that_cannot_start_are_reported(open_reader, num_allowed, message, monkeypatch):
    num_started = 0
    plain_start = threading.Thread.start

    def start(thread):
        nonlocal num_started
        num_started += 1
        if num_started > num_allowed:
            raise RuntimeError("can't start new thread")
        plain_start(thread)

    before = set(threading.enumerate())
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(StorageError, match=message):
        open_reader(io_chunk_bytes=CHUNK, queue_depth=4)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("name", NAMES)
def test_a_program_that_forgets_to_close_still_ends(name):
    script = textwrap.dedent(f"""
        from zeroinfer.native import open_reader
        reader = open_reader("{name}", io_chunk_bytes=4096, queue_depth=4)
        raise KeyboardInterrupt
    """)
    done = subprocess.run(
        [sys.executable, "-c", script],
        timeout=30,
        capture_output=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.stderr.rstrip().endswith(b"KeyboardInterrupt")


@pytest.mark.parametrize("queue_depth", [1, 1024])
@pytest.mark.parametrize("name", NAMES)
def test_readers_leave_no_descriptor_behind(tmp_path, name, queue_depth):
    (tmp_path / "w").write_bytes(bytes(5 * CHUNK))
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    for _ in range(30 if queue_depth == 1 else 1):
        with open_reader(name, io_chunk_bytes=CHUNK, queue_depth=queue_depth) as reader:
            file = reader.open_file(tmp_path / "w")
            memory = aligned_memory(5 * CHUNK)
            reader.wait(reader.submit(file, 0, memory, required_bytes=5 * CHUNK))
            assert len(list(descriptors.iterdir())) > before
            assert not any(memory)
    assert len(list(descriptors.iterdir())) == before
