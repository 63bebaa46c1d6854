"""Both readers over a disk that is late, answers out of order, comes short and fails.

A read brings the right bytes or a clear error, never anything else, and no place of the landing
ring is filled while anyone still uses it. With the kernel's ring where it may be used, its
completions are held back, shuffled and spoilt on their way to the reader.
"""

import random
from dataclasses import dataclass

import pytest

from tests.helpers.checkpoints import tiny_llama
from tests.helpers.engines import drive, greedy_requests, open_engine, run_requests
from tests.helpers.faults import Faults
from tests.helpers.io_shim import aligned_memory
from tests.helpers.rings import open_faulty_reader
from tests.helpers.streams import open_stream, write_weights
from zeroinfer.errors import StorageError
from zeroinfer.native import ReadTicket
from zeroinfer.units import align_down, align_up

BLOCK = 4096
RUNS_PER_TEST = 100
FIRST_SEEDS = range(0, 500, RUNS_PER_TEST)
GUARD, SCRATCHED = 0xFF, 0x77

readers = pytest.mark.parametrize("name", ["threads", "io_uring"])


def make_faults(seed, *, failed=0.0, empty=0.0):
    return Faults(seed=seed, late=0.4, short=0.3, failed=failed, empty=empty)


@dataclass
class Read:
    """A read of bytes [start, stop) into the middle of memory that must not change around it."""

    start: int
    stop: int
    memory: memoryview
    ticket: ReadTicket
    error: str = ""

    @classmethod
    def submit(cls, reader, file, source):
        start, stop = sorted(source.sample(range(file.size_bytes + 1), 2))
        begin, end = align_down(start, BLOCK), align_up(stop, BLOCK)
        memory = aligned_memory(end - begin + 2 * BLOCK)
        ticket = reader.submit(
            file, begin, memory[BLOCK:-BLOCK], required_bytes=stop - begin,
            is_urgent=source.random() < 0.2,
        )  # fmt: skip
        return cls(start, stop, memory, ticket)

    def wait(self, reader):
        try:
            reader.wait(self.ticket)
        except StorageError as error:
            self.error = str(error)
            self.memory[:] = bytes([SCRATCHED]) * len(self.memory)

    def check(self, path, data):
        """Compare with the file; after a failure nothing may have been written any more."""
        if self.error:
            assert f"of {path} " in self.error
            assert "(EIO)" in self.error or "came short" in self.error
            assert set(self.memory) == {SCRATCHED}
            return
        place = BLOCK + self.start % BLOCK
        assert self.memory[place : place + self.stop - self.start] == data[self.start : self.stop]
        assert set(self.memory[:BLOCK]) == set(self.memory[-BLOCK:]) == {GUARD}


def read_at_random(name, path, data, seed):
    """Make a few reads with faults; return how many were made and failed, and the faults."""
    source = random.Random(seed)
    rate = source.choice([0.0, 0.02, 0.1])
    faults = make_faults(seed, failed=rate, empty=rate / 2)
    cell = {"io_chunk_bytes": BLOCK * source.randint(1, 4), "queue_depth": source.randint(1, 5)}
    with open_faulty_reader(name, faults, **cell) as reader:
        file = reader.open_file(path)
        reads = [Read.submit(reader, file, source) for _ in range(source.randint(1, 6))]
        for read in source.sample(reads, len(reads)):
            read.wait(reader)
    for read in reads:
        read.check(path, data)
    num_failed = sum(bool(read.error) for read in reads)
    assert num_failed == 0 or faults.num_fatal > 0
    return len(reads), num_failed, faults


@pytest.mark.parametrize("first_seed", FIRST_SEEDS)
@readers
def test_a_read_brings_the_right_bytes_or_a_clear_error(tmp_path, name, first_seed):
    data = random.Random(first_seed).randbytes(30 * BLOCK + 77)
    path = tmp_path / "w"
    path.write_bytes(data)
    num_reads = num_failed = num_short = 0
    for seed in range(first_seed, first_seed + RUNS_PER_TEST):
        made, failed, faults = read_at_random(name, path, data, seed)
        num_reads += made
        num_failed += failed
        num_short += faults.num_short
    # Every kind of fault was there, and most reads got through.
    assert num_short > RUNS_PER_TEST
    assert 10 < num_failed < num_reads / 2


def check_places(events, homes):
    """Replay a coordinator's events: nobody fetches into bytes that are in flight or in use."""
    streamed = {idx: home for idx, home in homes.items() if not home.is_resident}
    live = set()
    num_submits = 0
    for position, (kind, _, unit_idx) in enumerate(events):
        if kind == "restart":
            live.clear()
        elif unit_idx not in streamed:
            continue
        elif kind == "submit":
            home = streamed[unit_idx]
            for other in (streamed[idx] for idx in live):
                is_apart = (
                    home.offset + home.footprint <= other.offset
                    or other.offset + other.footprint <= home.offset
                )
                assert is_apart, (position, unit_idx, other.unit_idx)
            live.add(unit_idx)
            num_submits += 1
        elif kind == "release":
            live.remove(unit_idx)
        else:
            assert kind == "landed"
            assert unit_idx in live
    return num_submits


def test_the_check_of_places_finds_a_place_that_is_used_early(tmp_path):
    with open_stream(write_weights(tmp_path / "w"), weights="nvme", prefetch_depth=1) as stream:
        for _ in range(2):
            stream.run_step(has_next=True)
        stream.fetch.drain()
        events, homes = list(stream.events), stream.store.homes
        assert check_places(events, homes) > len(stream.plan.streamed)
        late = next(idx for idx, event in enumerate(events) if event[0] == "release")
        with pytest.raises((AssertionError, KeyError)):
            check_places([*events[:late], *events[late + 1 :]], homes)


SMALL_RINGS = (
    {"weights": "nvme", "prefetch_depth": 1},
    {"weights": "auto", "prefetch_depth": 50, "dram_weights_bytes": 40_000},
    {"weights": "auto", "prefetch_depth": None, "dram_weights_bytes": 60_000},
)
"""Places are few and the depth would allow more: a fetch must wait for the release before it."""


@readers
def test_no_place_of_the_landing_ring_is_reused_early(tmp_path, name):
    weights = write_weights(tmp_path / "weights.bin", num_layers=4)
    errors = []
    for seed in range(36):
        faults = make_faults(seed, failed=0.01 if seed % 2 else 0.0)
        reader = open_faulty_reader(name, faults, io_chunk_bytes=8192, queue_depth=1 + seed % 4)
        with open_stream(weights, reader=reader, **SMALL_RINGS[seed % 3]) as stream:
            num_steps = 0
            while num_steps < 3:
                try:
                    stream.run_step(has_next=num_steps < 2)
                    num_steps += 1
                except StorageError as error:
                    errors.append(str(error))
                    stream.fetch.restart()
                    stream.events.append(("restart", -1, -1))
            assert stream.plan.streamed
            num_submits = check_places(stream.events, stream.store.homes)
            assert num_submits >= 3 * len(stream.plan.streamed)
        assert faults.num_short
    assert len(errors) > 3
    assert all("(EIO)" in error for error in errors)


REQUESTS = greedy_requests([(5, 6, 7, 8), (11, 12), (40,)], max_tokens=4)
STREAMED = {
    "offload.weights": "nvme",
    "offload.fetch_unit_bytes": "8KiB",
    "offload.prefetch_depth": 2,
    "offload.debug_poison": "false",
}
"""Poison is off: bytes that came too early would be those of another layer, not NaN."""


@readers
def test_an_engine_on_such_a_disk_gives_the_same_tokens(tmp_path, name):
    folder = tiny_llama(tmp_path / "llama", num_hidden_layers=4)
    expected = run_requests(folder, REQUESTS, {"offload.weights": "dram"}).ids
    for seed in range(8):
        faults = make_faults(seed)
        reader = open_faulty_reader(name, faults, io_chunk_bytes=8192, queue_depth=3)
        with open_engine(folder, REQUESTS, STREAMED, reader=reader) as engine:
            events = []
            engine._streaming.fetch._on_event = lambda *event, to=events: to.append(event)
            assert drive(engine, REQUESTS).ids == expected, seed
            num_submits = check_places(events, engine._streaming.fetch._homes)
            assert num_submits == 4 * len(engine.plan.streamed)
        assert faults.num_short


@readers
def test_an_engine_goes_on_after_a_failed_step(tmp_path, name):
    folder = tiny_llama(tmp_path / "llama", num_hidden_layers=4)
    expected = run_requests(folder, REQUESTS, {"offload.weights": "dram"}).ids
    errors = []
    for seed in range(6):
        faults = make_faults(seed, failed=0.005)
        reader = open_faulty_reader(name, faults, io_chunk_bytes=8192, queue_depth=3)
        with open_engine(folder, REQUESTS, STREAMED, reader=reader) as engine:
            for request in REQUESTS:
                engine.add_request(request)
            finished = []
            while engine.has_unfinished_requests():
                try:
                    finished += engine.step().finished
                except StorageError as error:
                    errors.append(str(error))
        rows = sorted(finished, key=lambda row: row.request_id)
        assert [list(row.token_ids) for row in rows] == expected, seed
    assert errors
    assert all("(EIO)" in error for error in errors)
