"""Which combinations of several settings to run where every two of them shall meet, but not every three."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value of each axis, the same ones always, in which every value of one axis meets every value of
    each other axis: all combinations of the two longest axes, and hardly more.

    For settings that are known to act one on one. A defect that takes three of them at once may hide.
    """
    bits: dict[Any, int] = {}  # of each pair one, as lanes of the tests do this each for itself
    pairs = {
        row: sum(bits.setdefault(pair, 1 << len(bits)) for pair in itertools.combinations(enumerate(row), 2))
        for row in itertools.product(*(range(len(axis)) for axis in axes))
    }
    missing = (1 << len(bits)) - 1
    chosen = []
    while missing:
        best = max(pairs, key=lambda row: (missing & pairs[row]).bit_count())  # the first of equals
        missing &= ~pairs[best]
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


T = TypeVar("T")


def covering(
    axes: Sequence[Sequence[T]], clash: Callable[[T, T], bool], is_wanted: Callable[[T, T], bool]
) -> list[tuple[T, ...]]:
    """As `pairwise`, for many axes, of which some values `clash` and are in no row together. Rows are not the fewest.

    Every pair that `is_wanted` and does not clash is in a row. Where nothing that is missing depends on an axis, a row
    has its first value that does not clash.
    """
    axis_of = [axis for axis, values in enumerate(axes) for _ in values]
    values = [value for axis in axes for value in axis]
    between = [pair for pair in itertools.combinations(range(len(values)), 2) if axis_of[pair[0]] != axis_of[pair[1]]]
    fitting = {(one, other) for one, other in between if not clash(values[one], values[other])}
    missing = {(one, other): None for one, other in sorted(fitting) if is_wanted(values[one], values[other])}

    def completed(row: tuple[int, ...], gains: dict[int, int]) -> tuple[int, ...] | None:
        """A row with a value of each axis. `gains` has what is open, and how many missing pairs it makes with `row`."""
        if not gains:
            return row
        for best in sorted(gains, key=lambda at: (-gains[at], at)):
            others = {at: (min(at, best), max(at, best)) for at in gains if axis_of[at] != axis_of[best]}
            left = {at: gains[at] + (pair in missing) for at, pair in others.items() if pair in fitting}
            if {axis_of[at] for at in left} == {axis_of[at] for at in others}:
                found = completed((*row, best), left)
                if found is not None:
                    return found
        return None

    rows = []
    while missing:
        seed = next(iter(missing))
        first = {at: len(values) * (at in seed) for at in range(len(values))}
        row = completed((), first)
        if row is None or not set(seed) <= set(row):
            raise ValueError(f"{[values[at] for at in seed]} are in no row together: say that they clash.")
        for pair in itertools.combinations(sorted(row), 2):
            missing.pop(pair, None)
        rows.append(tuple(values[at] for at in sorted(row)))
    return rows
