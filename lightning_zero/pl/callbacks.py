"""What `ZeroStrategy` does at Lightning's hooks: callbacks of its own, called around those of the trainer.

They are not in `trainer.callbacks`, which is the user's list: `interop` wraps Lightning's call of all callbacks.

Ranks stop together. A signal may reach one of them alone, anywhere: its handler only notes it (`Notices`), and the rank
goes on to where ranks agree. There all of them have heard of it, save, and leave with code 0:

- after a training batch, in the message that averages gradients, or that a step without gradients sends instead;
- at the beginning and the end of an epoch, in one message each;
- in an evaluation, where ranks need not have equally many batches: the rank that was told leaves it, and says so
  through the store, at which the others look after a batch, once a second; all meet when they have left it.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_zero.checkpoint import Folder
from lightning_zero.pl.checkpointing import CheckpointingStrategy
from lightning_zero.pl.monitor import ZeroMonitor
from lightning_zero.run.notices import Notice

PREEMPTED = "preempted.ckpt"
SIGNALS = tuple(vars(signal)[name] for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))  # Windows has one
LOOK_AGAIN = 1.0  # s between looks at the store, in an evaluation


class OwnCallbacks:
    """Those of one run of a trainer."""

    def __init__(self, strategy: CheckpointingStrategy, trainer: "pl.Trainer") -> None:
        self._strategy = strategy
        self._of_user: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        has_monitor = any(isinstance(callback, ZeroMonitor) for callback in self._of_user)
        self._monitor = None if has_monitor else ZeroMonitor()
        self._last = Preemption(strategy)
        self._first = First(strategy, self._last)

    @contextmanager
    def around(
        self, trainer: "pl.Trainer", hook: str, monitoring: bool | None, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        """Around the call of one hook of all callbacks, or of those that are `monitoring` (the latter part), or not."""
        called = [(self._first, monitoring is not True), (self._monitor, monitoring is not True)]
        if trainer.callbacks is not self._of_user:  # type: ignore[attr-defined]
            called.pop()  # Lightning's tuner tries something, which is no part of the run
        for callback, is_now in called:
            if callback is not None and is_now:
                getattr(callback, hook)(trainer, trainer.lightning_module, *args, **kwargs)
        yield
        if monitoring is not False:
            getattr(self._last, hook)(trainer, trainer.lightning_module, *args, **kwargs)

    def before_collective(self, trainer: "pl.Trainer") -> None:
        """In an evaluation, before a collective of Lightning's or the user's: a rank that was told to stop may have
        left, and waits for the others where they hear of it."""
        self._last.meet(trainer)

    def before_metrics(self, trainer: "pl.Trainer") -> None:
        """In an evaluation, before what is logged is synchronised, with or without `Strategy`: ranks that have more
        batches come first.

        Raises:
            RuntimeError: on every rank, where one has evaluated nothing, and would not take part.
        """
        self._last.meet(trainer)
        results = trainer._results
        logged = [] if results is None else results.result_metrics
        # Of a metric of torchmetrics Lightning does not say whether it is synchronised: mostly it is.
        waits = any(metric.meta.on_epoch and (metric.meta.sync.should or not metric.is_tensor) for metric in logged)
        there = self._strategy.comm.all_gather_object((bool(logged), waits), "what was logged")
        absent = [rank for rank, (has_logged, _) in enumerate(there) if not has_logged]
        if absent and any(waiting for _, waiting in there):
            raise RuntimeError(
                f"Ranks {absent} have logged nothing in this evaluation, and the others synchronise what they have. "
                "Give every rank a batch, or log with sync_dist=False."
            )

    def close(self, trainer: "pl.Trainer") -> None:
        """The run has ended."""
        self._last.tell(trainer)


class First(pl.Callback):
    """Before all callbacks: before another one draws random numbers in a resumed batch, and before metrics are
    synchronised with ranks that still evaluate."""

    def __init__(self, strategy: CheckpointingStrategy, preemption: "Preemption") -> None:
        self._strategy = strategy
        self._preemption = preemption

    def on_train_batch_start(self, trainer: "pl.Trainer", *_: Any) -> None:
        self._strategy._before_batch()
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        self._strategy._notices.move(Notice.IN_BATCH, f"in batch {batches} of epoch {trainer.current_epoch}")

    def on_validation_batch_start(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        assert trainer.state.stage is not None
        self._strategy._notices.place = f"in batch {batch_idx + 1} of {trainer.state.stage.value}"

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_validation_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._preemption.meet(trainer)

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end


class Preemption(pl.Callback):
    """After all callbacks: on SIGTERM or SIGUSR1 to any rank, all ranks save the same step and leave with code 0.

    Lightning saves, and calls a collective, inside the signal's handler, wherever the rank happens to be.
    """

    def __init__(self, strategy: CheckpointingStrategy) -> None:
        self._strategy = strategy
        self._handlers: dict[int, Any] = {}
        self._stops = False
        self._looks_at = 0.0  # s, of `time.monotonic`: when to look at the store again

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Takes the place of Lightning's handlers; when the run ends, Lightning puts back what was before them."""
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

    on_sanity_check_start = on_validation_start = on_test_start = on_predict_start = on_train_start

    def _note(self, notices: set[Notice], theirs: Any, number: int, frame: Any) -> None:
        self._strategy._notices.here.update(notices)
        if callable(theirs):
            theirs(number, frame)

    def on_train_batch_end(self, trainer: "pl.Trainer", *_: Any) -> None:
        notices, accumulates = self._strategy._notices, trainer.fit_loop._should_accumulate()
        if not (accumulates or notices.are_current):  # in manual optimization nothing was stepped
            self._strategy._meet()
        notices.leave()
        if not accumulates:
            self._stop_if_told(trainer)

    def on_train_epoch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self.meet(trainer)

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        place = f"at the end of epoch {trainer.current_epoch}, after {batches} batches"
        self._strategy._notices.move(Notice.AT_EPOCH_END, place)
        self._strategy._meet()
        self._strategy._notices.leave()
        self._stop_if_told(trainer)

    def on_validation_batch_end(self, trainer: "pl.Trainer", *_: Any) -> None:
        if self._is_told():
            self.meet(trainer)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def tell(self, trainer: "pl.Trainer") -> None:
        """It may be too late to stop, but the user may ask."""
        if self._strategy.engine is not None and Notice.STOP in self._strategy._notices.here:
            trainer._signal_connector.received_sigterm = True

    def meet(self, trainer: "pl.Trainer") -> None:
        """All ranks are here, or on their way; they stop if one of them was told to."""
        self._strategy._meet()
        self._stop_if_told(trainer)

    def _is_told(self) -> bool:
        """Whether this rank was, or another one has left word that it was."""
        strategy, now = self._strategy, time.monotonic()
        if Notice.STOP in strategy._notices.here:
            strategy.board.raise_flag(self._flag)
            return True
        if now < self._looks_at:
            return False
        self._looks_at = now + LOOK_AGAIN
        return strategy.board.has_flag(self._flag)

    @property
    def _flag(self) -> str:
        """Of this run alone: one that failed may have left its own."""
        return f"stop run {self._strategy._runs}"

    def _stop_if_told(self, trainer: "pl.Trainer") -> None:
        noticed = self._strategy._notices.anywhere
        if Notice.UNSAVED in noticed:
            self._strategy.finish_saves()  # raises why
        if Notice.STOP not in noticed or self._stops:
            return
        self._stops = True  # what saves meets, too
        if trainer.is_global_zero:
            self._strategy.board.lower_flag(self._flag)  # all have come, and nobody looks any more
        trainer._signal_connector.received_sigterm = True
        if trainer.state.fn == TrainerFn.FITTING:
            self._save(trainer, requeues=Notice.REQUEUE in noticed)
        raise SIGTERMException

    @staticmethod
    def _save(trainer: "pl.Trainer", *, requeues: bool) -> None:
        if requeues:
            trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)  # type: ignore[arg-type]
            return
        savers = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        folders = [Folder(callback.dirpath) for callback in savers if callback.dirpath]
        folder = folders[0] if folders else Folder(trainer.default_root_dir).inside("checkpoints")
        path = str(folder.inside(PREEMPTED))
        trainer.save_checkpoint(path)
        rank_zero_info(f"Told to stop: saved step {trainer.global_step} to {path}. Resume with ckpt_path='last'.")
