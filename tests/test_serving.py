"""When ranks do what one of them wants, apart from how they hear of it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_zero.run.serving import Serving

UNIT, OF_ALL, ALONE, TO_REDUCE = range(4)


@pytest.fixture
def serving() -> Serving:
    comm: Any = SimpleNamespace(host=None)
    cache: Any = SimpleNamespace(units=[SimpleNamespace(pass_by=lambda: None)])
    nothing: Any = None
    made = Serving(comm, cache, nothing, nothing, nothing)
    assert made.enroll("of all ranks", lambda wanted: "of all", is_of_all=True) == OF_ALL
    assert made.enroll("of one", lambda wanted: "alone") == ALONE
    assert made.to_reduce == TO_REDUCE
    return made


@pytest.mark.parametrize(
    ("wants", "early", "is_due"),
    [
        ([OF_ALL], False, True),
        ([OF_ALL, TO_REDUCE], False, True),  # a rank that is about to reduce comes to it later
        ([OF_ALL], True, False),  # so does one that was early, and that meets the others once more
        ([UNIT, OF_ALL], False, False),
        ([OF_ALL, ALONE], False, False),
    ],
)
def test_what_all_ranks_come_to_waits_until_none_wants_anything_else(
    wants: Sequence[int], early: bool, is_due: bool, serving: Serving
) -> None:
    assert serving.is_due(OF_ALL, wants, early=early) is is_due
    assert all(serving.is_due(want, wants, early=early) for want in wants if want != OF_ALL)


def test_a_result_is_given_once_to_the_rank_that_wanted_it(serving: Serving) -> None:
    """What is gathered for one rank is not kept longer than it keeps it."""
    serving.serve([ALONE], None)
    assert serving.take_result() is None
    serving.serve([UNIT, ALONE], ALONE)
    assert serving.take_result() == "alone"
    assert serving.take_result() is None
