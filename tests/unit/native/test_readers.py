"""One suite for every backend of the reader protocol."""

import errno
import mmap
import os
import random
import signal
import threading

import pytest

from tests.helpers.io_shim import (
    Gate,
    PreadvShim,
    aligned_memory,
    ramfs_mount,
    random_latency,
)
from tests.helpers.rings import open_uring_reader
from zeroinfer.counters import Trace
from zeroinfer.errors import StorageError
from zeroinfer.log import warn_once
from zeroinfer.native import ThreadReader, open_direct
from zeroinfer.units import align_down, align_up

BLOCK = 4096
CHUNK = 4 * BLOCK


@pytest.fixture(params=[ThreadReader.open, open_uring_reader], ids=["threads", "io_uring"])
def open_reader(request):
    """Open readers of one backend and close them at the end of the test."""
    readers = []

    def open_one(*, io_chunk_bytes=CHUNK, queue_depth=3, **kwargs):
        readers.append(
            request.param(io_chunk_bytes=io_chunk_bytes, queue_depth=queue_depth, **kwargs)
        )
        return readers[-1]

    yield open_one
    for reader in readers:
        reader.close()


def write_file(path, num_bytes, seed=0):
    data = random.Random(seed).randbytes(num_bytes)
    path.write_bytes(data)
    return data


def read_range(reader, path, start, stop):
    """Read bytes [start, stop) the way weights are read: aligned outwards."""
    begin, end = align_down(start, BLOCK), align_up(stop, BLOCK)
    memory = aligned_memory(end - begin)
    ticket = reader.submit(reader.open_file(path), begin, memory, required_bytes=stop - begin)
    reader.wait(ticket)
    assert ticket.is_done
    return bytes(memory[start - begin : stop - begin])


@pytest.mark.parametrize(
    "num_bytes", [1, 511, 4095, 4096, 4097, 100, BLOCK + 100, CHUNK + 100, 9 * CHUNK + 100]
)
def test_files_of_any_size_are_read_whole(open_reader, tmp_path, num_bytes):
    # Source: llama.cpp#18766 (tails), DeepSpeed#1070 (sizes).
    data = write_file(tmp_path / "w", num_bytes)
    assert read_range(open_reader(), tmp_path / "w", 0, num_bytes) == data


def test_random_ranges_equal_plain_reads(open_reader, tmp_path):
    data = write_file(tmp_path / "w", 50 * BLOCK + 77)
    reader = open_reader()
    source = random.Random(1)
    for _ in range(200):
        start, stop = sorted(source.sample(range(len(data) + 1), 2))
        assert read_range(reader, tmp_path / "w", start, stop) == data[start:stop]


def test_files_are_opened_directly_and_once(open_reader, tmp_path):
    write_file(tmp_path / "w", 5000)
    reader = open_reader()
    file = reader.open_file(tmp_path / "w")
    assert reader.open_file(tmp_path / "w") is file
    assert (file.is_direct, file.size_bytes) == (True, 5000)


def test_reads_are_split_into_chunks_and_kept_at_the_queue_depth(open_reader, tmp_path):
    write_file(tmp_path / "w", 10 * CHUNK)
    gate = Gate()
    reader = open_reader(queue_depth=3, preadv=gate)
    memory = aligned_memory(10 * CHUNK)
    ticket = reader.submit(
        reader.open_file(tmp_path / "w"), 0, memory, required_bytes=memory.nbytes
    )
    gate.wait_entered(3)
    assert not ticket.is_done
    gate.open()
    reader.wait(ticket)
    assert sorted(call.offset for call in gate.shim.calls) == [i * CHUNK for i in range(10)]
    assert {call.num_bytes for call in gate.shim.calls} == {CHUNK}
    assert gate.shim.max_inflight <= 3


def test_counters_count_what_the_file_gave(open_reader, tmp_path):
    write_file(tmp_path / "w", 2 * CHUNK + 100)
    reader = open_reader(queue_depth=1)
    read_range(reader, tmp_path / "w", 0, 2 * CHUNK + 100)
    counters = reader.counters
    assert (counters.bytes_read, counters.num_reads) == (2 * CHUNK + 100, 3)
    assert counters.busy_s > 0


def test_busy_time_covers_reads_still_in_flight_and_no_idle_time(open_reader, tmp_path):
    write_file(tmp_path / "w", CHUNK)
    gate = Gate()
    reader = open_reader(preadv=gate)
    file = reader.open_file(tmp_path / "w")
    ticket = reader.submit(file, 0, aligned_memory(CHUNK), required_bytes=CHUNK)
    gate.wait_entered(1)
    first_s = reader.counters.busy_s
    assert reader.counters.busy_s > first_s
    gate.open()
    reader.wait(ticket)
    idle_s = reader.counters.busy_s
    assert reader.counters.busy_s == idle_s


def test_short_reads_are_continued(open_reader, tmp_path):
    data = write_file(tmp_path / "w", 3 * CHUNK + 100)
    # One block, then an odd count: the latter makes the reader step back to alignment.
    shim = PreadvShim(max_bytes_at=lambda call: {0: BLOCK, BLOCK: BLOCK + 1000}.get(call.offset))
    reader = open_reader(preadv=shim, queue_depth=1)
    assert read_range(reader, tmp_path / "w", 0, len(data)) == data
    offsets = [call.offset for call in shim.calls]
    assert offsets[:4] == [0, BLOCK, 2 * BLOCK, CHUNK]
    assert reader.counters.bytes_read == shim.bytes_read


def test_short_buffered_reads_are_continued(open_reader, tmp_path, monkeypatch):
    refuse_direct(monkeypatch)
    data = write_file(tmp_path / "w", CHUNK)
    shim = PreadvShim(max_bytes_at=lambda call: 1000)
    assert read_range(open_reader(preadv=shim), tmp_path / "w", 0, CHUNK) == data
    assert [call.offset for call in shim.calls[:3]] == [0, 1000, 2000]


def test_a_failed_read_names_file_offset_and_bytes(open_reader, tmp_path):
    write_file(tmp_path / "w", 4 * CHUNK)
    shim = PreadvShim(fails_at=lambda call: call.offset == CHUNK)
    reader = open_reader(preadv=shim, queue_depth=1)
    with pytest.raises(StorageError) as caught:
        read_range(reader, tmp_path / "w", 0, 4 * CHUNK)
    assert str(caught.value) == (
        f"read of {CHUNK} bytes at {CHUNK} of {tmp_path / 'w'} failed: "
        f"Input/output error (EIO); got 0 bytes, need {CHUNK}; check the disk"
    )
    assert caught.value.errno == errno.EIO
    assert caught.value.exit_code == 4
    # The chunks behind the failed one were dropped.
    assert [call.offset for call in shim.calls] == [0, CHUNK]


def test_a_failure_leaves_other_reads_alone(open_reader, tmp_path):
    bad, good = write_file(tmp_path / "bad", 3 * CHUNK), write_file(tmp_path / "good", 3 * CHUNK, 1)
    gate = Gate()
    reader = open_reader(preadv=gate, queue_depth=2)
    files = [reader.open_file(tmp_path / name) for name in ("bad", "good")]
    gate.shim.fails_at = lambda call: call.num_bytes == CHUNK and call.offset == 0
    memories = [aligned_memory(len(bad)), aligned_memory(len(good))]
    first = reader.submit(files[0], 0, memories[0], required_bytes=len(bad))
    second = reader.submit(files[1], CHUNK, memories[1][CHUNK:], required_bytes=2 * CHUNK)
    gate.open()
    with pytest.raises(StorageError, match="bad failed"):
        reader.wait(first)
    reader.wait(second)
    assert memories[1][CHUNK:] == good[CHUNK:]


def test_a_failed_ticket_is_done_only_when_none_of_its_reads_is_in_flight(open_reader, tmp_path):
    write_file(tmp_path / "w", 3 * CHUNK)
    second_came, second_may_go, third_came = (threading.Event() for _ in range(3))

    def preadv(fd, buffers, offset):
        if offset == 0:
            assert second_came.wait(30)
            raise OSError(errno.EIO, "Input/output error")
        if offset == CHUNK:
            second_came.set()
            assert second_may_go.wait(30)
        else:
            third_came.set()
        return os.preadv(fd, buffers, offset)

    reader = open_reader(preadv=preadv, queue_depth=2)
    file = reader.open_file(tmp_path / "w")
    size = 2 * CHUNK
    ticket = reader.submit(file, 0, aligned_memory(size), required_bytes=size)
    reader.submit(file, size, aligned_memory(CHUNK), required_bytes=CHUNK)
    assert third_came.wait(30)  # The thread whose read failed has moved on.
    assert not ticket.is_done
    second_may_go.set()
    with pytest.raises(StorageError, match="EIO"):
        reader.wait(ticket)


def test_waiting_again_raises_again(open_reader, tmp_path):
    write_file(tmp_path / "w", CHUNK)
    reader = open_reader(preadv=PreadvShim(fails_at=lambda call: True))
    file = reader.open_file(tmp_path / "w")
    ticket = reader.submit(file, 0, aligned_memory(CHUNK), required_bytes=CHUNK)
    for _ in range(2):
        with pytest.raises(StorageError, match="EIO"):
            reader.wait(ticket)


def test_a_file_truncated_after_open_is_named_with_what_is_missing(open_reader, tmp_path):
    # Source: TensorRT-LLM#17368.
    write_file(tmp_path / "w", 4 * CHUNK)
    reader = open_reader(queue_depth=1)
    reader.open_file(tmp_path / "w")
    os.truncate(tmp_path / "w", CHUNK + BLOCK + 10)
    with pytest.raises(StorageError) as caught:
        read_range(reader, tmp_path / "w", 0, 4 * CHUNK)
    assert str(caught.value) == (
        f"read of {CHUNK} bytes at {CHUNK} of {tmp_path / 'w'} came short: got {BLOCK + 10} "
        f"bytes, need {CHUNK}; the file had {4 * CHUNK} bytes when it was opened and was cut "
        "since; restore it and run again"
    )


def test_a_range_beyond_the_end_that_needs_nothing_there_is_complete(open_reader, tmp_path):
    data = write_file(tmp_path / "w", 100)
    reader = open_reader()
    memory = aligned_memory(3 * CHUNK)
    reader.wait(reader.submit(reader.open_file(tmp_path / "w"), 0, memory, required_bytes=100))
    assert memory[:100] == data


def test_an_empty_read_is_done_at_once(open_reader, tmp_path):
    write_file(tmp_path / "w", CHUNK)
    reader = open_reader()
    ticket = reader.submit(
        reader.open_file(tmp_path / "w"), 0, memoryview(bytearray()), required_bytes=0
    )
    assert ticket.is_done
    reader.wait(ticket)
    assert reader.counters.num_reads == 0


def test_reads_go_first_come_first_served_and_urgent_ones_ahead(open_reader, tmp_path):
    write_file(tmp_path / "w", 100 * CHUNK)
    gate = Gate()
    reader = open_reader(preadv=gate, queue_depth=1)
    file = reader.open_file(tmp_path / "w")

    def submit(start, num_chunks, *, is_urgent=False):
        size = num_chunks * CHUNK
        return reader.submit(
            file, start * CHUNK, aligned_memory(size), required_bytes=size, is_urgent=is_urgent
        )

    tickets = [submit(0, 3), submit(10, 2)]
    gate.wait_entered(1)
    tickets += [submit(20, 2, is_urgent=True), submit(30, 1), submit(40, 1, is_urgent=True)]
    gate.open()
    for ticket in tickets:
        reader.wait(ticket)
    order = [call.offset // CHUNK for call in gate.shim.calls]
    assert order == [0, 20, 21, 40, 1, 2, 10, 11, 30]


def test_the_next_read_begins_before_the_last_one_ends(open_reader, tmp_path):
    write_file(tmp_path / "w", 2 * CHUNK)
    gate = Gate()
    reader = open_reader(preadv=gate, queue_depth=2)
    file = reader.open_file(tmp_path / "w")
    tickets = [
        reader.submit(file, offset, aligned_memory(CHUNK), required_bytes=CHUNK)
        for offset in (0, CHUNK)
    ]
    gate.wait_entered(2)  # Both stand in the kernel although neither is complete.
    gate.open()
    for ticket in tickets:
        reader.wait(ticket)


def test_many_threads_may_submit_and_wait(open_reader, tmp_path):
    data = write_file(tmp_path / "w", 64 * BLOCK + 5)
    reader = open_reader(preadv=PreadvShim(latency_s=random_latency(max_s=0.001)))
    failures = []

    def work(seed):
        source = random.Random(seed)
        for _ in range(25):
            start, stop = sorted(source.sample(range(len(data) + 1), 2))
            if read_range(reader, tmp_path / "w", start, stop) != data[start:stop]:
                failures.append((seed, start, stop))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_close_waits_for_reads_in_flight_and_drops_queued_ones(open_reader, tmp_path):
    data = write_file(tmp_path / "w", 4 * CHUNK)
    gate = Gate()
    reader = open_reader(preadv=gate, queue_depth=1)
    file = reader.open_file(tmp_path / "w")
    memory = aligned_memory(4 * CHUNK)
    running = reader.submit(file, 0, memory[:CHUNK], required_bytes=CHUNK)
    queued = reader.submit(file, CHUNK, memory[CHUNK:], required_bytes=3 * CHUNK)
    gate.wait_entered(1)
    closer = threading.Thread(target=reader.close)
    closer.start()
    with pytest.raises(StorageError, match="dropped: reader closed"):
        reader.wait(queued)
    assert closer.is_alive()
    gate.open()
    closer.join()
    reader.wait(running)
    assert memory[:CHUNK] == data[:CHUNK]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.fd)


def test_close_is_idempotent_and_ends_the_threads(open_reader):
    before = set(threading.enumerate())
    reader = open_reader(queue_depth=5)
    assert set(threading.enumerate()) - before
    reader.close()
    reader.close()
    assert set(threading.enumerate()) <= before


def test_a_closed_reader_refuses_files_and_reads(open_reader, tmp_path):
    write_file(tmp_path / "w", CHUNK)
    reader = open_reader()
    file = reader.open_file(tmp_path / "w")
    reader.close()
    with pytest.raises(StorageError, match="the reader is closed"):
        reader.open_file(tmp_path / "w")
    with pytest.raises(StorageError, match="the reader is closed"):
        reader.submit(file, 0, aligned_memory(CHUNK), required_bytes=CHUNK)


def test_the_destination_is_let_go_after_success_and_after_failure(open_reader, tmp_path):
    write_file(tmp_path / "w", 2 * CHUNK)
    shim = PreadvShim(fails_at=lambda call: call.offset == CHUNK)
    reader = open_reader(preadv=shim)
    file = reader.open_file(tmp_path / "w")
    for offset in (0, CHUNK):
        memory = mmap.mmap(-1, CHUNK)
        ticket = reader.submit(file, offset, memoryview(memory), required_bytes=CHUNK)
        try:
            reader.wait(ticket)
        except StorageError:
            assert offset == CHUNK
        memory.close()  # BufferError while anything still holds a view of it.


@pytest.mark.parametrize(
    ("offset", "skip", "num_bytes", "what"),
    [(100, 0, BLOCK, "offset"), (0, 8, BLOCK, "address"), (0, 0, 100, "length")],
)
def test_misaligned_direct_reads_are_refused(open_reader, tmp_path, offset, skip, num_bytes, what):
    write_file(tmp_path / "w", CHUNK)
    reader = open_reader()
    file = reader.open_file(tmp_path / "w")
    memory = aligned_memory(2 * BLOCK)[skip : skip + num_bytes]
    with pytest.raises(ValueError, match=f"{what} of a direct read of .* multiple of 4096"):
        reader.submit(file, offset, memory, required_bytes=0)


def test_read_only_memory_and_a_requirement_beyond_it_are_refused(open_reader, tmp_path):
    write_file(tmp_path / "w", CHUNK)
    reader = open_reader()
    file = reader.open_file(tmp_path / "w")
    with pytest.raises(ValueError, match="is read-only"):
        reader.submit(file, 0, memoryview(bytes(BLOCK)), required_bytes=0)
    with pytest.raises(ValueError, match="required_bytes must be 0 to 4096, got 4097"):
        reader.submit(file, 0, aligned_memory(BLOCK), required_bytes=BLOCK + 1)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"io_chunk_bytes": 1000}, "io_chunk_bytes must be a positive multiple of 4096, got 1000"),
        ({"io_chunk_bytes": 0}, "got 0"),
        ({"queue_depth": 0}, "queue_depth must be at least 1, got 0"),
    ],
)
def test_chunk_and_depth_out_of_range_are_refused(open_reader, kwargs, message):
    with pytest.raises(ValueError, match=message):
        open_reader(**kwargs)


def test_files_that_cannot_be_read_are_named(open_reader, tmp_path, monkeypatch):
    reader = open_reader()
    with pytest.raises(StorageError, match=r"cannot open .*missing: No such file.*\(ENOENT\)"):
        reader.open_file(tmp_path / "missing")
    with pytest.raises(StorageError, match="got a folder or device, need a regular file"):
        reader.open_file(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="pipe: got a folder or device"):
        reader.open_file(tmp_path / "pipe")

    def refuse(path, flags):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    write_file(tmp_path / "secret", 10)
    monkeypatch.setattr(open_direct, "_open_fd", refuse)
    with pytest.raises(StorageError, match=r"secret: Permission denied \(EACCES\)"):
        reader.open_file(tmp_path / "secret")


def refuse_direct(monkeypatch):
    """Make opens with O_DIRECT fail as ramfs does."""
    warn_once.cache_clear()
    plain_open = open_direct._open_fd

    def open_fd(path, flags):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain_open(path, flags)

    monkeypatch.setattr(open_direct, "_open_fd", open_fd)


def check_buffered_reads(reader, folder, caplog):
    data = {
        name: write_file(folder / name, 3 * CHUNK + 100, seed) for seed, name in enumerate("ab")
    }
    for name in data:
        assert read_range(reader, folder / name, 5, 3 * CHUNK + 100) == data[name][5:]
        assert not reader.open_file(folder / name).is_direct
    warnings = [r.getMessage() for r in caplog.records if "no direct I/O" in r.getMessage()]
    assert len(warnings) == 1
    assert str(open_direct.find_mount_point(folder / "a")) in warnings[0]
    # A buffered file may be read at any offset, as a whole file of odd size is.
    memory = memoryview(bytearray(50))
    reader.wait(reader.submit(reader.open_file(folder / "a"), 7, memory, required_bytes=50))
    assert memory == data["a"][7:57]


def test_a_file_system_that_refuses_o_direct_is_read_buffered(
    open_reader, tmp_path, monkeypatch, caplog
):
    # Source: ServerlessLLM#318.
    refuse_direct(monkeypatch)
    check_buffered_reads(open_reader(), tmp_path, caplog)


def test_ramfs_is_read_buffered(open_reader, tmp_path, monkeypatch, caplog):
    # Where mounting is not allowed the same refusal is made by hand, so that nothing is skipped.
    try:
        with ramfs_mount(tmp_path) as folder:
            warn_once.cache_clear()
            reader = open_reader()
            check_buffered_reads(reader, folder, caplog)
            assert open_direct.find_mount_point(folder / "a") == folder
            reader.close()
    except PermissionError:
        refuse_direct(monkeypatch)
        check_buffered_reads(open_reader(), tmp_path, caplog)


def test_a_file_system_that_refuses_the_first_direct_read_is_read_buffered(
    open_reader, tmp_path, monkeypatch, caplog
):
    warn_once.cache_clear()
    plain_preadv = os.preadv

    def preadv(fd, buffers, offset):
        if len(buffers[0]) == BLOCK and isinstance(buffers[0], mmap.mmap):
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain_preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    check_buffered_reads(open_reader(preadv=plain_preadv), tmp_path, caplog)


def test_pages_are_dropped_behind_buffered_reads(open_reader, tmp_path, monkeypatch):
    refuse_direct(monkeypatch)
    dropped = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: dropped.append(args))
    write_file(tmp_path / "w", 2 * CHUNK)
    reader = open_reader()
    read_range(reader, tmp_path / "w", 0, 2 * CHUNK)
    fd = reader.open_file(tmp_path / "w").fd
    assert sorted(dropped) == [
        (fd, 0, CHUNK, os.POSIX_FADV_DONTNEED),
        (fd, CHUNK, CHUNK, os.POSIX_FADV_DONTNEED),
    ]


def test_reads_survive_interrupting_signals(open_reader, tmp_path):
    data = write_file(tmp_path / "w", 40 * CHUNK)
    num_signals = 0

    def count(number, frame):
        nonlocal num_signals
        num_signals += 1

    reader = open_reader(preadv=PreadvShim(latency_s=0.001), queue_depth=2)
    previous = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        assert read_range(reader, tmp_path / "w", 0, len(data)) == data
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert num_signals > 0


def test_ctrl_c_in_the_waiting_thread_leaves_the_reader_usable(open_reader, tmp_path):
    data = write_file(tmp_path / "w", CHUNK)
    gate = Gate()
    reader = open_reader(preadv=gate)
    memory = aligned_memory(CHUNK)
    file = reader.open_file(tmp_path / "w")
    ticket = reader.submit(file, 0, memory, required_bytes=CHUNK)
    gate.wait_entered(1)

    def interrupt(number, frame):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            reader.wait(ticket)
    finally:
        signal.signal(signal.SIGALRM, previous)
    gate.open()
    reader.wait(ticket)
    assert memory == data


def test_each_thread_has_a_lane_in_the_trace(open_reader, tmp_path):
    write_file(tmp_path / "w", 4 * CHUNK)
    trace = Trace(is_enabled=True)
    gate = Gate()
    reader = open_reader(queue_depth=2, trace=trace, preadv=gate)
    memory = aligned_memory(4 * CHUNK)
    ticket = reader.submit(reader.open_file(tmp_path / "w"), 0, memory, required_bytes=4 * CHUNK)
    gate.wait_entered(2)
    gate.open()
    reader.wait(ticket)
    assert {event[0] for event in trace._events} == {"read 0", "read 1"}
    assert {event[1] for event in trace._events} == {f"w at {i * CHUNK}" for i in range(4)}
    assert all(start_s <= stop_s for _, _, start_s, stop_s in trace._events)
