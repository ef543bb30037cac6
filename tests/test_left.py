"""What a run leaves behind, and how it is told to stop: as under DDP."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import left_jobs
from ranks import HANGS, PATIENCE, SHORT, RankPool, run_alone

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


@pytest.fixture(scope="module")
def signalled(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The end of a run in which all ranks are sent a signal, each run made once."""
    folder = tmp_path_factory.mktemp("signalled")

    def run(strategy: Any, place: str) -> list[Any]:
        return two_ranks.once(left_jobs.run_until_signalled, strategy, place, (0, 1), folder)

    return run


@pytest.mark.parametrize("place", PLACES)
def test_a_signal_to_all_ranks_is_heard_where_ddp_hears_it(place: str, signalled: Any) -> None:
    expected = signalled(DDP, place)
    assert differing(signalled({"stage": 3}, place), expected) == []
    assert all(one["received"] for one in expected)
    assert {one["ended"] for one in expected} == {"returned" if place == "train end" else "SIGTERMException None"}


@pytest.mark.parametrize("place", ["step 2", "nothing 3", "validation 1", "test 1", "epoch end"])
def test_a_signal_to_one_rank_stops_all_where_a_signal_to_all_would(
    place: str, two_ranks: RankPool, tmp_path: Path, signalled: Any
) -> None:
    """Under DDP it would hang: the handler calls a collective."""
    for stage in (1, 3):
        folder = tmp_path / str(stage)
        found = two_ranks.run(
            left_jobs.run_until_signalled, {"stage": stage}, place, (1,), folder, enable_checkpointing=True
        )
        assert found == signalled({"stage": stage}, place)
        assert (folder / "checkpoints" / "preempted.ckpt").exists() == ("test" not in place)


@pytest.mark.parametrize("how", [{"enable_checkpointing": False}, {"enable_checkpointing": True, "fast_dev_run": 5}])
def test_a_run_that_is_to_save_nothing_leaves_nothing_when_it_is_told_to_stop(
    how: dict[str, Any], two_ranks: RankPool, tmp_path: Path
) -> None:
    (first, said), (second, _) = two_ranks.run(left_jobs.said_when_stopped, tmp_path, **how)
    assert (first["ended"], first["step"]) == (second["ended"], second["step"]) == ("SIGTERMException None", 3)
    why = "fast_dev_run" if "fast_dev_run" in how else "enable_checkpointing=False"
    assert said == [f"Told to stop after step 3. Nothing was saved: Trainer({why})."]
    assert list(tmp_path.rglob("*")) == []


def test_callbacks_of_a_trainer_are_its_users_own(two_ranks: RankPool) -> None:
    (seen, _) = assert_as_ddp(two_ranks, left_jobs.callbacks_of_two_fits)
    assert set(map(tuple, seen)) == {("Lists", "Own")}


def test_one_strategy_object_serves_several_trainers_each_with_a_strategy_of_its_own(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    for found, expected, are_shared in two_ranks.run(left_jobs.fit_with_one_strategy_object, tmp_path):
        assert differing(found, expected) == []
        assert are_shared == [False, False]


NVME = {"stage": 2, "offload": {"optimizer": "nvme", "path": "."}}
# Fits with one optimizer: the same cut of its state, another one, whole tensors, and another place.
IN_TURN: list[list[dict[str, Any]]] = [
    [{"stage": 2}, {"stage": 2}],
    [{"stage": 1}, {"stage": 3}],
    [{"stage": 3}, {"stage": 0}, {"stage": 1}],
    [{"stage": 2}, {"stage": 2, "granularity": "tensor"}],
    [{"stage": 3, "granularity": "tensor"}, {"stage": 3, "granularity": "tensor"}],
    [NVME, NVME],
    [NVME, {"stage": 2}],
    [{"stage": 2}, NVME],
]


@pytest.mark.parametrize("loads", [False, True], ids=["as it is", "loaded"])
@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
def test_an_optimizer_that_serves_several_fits_goes_on_with_its_state_as_under_ddp(
    kind: str, loads: bool, two_ranks: RankPool, tmp_path: Path
) -> None:
    for number, strategies in enumerate(IN_TURN[:2] if loads else IN_TURN):
        expected = two_ranks.once(left_jobs.fit_in_turn, [DDP] * len(strategies), kind, tmp_path, loads)
        found = two_ranks.run(left_jobs.fit_in_turn, strategies, kind, tmp_path / str(number), loads)
        assert differing(found, expected, str(strategies)) == []


def test_whole_state_that_is_loaded_after_fit_is_not_saved_as_pieces(two_ranks: RankPool, tmp_path: Path) -> None:
    for told in two_ranks.run(left_jobs.load_after_fit, 2, tmp_path):
        assert told is not None
        assert "AdamW was given whole state after fit had ended" in told


def test_pieces_of_a_rank_that_are_loaded_before_fit_are_refused_on_all(two_ranks: RankPool) -> None:
    for told in two_ranks.run(left_jobs.load_pieces_of_rank_0, "configure_optimizers"):
        assert told is not None
        assert "a piece, which optimizer.state_dict() has on one rank" in told


def test_pieces_of_another_rank_that_are_loaded_in_a_hook_are_refused_there() -> None:
    (told, of_rank_1), _ = run_alone(2, left_jobs.load_pieces_of_rank_0, "on_train_start")
    assert "a piece, which optimizer.state_dict() has on one rank" in of_rank_1
    assert "Rank 1 failed" in told


def test_a_module_whose_load_state_dict_returns_nothing_resumes(two_ranks: RankPool, tmp_path: Path) -> None:
    assert_as_ddp(two_ranks, left_jobs.resume_without_a_word, tmp_path)


def test_a_mock_in_place_of_load_state_dict_is_called_as_under_ddp(two_ranks: RankPool, tmp_path: Path) -> None:
    (calls, _) = assert_as_ddp(two_ranks, left_jobs.resume_with_a_mock, tmp_path)
    assert calls == [[{"strict": strict}] * 2 for strict in (True, True, False)]


@pytest.mark.parametrize("link", [True, "link"])
def test_the_last_checkpoint_is_the_one_that_ddp_resumes_from_and_keeps(
    link: bool | str, two_ranks: RankPool, tmp_path: Path
) -> None:
    ((first, second, third), _) = assert_as_ddp(two_ranks, left_jobs.go_on_from_the_last, tmp_path / str(link), link)
    assert (first[0], second[0], third[0]) == (None, "last.ckpt", "last.ckpt")
    assert third[2] == ["epoch=2.ckpt", "last.ckpt"]


def test_a_missing_checkpoint_is_told_in_the_words_of_ddp(two_ranks: RankPool, tmp_path: Path) -> None:
    (told, _) = assert_as_ddp(two_ranks, left_jobs.look_for_what_is_missing, tmp_path, stages=(2,))
    assert told == [f"Checkpoint file not found: {tmp_path}/nothing.ckpt"] * 4


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


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_after_fit_backward_clipping_and_steps_by_hand_are_plain_ones(precision: str, two_ranks: RankPool) -> None:
    assert_as_ddp(two_ranks, left_jobs.by_hand_after_fit, precision)


@pytest.mark.parametrize("place", ["forward", "inside", "backward", "validation"])
def test_after_an_error_of_all_ranks_the_model_is_whole_and_a_notebook_goes_on(place: str, two_ranks: RankPool) -> None:
    expected = assert_as_ddp(two_ranks, left_jobs.go_on_after_an_error, place)
    assert expected[0]["said"] == "ValueError: all ranks have had enough"
    assert not expected[0]["is_blamed"]


UNEVEN = [((4, 2), True), ((2, 4), False), ((0, 4), False)]


@pytest.mark.parametrize(("batches", "has_length"), UNEVEN)
@pytest.mark.parametrize("stage", STAGES)
def test_uneven_training_batches_end_in_one_error_on_every_rank(
    stage: int, batches: tuple[int, int], has_length: bool, two_ranks: RankPool
) -> None:
    """At the first batch that a rank has not; also where the others have begun to reduce, in more buckets than two."""
    given = {"stage": stage, "bucket_size_mb": 0.001}
    found = two_ranks.run(left_jobs.fit_unevenly, given, batches, has_length)
    first, fewest = batches.index(min(batches)), min(batches)
    assert len(set(found)) == 1
    assert f"rank {first} is at the end of epoch 0, after {fewest} batches" in found[0]
    assert f"rank {1 - first} is in batch {fewest + 1} of epoch 0" in found[0]
    assert "drop_last=True" in found[0]


@pytest.mark.parametrize(("stage", "name"), [(1, "barrier"), (3, "reduce")])
def test_a_collective_that_one_rank_alone_reaches_ends_on_both_with_both_places(stage: int, name: str) -> None:
    results, errors = run_alone(2, left_jobs.call_on_one_rank, {"stage": stage, "wait_timeout": SHORT}, name)
    assert errors == [None, None]
    for (error, note), places in zip(results, ("2", "34"), strict=True):  # rank 1 went on until it needed rank 0
        assert f"a call of Strategy.{name}, " in error
        assert re.search(f"in batch [{places}] of epoch 0", note)


def test_a_rank_may_read_all_weights_before_all_ranks_read_all_gradients(two_ranks: RankPool) -> None:
    assert_as_ddp(two_ranks, left_jobs.read_and_measure)


@pytest.mark.parametrize("batches", [(2, 4), (4, 2)])
def test_metrics_of_ranks_that_evaluate_unevenly_are_synchronised_at_the_end(
    batches: tuple[int, int], two_ranks: RankPool
) -> None:
    """Under DDP evaluation has no other collective, and so ends."""
    assert_as_ddp(two_ranks, left_jobs.validate_unevenly, batches)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_has_nothing_to_evaluate_ends_in_one_error_on_every_rank(stage: int, two_ranks: RankPool) -> None:
    """Where metrics are synchronised: under DDP the others would wait for it."""
    found = two_ranks.run(left_jobs.validate_nothing_on_rank_0, {"stage": stage})
    assert len(set(found)) == 1
    assert "Ranks [0] have logged nothing" in found[0]


def test_a_model_in_shards_is_traced_on_one_rank(two_ranks: RankPool) -> None:
    assert_as_ddp(two_ranks, left_jobs.trace_on_rank_0, stages=(3,))


ENDINGS = [
    ("forward", "killed", 2),
    ("backward", "raises", 3),
    ("step", "killed", 1),
    ("validation", "raises", 2),
    ("epoch end", "raises", 1),
    ("loader", "killed", 3),
    ("save", "raises", 3),
]


@pytest.mark.parametrize(("place", "how", "stage"), ENDINGS)
def test_wherever_a_rank_fails_or_dies_the_other_one_ends_and_names_it(
    place: str, how: str, stage: int, tmp_path: Path
) -> None:
    pool = RankPool(2)
    # A rank that raises lives on here, so that the other one waits for it; also in steps before, on a busy machine.
    limit = SHORT if how == "raises" else PATIENCE
    try:
        pool.begin(left_jobs.leave, {"stage": stage, "wait_timeout": limit}, place, how, tmp_path)
        results = dict(pool.next_outcome()[:2] for _ in range(1 if how == "killed" else 2))
    finally:
        pool.kill()
    told, seconds = results[0]
    assert re.match(
        r"RankTimeoutError: Rank 1 (failed|died \(connection \w+\)) during (validate after )?step \d, in", told
    )
    assert ("rank 1 has had enough" in told) == (how == "raises")
    assert seconds < HANGS / 2  # most of it is the run before
