"""Rows of a table that hold every pair of values of its columns, chosen greedily."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product

__all__ = ["cover"]

Row = dict[str, str]
Group = tuple[str, ...]


def cover(
    axes: Mapping[str, Sequence[str]],
    *,
    is_possible: Callable[..., bool],
    threes: Iterable[str] = (),
) -> list[Row]:
    """Return rows in which every possible pair of values stands somewhere.

    Args:
        axes: column -> its values; those with many values first make for fewer rows.
        is_possible: says of some columns' values, given by name, whether a row may hold them.
        threes: columns of which every three values must stand together as well.
    """
    groups = [*combinations(axes, 2), *combinations(threes, 3)]
    wanted = {
        tuple(zip(group, values, strict=True)): None
        for group in groups
        for values in product(*(axes[name] for name in group))
        if is_possible(**dict(zip(group, values, strict=True)))
    }
    rows = []
    while wanted:
        row = _grow(dict(next(iter(wanted))), axes, groups, wanted, is_possible)
        for group in groups:
            wanted.pop(_part(row, group), None)
        rows.append(row)
    return rows


def _grow(row: Row, axes, groups: Sequence[Group], wanted, is_possible) -> Row:
    """Give the other columns the values that bring most of what is wanted."""
    for name in axes:
        if name in row:
            continue
        known = [
            group for group in groups if name in group and all(n == name or n in row for n in group)
        ]
        choices = [{**row, name: value} for value in axes[name]]
        choices = [choice for choice in choices if is_possible(**choice)]
        assert choices, f"no {name} goes with {row}"
        row = max(choices, key=lambda choice: sum(_part(choice, g) in wanted for g in known))
    return {name: row[name] for name in axes}


def _part(row: Row, group: Group) -> tuple[tuple[str, str], ...]:
    return tuple((name, row[name]) for name in group)
