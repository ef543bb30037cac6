"""Offload under `Trainer`, on real ranks and a real disk."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import offload_jobs as jobs
from compare import assert_same_bits
from lightning_zero import Offload, ZeroStrategy
from ranks import RankPool

DDP = "ddp_find_unused_parameters_true"


def on_disk(folder: Path, stage: int, **offload: Any) -> dict[str, Any]:
    parameters = {"parameters": "nvme"} if stage == 3 else {}
    return {"stage": stage, "offload": {"optimizer": "nvme", "path": str(folder), **parameters, **offload}}


@pytest.mark.parametrize(
    ("stage", "precision"),
    [(1, "32-true"), (3, "32-true"), (2, "bf16-mixed"), (3, "16-mixed"), (2, "64-true"), (3, "bf16-true")],
)
def test_training_gives_the_bits_of_training_without_offload(
    stage: int, precision: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    how = {"precision": precision, "accumulate_grad_batches": 2, "max_epochs": 2}
    expected = two_ranks.run(jobs.fit, {"stage": stage}, 2, **how)
    found = two_ranks.run(jobs.fit, on_disk(tmp_path, stage), 2, **how)
    for mine, theirs in zip(found, expected, strict=True):
        jobs.assert_same_fit(mine, theirs)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_callbacks_see_at_every_hook_what_they_see_without_offload(
    stage: int, two_ranks: RankPool, tmp_path: Path
) -> None:
    expected = two_ranks.run(jobs.fit, {"stage": stage}, 2, looks=True)
    found = two_ranks.run(jobs.fit, on_disk(tmp_path, stage), 2, looks=True)
    assert expected[0]["seen"]
    for mine, theirs in zip(found, expected, strict=True):
        jobs.assert_same_fit(mine, theirs)


@pytest.mark.parametrize("parameters", ["cpu", "nvme", None])
def test_weights_that_are_loaded_between_two_steps_are_those_of_the_second_one(
    parameters: str | None, two_ranks: RankPool, tmp_path: Path
) -> None:
    disk, under_ddp, here = (tmp_path / name for name in ("disk", "under_ddp", "here"))
    disk.mkdir()
    strategy = on_disk(disk, 2) if parameters is None else on_disk(disk, 3, parameters=parameters)
    expected = two_ranks.run(jobs.go_back, DDP, under_ddp)
    for mine, theirs in zip(two_ranks.run(jobs.go_back, strategy, here), expected, strict=True):
        jobs.assert_same_fit(mine, theirs)


@pytest.mark.parametrize("stage", [2, 3])
def test_r58_a_killed_run_goes_on_with_the_disk_and_without_it_and_on_another_world(
    stage: int, pool_of: Callable[[int], RankPool], two_ranks: RankPool, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    offloaded, plain = on_disk(disk, stage), {"stage": stage}
    straight = two_ranks.run(jobs.train, tmp_path / "straight", offloaded, 2, 2)[0]
    doomed = RankPool(2)
    doomed.begin(jobs.wait_in_the_second_epoch, tmp_path / "killed", offloaded)
    deadline = time.monotonic() + 100
    while not all((tmp_path / "killed" / f"rank {rank} waits").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    doomed.kill()
    assert list(disk.iterdir()) == []
    saved = tmp_path / "killed" / "epoch=0.ckpt"
    steps = len(straight["losses"]) // 2
    for strategy in (offloaded, plain):
        again = two_ranks.run(jobs.train, tmp_path / "again", strategy, 2, 2, resume=saved)[0]
        assert again["losses"] == straight["losses"][steps:]
        assert_same_bits(again["weights"], straight["weights"])
    # On another world batches differ; with it and without it the numbers do not.
    one_rank = pool_of(1)
    with_it, without = (
        one_rank.run(jobs.train, tmp_path / "alone", strategy, 1, 2, resume=saved)[0] for strategy in (offloaded, plain)
    )
    assert with_it["losses"] == without["losses"]
    assert_same_bits(with_it["weights"], without["weights"])


def test_a_checkpoint_without_offload_goes_on_with_it(two_ranks: RankPool, tmp_path: Path) -> None:
    straight = two_ranks.run(jobs.train, tmp_path / "straight", {"stage": 2}, 2, 2)[0]
    saved = tmp_path / "straight" / "epoch=0.ckpt"
    again = two_ranks.run(jobs.train, tmp_path / "again", on_disk(tmp_path, 3), 2, 2, resume=saved)[0]
    assert_same_bits(again["weights"], straight["weights"])


@pytest.mark.parametrize("tier", [{"optimizer": "cpu"}, {"optimizer": "nvme", "path": "."}], ids=["cpu", "nvme"])
def test_a_resumed_run_with_state_in_two_bytes_is_the_run_that_was_not_interrupted(
    tier: dict[str, str], two_ranks: RankPool, tmp_path: Path
) -> None:
    narrow = {"stage": 2, "offload": {**tier, "state_dtype": "bf16"}}
    straight = two_ranks.run(jobs.train, tmp_path / "straight", narrow, 2, 2)[0]
    saved = tmp_path / "straight" / "epoch=0.ckpt"
    again = two_ranks.run(jobs.train, tmp_path / "again", narrow, 2, 2, resume=saved)[0]
    assert_same_bits(again["weights"], straight["weights"])
    plain = two_ranks.run(jobs.train, tmp_path / "plain", {"stage": 2}, 2, 2, resume=saved)[0]["losses"]
    assert all(map(math.isfinite, plain))


def test_a_disk_that_fails_is_named_with_the_last_complete_checkpoint(
    pool_of: Callable[[int], RankPool], tmp_path: Path
) -> None:
    disk, folder = tmp_path / "disk", tmp_path / "checkpoints"
    disk.mkdir()
    error, note = pool_of(1).run(jobs.lose_the_disk, folder, on_disk(disk, 2))[0]
    assert str(disk) in error
    assert "Input/output error" in error
    assert note == f"The last complete checkpoint of this run: {folder / 'epoch=0.ckpt'}."


def test_a_folder_that_one_rank_does_not_have_is_told_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    found = two_ranks.run(jobs.try_to_fit, on_disk(tmp_path, 2), absent)
    assert found[0] == found[1]
    assert f"rank 1, setting up: Offload(path={absent!r}): no file can be made there" in found[0]


def test_the_report_tells_what_rests_where(two_ranks: RankPool, tmp_path: Path) -> None:
    without = two_ranks.run(jobs.rests, {"stage": 2})[0]
    report = two_ranks.run(jobs.rests, on_disk(tmp_path, 2))[0]
    assert report["optimizer state"] == report["gradient"] == report["master"] == 0
    assert report["optimizer state (host)"] < 200  # Adam's counts of steps
    assert report["optimizer state (disk)"] + report["optimizer state (host)"] == without["optimizer state"]
    assert report["gradient (disk)"] > 0
    assert report["master (disk)"] > 0


def one_line(said: list[list[str]]) -> str:
    """The one message of rank 0, however it is wrapped."""
    (told,) = said[0]
    return " ".join(told.split())


def test_fit_says_what_is_offloaded_and_how_it_is_stepped(two_ranks: RankPool, tmp_path: Path) -> None:
    told = one_line(two_ranks.run(jobs.what_fit_says, on_disk(tmp_path, 2)))
    assert f"Optimizer state of 838 elements is kept on disk ({tmp_path})" in told
    assert "stepped by the optimizer's own kernels" in told
    assert "when its values are wanted" in told
    told = one_line(two_ranks.run(jobs.what_fit_says, on_disk(tmp_path, 0)))
    assert "in each call of step: gradients are whole" in told
    told = one_line(two_ranks.run(jobs.what_fit_says, {"stage": 2, "offload": {"optimizer": "cpu"}}))
    assert "is kept in host memory" in told
    assert "in each call of step: it is kept where it is used" in told
    assert "rounded" not in told
    told = one_line(two_ranks.run(jobs.what_fit_says, on_disk(tmp_path, 2, state_dtype="bf16")))
    assert f"is kept on disk ({tmp_path}), rounded to torch.bfloat16" in told
    assert "Averages with beta 0.999 cannot fall there: write 0.99 or less" in told


def test_fit_says_where_an_offloaded_step_could_be_hidden_in_backward(two_ranks: RankPool, tmp_path: Path) -> None:
    hint = "ZeroStrategy(step_in_backward=True) hides the offloaded step behind backward"
    assert hint in one_line(two_ranks.run(jobs.what_fit_says, on_disk(tmp_path, 2)))
    for said in (
        two_ranks.run(jobs.what_fit_says, on_disk(tmp_path, 0)),  # whole gradients
        two_ranks.run(jobs.what_fit_says, on_disk(tmp_path, 2), gradient_clip_val=1.0),
        two_ranks.run(jobs.what_fit_says, {"stage": 2}),
    ):
        assert hint not in one_line(said)
    in_backward = on_disk(tmp_path, 2) | {"step_in_backward": True}
    told = one_line(two_ranks.run(jobs.what_fit_says, in_backward, kind=jobs.Inattentive))
    assert "is stepped by the optimizer's own kernels, in backward" in told
    assert hint not in told


def test_state_on_disk_can_be_read_after_fit(two_ranks: RankPool, tmp_path: Path) -> None:
    for found in two_ranks.run(jobs.read_state_after_fit, on_disk(tmp_path, 2)):
        assert found


def test_parameters_are_offloaded_at_stage_3_alone() -> None:
    with pytest.raises(ValueError, match=r"are whole on every rank at stage=2. Write stage=3"):
        ZeroStrategy(stage=2, offload=Offload(parameters="cpu"))
