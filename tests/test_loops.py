"""Plugins for precision, loaders, the tuner and TorchScript, beside DDP on two real ranks."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.plugins.precision import TransformerEnginePrecision

import loop_jobs
from compare import differing
from lightning_zero.pl.precision import adapt
from ranks import SHORT, RankPool, run_alone

DDP = "ddp_find_unused_parameters_true"
STAGES = [1, 2, 3]


def assert_as_ddp(ranks: RankPool, job: Any, *args: Any, stages: Any = STAGES, **kwargs: Any) -> list[Any]:
    expected = ranks.run(job, DDP, *args, **kwargs)
    for stage in stages:
        for mine, theirs in zip(ranks.run(job, {"stage": stage}, *args, **kwargs), expected, strict=True):
            assert mine["losses"] == theirs["losses"], stage
            assert differing(mine["weights"], theirs["weights"]) == [], stage
            assert differing(mine["seen"], theirs["seen"]) == [], stage
    return expected


@pytest.mark.parametrize("name", loop_jobs.PLUGINS)
def test_a_precision_plugin_of_the_users_own_has_all_its_hooks_called(name: str, two_ranks: RankPool) -> None:
    assert_as_ddp(two_ranks, loop_jobs.fit_with_plugin, name)


def test_a_plugin_that_stores_parameters_in_a_way_of_its_own_is_refused() -> None:
    class Own(TransformerEnginePrecision):
        def __init__(self) -> None: ...

    with pytest.raises(ValueError, match="not work with Own: TransformerEnginePrecision stores parameters in a way"):
        adapt(Own())


@pytest.mark.parametrize("name", loop_jobs.SCRIPTED)
def test_modules_of_torchscript_train_inside_a_sharded_model(name: str, two_ranks: RankPool) -> None:
    """What they call in C++ no hook hears of, and parameters that rest elsewhere they would read as NaN."""
    assert_as_ddp(two_ranks, loop_jobs.fit_scripted, name)


def test_modules_of_torchscript_train_under_autocast(two_ranks: RankPool) -> None:
    assert_as_ddp(two_ranks, loop_jobs.fit_scripted, "Scripted", precision="bf16-mixed")


@pytest.mark.parametrize("mode", loop_jobs.MODES)
def test_combined_several_iterable_and_reloaded_loaders(mode: str, two_ranks: RankPool) -> None:
    first = assert_as_ddp(two_ranks, loop_jobs.fit_over_loaders, mode, stages=(3,))[0]
    assert len(first["seen"]) > 4


def test_r54_the_learning_rate_finder_finds_what_it_does_under_ddp_and_restores(
    two_ranks: RankPool, tmp_path: Any
) -> None:
    for one in assert_as_ddp(two_ranks, loop_jobs.find_lr_and_fit, str(tmp_path)):
        assert one["seen"]["restored"]
        assert one["seen"]["handled"].all(), "of signals, after what was tried as before it"
        assert one["left"] == []


def test_the_batch_size_finder_is_refused_as_under_ddp(two_ranks: RankPool) -> None:
    (refused,) = set(two_ranks.run(loop_jobs.find_batch_size, DDP))
    assert "not supported with distributed strategies" in refused
    assert set(two_ranks.run(loop_jobs.find_batch_size, {"stage": 3})) == {refused}


@pytest.mark.parametrize("world", [1, 2])
def test_r55_a_scheduler_moves_in_steps_without_a_loss_as_lightnings_does_on_one_device(
    world: int, pool_of: Callable[[int], RankPool]
) -> None:
    (expected,) = pool_of(1).run(loop_jobs.rates_of_steps_without_a_loss, "auto", 1)
    for stage in STAGES:
        found = pool_of(world).run(loop_jobs.rates_of_steps_without_a_loss, {"stage": stage}, world)
        assert found == [expected] * world, stage


@pytest.mark.parametrize("world", [1, 2])
def test_a_scheduler_waits_for_an_overflow_and_not_for_steps_without_a_loss_after_it(
    world: int, pool_of: Callable[[int], RankPool]
) -> None:
    for stage in STAGES:
        how = {"overflows": True, "precision": "16-mixed"}
        for rates, steps in pool_of(world).run(loop_jobs.rates_of_steps_without_a_loss, {"stage": stage}, world, **how):
            assert [rate / rates[0] for rate in rates] == [1.0, 0.5, 0.25, 0.125], stage
            assert steps == 4


def test_a_scheduler_of_epochs_moves_also_where_the_last_step_of_one_overflowed(two_ranks: RankPool) -> None:
    for rates in two_ranks.run(loop_jobs.rates_of_epochs_that_overflow, {"stage": 2}, 2):
        assert [rate / rates[0] for rate in rates] == [1.0, 0.5, 0.25]


def test_a_parameter_in_two_optimizers_is_stepped_by_both(two_ranks: RankPool) -> None:
    assert_as_ddp(two_ranks, loop_jobs.fit_input, "InTwoOptimizers")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("WithoutGradient", "does not require grad"),
        ("SearchesALine", "LBFGS looks at all parameters together"),
        ("OverSomeoneElses", r"Optimizer 0 \(SGD\) has a parameter of shape \(3, 3\) that is not the module's"),
    ],
)
def test_bad_input_ends_in_one_error_on_every_rank(name: str, told: str, two_ranks: RankPool) -> None:
    for stage in STAGES:
        (error,) = set(two_ranks.run(loop_jobs.fit_input, {"stage": stage}, name))
        assert re.search(told, error)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_without_a_gradient_on_one_rank_ends_in_an_error_on_all(stage: int) -> None:
    """Under DDP the others wait for it."""
    given = {"stage": stage, "wait_timeout": SHORT}
    (first, second), _ = run_alone(2, loop_jobs.fit_input, given, "WithoutGradientOnRank1")
    assert "does not require grad" in second
    assert "Rank 1 failed" in first
    assert "does not require grad" in first


@pytest.mark.parametrize("stage", STAGES)
def test_the_error_of_a_step_ends_the_fit_and_half_a_step_is_warned_of(stage: int, two_ranks: RankPool) -> None:
    for fails_after, warned in ((0, 0), (1, 1)):
        for told in two_ranks.run(loop_jobs.fit_that_fails, {"stage": stage}, fails_after, None):
            assert told == {"raised": ["ArithmeticError", "NoneType"], "warned": warned, "whole": True, "saved": []}


@pytest.mark.parametrize("stage", STAGES)
def test_after_an_exception_half_a_step_is_not_saved_and_one_that_changed_nothing_is(
    stage: int, two_ranks: RankPool, tmp_path: Path
) -> None:
    unchanged, half = tmp_path / "unchanged", tmp_path / "half"
    for told in two_ranks.run(loop_jobs.fit_that_fails, {"stage": stage}, 0, str(unchanged)):
        assert (told["raised"], told["saved"]) == (["ArithmeticError", "NoneType"], ["on_exception.ckpt"])
    for told in two_ranks.run(loop_jobs.fit_that_fails, {"stage": stage}, 1, str(half)):
        assert (told["raised"], told["saved"]) == (["TornStepError", "ArithmeticError"], [])


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_are_whole_where_users_catch_the_error_of_a_step(stage: int, two_ranks: RankPool) -> None:
    for values, gradients, expected in two_ranks.run(loop_jobs.shapes_where_an_error_is_caught, {"stage": stage}):
        assert values == gradients == expected


def test_training_goes_on_where_users_catch_the_error_of_a_backward(two_ranks: RankPool) -> None:
    assert_as_ddp(two_ranks, loop_jobs.fit, loop_jobs.CatchesThatOfBackward)


def test_a_rank_that_waits_in_a_save_is_told_why_the_other_one_failed(tmp_path: Path) -> None:
    """That one's own save has failed before it could report the first error."""
    given = {"stage": 2, "wait_timeout": SHORT}
    (first, second), _ = run_alone(2, loop_jobs.errors_of_a_fit_that_fails_on_one_rank, given, 1, str(tmp_path))
    assert [error.partition(":")[0] for error in second] == ["TornStepError", "ArithmeticError"]
    assert "Rank 1 failed: ArithmeticError: the optimizer's own" in first[0]
    assert first[-1].startswith("TornStepError: A step has ended with an error in the middle: on rank 1 FailingSGD")
