"""Whole training runs over torch's own collectives, which is all that NCCL adds but for its streams (test_gpu)."""

from typing import Any

import pytest

import jobs
import user_jobs
from compare import differing
from ranks import RankPool

DDP = "ddp_find_unused_parameters_true"


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_on_two_ranks_gives_ddps_bits(stage: int, precision: str, two_ranks: RankPool) -> None:
    found = two_ranks.run(jobs.on_native, jobs.fit, {"stage": stage}, 2, precision=precision)
    expected = two_ranks.once(jobs.fit, DDP, 2, precision=precision)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert mine["val_loss"] == theirs["val_loss"]
        assert differing(mine["weights"], theirs["weights"]) == []


@pytest.mark.parametrize("replicate_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_on_four_ranks_gives_ddps_bits(stage: int, replicate_size: int, pool_of: Any) -> None:
    """With numbers whose sum has the same bits in any order: with more than two ranks the order is the backend's."""
    strategy = {"stage": stage, "replicate_size": replicate_size}
    found = pool_of(4).run(jobs.on_native, jobs.fit_exactly, strategy, 4)
    expected = pool_of(4).once(jobs.fit_exactly, "ddp", 4)
    for mine, theirs in zip(found, expected, strict=True):
        assert differing(mine, theirs) == []


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_take_different_branches_give_ddps_bits(stage: int, two_ranks: RankPool) -> None:
    found = two_ranks.run(jobs.on_native, user_jobs.fit_routed, {"stage": stage}, precision="32-true")
    expected = two_ranks.once(user_jobs.fit_routed, DDP, precision="32-true")
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert differing(mine["weights"], theirs["weights"]) == []
