"""What io_uring alone has: a ring that breaks, sleeps and is refused by the system."""

import errno
import os
import threading
from types import SimpleNamespace

import pytest

from tests.helpers.io_shim import Gate, aligned_memory
from tests.helpers.rings import PreadvRing
from zeroinfer.errors import BackendUnavailableError, StorageError
from zeroinfer.native import UringReader, uring_error, uring_reader

CHUNK = 16384


class BrokenRing(PreadvRing):
    """A ring that cannot be waited for any more, and is not to be touched once it closes."""

    def __init__(self, depth, preadv=os.preadv):
        super().__init__(depth, preadv)
        self.closing = threading.Event()

    def wait(self):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def wake(self):
        assert not self.closing.is_set(), "a ring was woken that is closed"
        super().wake()

    def close(self):
        self.closing.set()
        super().close()


class LostRing(BrokenRing):
    """A ring that cannot even be drained; it is told once, as the kernel's is."""

    num_closes = 0

    def close(self):
        super().close()
        self.num_closes += 1
        if self.num_closes == 1:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))


class CountingRing(PreadvRing):
    """A ring that counts how often it was woken."""

    num_wakes = 0

    def wake(self):
        self.num_wakes += 1
        super().wake()


def open_reader(open_ring, *, queue_depth=2):
    return UringReader.open(io_chunk_bytes=CHUNK, queue_depth=queue_depth, open_ring=open_ring)


def test_a_broken_ring_fails_every_read_and_takes_no_more(tmp_path):
    (tmp_path / "w").write_bytes(bytes(8 * CHUNK))
    with open_reader(BrokenRing) as reader:
        file = reader.open_file(tmp_path / "w")
        tickets, refusals = [], []
        for idx in range(4):
            try:
                memory = aligned_memory(2 * CHUNK)
                ticket = reader.submit(file, 2 * idx * CHUNK, memory, required_bytes=2 * CHUNK)
            except StorageError as error:
                refusals.append(str(error))
            else:
                tickets.append(ticket)
        assert tickets
        assert len(tickets) + len(refusals) == 4
        assert all("the reader is closed" in refusal for refusal in refusals)
        for ticket in tickets:
            with pytest.raises(StorageError, match=r"EBADF|the ring is broken") as caught:
                reader.wait(ticket)
            assert caught.value.errno == errno.EBADF


def test_reads_of_a_broken_ring_fail_only_when_it_is_drained(tmp_path):
    data = os.urandom(CHUNK)
    (tmp_path / "w").write_bytes(data)
    gate = Gate()
    ring = BrokenRing(2, gate)
    with open_reader(lambda _: ring) as reader:
        memory = aligned_memory(CHUNK)
        ticket = reader.submit(reader.open_file(tmp_path / "w"), 0, memory, required_bytes=CHUNK)
        gate.wait_entered(1)
        assert ring.closing.wait(30), "the ring was never drained"
        assert not ticket.is_done
        gate.open()
        with pytest.raises(StorageError, match=r"failed: Bad file descriptor \(EBADF\)"):
            reader.wait(ticket)
    assert memory == data  # It was written to before the read failed, so never afterwards.


def test_a_ring_that_broke_is_not_woken_by_the_reader_that_closes(tmp_path, monkeypatch):
    (tmp_path / "w").write_bytes(bytes(CHUNK))
    gate = Gate()
    ring = BrokenRing(2, gate)
    reader = open_reader(lambda _: ring)
    file = reader.open_file(tmp_path / "w")
    ticket = reader.submit(file, 0, aligned_memory(CHUNK), required_bytes=CHUNK)
    assert ring.closing.wait(30), "the ring was never drained"
    (thread,) = reader._threads
    join = thread.join
    monkeypatch.setattr(thread, "join", lambda: (gate.open(), join()))
    reader.close()
    assert ticket.is_done


def test_memory_of_a_ring_that_cannot_be_drained_is_given_up(tmp_path):
    (tmp_path / "w").write_bytes(bytes(CHUNK))
    with open_reader(LostRing) as reader:
        file, memory = reader.open_file(tmp_path / "w"), aligned_memory(CHUNK)
        ticket = reader.submit(file, 0, memory, required_bytes=CHUNK)
        message = "may write to its memory at any time, which is never used again: .*ENXIO"
        with pytest.raises(StorageError, match=message):
            reader.wait(ticket)
        with pytest.raises(StorageError, match="the reader is closed"):
            reader.submit(file, 0, memory, required_bytes=CHUNK)


def test_a_sleeping_thread_is_woken_only_for_a_slot_that_is_free(tmp_path):
    (tmp_path / "w").write_bytes(bytes(8 * CHUNK))
    gate, rings = Gate(), []

    def make(depth):
        rings.append(CountingRing(depth, gate))
        return rings[0]

    with open_reader(make) as reader:
        file = reader.open_file(tmp_path / "w")

        def submit(idx):
            memory = aligned_memory(CHUNK)
            return reader.submit(file, idx * CHUNK, memory, required_bytes=CHUNK)

        tickets = [submit(0)]
        gate.wait_entered(1)
        assert rings[0].num_wakes == 0  # It slept where there was no read to wait for.
        tickets.append(submit(1))
        gate.wait_entered(1)
        assert rings[0].num_wakes == 1
        tickets += [submit(2), submit(3)]
        assert rings[0].num_wakes == 1  # All slots are taken: a completion will wake it.
        gate.open()
        for ticket in tickets:
            reader.wait(ticket)


def test_threads_that_submit_may_end_before_their_reads_do(tmp_path):
    data = os.urandom(4 * CHUNK)
    (tmp_path / "w").write_bytes(data)
    reader = UringReader.open(
        io_chunk_bytes=CHUNK,
        queue_depth=4,
        open_ring=PreadvRing if uring_error() else None,
    )
    with reader:
        memories = [aligned_memory(CHUNK) for _ in range(4)]
        tickets = {}

        def submit(idx):
            file = reader.open_file(tmp_path / "w")
            offset = idx * CHUNK
            tickets[idx] = reader.submit(file, offset, memories[idx], required_bytes=CHUNK)

        for idx in range(4):
            thread = threading.Thread(target=submit, args=(idx,))
            thread.start()
            thread.join()
        for idx, ticket in tickets.items():
            reader.wait(ticket)
            assert memories[idx] == data[idx * CHUNK : (idx + 1) * CHUNK]


def refuse(monkeypatch, code):
    """Make the extension say what a kernel without io_uring says."""
    fake = SimpleNamespace(uring_probe=lambda: -code)
    monkeypatch.setattr(uring_reader, "extension", fake)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.ENOMEM])
def test_a_kernel_that_refuses_is_named_with_what_is_needed(monkeypatch, code):
    refuse(monkeypatch, code)
    with pytest.raises(BackendUnavailableError) as caught:
        UringReader.open(io_chunk_bytes=CHUNK, queue_depth=1)
    assert str(caught.value) == (
        "the reader io_uring is not available: io_uring cannot be set up: "
        f"{os.strerror(code)} ({errno.errorcode[code]}); it needs Linux 5.6, the setting "
        "kernel.io_uring_disabled=0 and, in a container, a seccomp profile that allows it; or use "
        "--reader threads"
    )
    assert caught.value.exit_code == 2


def test_a_missing_extension_is_named_with_the_packages_to_install(monkeypatch):
    # Source: DeepSpeed#1037.
    monkeypatch.setattr(uring_reader, "extension", None)
    monkeypatch.setattr(
        uring_reader, "extension_error", "zeroinfer._C is missing; install gcc and g++"
    )
    message = "io_uring is not available: .* install gcc and g.+ or use --reader threads"
    with pytest.raises(BackendUnavailableError, match=message):
        UringReader.open(io_chunk_bytes=CHUNK, queue_depth=1)


def test_a_ring_that_the_system_refuses_is_an_error_that_says_what_to_do(monkeypatch):
    def refuse(depth):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(uring_reader, "extension", SimpleNamespace(Uring=refuse))
    monkeypatch.setattr(uring_reader, "require_uring", lambda: None)
    with pytest.raises(BackendUnavailableError, match=r"7 reads in flight .*lower io.queue_depth"):
        UringReader.open(io_chunk_bytes=CHUNK, queue_depth=7)
