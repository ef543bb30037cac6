"""What a rank knows of the reductions of the others in a backward, apart from how it hears of it."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_zero.run.readiness import Readiness

COMM = {"size": 2, "keeps_order": False, "sanitize": False}


def make(*, gathers: bool = False, steps: Any = None, **comm: Any) -> Readiness:
    settled: list[Any] = []
    reductions: Any = SimpleNamespace(steps=steps, may_settle_alone=True, settle_alone=settled.append, settled=settled)
    of_ranks: Any = SimpleNamespace(**{**COMM, **comm})
    return Readiness(of_ranks, reductions, gathers=gathers)


def told(*numbers: int, waits: list[bool] | None = None) -> Any:
    """What ranks have told each other."""
    return SimpleNamespace(numbers=list(numbers), wait=lambda: None if waits is None else waits.append(True))


@pytest.mark.parametrize(
    ("given", "marks"),
    [
        ({}, True),
        ({"size": 1}, False),
        ({"gathers": True}, False),
        ({"keeps_order": True}, False),  # what a rank that diverges wants could not pass reductions
        ({"sanitize": True}, False),  # ... and would be compared with them
        ({"steps": "in backward"}, False),  # the values that it wants would change meanwhile
    ],
    ids=str,
)
def test_marks_are_sent_only_where_a_rank_that_diverges_can_be_served_during_reductions(
    given: dict[str, Any], marks: bool
) -> None:
    assert make(**given).marks_reductions is marks


@pytest.mark.parametrize("each", [False, True])
def test_a_rank_settles_alone_only_where_each_has_gradients_of_its_own(each: bool) -> None:
    readiness = make()
    readiness.note_that_all_reduce(each=each)
    assert readiness.all_reduce
    assert readiness.settles_alone is each


def test_what_was_known_of_one_backward_is_not_of_the_next() -> None:
    """That each parameter had a gradient: others would take the next ones for complete, too."""
    readiness = make()
    readiness.note_that_all_reduce(each=True)
    readiness.knew_all = True
    readiness.settle_alone(None)
    assert (readiness.all_reduce, readiness.settles_alone) == (False, False)
    readiness.note_that_all_reduce(each=True)
    assert not readiness.knew_all
    readiness.reset()
    assert (readiness.all_reduce, readiness.settles_alone) == (False, False)


@pytest.mark.parametrize("marks", [(0, 0), (0, 1), (1, 0)])
def test_one_mark_is_enough_to_hear_that_a_rank_diverges_and_is_heard_once(marks: tuple[int, int]) -> None:
    readiness, waits = make(), list[bool]()
    readiness.marks = told(*marks, waits=waits)
    assert readiness.hear_marks() is any(marks)
    assert readiness.all_reduce is not any(marks)
    assert readiness.marks is None
    assert waits == [True]


def test_the_mark_of_a_rank_that_diverges_is_waited_for_once_all_have_come_to_an_exchange() -> None:
    waits: list[bool] = []
    readiness = make(host=SimpleNamespace(tell=lambda *_: told(1, waits=waits)))
    readiness._reductions.gradients = [SimpleNamespace(group=SimpleNamespace(name="group"))]  # type: ignore[misc]
    readiness.send_mark(diverges=True)
    assert readiness.marks is None
    assert waits == []
    readiness.end_mark()
    readiness.end_mark()
    assert waits == [True]
