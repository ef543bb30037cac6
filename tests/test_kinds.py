"""Parameters of every kind train, save and resume as under DDP: whole runs on two real ranks, at every stage."""

import pytest

import kind_jobs
from cover import runs_of
from ranks import RankPool
from test_edits import DDP, Outcome, differing, runs_once

STAGES = [1, 2, 3]


@pytest.fixture(scope="module")
def outcome(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return runs_once(two_ranks, kind_jobs.fit, tmp_path_factory.mktemp("kinds") / "run")


def assert_as_under_ddp(outcome: Outcome, name: str, precision: str, stage: int) -> None:
    for mine, theirs in zip(outcome(stage, name, precision), outcome(DDP, name, precision), strict=True):
        assert mine["losses"] == theirs["losses"]
        assert differing(mine["seen"], theirs["seen"]) == []
        assert differing(mine["weights"], theirs["weights"]) == []
        assert differing(mine["saved"], theirs["saved"]) == []
        assert mine["strides"] == theirs["strides"]


R53 = ["MixedDtypes"]
R57 = ["NoDimensions", "NoElements", "SmallerThanTheWorld", "NotContiguous", "ChannelsLast"]
OTHERS = [name for name in kind_jobs.MODULES if name not in {*R53, *R57}]


def precisions_of(name: str) -> list[str]:
    return ["32-true", "bf16-mixed"] if name in kind_jobs.IN_TWO_BYTES_TOO else ["32-true"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", R53)
def test_r53_mixed_dtypes_train_save_and_resume_as_they_are(
    name: str, precision: str, stage: int, outcome: Outcome
) -> None:
    assert_as_under_ddp(outcome, name, precision, stage)


@pytest.mark.parametrize(("name", "precision", "stage"), runs_of(R57, precisions_of))
def test_r57_parameters_of_any_shape_and_memory_format_train_save_and_resume(
    name: str, precision: str, stage: int, outcome: Outcome
) -> None:
    assert_as_under_ddp(outcome, name, precision, stage)


@pytest.mark.parametrize(("name", "precision", "stage"), runs_of(OTHERS, precisions_of))
def test_parameters_of_every_kind_train_and_resume_as_under_ddp(
    name: str, precision: str, stage: int, outcome: Outcome
) -> None:
    assert_as_under_ddp(outcome, name, precision, stage)


def test_a_weight_that_came_transposed_trains_to_rounding(two_ranks: RankPool) -> None:
    """Values rest in C order, and torch multiplies a transposed matrix by another kernel."""
    expected = two_ranks.once(kind_jobs.losses_of_turned, DDP)
    for stage in STAGES:
        for mine, theirs in zip(two_ranks.run(kind_jobs.losses_of_turned, {"stage": stage}), expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_r25_adapters_cost_gradients_and_state_for_themselves_alone_and_no_more_with_every_step(
    stage: int, two_ranks: RankPool
) -> None:
    fewer = two_ranks.run(kind_jobs.fit_adapters, {"stage": stage}, 1, 12)
    more = two_ranks.run(kind_jobs.fit_adapters, {"stage": stage}, 6, 3)  # for its report
    for run, with_more in zip(fewer, more, strict=True):
        report, trainable = run["report"], run["trainable"]
        assert report["gradient"] == pytest.approx(4 * trainable / (2 if stage > 1 else 1), rel=0.05)
        assert report["optimizer state"] == pytest.approx(8 * trainable / 2, rel=0.05)
        assert all(with_more["report"][part] == report[part] for part in ("gradient", "optimizer state", "bucket"))
        early, late = run["found"]
        assert late == early


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_left_alone_is_said_once(stage: int, two_ranks: RankPool) -> None:
    assert two_ranks.run(kind_jobs.what_fit_says_of, {"stage": stage}, "OnQuantised") == [
        ["Tensors of their own kind (Quantised) stay whole on every rank, as they are: adapted.base.weight"],
        [],
    ]
