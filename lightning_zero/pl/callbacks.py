"""What `ZeroStrategy` does at Lightning's hooks; it adds these callbacks to the trainer by itself."""

import signal
import threading
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_zero.checkpoint import Folder
from lightning_zero.pl.checkpointing import CheckpointingStrategy
from lightning_zero.run.notices import Notice

PREEMPTED = "preempted.ckpt"
SIGNALS = tuple(vars(signal)[name] for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))  # Windows has one


class First(pl.Callback):
    """The first callback: before metrics are synchronised with ranks that still evaluate, and before any other draws
    random numbers in a resumed batch."""

    def __init__(self, strategy: CheckpointingStrategy) -> None:
        self._strategy = strategy

    def on_train_batch_start(self, *_: Any) -> None:
        self._strategy.before_batch()

    def on_validation_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._strategy.end_rendezvous()

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end


class Preemption(pl.Callback):
    """The last callback: on SIGTERM or SIGUSR1 to any rank, all ranks save the same step and leave with code 0.

    Lightning saves, and calls a collective, inside the signal's handler, wherever the rank happens to be. Here the
    handler only notes it; ranks hear of each other's notes in a message that they send anyway (`Notices`).
    """

    def __init__(self, strategy: CheckpointingStrategy) -> None:
        self._strategy = strategy
        self._handlers: dict[int, Any] = {}

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Takes the place of Lightning's handlers; when fit ends, Lightning puts back what was before them."""
        if threading.current_thread() is not threading.main_thread():
            return
        noted = {number: {Notice.STOP} for number in SIGNALS}
        slurm = trainer._accelerator_connector.cluster_environment
        if isinstance(slurm, SLURMEnvironment) and slurm.auto_requeue and slurm.requeue_signal is not None:
            noted[slurm.requeue_signal] = {Notice.STOP, Notice.REQUEUE}
        for number, notices in noted.items():
            if number not in self._handlers or signal.getsignal(number) is not self._handlers[number]:
                theirs = trainer._signal_connector._original_handlers.get(number)
                self._handlers[number] = partial(self._note, notices, theirs)
                signal.signal(number, self._handlers[number])

    on_sanity_check_start = on_train_start

    def _note(self, notices: set[Notice], theirs: Any, number: int, frame: Any) -> None:
        self._strategy.notices.here.update(notices)
        if callable(theirs):
            theirs(number, frame)

    def on_train_batch_end(self, trainer: "pl.Trainer", *_: Any) -> None:
        noticed = self._strategy.notices.anywhere
        if Notice.UNSAVED in noticed:
            self._strategy.finish_saves()  # raises why
        if Notice.STOP not in noticed or trainer.fit_loop._should_accumulate():
            return
        if Notice.REQUEUE in noticed:
            trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)  # type: ignore[arg-type]
        else:
            savers = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
            folders = [Folder(callback.dirpath) for callback in savers if callback.dirpath]
            folder = folders[0] if folders else Folder(trainer.default_root_dir).inside("checkpoints")
            path = str(folder.inside(PREEMPTED))
            trainer.save_checkpoint(path)
            rank_zero_info(f"Told to stop: saved step {trainer.global_step} to {path}. Resume with ckpt_path='last'.")
        raise SIGTERMException
