"""Two and four ranks over NCCL, on one GPU: what a cluster runs, but for the number of GPUs."""

import queue
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import nccl_jobs
from compare import assert_same_bits
from lightning_zero.config import ActivationCheckpointing
from ranks import RankPool

pytestmark = pytest.mark.gpu
DDP = "ddp_find_unused_parameters_true"


def assert_same_training(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    assert_same_bits(found["weights"], expected["weights"])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_have_the_bits_of_ddp(stage: int, precision: str, two_ranks: RankPool) -> None:
    expected = two_ranks.once(nccl_jobs.fit, DDP, precision=precision)
    for mine, theirs in zip(two_ranks.run(nccl_jobs.fit, {"stage": stage}, precision=precision), expected, strict=True):
        assert_same_training(mine, theirs)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipped_accumulated_gradients_train_as_under_ddp(stage: int, two_ranks: RankPool) -> None:
    options = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    (expected, _), (found, _) = (two_ranks.run(nccl_jobs.fit, of, **options) for of in (DDP, {"stage": stage}))
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)


@pytest.mark.parametrize(
    ("stage", "offload"), [(1, {"optimizer": "cpu"}), (2, {"optimizer": "nvme"}),
                           (3, {"optimizer": "cpu", "parameters": "cpu"})], ids=str,
)  # fmt: skip
def test_offload_trains_as_ddp_does(stage: int, offload: dict[str, str], two_ranks: RankPool, tmp_path: Path) -> None:
    if "nvme" in offload.values():
        offload = {**offload, "path": str(tmp_path)}
    expected, _ = two_ranks.once(nccl_jobs.fit, DDP, precision="32-true")
    found, _ = two_ranks.run(nccl_jobs.fit, {"stage": stage, "offload": offload})
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)


@pytest.mark.parametrize("options", [
    {"stage": 2, "overlap": False}, {"stage": 3, "accumulation": "local"}, {"stage": 1, "granularity": "tensor"},
    {"stage": 3, "prefetch": 2}, {"stage": 2, "bucket_size_mb": 0.001},
], ids=str)  # fmt: skip
def test_each_option_has_the_bits_of_ddp(options: dict[str, Any], two_ranks: RankPool) -> None:
    expected, _ = two_ranks.once(nccl_jobs.fit, DDP, precision="32-true")
    found, _ = two_ranks.run(nccl_jobs.fit, options)
    assert_same_training(found, expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_replicas_of_two_ranks_train_as_four_ranks_of_ddp(stage: int, pool_of: Any) -> None:
    expected, found = (pool_of(4).run(nccl_jobs.fit, of)[0] for of in (DDP, {"stage": stage, "replicate_size": 2}))
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_buffers_of_rank_0_are_broadcast_between_reductions(stage: int, micro: int, two_ranks: RankPool) -> None:
    expected, found = (two_ranks.run(nccl_jobs.train_with_buffers, of, micro) for of in (0, stage))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_may_look_at_a_weight_alone(stage: int, two_ranks: RankPool) -> None:
    expected = two_ranks.once(nccl_jobs.fit_looking_once, DDP)
    found = two_ranks.run(nccl_jobs.fit_looking_once, {"stage": stage})
    assert found[0]["losses"] == pytest.approx(expected[0]["losses"], rel=1e-5)
    assert found[0]["seen"] == pytest.approx(expected[0]["seen"], rel=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_stages_on_tensor_parallel_ranks_train_alike(stage: int, pool_of: Any) -> None:
    expected, found = (pool_of(4).run(nccl_jobs.fit_tensor_parallel, of, 2)[0] for of in (0, stage))
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)


def test_blocks_divided_among_tensor_parallel_ranks_lose_no_bit(two_ranks: RankPool) -> None:
    divided = ActivationCheckpointing("Block", partition=True, offload=True)
    expected, found = (
        two_ranks.run(nccl_jobs.fit_tensor_parallel, 2, 2, activation_checkpointing=policy)[0]
        for policy in (ActivationCheckpointing("Block"), divided)
    )
    assert_same_training(found, expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_training_goes_on_from_a_checkpoint_as_ddp_does(stage: int, two_ranks: RankPool, tmp_path: Path) -> None:
    (expected, _), (found, _) = (_resumed(two_ranks, of, tmp_path / name) for of, name in
                                 ((DDP, "ddp.ckpt"), ({"stage": stage}, "zero.ckpt")))  # fmt: skip
    assert_same_training(found, expected)


def _resumed(ranks: RankPool, strategy: Any, path: Path) -> list[dict[str, Any]]:
    ranks.run(nccl_jobs.save_at, path, strategy)
    return ranks.run(nccl_jobs.resume_from, path, strategy)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_does_not_come_is_named(stage: int) -> None:
    pool = RankPool(2)
    try:
        pool.begin(nccl_jobs.fall_silent, {"stage": stage, "wait_timeout": 4}, "sleeps")
        rank, _, error = pool.next_outcome(60)
    finally:
        pool.kill()
    assert rank == 0
    assert "RankTimeoutError: Rank 1 did not come within wait_timeout=4 s during step 2" in error


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_does_not_outlive_one_that_has_died(stage: int) -> None:
    """Where it waits for the device, NCCL's watchdog finds out first, and ends the process in its own words."""
    pool = RankPool(2)
    try:
        pool.begin(nccl_jobs.fall_silent, {"stage": stage, "wait_timeout": 10}, "dies")
        pool.processes[1].join(60)
        told, until = "", time.monotonic() + 60
        while not told and pool.processes[0].is_alive() and time.monotonic() < until:
            with suppress(queue.Empty):
                _, _, told = pool.next_outcome(1)
        assert "RankTimeoutError: Rank 1" in told or pool.processes[0].exitcode == -signal.SIGABRT, told
    finally:
        pool.kill()
