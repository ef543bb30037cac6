"""Random training loops give what plain torch gives that averages gradients by hand: all that they read, and leave.

A campaign: RANDOM_PROGRAMS=2000 pytest --timeout=0 tests/test_random_programs.py. Otherwise the same few examples, always.
"""

import os
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings

from random_programs import Program, differing, programs, run_with_fabric

CAMPAIGN = int(os.environ.get("RANDOM_PROGRAMS", 0))


@settings(
    max_examples=CAMPAIGN or 40,
    derandomize=not CAMPAIGN,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(program=programs())
def test_a_random_loop_of_fabric_trains_as_plain_torch(pool_of: Any, program: Program) -> None:
    pool = pool_of(program.world)
    found = pool.run(run_with_fabric, program, program.strategy)
    for of in ("plain", "stage 0") if program.is_half else ("plain",):
        expected = pool.run(run_with_fabric, program, {"stage": 0} if of == "stage 0" else of)
        for mine, theirs in zip(found, expected, strict=True):
            assert differing(program, mine, theirs, of) == []
