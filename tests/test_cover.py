import itertools

import pytest

from cover import pairwise


@pytest.mark.parametrize("sizes", [(2, 3), (4, 4, 2, 2), (3, 2, 4, 2), (5, 1, 2)])
def test_every_value_meets_every_value_of_each_other_axis_in_few_rows(sizes: tuple[int, ...]) -> None:
    axes = [[f"{axis} {at}" for at in range(size)] for axis, size in enumerate(sizes)]
    rows = pairwise(*axes)
    for one, other in itertools.combinations(axes, 2):
        met = {pair for row in rows for pair in itertools.product(row, row)}
        assert met >= set(itertools.product(one, other))
    longest, second = sorted(sizes)[:-3:-1]
    assert longest * second <= len(rows) <= 1.25 * longest * second
