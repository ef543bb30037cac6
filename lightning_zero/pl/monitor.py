"""`ZeroMonitor`: reports what a run holds, sends and waits for, at its start, in its loggers and at its end."""

import re
import statistics
from collections.abc import Callable
from functools import wraps
from typing import Any, final

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_zero.device import allocated_bytes, is_host
from lightning_zero.pl.advice import (
    BESIDE,
    Held,
    advice_for,
    advise,
    asked_bytes,
    bytes_beside,
    command_for,
    options_beside_ddp,
    tell_once,
)
from lightning_zero.pl.checkpointing import CheckpointingStrategy
from lightning_zero.pl.lightning_private import accumulates, logged_step, should_log
from lightning_zero.pl.precision import ShardedGradients
from lightning_zero.pl.table import bytes_table, ranks_told, sized
from lightning_zero.run.forecast import bytes_under_ddp
from lightning_zero.tiers.host_memory import peak_resident_bytes
from lightning_zero.tiers.ledger import Category
from lightning_zero.wire.clock import Clock, Mark

KEPT = 1000  # number of latest steps whose median time is reported


@final
class MemoryAdvice(pl.Callback):
    """Says, when memory runs out, what has grown, and which option frees most."""

    def __init__(self) -> None:
        self._before = 0  # bytes of the device that no category has, at the start of fit

    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if not isinstance(trainer.strategy, CheckpointingStrategy):
            self._before = _beside_ddp(trainer, pl_module)

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        tell_once(exception, lambda: self._advice(trainer, pl_module, exception))

    def _advice(self, trainer: "pl.Trainer", module: "pl.LightningModule", error: BaseException) -> str:
        strategy, where = trainer.strategy, f"on rank {trainer.global_rank}, in step {trainer.global_step}"
        if isinstance(strategy, CheckpointingStrategy):
            return advise(strategy, error, where, module, trains=trainer.training)
        beside = _beside_ddp(trainer, module)
        grown = max(beside - self._before, 0)
        under_ddp = bytes_under_ddp(module, trainer.optimizers, averages=_averages(trainer))
        options = options_beside_ddp(under_ddp, trainer.world_size, grown + asked_bytes(error))
        held = Held(bytes_at_rest(trainer, module), {BESIDE: grown}, beside)
        return advice_for(error, where, held, options, command_for(module, trainer.world_size, strategy.root_device))


class ZeroMonitor(pl.Callback):
    """Reports what a run holds, sends and waits for. Add it to the callbacks of a Trainer with `ZeroStrategy`, or with
    another strategy, such as ``"ddp"``, to compare: there it counts what it can see, and takes the rest from formulas.
    Without it, nothing is written to loggers or to `trainer.callback_metrics`.

    At the start of fit it prints a table. For each step that is logged it writes to every logger, without a message to
    other ranks and without waiting for a GPU:

    - ``zero/bytes/<category>``: at rest on this rank, see `ZeroStrategy.memory_report`
    - ``zero/peak_bytes``: the most so far, in the GPU's memory, or without a GPU in the process
    - ``zero/wire_bytes``: sent by this rank in the step
    - ``zero/wait_seconds``: communication in the step that no work has hidden
    - ``zero/step_seconds``
    - ``zero/skipped_steps`` and ``zero/loss_scale`` under ``16-mixed``, which are in `trainer.callback_metrics` as well
    - ``zero/grad_norm`` where gradients are clipped by norm

    At the end it prints a summary. When memory runs out it says what has grown, and which option frees most. Without a
    `ZeroMonitor`, `ZeroStrategy` still prints table, summary and advice; ``Trainer(enable_model_summary=False)``
    silences the first two.

    Args:
        log: whether to write to loggers and to `trainer.callback_metrics`.
    """

    def __init__(self, *, log: bool = True) -> None:
        self._logs = log
        self.listeners: list[Callable[..., None]] = []  # called with `costs` when fit ends, on rank 0
        self._deaf: set[int] = set()  # ids of loggers that take no metrics
        self._advice = MemoryAdvice()
        self._begin_run(None)

    def _begin_run(self, device: torch.device | None) -> None:
        self._clock = Clock(device, keeps=KEPT)  # times batches
        self._mark: Mark = None
        self._batches, self._sent, self._waited = 0, 0, 0.0  # in all batches: number, bytes, s
        self._at_start = (0, 0.0)  # bytes and s when this batch began
        self._of_step = (0, 0, 0.0)  # the same as of all batches, in those of the step under way

    # -- the start

    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._begin_run(trainer.strategy.root_device)
        self._advice.on_fit_start(trainer, pl_module)
        if not isinstance(trainer.strategy, CheckpointingStrategy):
            buckets = isinstance(trainer.strategy, DDPStrategy)
            here = bytes_under_ddp(pl_module, trainer.optimizers, averages=_averages(trainer), buckets=buckets)
            numel = sum(parameter.numel() for parameter in pl_module.parameters())
            head = f"{type(trainer.strategy).__name__} on {ranks_told(trainer.world_size)}; {numel:,} parameters"
            rank_zero_info("\n  ".join([head, *bytes_table(numel, here=here)]))

    # -- steps

    def on_train_batch_start(self, trainer: "pl.Trainer", *_: Any) -> None:
        self._at_start = _communicated(trainer)
        self._mark = self._clock.start()

    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *_: Any) -> None:
        self._clock.stop(self._mark)
        (sent, waited), (sent_before, waited_before) = _communicated(trainer), self._at_start
        sent, waited = sent - sent_before, waited - waited_before
        self._batches, self._sent, self._waited = self._batches + 1, self._sent + sent, self._waited + waited
        batches, sent_in_step, waited_in_step = self._of_step
        batches, sent, waited = batches + 1, sent_in_step + sent, waited_in_step + waited
        self._of_step = (batches, sent, waited) if accumulates(trainer) else (0, 0, 0.0)
        if not self._logs or self._of_step[0]:
            return
        if isinstance(trainer.precision_plugin, ShardedGradients):
            trainer.callback_metrics.update(trainer.precision_plugin.scaling())
        if should_log(trainer):
            metrics = self._metrics(trainer, pl_module, batches)
            if isinstance(trainer.strategy, CheckpointingStrategy):
                metrics |= {"zero/wire_bytes": sent, "zero/wait_seconds": waited}
            self._log(trainer, metrics)

    def _metrics(self, trainer: "pl.Trainer", module: "pl.LightningModule", batches: int) -> dict[str, float]:
        """Returns what is logged of a step of so many batches, without what it has sent."""
        metrics: dict[str, float] = {
            f"zero/bytes/{re.sub(r'[()]', '', category).replace(' ', '_')}": nbytes
            for category, nbytes in bytes_at_rest(trainer, module).items()
        }
        device = trainer.strategy.root_device
        metrics["zero/peak_bytes"] = peak_resident_bytes() if is_host(device) else allocated_bytes(device)
        if latest := self._clock.latest:
            metrics["zero/step_seconds"] = sum(latest[-batches:])
        norm = getattr(trainer.precision_plugin, "grad_norm", None)
        told = trainer.callback_metrics if norm is None else {**trainer.callback_metrics, "zero/grad_norm": norm}
        names = ("zero/skipped_steps", "zero/loss_scale", "zero/grad_norm")
        return metrics | {name: float(told[name]) for name in names if name in told}

    def _log(self, trainer: "pl.Trainer", metrics: dict[str, float]) -> None:
        for logger in trainer.loggers:
            if id(logger) in self._deaf:
                continue
            try:
                logger.log_metrics(metrics, step=logged_step(trainer))
            except NotImplementedError:
                self._deaf.add(id(logger))
                rank_zero_warn(f"{type(logger).__name__} takes no metrics: ZeroMonitor writes none to it.")

    # -- the end

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        costs = self.costs(trainer, pl_module)
        if self.listeners:
            for peak in ("peak_resident_bytes", "peak_device_bytes"):
                if costs[peak]:  # the largest of any rank
                    number = torch.tensor(costs[peak], device=trainer.strategy.root_device)
                    costs[peak] = int(trainer.strategy.reduce(number, reduce_op="max"))
            for listener in self.listeners if trainer.is_global_zero else ():
                listener(**costs)
        if costs["seconds_per_step"] is not None:
            rank_zero_info(_summary(costs))

    def costs(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> dict[str, Any]:
        """Returns what a run has cost on this rank, in bytes and seconds; None for what was not measured."""
        per_step, latest, device = trainer.accumulate_grad_batches, self._clock.latest, trainer.strategy.root_device
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        counts = isinstance(trainer.strategy, CheckpointingStrategy) and self._batches > 0
        return {
            "strategy_class": type(trainer.strategy).__name__,
            "stage": getattr(trainer.strategy, "stage", None),
            "world_size": trainer.world_size,
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "steps": trainer.global_step,
            "metrics": {name: value for name, value in metrics.items() if not name.startswith("zero/")},
            "seconds_per_step": statistics.median(latest) * per_step if latest else None,
            "wait_seconds_per_step": self._waited * per_step / self._batches if counts else None,
            "memory_bytes": {str(category): nbytes for category, nbytes in bytes_at_rest(trainer, module).items()},
            "peak_resident_bytes": peak_resident_bytes(),
            "peak_device_bytes": None if is_host(device) else allocated_bytes(device),
            "wire_bytes_per_step": self._sent * per_step // self._batches if counts else _formula(trainer, module),
        }

    # -- when memory runs out

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        self._advice.on_exception(trainer, pl_module, exception)


def watch_trainers(listener: Callable[..., None]) -> Callable[[], None]:
    """Has the `costs` of every Trainer that is made in this process from here on go to `listener`. Returns a function
    that ends this."""
    trainers: Any = pl.Trainer
    theirs = trainers.__init__

    @wraps(theirs)
    def ours(trainer: Any, *args: Any, **kwargs: Any) -> None:
        theirs(trainer, *args, **kwargs)
        callbacks = trainer.callbacks
        if not any(isinstance(callback, ZeroMonitor) for callback in callbacks):
            callbacks.insert(0, ZeroMonitor())
        next(callback for callback in callbacks if isinstance(callback, ZeroMonitor)).listeners.append(listener)

    trainers.__init__ = ours
    return lambda: setattr(trainers, "__init__", theirs)


def bytes_at_rest(trainer: "pl.Trainer", module: "pl.LightningModule") -> dict[str, int]:
    """Returns the bytes on this rank by category: the strategy's own report, or a count where it has none."""
    strategy = trainer.strategy
    if hasattr(strategy, "memory_report"):
        return strategy.memory_report()
    wrapped = strategy.model
    has_buckets = isinstance(wrapped, DistributedDataParallel) and not wrapped.gradient_as_bucket_view
    # Between backward and step each parameter has a gradient, though zero_grad() may just have dropped it.
    found = bytes_under_ddp(module, (), averages=_averages(trainer), buckets=has_buckets)
    state = [item for optimizer in trainer.optimizers for held in optimizer.state.values() for item in held.values()]
    return found | {Category.OPTIMIZER_STATE: sum(item.nbytes for item in state if isinstance(item, torch.Tensor))}


def _averages(trainer: "pl.Trainer") -> int:
    """Returns the number of running averages of the model that callbacks keep."""
    return sum(isinstance(callback, WeightAveraging) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def _communicated(trainer: "pl.Trainer") -> tuple[int, float]:
    """Returns what this rank has sent in the run, in bytes, and how long it has waited for others, in s."""
    strategy = trainer.strategy
    if not isinstance(strategy, CheckpointingStrategy) or strategy.engine is None:
        return 0, 0.0
    return sum(strategy.communication_report().values()), strategy.engine.mesh.seconds_waited


def _formula(trainer: "pl.Trainer", module: "pl.LightningModule") -> int | None:
    """Returns what a rank sends per step under DDP, in bytes: its all-reduce is a ring, 2 (N-1)/N of all gradients."""
    ranks = trainer.world_size
    if ranks > 1 and not isinstance(trainer.strategy, DDPStrategy):
        return None
    return 2 * (ranks - 1) * bytes_under_ddp(module, ())[Category.GRADIENT] // ranks


def _summary(costs: dict[str, Any]) -> str:
    told = [f"{costs['seconds_per_step']:.3g} s per step"]
    if costs["wait_seconds_per_step"] is not None:
        told[0] += f" ({costs['wait_seconds_per_step']:.2g} s of it waiting for ranks)"
    if costs["wire_bytes_per_step"] is not None:
        told.append(f"{sized(costs['wire_bytes_per_step'])} sent per step")
    told.append(f"{sized(sum(costs['memory_bytes'].values()))} at rest")
    peaks = {"on the GPU": costs["peak_device_bytes"], "of the process": costs["peak_resident_bytes"]}
    told += [f"{sized(peak)} at the peak {where}" for where, peak in peaks.items() if peak is not None]
    return f"Trained {costs['steps']} steps. Rank 0:\n  " + "\n  ".join(told)


def _beside_ddp(trainer: "pl.Trainer", module: "pl.LightningModule") -> int:
    """Returns the bytes of the device, or without a GPU of the process, that are in no category."""
    device = trainer.strategy.root_device
    return bytes_beside(bytes_at_rest(trainer, module), device, device)
