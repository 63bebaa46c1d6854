"""Locked host memory: what is locked, what a refusal costs, and who needs none."""

import logging
import mmap
from pathlib import Path

import pytest

from zeroinfer.memory import Arena, HostPins, MlockPinner
from zeroinfer.units import MIB

PAGE = mmap.PAGESIZE


class _Pinner:
    """Refuses after so many ranges."""

    def __init__(self, num_granted):
        self.num_granted = num_granted
        self.asked, self.ranges = [], []

    def pin(self, address, num_bytes):
        self.asked.append((address, num_bytes))
        if len(self.ranges) == self.num_granted:
            return "Cannot allocate memory (ENOMEM)"
        self.ranges.append((address, num_bytes))
        return None

    def unpin(self, address, num_bytes):
        self.ranges.remove((address, num_bytes))


@pytest.fixture
def arena():
    with Arena.create(8 * PAGE, name="staging", is_prefaulted=True) as opened:
        yield opened


def locked_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmLck:")[1].split()[0]) * 1024


def test_mlock_locks_exactly_the_place_and_gives_it_back(arena):
    before = locked_bytes()
    with HostPins(MlockPinner()) as pins:
        pins.pin(arena, PAGE, 3 * PAGE)
        assert pins.num_bytes == 3 * PAGE
        assert locked_bytes() - before == 3 * PAGE
    assert locked_bytes() == before


def test_places_are_locked_one_by_one_and_unlocked_at_the_end(arena):
    pinner = _Pinner(10)
    pins = HostPins(pinner)
    for slot in range(4):
        pins.pin(arena, slot * 2 * PAGE, 2 * PAGE)
    pins.pin(arena, 0, 0)
    assert pinner.ranges == [(arena.address + slot * 2 * PAGE, 2 * PAGE) for slot in range(4)]
    pins.close()
    pins.close()
    assert pinner.ranges == []


def test_a_refusal_is_said_once_and_ends_the_locking(arena, caplog):
    pinner = _Pinner(1)
    with caplog.at_level(logging.WARNING), HostPins(pinner) as pins:
        for slot in range(4):
            pins.pin(arena, slot * PAGE, PAGE)
        assert pins.num_bytes == PAGE
    assert len(pinner.asked) == 2
    assert pinner.ranges == []
    assert [record.getMessage() for record in caplog.records] == [
        "locking 4.0 KiB of staging was refused after 4.0 KiB: Cannot allocate memory (ENOMEM); "
        "copies to the device go through unlocked memory, more slowly and with the same results; "
        "raise the limit (ulimit -l)"
    ]


def test_without_a_pinner_nothing_is_locked(arena):
    before = locked_bytes()
    with HostPins(None) as pins:
        pins.pin(arena, 0, 8 * PAGE)
        assert pins.num_bytes == 0
        assert locked_bytes() == before


def test_mlock_names_the_reason_of_a_refusal():
    with Arena.create(MIB, name="gone", is_prefaulted=False) as arena:
        reason = MlockPinner().pin(arena.address + (1 << 46), PAGE)
    assert reason == "Cannot allocate memory (ENOMEM)"


def test_a_place_is_locked_once_however_often_it_is_asked_for(arena):
    pinner = _Pinner(10)
    with HostPins(pinner) as pins:
        pins.pin(arena, 0, PAGE)
        pins.pin(arena, 0, PAGE)
        assert pinner.asked == [(arena.address, PAGE)]
        assert pins.num_bytes == PAGE
    assert pinner.ranges == []
