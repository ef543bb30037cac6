"""Tensor parallelism under Fabric, beside ranks that share nothing on the same batches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

import fabric_tensor_jobs
from compare import assert_same_bits
from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint import StoredCheckpoint
from lightning_zero.checkpoint.load import verify
from ranks import RankPool
from test_tensor_training import STAGES, TO_ROUNDING, Pools, assert_same_weights, mean_losses

FORMATS = ["sharded", "full"]


@pytest.fixture(scope="module")
def expected(two_ranks: RankPool) -> Callable[..., list[dict[str, Any]]]:
    """Two ranks that share nothing."""

    def train(**how: Any) -> list[dict[str, Any]]:
        return two_ranks.once(fabric_tensor_jobs.train, 0, 2, 1, **how)

    return train


def assert_same_training(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert mean_losses(found, 2) == pytest.approx(mean_losses(expected, 1), **TO_ROUNDING)
    for run in found:
        assert_same_weights(run["weights"], expected[0]["weights"])
        assert run["norms"] == pytest.approx(expected[0]["norms"], **TO_ROUNDING)


@pytest.mark.parametrize(("world", "module_first"), [(2, False), (2, True), (4, False)])
@pytest.mark.parametrize("stage", STAGES)
def test_training_is_that_of_data_parallel_ranks_on_the_same_batches(
    stage: int, world: int, module_first: bool, pool_of: Pools, expected: Callable[..., list[dict[str, Any]]]
) -> None:
    found = pool_of(world).run(fabric_tensor_jobs.train, stage, world, 2, clips=True, module_first=module_first)
    assert_same_training(found, expected(clips=True))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_goes_on_at_any_other_degree(
    stage: int, kind: str, pool_of: Pools, two_ranks: RankPool, expected: Any, tmp_path: Path
) -> None:
    shared, alone, again = (tmp_path / f"{name}.ckpt" for name in ("shared", "alone", "again"))
    how = {"checkpoint": {"format": kind}}
    pool_of(4).run(fabric_tensor_jobs.train, stage, 4, 2, save=shared, **how)
    two_ranks.run(fabric_tensor_jobs.train, 0, 2, 1, save=alone)
    if kind == "sharded":
        assert verify(shared) == []
    then = two_ranks.run(fabric_tensor_jobs.train, 0, 2, 1, load=alone)
    divided = two_ranks.run(fabric_tensor_jobs.train, stage, 2, 1, load=shared, save=again, **how)
    for found in (divided, pool_of(4).run(fabric_tensor_jobs.train, stage, 4, 2, load=alone)):
        shares = 2 if len(found) == 4 else 1
        assert mean_losses(found, shares) == pytest.approx(mean_losses(then, 1), **TO_ROUNDING)
        assert_same_weights(found[0]["weights"], then[0]["weights"])


def test_ranks_that_share_modules_see_the_same_batches_and_draw_the_same(pool_of: Pools) -> None:
    runs = pool_of(4).run(fabric_tensor_jobs.train, 2, 4, 2, drops=0.5, shuffle=True)
    for one, other in ((runs[0], runs[1]), (runs[2], runs[3])):
        assert torch.equal(one["seen"], other["seen"])
        assert one["losses"] == other["losses"]
    assert not torch.equal(runs[0]["seen"], runs[2]["seen"])


def test_workers_of_loaders_draw_the_same_for_ranks_that_share_modules(pool_of: Pools) -> None:
    assert pool_of(4).run(fabric_tensor_jobs.seed_of_workers, 4, 2) == [0, 0, 1, 1]
    assert pool_of(4).run(fabric_tensor_jobs.seed_of_workers, 4, 1) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("stage", STAGES)
def test_what_users_save_beside_the_model_is_whole_in_the_checkpoint(
    stage: int, kind: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    weights, _ = two_ranks.run(fabric_tensor_jobs.saves_a_copy_of_its_own, stage, 2, tmp_path / "a.ckpt", kind)
    saved = StoredCheckpoint(tmp_path / "a.ckpt").load() if kind == "sharded" else torch.load(tmp_path / "a.ckpt")
    assert_same_bits(saved["copies"], weights)
    assert_same_bits(saved["model"], weights)


def test_a_model_that_nobody_has_parallelized_is_told_in_one_warning(two_ranks: RankPool) -> None:
    (told,), others = two_ranks.run(fabric_tensor_jobs.told_of_a_model_that_nobody_has_parallelized)
    assert "no module was parallelized" in told
    assert others == []


def test_sizes_that_do_not_divide_the_ranks_are_refused_at_launch() -> None:
    made = Fabric(accelerator="cpu", devices=1, strategy=ZeroStrategy(stage=2, tensor_parallel_size=3))
    with pytest.raises(ValueError, match="tensor_parallel_size=3 does not divide the 1 ranks"):
        made.launch()
