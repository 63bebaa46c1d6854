"""Weights on several file systems: each is read by a reader of its own, all at once."""

import functools
import mmap
import os
import threading
from pathlib import Path

import pytest

from tests.helpers.checkpoints import tiny_llama
from tests.helpers.engines import drive, greedy_requests, open_engine
from zeroinfer.counters import Trace
from zeroinfer.errors import StorageError
from zeroinfer.native import ThreadReader, striped_reader
from zeroinfer.native.striped_reader import StripedReader, count_devices, open_over

BLOCK = 4096


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two files that pretend to lie on disks named after their folders."""
    paths = []
    for number, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "w"
        path.write_bytes(bytes([number + 1]) * 4 * BLOCK)
        paths.append(path)
    monkeypatch.setattr(striped_reader, "_device", lambda path: ord(path.parent.name))
    return paths


def buffer(num_blocks=4):
    return memoryview(mmap.mmap(-1, num_blocks * BLOCK))


open_one = functools.partial(ThreadReader.open, io_chunk_bytes=BLOCK, queue_depth=1)


def open_reader(*, preadv=os.preadv, trace=None):
    return StripedReader(functools.partial(open_one, preadv=preadv), trace or Trace())


def test_one_file_system_needs_no_more_than_one_reader(files):
    with open_over(files[:1], open_one, trace=Trace()) as reader:
        assert isinstance(reader, ThreadReader)
    with open_over(files, open_one, trace=Trace()) as reader:
        assert isinstance(reader, StripedReader)


def test_bytes_and_counters_of_both(files):
    with open_reader() as reader:
        landed = []
        for path in files:
            destination = buffer()
            file = reader.open_file(path)
            ticket = reader.submit(file, 0, destination, required_bytes=4 * BLOCK)
            reader.wait(ticket)
            assert ticket.is_done
            landed.append(bytes(destination))
        assert landed == [path.read_bytes() for path in files]
        assert reader.open_file(files[0]).fd == reader.open_file(files[0]).fd
        counters = reader.counters
        assert (counters.bytes_read, counters.num_reads) == (8 * BLOCK, 8)
        assert counters.busy_s > 0
        assert reader.counters is counters


def test_each_disk_has_lanes_of_its_own_in_the_trace(files):
    trace = Trace(is_enabled=True)
    with open_reader(trace=trace) as reader:
        for path in files:
            file = reader.open_file(path)
            reader.wait(reader.submit(file, 0, buffer(1), required_bytes=BLOCK))
    lanes = [lane for lane, *_ in trace._events]
    # The devices 97 and 98 are no disks, so they have numbers for names.
    assert lanes == ["0:97 read 0", "0:98 read 0"]


def test_a_busy_disk_does_not_hold_up_the_other(files):
    may_go_on = threading.Event()
    slow = {}

    def preadv(fd, buffers, offset):
        if fd == slow["fd"]:
            assert may_go_on.wait(30)
        return os.preadv(fd, buffers, offset)

    with open_reader(preadv=preadv) as reader:
        first, second = (reader.open_file(path) for path in files)
        slow["fd"] = first.fd
        stuck = reader.submit(first, 0, buffer(), required_bytes=4 * BLOCK)
        other = reader.submit(second, 0, buffer(), required_bytes=4 * BLOCK)
        reader.wait(other)
        assert not stuck.is_done
        may_go_on.set()
        reader.wait(stuck)


def test_a_failure_is_the_readers_own(files):
    def preadv(fd, buffers, offset):
        raise OSError(5, "Input/output error")

    with open_reader(preadv=preadv) as reader:
        file = reader.open_file(files[1])
        ticket = reader.submit(file, 0, buffer(), required_bytes=BLOCK)
        with pytest.raises(StorageError, match=rf"{files[1]} failed: .*EIO"):
            reader.wait(ticket)


def test_closing_closes_all_and_ends_opening(files):
    reader = open_reader()
    fds = [reader.open_file(path).fd for path in files]
    reader.close()
    reader.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    with pytest.raises(StorageError, match="the reader is closed"):
        reader.open_file(files[0])


def test_devices_are_counted_through_links(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert count_devices((tmp_path / "a", tmp_path / "link")) == 1
    assert count_devices((tmp_path / "a", tmp_path / "link", Path("/proc/version"))) == 2
    with pytest.raises(StorageError, match=r"cannot read \S+gone: No such file"):
        count_devices((tmp_path / "gone",))


def test_steps_of_an_engine_count_the_bytes_of_all_readers(tmp_path):
    folder, requests = tiny_llama(tmp_path / "tiny"), greedy_requests([[5, 6, 7]], max_tokens=4)
    settings = {"offload.weights": "nvme"}
    with open_engine(folder, requests, settings, reader=open_reader()) as engine:
        drive(engine, requests)
        report = engine.report()
    assert sum(step["nvme_bytes"] for step in report["steps"]) == report["io"]["nvme"]["bytes_read"]
    assert all(step["nvme_bytes"] > 0 for step in report["steps"])
