"""The binding of the ring: types, lifetime, errno, and the interpreter's lock."""

import array
import errno
import gc
import os
import queue
import threading
from pathlib import Path

import pytest

from zeroinfer.native import uring_error
from zeroinfer.native.extension import extension

pytestmark = [
    pytest.mark.io_uring,
    pytest.mark.skipif(uring_error() is not None, reason=f"no io_uring: {uring_error()}"),
]


@pytest.fixture
def ring():
    opened = extension.Uring(depth=2)
    yield opened
    opened.close()


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.mark.parametrize(
    "buffer",
    [
        memoryview(array.array("f", [0.0] * 8)),
        memoryview(array.array("b", bytes(8))),
        memoryview(bytearray(8)).cast("B", (2, 4)),
        memoryview(bytearray(8))[::2],
        memoryview(bytes(8)),
        bytes(8),
        None,
    ],
    ids=["float32", "int8", "two dimensions", "strided", "read-only", "bytes", "none"],
)
def test_memory_of_another_kind_is_refused_and_not_converted(ring, buffer):
    with pytest.raises(TypeError):
        ring.submit(0, 0, buffer, 0)


def test_reads_of_a_file_arrive_in_the_memory_itself(ring, tmp_path):
    (tmp_path / "w").write_bytes(b"0123456789")
    fd = os.open(tmp_path / "w", os.O_RDONLY)
    memory = bytearray(6)
    ring.submit(0, fd, memoryview(memory)[:4], 3)
    ring.submit(1, fd, memoryview(memory)[4:], 9)
    done = []
    while len(done) < 2:
        done += ring.wait()
    os.close(fd)
    assert sorted(done) == [(0, 4), (1, 1)]
    assert memory == b"34569\0"


def test_memory_is_kept_alive_until_its_read_was_returned(ring, pipe):
    memory = bytearray(4)
    ring.submit(0, pipe[0], memoryview(memory), 0)
    with pytest.raises(BufferError):
        memory.clear()
    os.write(pipe[1], b"abcd")
    assert ring.wait() == [(0, 4)]
    assert memory == b"abcd"
    memory.clear()


def test_a_wait_sleeps_without_the_interpreter_lock_and_a_wake_ends_it(ring, pipe):
    memory, results = bytearray(1), queue.SimpleQueue()
    ring.submit(0, pipe[0], memoryview(memory), 0)

    def wait_twice():
        results.put(ring.wait())
        results.put(ring.wait())

    # One thread for both: the kernel cancels the reads of a thread that ends.
    thread = threading.Thread(target=wait_twice)
    thread.start()
    ring.wake()
    assert results.get(timeout=30) == []
    os.write(pipe[1], b"x")
    assert results.get(timeout=30) == [(0, 1)]
    thread.join()


def test_failed_reads_are_results_and_wrong_calls_are_errors(ring, pipe):
    memory = memoryview(bytearray(1))
    ring.submit(0, 10**6, memory, 0)
    assert ring.wait() == [(0, -errno.EBADF)]
    ring.submit(0, pipe[0], memory, 0)
    for slot, code in ((0, errno.EBUSY), (2, errno.EINVAL), (-1, errno.EINVAL)):
        with pytest.raises(OSError, match=os.strerror(code)) as caught:
            ring.submit(slot, pipe[0], memory, 0)
        assert caught.value.errno == code
    os.write(pipe[1], b"x")
    assert ring.wait() == [(0, 1)]
    with pytest.raises(OSError, match="Invalid argument"):
        ring.wait()
    with pytest.raises(OSError, match="Invalid argument"):
        extension.Uring(0)


def test_a_closed_ring_refuses_calls(ring):
    ring.close()
    ring.close()
    for call in (ring.wait, ring.wake, lambda: ring.submit(0, 0, memoryview(bytearray(1)), 0)):
        with pytest.raises(ValueError, match="the ring is closed"):
            call()


def test_closing_waits_for_reads_in_flight_and_lets_the_memory_go(pipe):
    ring = extension.Uring(1)
    memory = bytearray(1)
    ring.submit(0, pipe[0], memoryview(memory), 0)
    ring.wake()
    assert ring.wait() == []
    threading.Thread(target=os.write, args=(pipe[1], b"x")).start()
    ring.close()
    assert memory == b"x"
    memory.clear()


def find_rings():
    """Return the descriptors of this process that are rings."""
    links = [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return {int(fd.name) for fd in links if "io_uring" in str(fd.readlink())}


def test_memory_is_never_let_go_if_the_kernel_cannot_be_waited_for(pipe):
    before = find_rings()
    ring = extension.Uring(1)
    (ring_fd,) = find_rings() - before
    memory = bytearray(1)
    ring.submit(0, pipe[0], memoryview(memory), 0)
    ring.wake()
    assert ring.wait() == []
    os.dup2(pipe[1], ring_fd)  # The kernel's calls now find a pipe in place of their ring.
    with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
        ring.close()
    ring.close()
    del ring
    gc.collect()
    with pytest.raises(BufferError):
        memory.clear()
