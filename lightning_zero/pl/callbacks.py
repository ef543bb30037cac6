"""What `ZeroStrategy` does at Lightning's hooks; it adds these callbacks to the trainer by itself."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_zero.checkpoint import Folder
from lightning_zero.run.notices import Notice, Notices

PREEMPTED = "preempted.ckpt"
SIGNALS = tuple(vars(signal)[name] for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))  # Windows has one


class Attended(Protocol):
    """What the callbacks need of the strategy."""

    def end_rendezvous(self) -> None: ...

    def before_batch(self) -> None: ...

    def finish_saves(self) -> None: ...

    @property
    def notices(self) -> Notices: ...


class First(pl.Callback):
    """The first callback: before metrics are synchronised with ranks that still evaluate, and before any other draws
    random numbers in a resumed batch."""

    def __init__(self, strategy: Attended) -> None:
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

    def __init__(self, strategy: Attended) -> None:
        self._strategy = strategy
        self._handlers: dict[int, Any] = {}

    def on_sanity_check_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._listen(trainer)

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._listen(trainer)

    def _listen(self, trainer: "pl.Trainer") -> None:
        """Takes the place of Lightning's handlers; when fit ends, Lightning puts back what was before them."""
        if threading.current_thread() is not threading.main_thread():
            return
        originals = trainer._signal_connector._original_handlers
        slurm = _requeueing(trainer)
        noted = {number: {Notice.STOP} for number in SIGNALS}
        if slurm is not None and slurm.requeue_signal is not None:
            noted[slurm.requeue_signal] = {Notice.STOP, Notice.REQUEUE}
        for number, notices in noted.items():
            if self._handlers.get(number) is None or signal.getsignal(number) is not self._handlers[number]:
                theirs = originals.get(number)
                self._handlers[number] = self._handler(notices, theirs if callable(theirs) else None)
                signal.signal(number, self._handlers[number])

    def _handler(
        self, notices: set[Notice], theirs: Callable[..., Any] | None
    ) -> Callable[[int, FrameType | None], None]:
        def note(number: int, frame: FrameType | None) -> None:
            self._strategy.notices.here.update(notices)
            if theirs is not None:
                theirs(number, frame)

        return note

    def on_train_batch_end(self, trainer: "pl.Trainer", *_: Any) -> None:
        noticed = self._strategy.notices.anywhere
        if Notice.UNSAVED in noticed:
            self._strategy.finish_saves()  # raises why
        if Notice.STOP not in noticed or trainer.fit_loop._should_accumulate():
            return
        if Notice.REQUEUE in noticed:
            trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)  # type: ignore[arg-type]
        else:
            path = str(Folder(_folder_of(trainer)).inside(PREEMPTED))
            trainer.save_checkpoint(path)
            rank_zero_info(f"Told to stop: saved step {trainer.global_step} to {path}. Resume with ckpt_path='last'.")
        raise SIGTERMException


def _requeueing(trainer: "pl.Trainer") -> SLURMEnvironment | None:
    """The SLURM job, where Lightning is to have it started again."""
    environment = trainer._accelerator_connector.cluster_environment
    return environment if isinstance(environment, SLURMEnvironment) and environment.auto_requeue else None


def _folder_of(trainer: "pl.Trainer") -> str:
    """Where checkpoints of this run lie."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath:
            return str(callback.dirpath)
    return str(Folder(trainer.default_root_dir).inside("checkpoints"))
