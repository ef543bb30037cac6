"""`ZeroEMA` beside Lightning's `EMAWeightAveraging` under ddp, on real ranks."""

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from safetensors.torch import load_file

import ema_jobs as jobs
from compare import differing
from jobs import read_checkpoint
from lightning_zero import ZeroEMA, ZeroStrategy, consolidate, export_safetensors
from lightning_zero.run.average import Average
from ranks import RankPool

DDP = "ddp_find_unused_parameters_true"
RUNS = [(stage, precision) for stage in (0, 1, 2, 3) for precision in ("32-true", "bf16-mixed")] + [(3, "bf16-true")]
Outcome = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ema")


@pytest.fixture(scope="module")
def of_ddp(two_ranks: RankPool, folder: Path) -> Outcome:
    @cache
    def run(precision: str = "32-true", **arguments: Any) -> list[dict[str, Any]]:
        told = "-".join(f"{name}{value}" for name, value in arguments.items())
        return two_ranks.run(jobs.fit, DDP, precision, folder / f"ddp-{precision}{told}", **arguments)

    return run


def assert_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]], rounds: bool = False) -> None:
    """If the module `rounds` the average that it takes at the end, checkpoints from then on have it rounded."""
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert mine["tested"] == theirs["tested"]
        for part in ("seen", "weights", "saved", *(() if rounds else ("at the end",))):
            assert differing(mine[part], theirs[part]) == [], part


@pytest.mark.parametrize(("stage", "precision"), RUNS)
def test_r21_the_sharded_average_is_lightnings_to_the_bit_in_a_share_of_the_memory(
    stage: int, precision: str, two_ranks: RankPool, folder: Path, of_ddp: Outcome
) -> None:
    """In validation, in checkpoints, after fit, in a test; whatever is saved beside it as well."""
    found = two_ranks.once(jobs.fit, {"stage": stage}, precision, folder / f"{stage}-{precision}")
    assert_alike(found, of_ddp(precision), rounds=precision == "bf16-true")
    held = list(jobs.Model().named_parameters())
    whole, buffers = 4 * sum(p.numel() for _, p in held), sum(b.nbytes for b in jobs.Model().buffers())
    padding = 2 * 4 * 64 * len(held)
    assert all(abs(one["nbytes"] - buffers - whole / (2 if stage else 1)) <= padding for one in found)


OFFLOADED = [
    (2, {"optimizer": "cpu"}),
    (3, {"optimizer": "cpu", "parameters": "cpu"}),
    (3, {"optimizer": "nvme", "parameters": "nvme"}),
]


@pytest.mark.parametrize(("stage", "offload"), OFFLOADED)
def test_r21_offloaded_it_is_the_same(
    stage: int, offload: dict[str, str], two_ranks: RankPool, tmp_path: Path, of_ddp: Outcome
) -> None:
    path = {"path": str(tmp_path)} if "nvme" in offload.values() else {}
    strategy = {"stage": stage, "offload": {**offload, **path}}
    assert_alike(two_ranks.run(jobs.fit, strategy, "32-true", tmp_path / "run"), of_ddp())


def test_r21_single_files_have_it_too(two_ranks: RankPool, tmp_path: Path, of_ddp: Outcome) -> None:
    strategy = {"stage": 3, "checkpoint": "full"}
    assert_alike(two_ranks.run(jobs.fit, strategy, "32-true", tmp_path / "run"), of_ddp())


ARGUMENTS = [
    {"use_buffers": False, "update_every_n_steps": 3},
    {"update_starting_at_step": 4},
    {"update_every_n_steps": 0, "update_starting_at_epoch": 0},
    {"device": "cpu", "update_starting_at_step": 100},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_its_arguments_mean_what_lightnings_mean(
    arguments: dict[str, Any], two_ranks: RankPool, tmp_path: Path, of_ddp: Outcome
) -> None:
    found = two_ranks.run(jobs.fit, {"stage": 2}, "32-true", tmp_path / "run", **arguments)
    assert_alike(found, of_ddp(**arguments))


def test_r21_checkpoints_are_resumed_at_other_stages_and_worlds_and_by_lightnings_own(
    two_ranks: RankPool, pool_of: Callable[[int], RankPool], folder: Path, of_ddp: Outcome
) -> None:
    of_ddp()
    single, shards = folder / "ddp-32-true.file", folder / "2-32-true.folder"
    two_ranks.once(jobs.fit, {"stage": 2}, "32-true", folder / "2-32-true")
    expected = two_ranks.once(jobs.resume, DDP, 2, single)
    by_lightning = two_ranks.once(jobs.resume, DDP, 2, shards)
    for found in (
        by_lightning,
        two_ranks.run(jobs.resume, {"stage": 1}, 2, shards),
        two_ranks.run(jobs.resume, {"stage": 3}, 2, shards),
        two_ranks.run(jobs.resume, {"stage": 3}, 2, single),
        two_ranks.run(jobs.resume, {"stage": 2, "offload": "cpu", "checkpoint": "full"}, 2, shards),
    ):
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine["losses"], mine["updates"]) == (theirs["losses"], theirs["updates"])
            assert differing(mine["seen"], theirs["seen"]) == differing(mine["weights"], theirs["weights"]) == []
    saved = read_checkpoint(shards)
    for world in (1, 3):
        for began in pool_of(world).run(jobs.resume, {"stage": 3}, world, shards):
            assert differing(began["averaged"], saved["state_dict"]) == []
            assert differing(began["own"], saved["current_model_state"]) == []


def test_r21_exports_and_plain_loading_have_the_average(two_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    two_ranks.once(jobs.fit, {"stage": 3}, "32-true", folder / "3-32-true")
    shards = folder / "3-32-true.folder"
    saved = read_checkpoint(shards)
    assert differing(saved["state_dict"], saved["current_model_state"])
    consolidate(shards, tmp_path / "one.ckpt")
    export_safetensors(shards, tmp_path / "hf")
    loaded = jobs.Model.load_from_checkpoint(tmp_path / "one.ckpt").state_dict()
    assert differing(loaded, saved["state_dict"]) == []
    assert differing(load_file(tmp_path / "hf" / "model.safetensors"), saved["state_dict"]) == []


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_tested_of_a_checkpoint_is_its_average(stage: int, two_ranks: RankPool, folder: Path) -> None:
    two_ranks.once(jobs.fit, {"stage": 3}, "32-true", folder / "3-32-true")
    saved = read_checkpoint(folder / "3-32-true.folder")
    for found in two_ranks.run(jobs.evaluate, {"stage": stage}, folder / "3-32-true.folder"):
        assert differing(found["weights"], saved["state_dict"]) == []
        assert found["averages"] == [True, False]


def test_a_module_that_is_loaded_without_strict_is_so_with_an_average() -> None:
    checkpoint = {"current_model_state": {}, "averaging_state": {}}
    strategy, module = Mock(spec=ZeroStrategy), Mock(strict_loading=False)
    ZeroEMA().on_load_checkpoint(Mock(strategy=strategy, **{"state.fn": TrainerFn.FITTING}), module, checkpoint)
    strategy.load_model_state_dict.assert_called_once_with({"state_dict": {}}, strict=False)


def test_a_checkpoint_without_an_average_begins_one(two_ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "without.ckpt"
    two_ranks.run(jobs.without, {"stage": 2}, path)
    saved = read_checkpoint(path)["state_dict"]
    for began in two_ranks.run(jobs.resume, {"stage": 3}, 2, path):
        assert differing(began["averaged"], saved) == []


def test_what_a_run_that_goes_on_has_changed_and_thawed_is_averaged_as_it_is(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    """And not as the checkpoint has it, whose averages count until training begins."""
    for averaged in two_ranks.run(jobs.thaw_in_a_run_that_goes_on, {"stage": 2}, tmp_path / "saved.ckpt"):
        assert averaged.eq(0.5).all()


def test_another_fit_begins_another_average(two_ranks: RankPool) -> None:
    expected = two_ranks.once(jobs.twice, DDP)
    for mine, theirs in zip(two_ranks.run(jobs.twice, {"stage": 3}), expected, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert differing(mine["weights"], theirs["weights"]) == []


@pytest.mark.parametrize("stage", [1, 3])
def test_what_a_failed_validation_leaves_is_saved_with_each_in_its_place(
    stage: int, two_ranks: RankPool, tmp_path: Path
) -> None:
    for found in two_ranks.run(jobs.fail, {"stage": stage}, tmp_path):
        saved = found["saved"]
        weights = [name for name in saved["state_dict"] if "running" not in name and "tracked" not in name]
        for mine, place in (("own", "current_model_state"), ("averaged", "state_dict")):
            assert all(found[mine][name].equal(saved[place][name]) for name in weights)


def test_another_device_is_refused_on_every_rank(two_ranks: RankPool) -> None:
    for error in two_ranks.run(jobs.error_of, {"stage": 1}, device="cuda:1"):
        assert "write device='cpu'" in error


def test_without_the_strategy_it_is_lightnings_own() -> None:
    assert issubclass(ZeroEMA, EMAWeightAveraging)
    found, expected = jobs.on_one_device(ZeroEMA), jobs.on_one_device(EMAWeightAveraging)
    assert differing(found["weights"], expected["weights"]) == differing(found["seen"], expected["seen"]) == []


def test_a_checkpoint_from_before_the_first_fit_has_no_average() -> None:
    checkpoint: dict[str, Any] = {"state_dict": {}}
    ZeroEMA().on_save_checkpoint(Mock(strategy=ZeroStrategy(stage=2)), Mock(), checkpoint)
    assert checkpoint == {"state_dict": {}}


@pytest.mark.parametrize("updates", [0, 1])
def test_an_average_that_was_never_updated_is_told_of(updates: int) -> None:
    callback = ZeroEMA()
    callback._average_model = Mock(spec=Average, updates=updates)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        callback._copy_average_to_current(Mock())
    assert [str(each.message).partition(":")[0] for each in told] == ["ZeroEMA was never updated"] * (updates == 0)


def test_it_is_read_in_training_alone() -> None:
    with pytest.raises(RuntimeError, match="the module's weights are the average"):
        ZeroEMA().averaged_state_dict()
