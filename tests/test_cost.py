"""The time of a step, as its lanes are laid out."""

from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_zero.distributed_private import COLLECTIVES
from lightning_zero.rehearsal.cost import Lane, Rates, Span, Work, timing_of, work_of
from lightning_zero.rehearsal.rehearsal import rehearse
from lightning_zero.run.program import (
    Among,
    Cause,
    Facts,
    GroupFacts,
    Kind,
    Op,
    OptimizerFacts,
    Program,
    Use,
    WindowFacts,
)

RATES = Rates(flops=1.0, memory=1e30, link=1.0, latency=0.0, host=1.0)
USES = (Use(Cause.FORWARD), Use(Cause.BACKWARD), Use(Cause.END), Use(Cause.STEP))
FACTS = Facts(groups=(GroupFacts(name="a", shard=1),), ranks=2)


def step_of(*ops: Op) -> Program:
    return Program(FACTS, USES, ops)


def test_what_is_sent_beside_work_takes_no_time() -> None:
    sent = Op(Kind.REDUCE, 0, at=1, by=2, nbytes=4)
    timing = timing_of(step_of(sent), {1: Work(flops=5)}, RATES)
    assert (timing.seconds, timing.waited, timing.hidden) == (5, 0, 1)


def test_cores_that_send_by_themselves_do_nothing_else_meanwhile() -> None:
    sent = Op(Kind.REDUCE, 0, at=1, by=2, nbytes=4)
    timing = timing_of(step_of(sent), {1: Work(flops=5)}, replace(RATES, shares=True))
    assert (timing.seconds, timing.waited, timing.hidden) == (9, 4, 0)


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


def test_what_comes_after_an_op_of_the_step_before_waits_for_that_one() -> None:
    """As the values of a window are read again only when those of the step before are written."""
    ops = [Op(Kind.STORE, 0, at=0, after=(1,)), Op(Kind.REDUCE, 0, at=3, nbytes=7)]
    timing = timing_of(step_of(*ops), {3: Work(flops=3)}, RATES)
    assert (timing.seconds, timing.waited) == (7, 4)


def test_the_models_own_collectives_are_waited_for_where_they_are_called() -> None:
    work = {1: Work(flops=5, messages=2, sent=3)}
    timing = timing_of(step_of(), work, replace(RATES, latency=1.0))
    assert (timing.seconds, timing.compute, timing.sent, timing.waited, timing.hidden) == (10, 5, 5, 5, 0)


def test_replicas_send_also_where_a_rank_has_all_of_its_shard() -> None:
    alone = replace(FACTS, ranks=1)
    for among, seconds in ((Among.SHARD, 5), (Among.REPLICAS, 9)):
        sent = Op(Kind.REDUCE, 0, at=1, by=1, nbytes=4, among=among)
        assert timing_of(Program(alone, USES, (sent,)), {1: Work(flops=5)}, RATES).seconds == seconds


def test_each_window_of_a_group_moves_its_part_of_it() -> None:
    windows = tuple(WindowFacts(groups=(0,), is_staged=True) for _ in range(3))
    facts = replace(FACTS, optimizers=(OptimizerFacts(groups=(0,), windows=windows),))
    ops = tuple(Op(Kind.FETCH, 0, at=3, by=3) for _ in windows)
    assert timing_of(Program(facts, USES, ops), {}, RATES).moved == 3 * 4  # master and two states, of one element


@pytest.mark.parametrize(
    ("name", "times"), [("all_reduce", 2), ("all_gather_into_tensor", 1), ("reduce_scatter_tensor", 1)]
)
def test_a_collective_of_the_model_sends_the_larger_of_what_goes_in_and_comes_out(name: str, times: int) -> None:
    func = getattr(getattr(torch.ops, COLLECTIVES), name).default
    small, large = torch.ones(4), torch.ones(8)
    for given, result in ((small, large), (large, small)):
        assert work_of(func, (given, 2, "group"), {}, result) == Work(messages=1, sent=times * large.nbytes)
    wait = getattr(torch.ops, COLLECTIVES).wait_tensor.default
    assert work_of(wait, (large,), {}, large) == Work()


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
    with pytest.raises(ValueError, match=rf"Rates\({name}=0\) is to be a number above 0"):
        Rates(**{name: 0})


@pytest.mark.parametrize("name", ["flops", "latency"])
@pytest.mark.parametrize("wrong", ["fast", float("nan"), -1])
def test_a_rate_is_a_number(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"Rates\({name}={wrong!r}\) is to be a number above 0"):
        Rates(**{name: wrong})
    with pytest.raises(ValueError, match="shares='yes' is neither True nor False"):
        Rates(shares="yes")  # type: ignore[arg-type]


WIDTH, BLOCKS = 512, 48
BLOCK_MIB = 8 * WIDTH**2 * 4 / 2**20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Tower(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_r63_four_fifths_are_hidden_where_communication_takes_as_long_as_computation(stage: int) -> None:
    """At stages 1 and 2 more cannot be: half of what is sent are new weights, which nothing but the next forward can
    hide, and that is a third of the computation. So a sixth stays, and what is sent before the first block and after
    the last one."""
    strategy = {"stage": stage, "units": {Block}, "bucket_size_mb": BLOCK_MIB}
    told = rehearse(Tower, lambda: torch.ones(64, WIDTH), strategy, ranks=8)
    computed = sum(work.flops for work in told.work.values())
    rates = Rates(flops=computed, memory=1e30, link=told.program.bytes_sent, latency=0.0)  # each takes a second
    timing = told.timing(rates)
    assert (timing.compute, timing.sent) == pytest.approx((1.0, 1.0))
    assert timing.hidden >= 0.8
    assert timing.seconds == pytest.approx(2.0 - timing.hidden)
