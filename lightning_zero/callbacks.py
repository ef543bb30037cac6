"""What `ZeroStrategy` does at Lightning's hooks; it adds these callbacks to the trainer by itself."""

import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_zero.checkpoint import Folder
from lightning_zero.schedule import StopRequest

if TYPE_CHECKING:
    from collections.abc import Callable

PREEMPTED = "preempted.ckpt"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Attended(Protocol):
    """What the callbacks need of the strategy."""

    def end_rendezvous(self) -> None: ...

    def before_first_batch(self) -> None: ...

    def poll_saves(self) -> None: ...

    def finish_saves(self) -> None: ...

    @property
    def stop_request(self) -> StopRequest: ...


class First(pl.Callback):
    """The first callback: before metrics are synchronised with ranks that still evaluate, and before any other draws
    random numbers in a resumed batch."""

    def __init__(self, strategy: Attended) -> None:
        self._strategy = strategy

    def on_train_batch_start(self, *_: Any) -> None:
        self._strategy.before_first_batch()
        self._strategy.poll_saves()

    def on_validation_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._strategy.end_rendezvous()

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end


class Preemption(pl.Callback):
    """The last callback: on SIGTERM or SIGUSR1 to any rank, all ranks save the same step and leave with code 0.

    Lightning saves, and calls a collective, inside the signal's handler, wherever the rank happens to be. Here the
    handler only notes it; ranks hear of each other's notes in a message that they send anyway (`StopRequest`).
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
        for number in SIGNALS:
            if self._handlers.get(number) is None or signal.getsignal(number) is not self._handlers[number]:
                theirs = originals.get(number)
                self._handlers[number] = self._handler(theirs if callable(theirs) else None)
                signal.signal(number, self._handlers[number])

    def _handler(self, theirs: "Callable[..., Any] | None") -> "Callable[[int, FrameType | None], None]":
        def note(number: int, frame: FrameType | None) -> None:
            self._strategy.stop_request.here = True
            if theirs is not None:
                theirs(number, frame)

        return note

    def on_train_batch_end(self, trainer: "pl.Trainer", *_: Any) -> None:
        if not self._strategy.stop_request.anywhere or trainer.fit_loop._should_accumulate():
            return
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)  # type: ignore[arg-type]
        else:
            path = str(Folder(_folder_of(trainer)).inside(PREEMPTED))
            trainer.save_checkpoint(path)
            self._strategy.finish_saves()  # a job whose save failed must not end with 0
            rank_zero_info(f"Told to stop: saved step {trainer.global_step} to {path}. Resume with ckpt_path='last'.")
        raise SIGTERMException


def _folder_of(trainer: "pl.Trainer") -> str:
    """Where checkpoints of this run lie."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath:
            return str(callback.dirpath)
    return str(Folder(trainer.default_root_dir).inside("checkpoints"))
