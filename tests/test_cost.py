"""The time of a step, as its lanes are laid out."""

import pytest

from lightning_zero.rehearsal.cost import Lane, Rates, Span, Work, timing_of
from lightning_zero.run.program import Cause, Facts, GroupFacts, Kind, Op, Program, Use

RATES = Rates(flops=1.0, memory=1e30, link=1.0, latency=0.0, host=1.0)
USES = (Use(Cause.FORWARD), Use(Cause.BACKWARD), Use(Cause.END), Use(Cause.STEP))
FACTS = Facts(groups=(GroupFacts(name="a", shard=1),), ranks=2)


def step_of(*ops: Op) -> Program:
    return Program(FACTS, USES, ops)


def test_what_is_sent_beside_work_takes_no_time() -> None:
    sent = Op(Kind.REDUCE, 0, at=1, by=2, nbytes=4)
    timing = timing_of(step_of(sent), {1: Work(flops=5)}, RATES)
    assert (timing.seconds, timing.waited, timing.hidden) == (5, 0, 1)


def test_the_rest_is_waited_for_where_it_is_needed() -> None:
    sent = Op(Kind.REDUCE, 0, at=1, by=2, nbytes=8)
    timing = timing_of(step_of(sent), {0: Work(flops=2), 1: Work(flops=5)}, RATES)
    assert (timing.seconds, timing.sent, timing.waited) == (10, 8, 3)
    assert timing.hidden == pytest.approx(5 / 8)


def test_one_lane_does_one_thing_at_a_time() -> None:
    ops = [Op(Kind.REDUCE, 0, at=0, by=1, nbytes=3), Op(Kind.REDUCE, 0, at=0, by=1, nbytes=3)]
    assert timing_of(step_of(*ops), {}, RATES).seconds == 6


def test_what_comes_after_an_op_waits_for_it_on_another_lane_too() -> None:
    ops = [Op(Kind.REDUCE, 0, at=0, nbytes=3), Op(Kind.STORE, 0, at=2, after=(0,))]
    timing = timing_of(step_of(*ops), {3: Work(flops=1)}, RATES)
    assert (timing.seconds, timing.waited) == (4, 3)


def test_what_a_step_leaves_is_waited_for_in_the_next_one() -> None:
    late = Op(Kind.PUBLISH, 0, at=3, by=0, nbytes=7)
    timing = timing_of(step_of(late), {2: Work(flops=2), 3: Work(flops=3)}, RATES)
    assert timing.seconds == 2 + 7  # three of the seven seconds lie beside the work of its own use


def test_spans_say_from_when_to_when_each_use_and_op_lies_on_its_lane() -> None:
    ops = [Op(Kind.REDUCE, 0, at=1, nbytes=8), Op(Kind.STORE, 0, at=2, after=(0,)), Op(Kind.PUT, 0, at=3)]
    timing = timing_of(step_of(*ops), {0: Work(flops=2), 1: Work(flops=5), 3: Work(flops=1, nbytes=6)}, RATES)
    assert timing.spans == (
        Span(Lane.DEVICE, 0, 2, 0, None, 0),
        Span(Lane.LINK, 2, 10, 1, 0, 8),
        Span(Lane.DEVICE, 2, 7, 1, None, 0),
        Span(Lane.DEVICE, 10, 10, 2, 1, 0),
        Span(Lane.DEVICE, 10, 10, 2, None, 0),
        Span(Lane.HOST, 12, 24, 3, 2, 12),  # behind that of the step before, and into the step after
        Span(Lane.DEVICE, 10, 11, 3, None, 6),
    )
    assert timing.seconds == 11


@pytest.mark.parametrize("name", ["flops", "memory", "link", "host"])
def test_a_rate_is_more_than_nothing(name: str) -> None:
    with pytest.raises(ValueError, match=rf"Rates\({name}=0\) is to be more than 0"):
        Rates(**{name: 0})
