"""Residents stay inside the budget and are spread so that the link never idles for long."""

from hypothesis import given
from hypothesis import strategies as st

from zeroinfer.planner import choose_resident

FOOTPRINTS = st.lists(st.integers(1, 60), min_size=1, max_size=50)
BUDGETS = st.integers(0, 1500)


def used_bytes(footprints, chosen):
    return sum(footprints[idx] for idx in chosen)


@given(FOOTPRINTS, BUDGETS)
def test_residents_never_exceed_the_budget(footprints, budget):
    chosen = choose_resident(footprints, budget_bytes=budget)
    assert used_bytes(footprints, chosen) <= budget
    assert chosen <= set(range(len(footprints)))


@given(FOOTPRINTS, BUDGETS)
def test_no_unit_that_would_still_fit_is_left_out(footprints, budget):
    chosen = choose_resident(footprints, budget_bytes=budget)
    rest = budget - used_bytes(footprints, chosen)
    assert all(footprints[idx] > rest for idx in range(len(footprints)) if idx not in chosen)


@given(FOOTPRINTS, st.integers(1, 1500))
def test_streamed_runs_are_bounded_by_even_spreading(footprints, budget):
    chosen = choose_resident(footprints, budget_bytes=budget)
    run = longest = 0
    for idx, footprint in enumerate(footprints):
        run = 0 if idx in chosen else run + footprint
        longest = max(longest, run)
    # Credit grows by budget / total per byte, and a unit is kept once the credit covers it.
    assert longest <= max(footprints) * sum(footprints) / budget + 1e-6


@given(FOOTPRINTS)
def test_everything_stays_when_it_fits(footprints):
    chosen = choose_resident(footprints, budget_bytes=sum(footprints))
    assert chosen == set(range(len(footprints)))


@given(FOOTPRINTS)
def test_nothing_stays_without_a_budget(footprints):
    assert choose_resident(footprints, budget_bytes=0) == frozenset()


def test_half_of_equal_units_alternates():
    assert choose_resident([10] * 8, budget_bytes=40) == {1, 3, 5, 7}
