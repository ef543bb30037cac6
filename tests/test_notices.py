"""What one rank notices, told to all."""

from lightning_zero.run.notices import Notice, Notices


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
