"""Random training loops give what plain torch gives that averages gradients by hand: all that they read, and leave.

A campaign: RANDOM_PROGRAMS=2000 pytest --timeout=0 tests/test_random_programs.py. Otherwise the same few examples.
"""

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import lane
from random_loops import run_with_fabric, run_with_trainer
from random_programs import Backward, Program, Read, Step, differing, programs
from ranks import SHORT, RankFailed

CAMPAIGN = int(os.environ.get("RANDOM_PROGRAMS", 0))


of_a_campaign = settings(
    max_examples=CAMPAIGN or 15,
    derandomize=not CAMPAIGN,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def run_on(pool_of: Any, run: Any, program: Program, how: Any) -> list[Any]:
    """On ranks of the session. After a failure they may wait for each other, and are replaced by new ones."""
    pool = pool_of(program.world)
    try:
        return pool.run(run, program, how)
    except RankFailed:
        pool.kill()
        lane._POOLS.pop(program.world)
        raise


def compare(run: Any, program: Program, pool_of: Any) -> None:
    found = run_on(pool_of, run, program, {"wait_timeout": SHORT, **program.strategy})
    # Adam divides by the size of a gradient: what two bytes round in one near zero moves a weight as far as any other.
    references = ["stage 0"] if program.is_half else []
    if not (program.is_half and program.kind == "adam"):
        references.append("plain")
    for of in references:
        expected = run_on(pool_of, run, program, {"stage": 0} if of == "stage 0" else of)
        for mine, theirs in zip(found, expected, strict=True):
            assert differing(program, mine, theirs, of) == []


@of_a_campaign
@given(program=programs())
def test_a_random_loop_of_fabrics_trains_as_plain_torch(pool_of: Any, program: Program) -> None:
    compare(run_with_fabric, program, pool_of)


@of_a_campaign
@given(program=programs())
def test_random_manual_optimization_trains_as_plain_torch(pool_of: Any, program: Program) -> None:
    compare(run_with_trainer, program, pool_of)


_PENALTY = Backward((), penalty=0)
WITHOUT_STEP = {
    "after a batch with one": (Backward(), Step(), Backward(), Read("norms", 0)),
    # Ranks have met in this batch, for the gradients of a backward that is not the last one.
    "after three backwards": (_PENALTY._replace(syncs=False), _PENALTY, _PENALTY, Read("gradients", 0)),
}


@pytest.mark.parametrize("reader", [0, 1])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("when", WITHOUT_STEP)
def test_a_rank_may_read_gradients_alone_in_a_batch_without_a_step(
    when: str, stage: int, reader: int, pool_of: Any
) -> None:
    """The others wait for it at the end of their batch, and it must not go on to another one, or out of the epoch."""
    *ops, reads = WITHOUT_STEP[when]
    compare(run_with_trainer, Program((*ops, reads._replace(who=reader)), strategy={"stage": stage}), pool_of)
