"""`ZeroMonitor`: what a run holds, sends and waits for, told at its start, in its loggers, and at its end."""

import logging
import resource
import statistics
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.callback_connector import _CallbackConnector
from torch.nn.parallel import DistributedDataParallel

from lightning_zero.pl.advice import Held, advice_for, is_out_of_memory, options_beside_ddp, options_of
from lightning_zero.pl.checkpointing import CheckpointingStrategy
from lightning_zero.pl.table import bytes_table, ranks_told, sized
from lightning_zero.run.forecast import bytes_under_ddp, forecast
from lightning_zero.tiers.ledger import Category
from lightning_zero.wire.clock import Clock, Mark

log = logging.getLogger(__name__)

KEPT = 1000  # latest steps, whose median is told
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024  # that getrusage counts in


class ZeroMonitor(pl.Callback):
    """Tells what a run holds, sends and waits for. `ZeroStrategy` has one in every fit; under another strategy, such as
    ``"ddp"``, add it to compare: it counts what it can see there, and takes the rest from formulas.

    At the start of fit one table (under `ZeroStrategy` its own). For each step that is logged, to every logger, without
    a message to other ranks and without waiting for a GPU:

    - ``zero/bytes/<category>``: at rest on this rank, see `ZeroStrategy.memory_report`
    - ``zero/peak_bytes``: the most so far, of the GPU's memory, or where there is none of the process
    - ``zero/wire_bytes``: sent by this rank in the step
    - ``zero/wait_seconds``: communication in the step that no work has hidden
    - ``zero/step_seconds``
    - ``zero/skipped_steps`` and ``zero/loss_scale`` under ``16-mixed``
    - ``zero/grad_norm`` where gradients are clipped by it

    At the end a summary. When memory runs out: what has grown, and which option frees most.

    Args:
        log: whether to write to loggers.
    """

    def __init__(self, *, log: bool = True) -> None:
        self._logs = log
        self.listeners: list[Callable[..., None]] = []  # take `costs` when fit ends, on rank 0
        self._deaf: set[int] = set()  # ids of loggers that take no metrics
        self._before = Held({}, 0)  # at the start of fit
        self._begin(None)

    def _begin(self, device: torch.device | None) -> None:
        self._clock = Clock(device, keeps=KEPT)  # of batches
        self._mark: Mark = None
        self._batches, self._sent, self._waited = 0, 0, 0.0  # in all batches: bytes, s
        self._sent_before, self._waited_before = 0, 0.0  # in this one

    # -- the start

    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._begin(trainer.strategy.root_device)
        self._before = _held(trainer, pl_module)
        if not isinstance(trainer.strategy, CheckpointingStrategy):
            buckets = isinstance(trainer.strategy, DDPStrategy)
            here = bytes_under_ddp(pl_module, trainer.optimizers, buckets=buckets)
            numel = sum(parameter.numel() for parameter in pl_module.parameters())
            head = f"{type(trainer.strategy).__name__} on {ranks_told(trainer.world_size)}; {numel:,} parameters"
            rank_zero_info("\n  ".join([head, *bytes_table(numel, here=here)]))

    # -- steps

    def on_train_batch_start(self, trainer: "pl.Trainer", *_: Any) -> None:
        self._sent_before, self._waited_before = _sent_bytes(trainer), _waited_seconds(trainer)
        self._mark = self._clock.start()

    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *_: Any) -> None:
        self._clock.stop(self._mark)
        sent, waited = _sent_bytes(trainer) - self._sent_before, _waited_seconds(trainer) - self._waited_before
        self._batches, self._sent, self._waited = self._batches + 1, self._sent + sent, self._waited + waited
        if self._logs and trainer._logger_connector.should_update_logs and not trainer.fit_loop._should_accumulate():
            metrics = self._metrics(trainer, pl_module)
            if isinstance(trainer.strategy, CheckpointingStrategy):
                metrics |= {"zero/wire_bytes": sent, "zero/wait_seconds": waited}
            self._log(trainer, metrics)

    def _metrics(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> dict[str, float]:
        metrics: dict[str, float] = {
            f"zero/bytes/{category.replace(' ', '_').translate(_NO_BRACKETS)}": nbytes
            for category, nbytes in bytes_at_rest(trainer, module).items()
        }
        metrics["zero/peak_bytes"] = _peak_bytes(trainer)
        if latest := self._clock.latest:
            metrics["zero/step_seconds"] = latest[-1]
        norm = getattr(trainer.precision_plugin, "grad_norm", None)
        told = trainer.callback_metrics if norm is None else {**trainer.callback_metrics, "zero/grad_norm": norm}
        names = ("zero/skipped_steps", "zero/loss_scale", "zero/grad_norm")
        return metrics | {name: float(told[name]) for name in names if name in told}

    def _log(self, trainer: "pl.Trainer", metrics: dict[str, float]) -> None:
        for logger in trainer.loggers:
            if id(logger) in self._deaf:
                continue
            try:
                logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
            except NotImplementedError:
                self._deaf.add(id(logger))
                rank_zero_warn(f"{type(logger).__name__} takes no metrics: ZeroMonitor writes none to it.")

    # -- the end

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        costs = self.costs(trainer, pl_module)
        if self.listeners:
            for peak in ("peak_resident_bytes", "peak_device_bytes"):
                costs[peak] = costs[peak] and _largest(trainer, costs[peak])
            for listener in self.listeners if trainer.is_global_zero else ():
                listener(**costs)
        if costs["seconds_per_step"] is not None:
            rank_zero_info(_summary(costs))

    def costs(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> dict[str, Any]:
        """What a run has cost on this rank: bytes, seconds; None for what was not measured."""
        per_step, latest = trainer.accumulate_grad_batches, self._clock.latest
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
            "peak_resident_bytes": resident_bytes(),
            "peak_device_bytes": _peak_bytes(trainer) if _is_on_gpu(trainer) else None,
            "wire_bytes_per_step": self._sent * per_step // self._batches if counts else _formula(trainer, module),
        }

    # -- when memory runs out

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        if is_out_of_memory(exception):
            with suppress(Exception):  # advice must not take the place of the error
                log.error(_advice(trainer, pl_module, exception, self._before))


_NO_BRACKETS = str.maketrans("", "", "()")


def monitor_of(trainer: "pl.Trainer") -> ZeroMonitor:
    """The monitor of a trainer, which has one from here on."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    found = next((callback for callback in callbacks if isinstance(callback, ZeroMonitor)), None)
    if found is None:
        found = ZeroMonitor()
        callbacks.insert(0, found)
    return found


def watch_trainers(listener: Callable[..., None]) -> Callable[[], None]:
    """From here on every Trainer that is made in this process has a monitor, whose `costs` go to `listener`. Returns
    what ends it."""
    connectors: Any = _CallbackConnector
    theirs = connectors.on_trainer_init

    @wraps(theirs)
    def ours(connector: Any, *args: Any, **kwargs: Any) -> None:
        theirs(connector, *args, **kwargs)
        monitor_of(connector.trainer).listeners.append(listener)

    connectors.on_trainer_init = ours
    return lambda: setattr(connectors, "on_trainer_init", theirs)


def bytes_at_rest(trainer: "pl.Trainer", module: "pl.LightningModule") -> dict[str, int]:
    """On this rank, by category: the strategy's own report, or for strategies without one a count."""
    strategy = trainer.strategy
    if hasattr(strategy, "memory_report"):
        return strategy.memory_report()
    state = [item for optimizer in trainer.optimizers for held in optimizer.state.values() for item in held.values()]
    parameters = list(module.parameters())
    # One gradient per parameter rests between backward and step, though zero_grad() may just have dropped it.
    gradients = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    wrapped = strategy.model
    # DDP's buckets are a second copy of all gradients, unless the gradients are views of them.
    has_buckets = isinstance(wrapped, DistributedDataParallel) and not wrapped.gradient_as_bucket_view
    return {
        Category.PARAMETER: sum(parameter.nbytes for parameter in parameters),
        Category.GRADIENT: gradients,
        Category.OPTIMIZER_STATE: sum(item.nbytes for item in state if isinstance(item, torch.Tensor)),
        Category.BUCKET: gradients if has_buckets else 0,
    }


def resident_bytes() -> int:
    """The most that this process has had in host memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_BYTES


def _is_on_gpu(trainer: "pl.Trainer") -> bool:
    return trainer.strategy.root_device.type == "cuda"


def _peak_bytes(trainer: "pl.Trainer") -> int:
    return torch.cuda.max_memory_allocated(trainer.strategy.root_device) if _is_on_gpu(trainer) else resident_bytes()


def _largest(trainer: "pl.Trainer", value: int) -> int:
    """The largest value of any rank. A collective."""
    number = torch.tensor(value, device=trainer.strategy.root_device)
    return int(trainer.strategy.reduce(number, reduce_op="max"))


def _sent_bytes(trainer: "pl.Trainer") -> int:
    report = getattr(trainer.strategy, "communication_report", dict)
    return sum(report().values())


def _waited_seconds(trainer: "pl.Trainer") -> float:
    engine = getattr(trainer.strategy, "engine", None)
    return 0.0 if engine is None else engine.mesh.seconds_waited


def _formula(trainer: "pl.Trainer", module: "pl.LightningModule") -> int | None:
    """Bytes that a rank sends per step under DDP, whose all-reduce is a ring: 2 (N-1)/N of all gradients."""
    ranks = trainer.world_size
    if ranks > 1 and not isinstance(trainer.strategy, DDPStrategy):
        return None
    gradients = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    return 2 * (ranks - 1) * gradients // ranks


def _summary(costs: dict[str, Any]) -> str:
    told = [f"{costs['seconds_per_step']:.3g} s per step"]
    if costs["wait_seconds_per_step"] is not None:
        told[0] += f" ({costs['wait_seconds_per_step']:.2g} s of it waiting for other ranks)"
    if costs["wire_bytes_per_step"] is not None:
        told.append(f"{sized(costs['wire_bytes_per_step'])} sent per step")
    told.append(f"{sized(sum(costs['memory_bytes'].values()))} at rest")
    peaks = {"on the GPU": costs["peak_device_bytes"], "of the process": costs["peak_resident_bytes"]}
    told += [f"{sized(peak)} at the peak {where}" for where, peak in peaks.items() if peak is not None]
    return f"Trained {costs['steps']} steps. Rank 0:\n  " + "\n  ".join(told)


def _held(trainer: "pl.Trainer", module: "pl.LightningModule") -> Held:
    report = {name: nbytes for name, nbytes in bytes_at_rest(trainer, module).items() if "(" not in name}
    return Held(report, max(_peak_bytes(trainer) - sum(report.values()), 0))


def _advice(trainer: "pl.Trainer", module: "pl.LightningModule", error: BaseException, before: Held) -> str:
    strategy, now = trainer.strategy, _held(trainer, module)
    engine = getattr(strategy, "engine", None)
    beside = max(now.beside - before.beside, 0)
    if isinstance(strategy, CheckpointingStrategy) and engine is not None:
        options = options_of(engine, strategy.stage, forecast(engine, trainer.optimizers), beside)
    else:
        options = options_beside_ddp(bytes_under_ddp(module, trainer.optimizers), trainer.world_size, beside)
    return advice_for(error, f"on rank {trainer.global_rank}, in step {trainer.global_step}", before, now, options)
