"""What is done at Lightning's hooks: preemption under SLURM, and callbacks that write to weights."""

import os
import signal
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

import callback_jobs
import jobs
from checkpoint_jobs import Everything, Signal, resumable, trainer
from jobs import Classifier
from lightning_zero.checkpoint import Folder, verify
from lightning_zero.checkpoint.folder import hidden_beside
from lightning_zero.pl.callbacks import OwnCallbacks, Preemption
from lightning_zero.run.notices import Notice, Notices
from lightning_zero.wire.board import Board
from ranks import RankPool
from test_one_device import differences


class Slurm(SLURMEnvironment):
    """SLURM's, on ranks that the tests have started."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._started = LightningEnvironment()

    @property
    def main_address(self) -> str:
        return self._started.main_address

    @property
    def main_port(self) -> int:
        return self._started.main_port

    def world_size(self) -> int:
        return self._started.world_size()

    def set_world_size(self, size: int) -> None:
        self._started.set_world_size(size)

    def global_rank(self) -> int:
        return self._started.global_rank()

    def set_global_rank(self, rank: int) -> None:
        self._started.set_global_rank(rank)

    def local_rank(self) -> int:
        return self._started.local_rank()

    def node_rank(self) -> int:
        return self._started.node_rank()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        pass


def fit_under_slurm(strategy: Any, folder: Path, number: int, requeue_signal: int, *, auto_requeue: bool = True) -> Any:
    """How a job ends that gets a signal before its third step."""
    os.environ |= {"SLURM_JOB_ID": "77", "PATH": f"{folder}:{os.environ['PATH']}"}
    environment = Slurm(auto_requeue=auto_requeue, requeue_signal=signal.Signals(requeue_signal))
    L.seed_everything(1, verbose=False)
    run = trainer(
        strategy,
        2,
        max_epochs=2,
        plugins=[environment],
        callbacks=[Signal(number, 1, 2)],
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    try:
        run.fit(Everything(), resumable(2, 5))
    except SystemExit as leaving:
        return leaving.code or 0
    return "it went on"


@pytest.mark.parametrize(
    ("number", "requeue_signal", "saved"),
    [
        (signal.SIGUSR1, signal.SIGUSR1, "hpc_ckpt_1.ckpt"),
        (signal.SIGUSR2, signal.SIGUSR2, "hpc_ckpt_1.ckpt"),
        (signal.SIGTERM, signal.SIGUSR1, "checkpoints/preempted.ckpt"),  # cancelled: not to come back
    ],
)
@pytest.mark.parametrize("asynchronously", [False, True])
def test_slurm_starts_a_job_again_after_its_signal_once_the_checkpoint_is_complete(
    asynchronously: bool, number: int, requeue_signal: int, saved: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    scontrol = tmp_path / "scontrol"
    manifest = tmp_path / saved / "manifest.json"
    scontrol.write_text(f"#!/bin/sh\ntest -e {manifest} && echo $@ > {tmp_path}/requeued\n")
    scontrol.chmod(0o755)
    strategy = {"stage": 2, "checkpoint": {"async_save": asynchronously}}
    assert two_ranks.run(fit_under_slurm, strategy, tmp_path, number, requeue_signal) == [0, 0]
    assert verify(tmp_path / saved) == []
    requeued = tmp_path / "requeued"
    assert (requeued.read_text().split() if requeued.exists() else None) == (
        ["requeue", "77"] if number == requeue_signal else None
    )


def test_slurm_starts_no_job_again_that_is_not_to_be(two_ranks: RankPool, tmp_path: Path) -> None:
    """``SLURMEnvironment(auto_requeue=False)``: its signal ends the run as any other does, with a checkpoint."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $@ > {tmp_path}/requeued\n")
    scontrol.chmod(0o755)
    job = partial(fit_under_slurm, auto_requeue=False)
    assert two_ranks.run(job, {"stage": 2}, tmp_path, signal.SIGUSR1, signal.SIGUSR1) == [0, 0]
    assert verify(tmp_path / "checkpoints" / "preempted.ckpt") == []
    assert not (tmp_path / "requeued").exists()


def test_a_flag_that_a_failed_run_has_left_stops_no_later_one() -> None:
    """A rank that was told to stop raises it in an evaluation, where the others look."""
    board = Board(dist.HashStore(), 0, 2, timedelta(seconds=5))

    def is_told(run: int, *here: Notice) -> bool:
        strategy: Any = SimpleNamespace(board=board, _runs=run, _notices=Notices(here=set(here)))
        return Preemption(strategy)._is_told()

    assert [is_told(1), is_told(1, Notice.STOP), is_told(1), is_told(2)] == [False, True, True, False]


@pytest.mark.parametrize(("function", "saved"), [(TrainerFn.FITTING, 1), (TrainerFn.VALIDATING, 0)])
def test_who_is_told_to_stop_saves_a_fit_where_the_first_callback_saves_and_is_told_once(
    function: TrainerFn, saved: int, tmp_path: Path
) -> None:
    board, savers = (
        Board(dist.HashStore(), 0, 2, timedelta(seconds=5)),
        [ModelCheckpoint(), *map(ModelCheckpoint, "ab")],
    )
    for saver, name in zip(savers[1:], "ab", strict=True):
        saver.dirpath = str(tmp_path / name)

    def preemption(*told: Notice) -> Preemption:
        notices: Any = SimpleNamespace(here=set(told), anywhere=set(told))
        return Preemption(SimpleNamespace(board=board, _runs=1, _notices=notices, _savers=savers))  # type: ignore[arg-type]

    run = Mock(fast_dev_run=False, is_global_zero=True, **{"state.fn": function})
    stopped = preemption(Notice.STOP)
    assert stopped._is_told()
    with pytest.raises(SIGTERMException):
        stopped._stop_if_told(run)
    assert run.save_checkpoint.call_args_list == [call(str(tmp_path / "a" / "preempted.ckpt"))] * saved
    assert not preemption()._is_told()


def test_the_users_own_handler_of_a_signal_is_called_too() -> None:
    strategy: Any = SimpleNamespace(_notices=SimpleNamespace(here=set()))
    theirs = Mock()
    for before in (theirs, signal.SIG_DFL, None):
        Preemption(strategy)._on_signal({Notice.STOP}, before, signal.SIGTERM, None)
    theirs.assert_called_once_with(signal.SIGTERM, None)
    assert strategy._notices.here == {Notice.STOP}


def test_what_lightnings_tuner_tries_is_not_told_as_a_run() -> None:
    """It replaces the callbacks of the trainer meanwhile."""
    run = Mock(callbacks=[], checkpoint_callbacks=[], **{"trainer.callbacks": []})
    own, told = OwnCallbacks(Mock(), run), Mock()
    own._told = [own, told]
    for callbacks, calls in (([Mock()], 0), (run.callbacks, 1)):
        with own.around(SimpleNamespace(callbacks=callbacks, lightning_module=None), "on_train_end", None):  # type: ignore[arg-type]
            pass
        assert told.on_train_end.call_count == calls


def test_what_a_killed_save_leaves_is_no_checkpoint_that_a_slurm_job_goes_on_from(tmp_path: Path) -> None:
    newest = _CheckpointConnector._CheckpointConnector__max_ckpt_version_in_folder  # type: ignore[attr-defined]
    (tmp_path / "hpc_ckpt_1.ckpt").mkdir()
    for purpose in ("saving", "lock", "linking", "deleting"):
        hidden_beside(tmp_path / "hpc_ckpt_2.ckpt", purpose).mkdir()
    assert len(Folder(tmp_path).names()) == 5
    assert newest(str(tmp_path), "hpc_ckpt_") == 1


class Copies(ModelPruning):
    """Rewinds to the original weights by value: Lightning's callback assigns its own tensors to `p.data`, which under
    DDP train along from then on, and are no original when it rewinds again."""

    @staticmethod
    def _copy_param(new: Any, old: Any, name: str) -> None:
        into = getattr(new, name + "_orig", None)
        (getattr(new, name) if into is None else into).data.copy_(getattr(old, name).data)


def fit_pruning(strategy: Any, callback: type[ModelPruning]) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = Classifier(tied=False)
    pruned = [(model.net[0], "weight"), (model.net[4], "weight")]
    prunes = callback("l1_unstructured", pruned, amount=0.3, use_lottery_ticket_hypothesis=True)
    jobs.trainer(strategy, 2, max_epochs=3, callbacks=[prunes]).fit(model, jobs.loader(samples=16))
    return jobs.state_of(model)


def test_lottery_tickets_are_rewound_to_values_and_not_to_tensors_that_train_along(two_ranks: RankPool) -> None:
    """A declared deviation from DDP: `p.data = t` takes over t's values, not its memory."""
    ddp = "ddp_find_unused_parameters_true"
    expected, by_tensor = (two_ranks.run(fit_pruning, ddp, kind) for kind in (Copies, ModelPruning))
    assert any(not torch.equal(value, by_tensor[0][name]) for name, value in expected[0].items())
    for stage in (1, 2, 3):
        for mine, theirs in zip(two_ranks.run(fit_pruning, {"stage": stage}, ModelPruning), expected, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], value) for name, value in theirs.items())


DDP = "ddp_find_unused_parameters_true"


@pytest.mark.parametrize(("profiler", "bar", "stages"), [("simple", "tqdm", [1, 2, 3]), ("pytorch", "rich", [3])])
def test_callbacks_loggers_and_profilers_see_say_and_write_what_they_do_under_ddp(
    profiler: str, bar: str, stages: list[int], two_ranks: RankPool, tmp_path: Path
) -> None:
    """All of them in one run: those that only look, save or stop. Only folders of shards are not uploaded."""
    (tmp_path / "ddp").mkdir()
    expected = two_ranks.run(callback_jobs.fit_watched, DDP, tmp_path / "ddp", profiler, bar)
    uploaded = [of_rank.pop("uploaded") for of_rank in expected]
    assert uploaded[0]
    for stage in stages:
        strategy = {"stage": stage, "checkpoint": "full" if stage == 2 else "sharded"}
        found = two_ranks.run(callback_jobs.fit_watched, strategy, tmp_path / f"{stage}", profiler, bar)
        there = [of_rank.pop("uploaded") for of_rank in found]
        assert there == (uploaded if stage == 2 else [[], []])
        assert differences(found, expected) == [], stage


@pytest.fixture(scope="module")
def folder_of_ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ddp")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_callbacks_that_end_a_run_end_it_where_they_do_under_ddp(
    stage: int, two_ranks: RankPool, tmp_path: Path, folder_of_ddp: Path
) -> None:
    spike, timer = callback_jobs.fit_until_a_spike, callback_jobs.fit_in_time
    strategy = {"stage": stage}
    expected = two_ranks.once(spike, DDP, folder_of_ddp)
    assert expected[1]["error"].startswith("TrainingSpikeException")
    assert differences(two_ranks.run(spike, strategy, tmp_path / "mine"), expected) == []
    for interval in ("step", "epoch"):
        assert differences(two_ranks.run(timer, strategy, interval), two_ranks.once(timer, DDP, interval)) == []
