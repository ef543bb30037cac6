"""Published packages, unchanged, beside DDP on two real ranks: `make test-clients`, which installs them, and not
`make test`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import client_jobs
from compare import assert_same_bits
from ranks import RankPool

DDP = "ddp_find_unused_parameters_true"
STAGES = [1, 2, 3]


def assert_as_ddp(ranks: RankPool, folder: Path, job: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Losses of every step and rank, weights after fit and after a resume, and what a loaded checkpoint predicts."""
    expected = ranks.run(job, DDP, folder / "ddp", *args)
    assert all(of_rank["steps"] >= 9 for of_rank in expected)
    for stage in STAGES:
        found = ranks.run(job, {"stage": stage, **options}, folder / str(stage), *args)
        for mine, theirs in zip(found, expected, strict=True):
            tensors = {name: value for name, value in theirs.items() if isinstance(value, dict)}
            for name in tensors:
                assert_same_bits(mine.pop(name), tensors[name])
            assert_same_bits(mine, {name: theirs[name] for name in theirs.keys() - tensors.keys()})


@pytest.mark.parametrize("checkpoint", ["sharded", "full"])
def test_chemprop_trains_resumes_and_loads_as_under_ddp(checkpoint: str, two_ranks: RankPool, tmp_path: Path) -> None:
    """A sharded checkpoint is consolidated first, as chemprop opens one file."""
    assert_as_ddp(two_ranks, tmp_path, client_jobs.fit_chemprop, checkpoint=checkpoint)


@pytest.mark.parametrize("name", ["DeepAR", "TemporalFusionTransformer"])
def test_pytorch_forecasting_trains_resumes_and_loads_as_under_ddp(
    name: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    assert_as_ddp(two_ranks, tmp_path, client_jobs.fit_forecaster, name)
