"""Places in the landing ring, compared with a brute-force replay of all steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroinfer.planner import lay_out_ring


@st.composite
def rings(draw):
    footprints = draw(st.lists(st.integers(1, 40), min_size=1, max_size=40))
    return footprints, draw(st.integers(max(footprints), 200))


def overlaps(ring, footprints, first, second):
    starts = ring.offsets[first], ring.offsets[second]
    return starts[0] < starts[1] + footprints[second] and starts[1] < starts[0] + footprints[first]


@given(rings())
def test_every_place_lies_inside_the_ring_and_the_ring_inside_its_limit(case):
    footprints, max_bytes = case
    ring = lay_out_ring(footprints, max_bytes=max_bytes)
    ends = [offset + size for offset, size in zip(ring.offsets, footprints, strict=True)]
    assert min(ring.offsets) >= 0
    assert max(ends) == ring.num_bytes <= max_bytes


@given(rings())
def test_lookback_is_the_last_use_of_the_place_in_this_step_or_the_one_before(case):
    footprints, max_bytes = case
    ring = lay_out_ring(footprints, max_bytes=max_bytes)
    count = len(footprints)
    for position in range(count):
        # Uses of two steps in order, up to the one before this position in the second step.
        earlier = [index % count for index in range(count + position)]
        blockers = [
            index
            for index, other in enumerate(earlier)
            if overlaps(ring, footprints, position, other)
        ]
        assert count + position - blockers[-1] == ring.lookback[position]


@given(rings())
def test_units_closer_than_their_lookback_never_share_a_byte(case):
    footprints, max_bytes = case
    ring = lay_out_ring(footprints, max_bytes=max_bytes)
    count = len(footprints)
    for position in range(count):
        for distance in range(1, ring.lookback[position]):
            assert not overlaps(ring, footprints, position, (position - distance) % count)


@given(rings())
def test_laps_are_balanced_to_within_a_unit(case):
    footprints, max_bytes = case
    ring = lay_out_ring(footprints, max_bytes=max_bytes)
    laps = []
    for offset, size in zip(ring.offsets, footprints, strict=True):
        if offset == 0:
            laps.append(0)
        laps[-1] += size
    average = sum(footprints) / len(laps)
    assert max(laps) <= average + max(footprints)
    assert len(laps) <= 2 * sum(footprints) / max_bytes + 2


def test_nearly_equal_units_stand_in_columns_and_wait_for_one_other_only():
    # Packed, each of the second lap would lie across the border of two of the first.
    ring = lay_out_ring([11, 10, 10, 11, 10, 10], max_bytes=33)
    assert ring.offsets == (0, 11, 21, 0, 11, 21)
    ring = lay_out_ring([10, 11, 11, 10, 10, 11], max_bytes=33)
    assert ring.offsets == (0, 10, 21, 0, 10, 21)
    assert ring.lookback == (3, 3, 3, 3, 3, 3)


@given(st.integers(1, 60), st.integers(1, 20))
def test_ring_of_equal_units_is_used_evenly_up_to_the_border_between_steps(count, places):
    ring = lay_out_ring([10] * count, max_bytes=10 * places)
    num_laps = -(-count // places)
    assert ring.offsets.count(0) == num_laps
    assert min(ring.lookback) >= count // num_laps
    assert ring.max_depth >= count // num_laps - 1


def test_ring_of_everything_has_no_unit_that_waits_for_another():
    ring = lay_out_ring([5, 6, 7], max_bytes=100)
    assert ring.lookback == (3, 3, 3)
    assert ring.max_depth == 2


def test_no_streamed_units_need_no_ring():
    ring = lay_out_ring([], max_bytes=0)
    assert (ring.num_bytes, ring.offsets, ring.lookback) == (0, (), ())


def test_unit_larger_than_the_ring_is_a_fault_of_the_caller():
    with pytest.raises(AssertionError, match="unit of 9 bytes cannot land in a ring of 8"):
        lay_out_ring([3, 9], max_bytes=8)
