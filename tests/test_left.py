"""What a run leaves behind, and how it is told to stop: as under DDP."""

from pathlib import Path
from typing import Any

import pytest
import torch

import left_jobs
from ranks import RankPool

DDP = "ddp_find_unused_parameters_true"
STAGES = [1, 2, 3]


def differing(found: Any, expected: Any, where: str = "") -> list[str]:
    """Where two results differ, with what is there."""
    if type(found) is type(expected) and isinstance(expected, dict | list | tuple) and len(found) == len(expected):
        items = expected.items() if isinstance(expected, dict) else enumerate(expected)
        return [told for key, value in items for told in differing(found[key], value, f"{where}.{key}")]
    tensors = isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)
    is_same = torch.equal(found, expected) if tensors else found == expected
    return [] if is_same else [f"{where}: {found} instead of {expected}"]


def assert_as_ddp(ranks: RankPool, job: Any, *args: Any, stages: Any = STAGES) -> list[Any]:
    expected = ranks.run(job, DDP, *args)
    for stage in stages:
        found = ranks.run(job, {"stage": stage}, *args)
        assert differing(found, expected, f"stage {stage}") == []
    return expected


PLACES = ["sanity check 0", "start", "step 2", "step 5", "nothing 3", "validation 1", "validation 5", "test 1"]
PLACES += ["epoch end", "train end"]


@pytest.mark.parametrize("place", PLACES)
def test_a_signal_to_all_ranks_is_heard_where_ddp_hears_it(place: str, two_ranks: RankPool, tmp_path: Path) -> None:
    expected = assert_as_ddp(two_ranks, left_jobs.run_until_signalled, place, (0, 1), tmp_path, stages=(3,))
    assert all(one["received"] for one in expected)
    assert {one["ended"] for one in expected} == {"returned" if place == "train end" else "SIGTERMException None"}


@pytest.mark.parametrize("place", ["step 2", "nothing 3", "validation 1", "test 1", "epoch end"])
def test_a_signal_to_one_rank_stops_all_where_a_signal_to_all_would(
    place: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    """Under DDP it would hang: the handler calls a collective."""
    for stage in (1, 3):
        expected = two_ranks.run(left_jobs.run_until_signalled, {"stage": stage}, place, (0, 1), tmp_path)
        assert two_ranks.run(left_jobs.run_until_signalled, {"stage": stage}, place, (1,), tmp_path) == expected
    assert (tmp_path / "checkpoints" / "preempted.ckpt").exists() == ("test" not in place)


def test_callbacks_of_a_trainer_are_its_users_own(two_ranks: RankPool) -> None:
    (seen, _) = assert_as_ddp(two_ranks, left_jobs.callbacks_of_two_fits)
    assert set(map(tuple, seen)) == {("Lists", "Own")}


def test_a_module_whose_load_state_dict_returns_nothing_resumes(two_ranks: RankPool, tmp_path: Path) -> None:
    assert_as_ddp(two_ranks, left_jobs.resume_without_a_word, tmp_path)


def test_trainer_strategy_callbacks_and_model_are_copied_and_pickled_during_and_after_fit(two_ranks: RankPool) -> None:
    ((_, outputs, _), _) = assert_as_ddp(two_ranks, left_jobs.copy_during_and_after)
    assert len(outputs) == 2


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_after_fit_gradients_are_there_and_the_strategys_methods_work(
    precision: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    (first, _) = assert_as_ddp(two_ranks, left_jobs.left_after_fit, tmp_path, precision)
    assert first["restored"]
    assert sum(grad is not None for grad in first["grads"].values()) > 10


@pytest.mark.parametrize("place", ["forward", "inside", "backward", "validation"])
def test_after_an_error_of_all_ranks_the_model_is_whole_and_a_notebook_goes_on(place: str, two_ranks: RankPool) -> None:
    expected = assert_as_ddp(two_ranks, left_jobs.go_on_after_an_error, place)
    assert expected[0]["said"] == "ValueError: all ranks have had enough"
