"""Code that users have, unchanged, beside DDP on two real ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import user_jobs
from compare import differing
from ranks import SHORT, RankPool

DDP = "ddp_find_unused_parameters_true"
STAGES = [1, 2, 3]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", user_jobs.MODULES)
def test_modules_train_unchanged_and_equal_ddp(name: str, precision: str, two_ranks: RankPool) -> None:
    expected = two_ranks.once(user_jobs.fit_module, DDP, name, precision=precision)[0]
    for stage in STAGES:
        found = two_ranks.once(user_jobs.fit_module, {"stage": stage}, name, precision=precision)[0]
        # clip_grad_norm_ is torch's own here, on the same whole gradients: the same bits
        assert found["losses"] == expected["losses"], stage
        assert all(torch.equal(found["weights"][key], value) for key, value in expected["weights"].items()), stage


def test_collectives_of_ones_own_may_edit_gradients_and_weights_that_rest_as_shards(two_ranks: RankPool) -> None:
    expected = two_ranks.once(user_jobs.fit_module, DDP, "Synchronised", precision="32-true")[0]
    found = two_ranks.run(user_jobs.fit_module, {"stage": 3, "units": "modules"}, "Synchronised", precision="32-true")[
        0
    ]
    assert found["losses"] == expected["losses"]
    assert differing(found["weights"], expected["weights"]) == []


def test_callbacks_that_read_weights_see_them_whole(two_ranks: RankPool) -> None:
    expected = two_ranks.once(user_jobs.average_weights, DDP)
    for stage in STAGES:
        for mine, theirs in zip(two_ranks.run(user_jobs.average_weights, {"stage": stage}), expected, strict=True):
            assert all(torch.equal(mine[name], value) for name, value in theirs.items())


def test_evaluation_needs_no_optimizer(two_ranks: RankPool) -> None:
    expected = two_ranks.once(user_jobs.evaluate_only, DDP)
    for stage in STAGES:
        for mine, theirs in zip(two_ranks.run(user_jobs.evaluate_only, {"stage": stage}), expected, strict=True):
            assert mine["loss"] == theirs["loss"]
            assert torch.equal(mine["predictions"], theirs["predictions"])


@pytest.mark.parametrize("stage", STAGES)
def test_copies_are_saved_in_a_hook_with_the_bytes_of_ddp(stage: int, two_ranks: RankPool, tmp_path: Path) -> None:
    expected = two_ranks.run(user_jobs.export_at_the_end, DDP, tmp_path / "ddp")
    found = two_ranks.run(user_jobs.export_at_the_end, {"stage": stage}, tmp_path / "here")
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["bytes"] == theirs["bytes"]
        for file in ("state", "model", "head"):
            assert differing(mine[file], theirs[file]) == [], file


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_may_read_weights_and_draw_samples(stage: int, precision: str, two_ranks: RankPool) -> None:
    found = two_ranks.run(user_jobs.look_on_rank_0_only, {"stage": stage}, precision)
    expected = two_ranks.once(user_jobs.look_on_rank_0_only, DDP, precision)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == theirs
    assert len(found[0]["seen"]) > 90


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}])
def test_one_rank_may_look_at_gradients_until_the_step(settings: dict[str, Any], two_ranks: RankPool) -> None:
    look, alone = user_jobs.look_at_gradients_on_rank_0_only, settings == {"accumulate_grad_batches": 2}
    for stage in STAGES:
        given = {"stage": stage, "accumulation": "local" if alone else "sharded"}
        found, expected = two_ranks.run(look, given, **settings), two_ranks.once(look, DDP, **settings)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine["losses"] == theirs["losses"]
            assert all(map(torch.equal, mine["seen"], theirs["seen"]))
        assert len(found[0]["seen"]) > 60


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}, {"precision": "16-mixed"}])
def test_a_rank_without_a_loss_contributes_zeros_to_the_average(settings: dict[str, Any], two_ranks: RankPool) -> None:
    fit, skips = user_jobs.fit_skipping, user_jobs.rank_1_skips_one
    for stage in STAGES:
        given = {"stage": stage, "accumulation": "local", "bucket_size_mb": 0.001}  # more buckets than travel at once
        found = two_ranks.run(fit, given, skips, **settings)
        expected = two_ranks.once(fit, {"stage": 0} if "precision" in settings else DDP, skips, True, **settings)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine["losses"] == theirs["losses"]
            assert differing(mine["weights"], theirs["weights"]) == []


def test_a_rank_without_a_loss_contributes_zeros_also_where_backward_is_the_users_own(two_ranks: RankPool) -> None:
    fit, skips, kind = user_jobs.fit_skipping, user_jobs.rank_1_skips_one, user_jobs.SkippingInBackward
    expected = two_ranks.once(fit, DDP, skips, True)
    for stage in STAGES:
        for mine, theirs in zip(two_ranks.run(fit, {"stage": stage}, skips, False, kind), expected, strict=True):
            assert mine["losses"] == theirs["losses"]
            assert differing(mine["weights"], theirs["weights"]) == []


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}])
def test_where_no_rank_has_a_loss_nothing_is_stepped(settings: dict[str, Any], two_ranks: RankPool) -> None:
    """Momentum would move weights by zeros, too."""
    fit, skips = user_jobs.fit_skipping, user_jobs.all_skip_the_last_two
    expected = two_ranks.run(fit, DDP, skips, **settings, limit_train_batches=2)
    for stage in STAGES:
        given = {"stage": stage, "accumulation": "local"}
        found = two_ranks.run(fit, given, skips, **settings)
        assert [of_rank["losses"] for of_rank in found] == [of_rank["losses"] for of_rank in expected]
        # Rank 0's: the others take its buffers before a step without a loss, too.
        assert differing(found[0]["weights"], expected[0]["weights"]) == []


@pytest.mark.parametrize(("world", "by_hand"), [(1, False), (1, True), (2, True)])
def test_of_a_step_without_a_loss_hooks_are_told_what_they_are_on_one_device(
    world: int, by_hand: bool, pool_of: Callable[[int], RankPool]
) -> None:
    (expected,) = pool_of(1).run(user_jobs.told_of_steps_without_a_loss, "auto", 1, by_hand)
    assert "a backward" not in expected
    for told in pool_of(world).run(user_jobs.told_of_steps_without_a_loss, {"stage": 2}, world, by_hand):
        assert told == expected[: len(told)] != []


@pytest.mark.parametrize("always", [True, False])
def test_gradients_that_are_kept_over_a_step_add_up_as_under_ddp_to_rounding(always: bool, two_ranks: RankPool) -> None:
    """An `optimizer_zero_grad` of the user's own leaves them. What is new is averaged before it is added to them."""
    expected = two_ranks.once(user_jobs.fit_keeping_gradients, DDP, always)
    zeroed = two_ranks.once(user_jobs.fit_keeping_gradients, DDP, not always)
    for stage in STAGES:
        for mine, theirs, other in zip(
            two_ranks.run(user_jobs.fit_keeping_gradients, {"stage": stage}, always), expected, zeroed, strict=True
        ):
            assert mine == pytest.approx(theirs, rel=1e-5), stage
            assert mine != pytest.approx(other, rel=1e-5), "what is kept makes no difference here"


def test_parameters_added_in_the_middle_of_a_step_are_refused_with_the_remedy(two_ranks: RankPool) -> None:
    for stage in STAGES:
        for error in two_ranks.run(user_jobs.add_a_group_while_training, {"stage": stage}):
            assert error is not None
            assert "was thawed in the middle of a step" in error


@pytest.mark.parametrize("arguments", [{"stage": 2}, {"stage": 3}])
def test_sanitizing_a_sound_run_changes_nothing(arguments: dict[str, Any], two_ranks: RankPool) -> None:
    plain = two_ranks.once(user_jobs.fit_module, arguments, "Penalised", precision="32-true")[0]
    checked = two_ranks.run(user_jobs.fit_module, {**arguments, "sanitize": True}, "Penalised", precision="32-true")[0]
    assert checked["losses"] == plain["losses"]


def test_strategies_that_come_and_go_leave_no_sockets_and_threads_behind(two_ranks: RankPool) -> None:
    two_ranks.run(user_jobs.fit_module, {"stage": 3}, "Penalised", precision="32-true")  # makes what all share
    assert two_ranks.run(user_jobs.what_a_fit_leaves_open, {"stage": 3}) == [[], []]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_one_rank_may_read_weights_after_each_batch_while_the_others_go_on(precision: str, two_ranks: RankPool) -> None:
    expected = two_ranks.run(user_jobs.read_on_rank_0_after_each_batch, DDP, precision=precision)
    for stage in STAGES:
        found = two_ranks.run(user_jobs.read_on_rank_0_after_each_batch, {"stage": stage}, precision=precision)
        assert found == expected, stage


def test_reading_a_sharded_weight_where_other_ranks_do_not_answer_ends_in_an_error_that_names_it() -> None:
    """They are in a collective of the user's own, which rank 0 comes to after its read."""
    pool = RankPool(2)
    try:
        pool.begin(user_jobs.read_on_rank_0_after_each_batch, {"stage": 3, "wait_timeout": SHORT}, True)
        rank, _, error = pool.next_outcome()  # rank 1 ends when rank 0's process does; here it lives on
    finally:
        pool.kill()
    assert rank == 0
    assert "Rank 1 did not come within wait_timeout=8 s during step 1, in the all-gather of net.0, on rank 0. " in error
