"""Which combinations of several settings to run where every two of them shall meet, but not every three."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(row), 2))


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value of each axis, the same ones always, in which every value of one axis meets every value of
    each other axis: all combinations of the two longest axes, and hardly more.

    For settings that are known to act one on one. A defect that takes three of them at once may hide.
    """
    rows = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing = set().union(*map(_pairs, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing & _pairs(row)))  # the first of equals
        missing -= _pairs(best)
        chosen.append(best)
    return [tuple(axis[at] for axis, at in zip(axes, row, strict=True)) for row in sorted(chosen)]


def runs_of(names: Sequence[str], precisions_of: Callable[[str], Sequence[str]]) -> list[tuple[str, str, int]]:
    """Name, precision and stage, pairwise: every name meets each of its precisions at stage 3, and at stages 1 and 2 by
    turns, which are apart in where gradients rest alone. What has one precision meets both there."""
    return [
        (name, precision, stage)
        for number, name in enumerate(names)
        for at, precision in enumerate(precisions_of(name))
        for stage in ((1, 2, 3) if len(precisions_of(name)) == 1 else (1 + (number + at) % 2, 3))
    ]


def name_of(value: Any) -> str:
    """For the ids of tests, which are to be the same in every process: a function's `str` has its address."""
    return getattr(value, "__name__", str(value))
