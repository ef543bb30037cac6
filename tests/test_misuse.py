"""What cannot work ends in one error that names the parameter, on every rank, and never in another number."""

import re

import pytest

import misuse_jobs
from ranks import RankPool
from test_edits import DDP, differing

STAGES = [1, 2, 3]

CHANGED = r"Parameter '(first|last)\.\w+' was torch.float32 on 'cpu' at set-up and would now be torch.{} .*before fit"
STRANGE = r"Parameter '{}' was made in the middle of a step, and has a gradient .*Make modules between steps"
THAWED = r"Parameter '{}' was thawed in the middle of a step, .*Thaw it, and call add_param_group, between steps"

MISUSES = {
    "Halved": CHANGED.format("float16"),
    "HalvedInTrainingStep": CHANGED.format("bfloat16"),
    "HalvedInValidation": CHANGED.format("float16"),
    "Doubled": CHANGED.format("float64"),
    "DoubledAfterBackward": CHANGED.format("float64"),
    "DoubledAtTheEnd": CHANGED.format("float64"),
    "ReplacedInTrainingStep": STRANGE.format("last.weight"),
    "AddedInTrainingStep": STRANGE.format("more.weight"),
    "ThawedInTrainingStep": THAWED.format("extra.weight"),
    "Foreign": r"Parameter 'quantised' is a Quantised, .* and trains.*Freeze it",
    "ForeignThawed": r"Parameter 'adapted.base.weight' is a Quantised, .* trains since set-up.*Keep it frozen",
    "TiedByData": r"Parameters 'first.weight' and 'more.weight' are two that share their memory.*Make them one",
    "OverlapsByData": r"Parameters 'first.weight' and 'more' are two that share their memory.*Make them one",
    **dict.fromkeys(
        ("KeptInABuffer", "KeptInABufferAndFrozen"),
        r"Parameter 'first.weight' trains, and buffer 'kept' is in the same memory.*its own values",
    ),
    "AveragesItself": r"Averaging asks the other ranks in its step, .* leave both out of it .*, or use stage=0",
    "OptimizersMadeAnew": r"Optimizers \(\w+\) were made in the middle of fit.*Keep those that fit began with",
    "OptimizerReplaced": r"Optimizers \(AdamW\) were made in the middle of fit.*Keep those that fit began with",
    "OnlySaysSo": r"Optimizer 0 \(SaysItIsOne\) cannot be given torch's hooks.*Derive it from torch.optim.Optimizer",
    "InTwoGroups": "some parameters appear in more than one parameter group",  # torch's own
}

HARMLESS = [
    *("Moved", "Wrapped", "Removed", "ThawedButNotStepped", "ModuleReplaced", "ModuleReplacedBeforeTheFirstStep"),
    *("WeightReplaced", "Added", "InTheGaps"),
    *("AddedToTheOptimizer", "FrozenInTheOptimizer", "ListedTwice"),
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("name", "precision"),
    [*[(name, "32-true") for name in MISUSES], *[(name, "bf16-mixed") for name in list(MISUSES)[:6]]],
)
def test_misuse_ends_in_an_error_that_names_the_parameter_on_every_rank(
    name: str, precision: str, stage: int, two_ranks: RankPool
) -> None:
    for found in two_ranks.run(misuse_jobs.fit, {"stage": stage}, name, precision):
        assert re.search(MISUSES[name], found["error"], re.DOTALL)


@pytest.mark.parametrize("stage", STAGES)
def test_several_backwards_where_lightning_expects_one_are_each_averaged(stage: int, two_ranks: RankPool) -> None:
    """Under DDP ranks train apart: it averages the first one alone."""
    expected = two_ranks.once(misuse_jobs.fit, DDP, "BackwardOfTheSum")
    found = two_ranks.run(misuse_jobs.fit, {"stage": stage, "bucket_size_mb": 0.0001}, "SeveralBackwards")
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    assert differing(found[0]["weights"], found[1]["weights"]) == []


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_like_misuse_trains_as_under_ddp(name: str, two_ranks: RankPool) -> None:
    expected = two_ranks.once(misuse_jobs.fit, DDP, name)
    for stage in STAGES:
        for mine, theirs in zip(two_ranks.run(misuse_jobs.fit, {"stage": stage}, name), expected, strict=True):
            assert mine["losses"] == theirs["losses"]
            assert differing(mine["weights"], theirs["weights"]) == []


def test_an_optimizer_that_averages_gradients_itself_trains_at_stage_0_as_under_ddp(two_ranks: RankPool) -> None:
    expected = two_ranks.run(misuse_jobs.fit, DDP, "AveragesItself")
    for mine, theirs in zip(two_ranks.run(misuse_jobs.fit, {"stage": 0}, "AveragesItself"), expected, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert differing(mine["weights"], theirs["weights"]) == []


DIFFERING = {
    "name": ("all_reduce of rank 0 (2,) torch.float32", "all_reduce of rank 1 (2,) torch.float32"),
    "size": ("all_reduce mine (2,) torch.float32", "all_reduce mine (3,) torch.float32"),
    "dtype": ("all_reduce mine (2,) torch.float32", "all_reduce mine (2,) torch.float64"),
    "kind": ("all_reduce mine (2,) torch.float32", "broadcast mine (2,) torch.float32"),
    "object": ("all_reduce mine (2,) torch.float32", "object mine"),
    "method": ("all_reduce before Strategy.reduce", "all_reduce before Strategy.barrier"),
}


@pytest.mark.parametrize("how", DIFFERING)
def test_sanitize_tells_every_rank_which_collectives_differ(how: str, two_ranks: RankPool) -> None:
    first, second = DIFFERING[how]
    for stage in STAGES:
        (told,) = set(two_ranks.run(misuse_jobs.disagree, {"stage": stage}, how))
        assert f"rank 0: {first}" in told
        assert f"rank 1: {second}" in told


def test_an_error_at_set_up_is_told_first_and_without_the_calls_in_between(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(misuse_jobs.told_of, "Foreign")
    assert first["error"] == second["error"]
    assert first["logged"] == [f"ZeroStrategy: {first['error']}"]
    assert "Traceback" in first["printed"]
    assert second["logged"] == []
    assert second["printed"] == f"[rank1]: ValueError: {second['error']}\n"
    for found in (first, second):
        assert found["calls"] == ["misuse_jobs", "lightning"]


@pytest.mark.parametrize("name", ["HalvedInTrainingStep", "Mistaken"])
def test_an_error_while_training_or_of_the_users_own_keeps_its_traceback(name: str, two_ranks: RankPool) -> None:
    for found in two_ranks.run(misuse_jobs.told_of, name):
        assert found["logged"] == []
        assert "Traceback" in found["printed"]
        assert "lightning_zero" in found["calls"]
