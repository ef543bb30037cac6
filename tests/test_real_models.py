"""Models that people really train, beside DDP on two real ranks: same losses, weights, evaluations, generated text.

One run serves all tests of a model, a precision and a stage. Its last step clips by norm; there DDP sums the norm in
float64, as ZeroStrategy does, so that every bit must agree.
"""

from collections.abc import Callable, Collection
from typing import Any

import pytest
from torch import Tensor

import real_jobs
from compare import differing
from cover import runs_of
from ranks import RankPool

DDP = "ddp_find_unused_parameters_true"
STAGES = [1, 2, 3]
PRECISIONS = ["32-true", "bf16-mixed"]
FUSED_IN_FP32_ONLY = "padded encoder"  # torch's own call for padded layers refuses autocast on a CPU

Outcomes = list[dict[str, Any]]  # of the ranks
Outcome = Callable[..., Outcomes]


def precisions_of(name: str) -> list[str]:
    return PRECISIONS[:1] if name == FUSED_IN_FP32_ONLY else PRECISIONS


RUNS = runs_of(list(real_jobs.MODELS), precisions_of)


def each_run_of(names: Collection[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "precision", "stage"), [run for run in RUNS if run[0] in names])


each_stage = pytest.mark.parametrize("stage", STAGES)
each_precision = pytest.mark.parametrize("precision", PRECISIONS)


@pytest.fixture(scope="module")
def outcome(two_ranks: RankPool) -> Outcome:
    """`outcome(job, strategy, ...)` runs a job of `real_jobs` once, with whatever arguments."""

    def run(job: Callable[..., Any], strategy: str | int, *args: Any, **kwargs: Any) -> Outcomes:
        return two_ranks.once(job, {"stage": strategy} if isinstance(strategy, int) else strategy, *args, **kwargs)

    return run


def both(outcome: Outcome, stage: int, job: Callable[..., Any], *args: Any, ddp: str = DDP, **kwargs: Any) -> Any:
    """Pairs of what a rank has under ZeRO and under DDP."""
    expected = outcome(job, ddp, *args, exact_norm=True, **kwargs)
    return zip(outcome(job, stage, *args, **kwargs), expected, strict=True)


def assert_trained_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    assert differing(found["weights"], expected["weights"]) == []


def assert_same_tensors(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert [mine.shape for mine in found] == [theirs.shape for theirs in expected]
    assert [at for at, (mine, theirs) in enumerate(zip(found, expected, strict=True)) if not mine.equal(theirs)] == []


@each_run_of(real_jobs.MODELS)
def test_training_gives_ddps_bits(name: str, precision: str, stage: int, outcome: Outcome) -> None:
    for mine, theirs in both(outcome, stage, real_jobs.fit, name, precision=precision):
        assert_trained_alike(mine, theirs)
        assert len(set(mine["losses"])) == real_jobs.STEPS


@each_run_of(real_jobs.MODELS)
def test_evaluation_before_and_after_training_gives_ddps_bits(
    name: str, precision: str, stage: int, outcome: Outcome
) -> None:
    for mine, theirs in both(outcome, stage, real_jobs.fit, name, precision=precision):
        assert_same_tensors(mine["evaluated"], theirs["evaluated"])


@each_run_of(real_jobs.GENERATE)
def test_text_generated_in_validation_is_ddps(name: str, precision: str, stage: int, outcome: Outcome) -> None:
    for mine, theirs in both(outcome, stage, real_jobs.fit, name, precision=precision):
        assert_same_tensors(mine["generated"], theirs["generated"])
        assert len(mine["generated"]) == 2


@each_stage
def test_what_is_tied_or_frozen_stays_so(stage: int, outcome: Outcome) -> None:
    for name in ("bert", "gpt2", "llama", "t5", "albert", "lora"):
        precision = next(precision for model, precision, at in RUNS if (model, at) == (name, stage))
        for mine, theirs in both(outcome, stage, real_jobs.fit, name, precision=precision):
            assert mine["parameters"] == theirs["parameters"]
            assert mine["moved"] == theirs["moved"]
        if name == "lora":
            assert {key for key in mine["weights"] if "lora_" in key} == mine["moved"]


@pytest.mark.parametrize("name", real_jobs.MIXTURES)
def test_the_mixtures_leave_experts_idle_on_one_rank_and_on_both(name: str, outcome: Outcome) -> None:
    """Otherwise the tests above would say little of them."""
    one, other = (rank["experts"] for rank in outcome(real_jobs.fit, DDP, name, precision="32-true", exact_norm=True))
    assert any(first != second for first, second in zip(one, other, strict=True))
    assert any(len(first | second) < real_jobs.EXPERTS for first, second in zip(one, other, strict=True))


@each_stage
@pytest.mark.parametrize("name", ["t5", "resnet"])
def test_clipping_by_the_trainer_stays_within_a_millionth_of_ddps(name: str, stage: int, outcome: Outcome) -> None:
    expected = outcome(real_jobs.fit_clipped, DDP, name)
    for mine, theirs in zip(outcome(real_jobs.fit_clipped, stage, name), expected, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        for key, value in theirs["weights"].items():
            assert (mine["weights"][key] - value).float().norm() <= 1e-6 * value.float().norm(), key


@each_stage
@each_precision
def test_dropout_draws_what_it_draws_under_ddp(precision: str, stage: int, outcome: Outcome) -> None:
    for mine, theirs in both(outcome, stage, real_jobs.fit_with_dropout, "gpt2", precision=precision):
        assert_trained_alike(mine, theirs)
        assert_same_tensors(mine["evaluated"], theirs["evaluated"])


@each_stage
@each_precision
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "lora"])
def test_layers_computed_again_in_backward_give_ddps_bits(
    name: str, reentrant: bool, precision: str, stage: int, outcome: Outcome
) -> None:
    arguments = {"reentrant": reentrant, "precision": precision}
    # DDP cannot look for unused parameters through a reentrant checkpoint; neither model has any
    for mine, theirs in both(outcome, stage, real_jobs.fit_with_recomputation, name, ddp="ddp", **arguments):
        assert_trained_alike(mine, theirs)
