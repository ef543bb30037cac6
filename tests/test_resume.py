"""What users do around loading, beside DDP on two real ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import resume_jobs as jobs
from ranks import PATIENCE, RankPool

DDP = "ddp_find_unused_parameters_true"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize(
    "do",
    [
        jobs.average_weights,
        jobs.edit_in_a_callback,
        jobs.edit_on_rank_0_only,
        jobs.edit_before_a_test,
        jobs.edit_the_checkpoint_in_place,
        jobs.save_between_forward_and_backward,
        jobs.edit_in_a_hook,
        jobs.override_load_state_dict,
        jobs.assign_what_is_loaded,
        jobs.load_parts_again,
        jobs.rewind_to_the_checkpoint,
        jobs.read_in_configure_optimizers,
        jobs.take_the_optimizers_out,
        jobs.go_on_from_what_was_saved_after_a_test,
        jobs.evaluate_a_checkpoint_and_fit_another_model,
        jobs.find_a_learning_rate_first,
        jobs.hold_a_module_as_hyper_parameter,
        jobs.keep_the_best_of_two,
        jobs.keep_the_last_behind_early_stopping,
        jobs.keep_two_last_ones,
        jobs.replace_a_layer_in_a_precision_plugin,
        jobs.remove_a_checkpoint_on_rank_0_only,
    ],
    ids=lambda do: do.__name__,
)
def test_a_run_goes_on_as_under_ddp_when_users(do: Callable[..., Any], two_ranks: RankPool, folder: Path) -> None:
    own = folder / do.__name__
    expected = two_ranks.run(do, DDP, own / "ddp" / "a.ckpt")
    for stage, checkpoint in ((1, "sharded"), (2, {"async_save": True}), (3, "sharded"), (3, None)):
        # The model is so small that it would stay whole at stage 3.
        strategy = {"stage": stage, "units": "modules", "checkpoint": checkpoint}
        assert two_ranks.run(do, strategy, own / f"{stage} {checkpoint}" / "a.ckpt") == expected, strategy


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_a_save_that_is_refused_can_be_caught_and_the_run_goes_on(
    form: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    expected = two_ranks.run(jobs.save_where_that_fails, DDP, path)
    strategy = {"stage": 3, "checkpoint": {"format": form}, "wait_timeout": PATIENCE}
    found = two_ranks.run(jobs.save_where_that_fails, strategy, path)
    assert [losses for losses, _ in found] == [losses for losses, _ in expected]
    assert [failed for _, failed in found] == [[0, 1]] * 2
