"""Callbacks of `ZeroStrategy` itself, called before and after those of the trainer.

They are not in `trainer.callbacks`, which is the user's list: `interop` wraps Lightning's call of all callbacks.

Ranks stop together. A signal may reach one rank alone, anywhere. Its handler only notes it (`Notices`), and the rank
continues to the next place where ranks exchange notices. There all ranks learn of it, save, and exit with code 0:

- after a training batch, in the message that averages gradients, or that a step without gradients sends instead;
- at the beginning and the end of an epoch, in one message each;
- in an evaluation, where ranks may have different numbers of batches: the rank that got the signal leaves the
  evaluation, and raises a flag in the store. The others look at it after a batch, once a second. All ranks meet when
  they have left the evaluation.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_zero.checkpoint import Folder
from lightning_zero.pl import lightning_private as private
from lightning_zero.pl.checkpointing import CheckpointingStrategy
from lightning_zero.pl.monitor import MemoryAdvice, ZeroMonitor
from lightning_zero.run.notices import Notice
from lightning_zero.wire.comm import RankTimeoutError

PREEMPTED = "preempted.ckpt"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
LOOK_AGAIN = 1.0  # s between looks at the flag in the store, in an evaluation


class OwnCallbacks(pl.Callback):
    """The strategy's callbacks of one run. Its own hooks are called before those of all others: before they draw random
    numbers in a resumed batch, and before they synchronise metrics with ranks that still evaluate."""

    def __init__(self, strategy: CheckpointingStrategy, trainer: "pl.Trainer") -> None:
        self._strategy = strategy
        self._of_user: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        is_monitored = any(isinstance(callback, ZeroMonitor) for callback in self._of_user)
        # Whether the console gets a table at the start of fit and a summary at its end. Trainer(enable_model_summary=)
        # leaves a callback, or none, and a depth of 0 turns that one off.
        summaries = [callback for callback in self._of_user if isinstance(callback, ModelSummary)]
        self.summarises = is_monitored or any(private.depth_of(callback) for callback in summaries)
        self._told: list[pl.Callback] = [self]  # those called before the user's
        if not is_monitored:  # logging is opt-in
            self._told.append(ZeroMonitor(log=False) if self.summarises else MemoryAdvice())
        self.preemption = Preemption(strategy)

    @contextmanager
    def around(
        self, trainer: "pl.Trainer", hook: str, monitoring: bool | None, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        """Surrounds Lightning's call of one hook of all callbacks, or of a part of them: of those that do not monitor a
        metric (`monitoring` is False), or, later, of those that do (True)."""
        # Lightning's tuner replaces the callbacks while it tries something, which is no part of the run.
        is_trial = trainer.callbacks is not self._of_user  # type: ignore[attr-defined]
        before = [self] if is_trial else self._told
        for callback in before if monitoring is not True else ():
            getattr(callback, hook)(trainer, trainer.lightning_module, *args, **kwargs)
        yield
        if monitoring is not False:
            getattr(self.preemption, hook)(trainer, trainer.lightning_module, *args, **kwargs)

    def on_train_batch_start(self, trainer: "pl.Trainer", *_: Any) -> None:
        self._strategy._before_batch()
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        self._strategy._notices.move(Notice.IN_BATCH, f"in batch {batches} of epoch {trainer.current_epoch}")

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Reports the error before users' callbacks hear of it: where a save of theirs fails, Lightning does not tell
        the strategy."""
        if not isinstance(exception, RankTimeoutError):
            self._strategy._report(exception)

    def on_validation_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int, *_: Any
    ) -> None:
        assert trainer.state.stage is not None
        self._strategy._notices.place = f"in batch {batch_idx + 1} of {trainer.state.stage.value}"

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start  # type: ignore[assignment]

    def on_validation_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self.preemption.meet(trainer)

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def before_metrics(self, trainer: "pl.Trainer") -> None:
        """Meets, in an evaluation, before logged metrics are synchronised, through `Strategy` or not: until then, ranks
        that have more batches need the others.

        Raises:
            RuntimeError: on every rank, when one has logged nothing, and would not take part.
        """
        self.preemption.meet(trainer)
        results = private.results_of(trainer)
        logged = [] if results is None else results.result_metrics
        # Lightning does not say whether a metric of torchmetrics is synchronised: mostly it is.
        waits = any(metric.meta.on_epoch and (metric.meta.sync.should or not metric.is_tensor) for metric in logged)
        there = self._strategy.comm.all_gather_object((bool(logged), waits), "what was logged")
        absent = [rank for rank, (has_logged, _) in enumerate(there) if not has_logged]
        if absent and any(waiting for _, waiting in there):
            raise RuntimeError(
                f"Ranks {absent} have logged nothing in this evaluation, and the others synchronise what they have. "
                "Give every rank a batch, or log with sync_dist=False."
            )


class Preemption(pl.Callback):
    """Callback that is called after all others. On SIGTERM or SIGUSR1 to any rank, all ranks save the same step, unless
    the Trainer saves no checkpoints, and exit with code 0. (Lightning's handler itself saves, and calls a collective,
    wherever the rank happens to be.)"""

    def __init__(self, strategy: CheckpointingStrategy) -> None:
        self._strategy = strategy
        self._handlers: dict[int, Any] = {}
        self._stops = False
        self._looks_at = 0.0  # s, by `time.monotonic`: when to look at the store again

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Replaces Lightning's signal handlers. When the run ends, Lightning restores those from before its own."""
        theirs_of = private.handlers_before(trainer)
        # The tuner tries batches before Lightning has put its handlers in: nobody would take these out again.
        if threading.current_thread() is not threading.main_thread() or not theirs_of:
            return
        noted = {number: {Notice.STOP} for number in SIGNALS}
        slurm = cast(Any, trainer.strategy).cluster_environment
        if isinstance(slurm, SLURMEnvironment) and slurm.auto_requeue and slurm.requeue_signal is not None:
            noted[slurm.requeue_signal] = {Notice.STOP, Notice.REQUEUE}
        for number, notices in noted.items():
            if number not in self._handlers or signal.getsignal(number) is not self._handlers[number]:
                self._handlers[number] = partial(self._on_signal, notices, theirs_of.get(number))
                signal.signal(number, self._handlers[number])

    on_sanity_check_start = on_validation_start = on_test_start = on_predict_start = on_train_start

    def _on_signal(self, notices: set[Notice], theirs: Any, number: int, frame: Any) -> None:
        self._strategy._notices.here.update(notices)
        if callable(theirs):
            theirs(number, frame)

    def on_train_batch_end(self, trainer: "pl.Trainer", *_: Any) -> None:
        notices, is_open = self._strategy._notices, private.accumulates(trainer)
        if not (is_open or notices.are_current):  # a batch without a step, in manual optimization
            self._strategy._meet()
        notices.note_outside_batches()
        if not is_open:
            self._stop_if_told(trainer)

    def on_train_epoch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self.meet(trainer)

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        place = f"at the end of epoch {trainer.current_epoch}, after {batches} batches"
        self._strategy._notices.move(Notice.AT_EPOCH_END, place)
        self._strategy._meet()
        self._strategy._notices.note_outside_batches()
        self._stop_if_told(trainer)

    def on_validation_batch_end(self, trainer: "pl.Trainer", *_: Any) -> None:
        if self._is_told():
            self.meet(trainer)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def tell(self, trainer: "pl.Trainer") -> None:
        """Ends a run: sets `received_sigterm`, which users may read, also if the signal came too late to stop."""
        if self._strategy.engine is not None and Notice.STOP in self._strategy._notices.here:
            private.note_sigterm(trainer)

    def meet(self, trainer: "pl.Trainer") -> None:
        """Meets all other ranks. Then they all stop, if one of them was told to. Collective.

        In an evaluation this comes before any other collective: a rank that was told to stop may have left, and waits
        here for the others.
        """
        self._strategy._meet()
        self._stop_if_told(trainer)

    def _is_told(self) -> bool:
        """Whether this rank was told to stop, or another one has raised the flag."""
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
        """Name of the flag in the store. Each run has its own, because a run that failed may have left one."""
        return f"stop run {self._strategy._runs}"

    def _stop_if_told(self, trainer: "pl.Trainer") -> None:
        noticed = self._strategy._notices.anywhere
        if Notice.UNSAVED in noticed:
            self._strategy.finish_saves()  # raises the error
        if Notice.STOP not in noticed or self._stops:
            return
        self._stops = True  # saving meets again, and must not stop again
        if trainer.is_global_zero:
            self._strategy.board.lower_flag(self._flag)  # all ranks are here: none looks at it any more
        private.note_sigterm(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._save(trainer, requeues=Notice.REQUEUE in noticed)
        raise SIGTERMException

    def _save(self, trainer: "pl.Trainer", *, requeues: bool) -> None:
        if requeues:
            private.save_and_requeue(trainer)
            return
        is_trial: bool = trainer.fast_dev_run  # type: ignore[attr-defined]
        if is_trial or not trainer.checkpoint_callbacks:
            why = "fast_dev_run" if is_trial else "enable_checkpointing=False"
            rank_zero_info(f"Told to stop after step {trainer.global_step}. Nothing was saved: Trainer({why}).")
            return
        folders = [Folder(saver.dirpath) for saver in self._strategy._savers if saver.dirpath]
        folder = folders[0] if folders else Folder(trainer.default_root_dir).joinpath("checkpoints")
        path = str(folder.joinpath(PREEMPTED))
        trainer.save_checkpoint(path)
        rank_zero_info(f"Told to stop: saved step {trainer.global_step} to {path}. Resume with ckpt_path='last'.")
