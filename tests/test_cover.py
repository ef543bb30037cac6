import itertools

import pytest

from cover import covering, pairwise, runs_of


@pytest.mark.parametrize("sizes", [(2, 3), (4, 4, 2, 2), (3, 2, 4, 2), (5, 1, 2)])
def test_every_value_meets_every_value_of_each_other_axis_in_few_rows(sizes: tuple[int, ...]) -> None:
    axes = [[f"{axis} {at}" for at in range(size)] for axis, size in enumerate(sizes)]
    rows = pairwise(*axes)
    for one, other in itertools.combinations(axes, 2):
        met = {pair for row in rows for pair in itertools.product(row, row)}
        assert met >= set(itertools.product(one, other))
    longest, second = sorted(sizes)[:-3:-1]
    assert longest * second <= len(rows) <= 1.25 * longest * second


def test_every_name_meets_each_stage_and_each_precision_and_both_meet_where_parameters_are_elsewhere() -> None:
    precisions = {"one": ["a"], "two": ["a", "b"], "three": ["a", "b"]}
    rows = runs_of(list(precisions), precisions.__getitem__)
    for name, its_precisions in precisions.items():
        assert {stage for of, _, stage in rows if of == name} == {1, 2, 3}
        assert {precision for of, precision, stage in rows if of == name and stage == 3} == set(its_precisions)
    assert {(precision, stage) for _, precision, stage in rows} == set(itertools.product("ab", (1, 2, 3)))
    assert len(rows) == 3 + 4 + 4


def test_every_wanted_pair_that_does_not_clash_is_in_a_row_and_none_that_does() -> None:
    axes = [[f"{axis} {at}" for at in range(size)] for axis, size in enumerate((3, 4, 2, 2, 2))]
    clashes = [{"0 0", "1 0"}, {"0 1", "2 1"}, {"1 3", "0 2"}, {"3 1", "4 1"}]

    def clash(one: str, other: str) -> bool:
        return {one, other} in clashes

    rows = covering(axes, clash, lambda one, other: "4 0" not in (one, other))
    for one, other in itertools.combinations(axes, 2):
        for pair in itertools.product(one, other):
            together = [row for row in rows if set(pair) <= set(row)]
            assert not together if clash(*pair) else together or "4 0" in pair
    assert {len(row) for row in rows} == {len(axes)}
    assert len(rows) <= 20
    with pytest.raises(ValueError, match=r"\['0 0', '1 0'\] are in no row together"):
        covering([["0 0"], ["1 0"], ["2 0"]], lambda one, other: "2 0" in (one, other), lambda one, other: True)
