"""`Trainer(strategy=ZeroStrategy(...))` beside Lightning's own strategies, on real processes."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

import jobs
from compare import assert_same_bits
from lightning_zero import ZeroStrategy
from lightning_zero.tiers import host_memory
from ranks import RankPool, run_alone
from unit_jobs import on_engine, tower

STAGES = [0, 1, 2, 3]


def assert_same_run(found: dict[str, Any], expected: dict[str, Any], precision: str = "32-true") -> None:
    assert found["losses"] == expected["losses"]
    # Under bf16-true the reference's gradients, and so the norms it is told, have eight bits; ours have 24.
    assert found["norms"] == pytest.approx(expected["norms"], rel=2**-7 if precision == "bf16-true" else 1e-5)
    assert found["val_loss"] == expected["val_loss"]
    assert found["lr"] == expected["lr"]
    assert_same_bits(found["weights"], expected["weights"])


@pytest.fixture(scope="module")
def ddp(two_ranks: RankPool) -> Any:
    """DDP's runs on two ranks, each made once."""
    return functools.partial(two_ranks.once, jobs.fit, "ddp_find_unused_parameters_true", 2)


@pytest.fixture(scope="module")
def saved_by(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], tuple[Path, Any]]:
    """A checkpoint after an epoch, and the run that wrote it; each made once."""
    folder = tmp_path_factory.mktemp("saved")

    def get(saver: Any) -> tuple[Path, Any]:
        path = folder / f"{saver if isinstance(saver, str) else saver['stage']}.ckpt"
        return path, two_ranks.once(jobs.save_at, path, saver, 2)

    return get


PRECISIONS = ["32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_equal_ddp_bit_for_bit(stage: int, precision: str, two_ranks: RankPool, ddp: Any) -> None:
    found = two_ranks.run(jobs.fit, {"stage": stage}, 2, precision=precision)
    for rank, run in enumerate(ddp(precision=precision)):
        assert_same_run(found[rank], run, precision)


def test_a_tiny_model_stays_whole_at_stage_3_and_fit_says_so(two_ranks: RankPool, ddp: Any) -> None:
    found = two_ranks.run(jobs.fit, {"stage": 3, "units": "auto"}, 2, precision="32-true")
    for mine, theirs in zip(found, ddp(precision="32-true"), strict=True):
        assert_same_run(mine, theirs)
    (said, *_), (*_,) = two_ranks.run(jobs.what_fit_says, {"stage": 3, "units": "auto"}, "32-true")
    assert "838 stay whole on every rank" in said
    (said, *_), (*_,) = two_ranks.run(jobs.what_fit_says, {"stage": 3}, "32-true")
    assert "stay whole" not in said


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_r34_one_rank_equals_a_single_device_bit_for_bit(stage: int, precision: str, pool_of: Any) -> None:
    one = pool_of(1)
    found = one.run(jobs.fit, {"stage": stage}, 1, precision=precision)[0]
    assert_same_run(found, one.once(jobs.fit, "auto", 1, precision=precision)[0], precision)


@pytest.mark.parametrize("stage", STAGES)
def test_r34_two_cpu_ranks_train_validate_and_test(stage: int, two_ranks: RankPool) -> None:
    results = two_ranks.run(jobs.whole_life, {"stage": stage}, 2)
    expected = two_ranks.once(jobs.whole_life, "ddp_find_unused_parameters_true", 2)
    for found, reference in zip(results, expected, strict=True):
        assert found["test_loss"] == reference["test_loss"]
        assert torch.equal(found["predictions"], reference["predictions"])
        assert found["losses"] == reference["losses"]
        assert_same_bits(found["checkpoint"], reference["checkpoint"])
        assert found["user_hook_calls"] == reference["user_hook_calls"]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [3, 4])
def test_more_ranks_than_divide_evenly_match_ddp(stage: int, world: int, pool_of: Any) -> None:
    pool = pool_of(world)
    found = pool.run(jobs.fit, {"stage": stage}, world, shuffle=False)[0]
    expected = pool.once(jobs.fit, "ddp_find_unused_parameters_true", world, shuffle=False)[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_replicas_of_two_shards_match_ddp(stage: int, pool_of: Any) -> None:
    pool = pool_of(4)
    found = pool.run(jobs.fit, {"stage": stage, "replicate_size": 2}, 4, shuffle=False)
    expected = pool.once(jobs.fit, "ddp_find_unused_parameters_true", 4, shuffle=False)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-5)


def test_a_replicate_size_that_does_not_divide_the_ranks_is_an_error_on_every_rank(two_ranks: RankPool) -> None:
    _, errors = run_alone(2, jobs.fit, {"stage": 2, "replicate_size": 3}, 2)
    for error in errors:
        assert "replicate_size=3 does not divide the 2 ranks. Write one of [1, 2]." in error


@pytest.mark.parametrize("stage", STAGES)
def test_r06_stages_give_ddps_weights_with_accumulation_clipping_and_two_groups(
    stage: int, two_ranks: RankPool, ddp: Any
) -> None:
    settings = {"accumulate_grad_batches": 5, "gradient_clip_val": 0.3}  # 6 batches: the epoch ends inside a window
    found = two_ranks.run(jobs.fit, {"stage": stage, "accumulation": "local"}, 2, **settings)[0]
    expected = ddp(**settings)[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_r12_clipping_by_norm_by_value_and_by_override_matches_ddp(stage: int, two_ranks: RankPool) -> None:
    for clip in ("norm", "value", "override"):
        found = two_ranks.run(jobs.fit_clipped, {"stage": stage}, 2, clip)
        expected = two_ranks.once(jobs.fit_clipped, "ddp_find_unused_parameters_true", 2, clip)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
            assert mine["norms_after"] == pytest.approx(theirs["norms_after"], rel=1e-6)
        assert found[0]["norms_after"] == found[1]["norms_after"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_have_met_to_clip_do_not_meet_again_to_step(stage: int, two_ranks: RankPool) -> None:
    plain, _ = two_ranks.run(jobs.exchanges_of_steps, {"stage": stage}, None)
    clipped, _ = two_ranks.run(jobs.exchanges_of_steps, {"stage": stage}, 0.05)
    assert clipped["exchanges"] == plain["exchanges"]
    assert min(plain["exchanges"]) == 1


@pytest.mark.parametrize("clip", [None, 0.05])
def test_batches_that_accumulate_at_stage_3_need_no_agreement_but_the_one_of_their_step(
    clip: float | None, two_ranks: RankPool
) -> None:
    found, _ = two_ranks.run(jobs.exchanges_of_steps, {"stage": 3}, clip, jobs.Classifier, 2)
    assert found["exchanges"][-4:-1] == [0, 1, 0]  # validation follows the last batch


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "clip"), [(jobs.LooksOnceClipped, 0.05), (jobs.LooksInAWrapper, 0.05), (jobs.LooksByHand, None)]
)
def test_a_rank_that_looks_at_a_weight_between_clipping_and_step_sees_ddps(
    kind: type[jobs.Classifier], clip: float | None, stage: int, two_ranks: RankPool
) -> None:
    given = {"stage": stage, "units": "modules"} if stage == 3 else {"stage": stage}  # so that reading gathers
    found = two_ranks.run(jobs.exchanges_of_steps, given, clip, kind)
    expected = two_ranks.once(jobs.exchanges_of_steps, "ddp_find_unused_parameters_true", clip, kind)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        assert mine["seen"] == pytest.approx(theirs["seen"], rel=1e-6)
    assert found[0]["seen"]


@pytest.mark.parametrize("saver", ["ddp_find_unused_parameters_true", {"stage": 1}, {"stage": 3}])
@pytest.mark.parametrize("resumer", ["ddp_find_unused_parameters_true", {"stage": 2}, {"stage": 3}])
def test_full_checkpoints_resume_under_any_strategy(
    saver: Any, resumer: Any, two_ranks: RankPool, saved_by: Any
) -> None:
    ddps, straight = saved_by("ddp_find_unused_parameters_true")
    path, _ = saved_by(saver)
    reference = two_ranks.once(jobs.resume_from, ddps, "ddp_find_unused_parameters_true", 2)
    found = two_ranks.run(jobs.resume_from, path, resumer, 2)
    assert found[0]["losses"] == reference[0]["losses"]
    assert_same_bits(found[0]["weights"], reference[0]["weights"])
    assert straight[0]["weights"].keys() == found[0]["weights"].keys()


@pytest.mark.parametrize(("stage", "copies"), [(0, (1, 1, 1, 2)), (2, (1, 1, 1, 2)), (3, (0, 0, 1, 2))])
def test_so_many_whole_copies_fit_as_all_ranks_of_a_machine_can_hold_at_once(
    stage: int, copies: tuple[int, ...]
) -> None:
    """Weights that are whole already count as one."""
    ranks = Mock(num_processes=4, root_device=torch.device("cpu"))

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> tuple[int, ...]:
        needed = 4 * sum(parameter.nbytes for parameter in model.parameters())
        found = []
        for available in (needed // 4 + 1, needed - 1, needed + 1, 2 * needed + 1):
            with patch.object(host_memory, "available_host_bytes", return_value=available):
                found.append(ZeroStrategy._copies_that_fit(ranks, engine))
        return tuple(found)

    assert on_engine(tower(), act, stage, world=1) == [copies]


@pytest.mark.parametrize(("available", "expected"), [(1003, 250), (None, None)])
def test_a_rank_may_use_its_share_of_the_host_memory_of_its_machine(
    available: int | None, expected: int | None
) -> None:
    with patch.object(host_memory, "available_host_bytes", return_value=available):
        assert ZeroStrategy._machine(Mock(num_processes=4)).host_bytes == expected


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_model_that_does_not_fit_whole_is_used_in_shards_after_fit(
    precision: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    for name in ("zero", "ddp"):
        (tmp_path / name).mkdir()
    found = two_ranks.run(jobs.use_after_fit, {"stage": 3}, tmp_path / "zero", precision, host_bytes=1000)
    expected = two_ranks.run(jobs.use_after_fit, "ddp_find_unused_parameters_true", tmp_path / "ddp", precision)
    for mine, theirs in zip(found, expected, strict=True):
        error = mine.pop("error")
        assert "whole copies do not fit into host memory" in error
        assert "fit(model, ckpt_path=...)" in error
        assert_same_bits(mine.pop("saved"), theirs.pop("saved"))
        assert torch.equal(mine.pop("predicted"), theirs.pop("predicted"))
        assert mine == theirs


def test_a_model_fits_whole_only_where_it_does_on_every_rank(two_ranks: RankPool) -> None:
    assert two_ranks.run(jobs.fits_where_one_rank_cannot_tell) == [False, False]
