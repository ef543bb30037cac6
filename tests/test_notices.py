"""What one rank notices, told to all."""

from typing import Any

import pytest

from lightning_zero.run.notices import Notice, Notices, TornStepError
from lightning_zero.shards.window import Changes


def test_ranks_hear_of_all_that_any_of_them_noticed_and_of_nothing_else() -> None:
    first, second = Notices(), Notices()
    first.here.add(Notice.UNSAVED)
    second.here.update({Notice.STOP, Notice.REQUEUE})
    first.here.discard(Notice.UNSAVED)
    highest = [max(flags) for flags in zip(first.flags(), second.flags(), strict=True)]
    for notices in (first, second):
        notices.hear(highest)
        assert notices.anywhere == {Notice.STOP, Notice.REQUEUE}
    first.hear([0] * len(Notice))
    assert first.anywhere == set()


@pytest.mark.parametrize(
    ("steps", "is_torn"),
    [
        ([(4, 4), (2, 2)], False),
        ([(0, 4), (0, 2)], False),
        ([(0, 4), (0, 0)], False),
        ([(3, 4), (2, 2)], True),
        ([(0, 4), (2, 2)], True),
        ([(1, 4), (0, 2)], True),
        ([(0, 4, True), (0, 2)], True),
    ],
)
def test_a_step_is_torn_unless_all_of_it_or_nothing_is_done(steps: list[tuple[Any, ...]], is_torn: bool) -> None:
    ranks = [Notices() for _ in steps]
    for notices, changes in zip(ranks, steps, strict=True):
        notices.note_step("Adam", Changes(*changes, *([False] * (3 - len(changes)))))
    highest = [max(flags) for flags in zip(*[notices.flags() for notices in ranks], strict=True)]
    for notices in ranks:
        notices.hear(highest)
        assert notices.is_torn == is_torn
        if is_torn:
            with pytest.raises(TornStepError):
                notices.refuse_torn_step([notices.left])
        notices.hear(highest)  # it is told once
        assert not notices.is_torn


@pytest.mark.parametrize("begins", [False, True])
def test_what_ranks_tell_in_two_meetings_is_of_one_step_unless_another_one_has_begun(begins: bool) -> None:
    notices = Notices()
    for changes in (Changes(2, 2, True), Changes(0, 2, False)):
        notices.note_step("Adam", changes)
        notices.hear(notices.flags())
        assert notices.is_torn == (changes.parameters == 0 and not begins)
        if begins:
            notices.begin_step()


def test_a_rank_is_in_a_batch_or_at_the_end_of_its_epoch_and_only_two_ranks_are_in_both() -> None:
    first, second = Notices(), Notices()
    for moved, are_apart in (
        ((Notice.IN_BATCH, Notice.IN_BATCH), False),
        ((Notice.AT_EPOCH_END, Notice.IN_BATCH), True),
        ((Notice.AT_EPOCH_END, Notice.AT_EPOCH_END), False),
    ):
        for notices, notice in zip((first, second), moved, strict=True):
            notices.move(notice, "here")
        first.hear([max(flags) for flags in zip(first.flags(), second.flags(), strict=True)])
        assert first.are_apart == are_apart


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (Changes(1, 3, True), "Adam.step() had changed 1 of 3 parameters and some of their state"),
        (Changes(0, 3, False), "Adam.step() had changed 0 of 3 parameters"),
        (Changes(3, 3, True), ""),
    ],
)
def test_what_a_step_has_left_undone_is_said(changes: Changes, told: str) -> None:
    notices = Notices()
    notices.note_step("Adam", changes)
    assert notices.left == told


def test_each_torn_step_is_told_of_and_the_error_behind_it_once() -> None:
    """Who catches it loads a checkpoint, and trains on."""
    notices = Notices(late_errors=[ArithmeticError()])
    for cause in (ArithmeticError, type(None)):
        notices.begin_step()
        notices.note_step("Adam", Changes(1, 2, False))
        notices.hear(notices.flags())
        assert notices.is_torn
        with pytest.raises(TornStepError) as told:
            notices.refuse_torn_step([notices.left])
        assert isinstance(told.value.__cause__, cause)
