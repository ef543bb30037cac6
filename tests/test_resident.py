"""What a rehearsal and a plan say of memory holds for the memory that the system sees."""

from functools import cache

import pytest

import rehearsal_jobs
from lightning_zero.rehearsal.planning import Candidate, plan
from lightning_zero.rehearsal.rehearsal import Rehearsal, rehearse
from ranks import run_alone

MB = 10**6


@cache
def resident(stage: int) -> int:
    """What training has added to the resident memory of the rank with more of it."""
    found, errors = run_alone(2, rehearsal_jobs.resident_bytes, {"stage": stage, "units": "auto"})
    assert errors == [None, None]
    return max(found)


@cache
def rehearsed(stage: int) -> Rehearsal:
    return rehearse(rehearsal_jobs.Deep, rehearsal_jobs.deep_batch_of, stage, ranks=2, host_is_apart=False)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resident_memory_grows_by_what_is_rehearsed(stage: int) -> None:
    assert resident(stage) / MB == pytest.approx(rehearsed(stage).peak.nbytes / MB, rel=0.1)


def test_what_a_plan_chooses_keeps_to_the_memory_and_the_next_faster_one_does_not() -> None:
    made = (rehearsal_jobs.Deep, rehearsal_jobs.deep_batch_of)
    limit = Candidate(strategy={}, rehearsal=rehearsed(2), seconds=0.0, hidden=0.0).device_bytes
    planned = plan(*made, ranks=2, device_bytes=limit, host_is_apart=False, thorough=False)
    assert planned.best.strategy == {"stage": 2}
    rejected = [one.strategy for one in planned.candidates if not planned.fits(one)]
    assert {"stage": 1} in rejected
    assert resident(2) <= limit
    assert resident(1) > limit
