"""Runs whose monitor tests/test_monitor.py looks at, on real ranks."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
from lightning.pytorch.loggers import Logger
from torch import Tensor

from jobs import Classifier, loader, trainer
from lightning_zero import ZeroMonitor

STEPS = 3


class Recorder(Logger):
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.logged: list[dict[str, float]] = []
        self.received: list[tuple[Any, ...]] = []  # all calls, in order

    name = version = "recorder"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.received.append(("metrics", dict(metrics), step))
        if "zero/peak_bytes" in metrics:
            self.steps.append(step or 0)
            self.logged.append(dict(metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self.received.append(("hyperparams", *map(str, args)))

    def log_graph(self, model: Any, *args: Any) -> None:
        self.received.append(("graph", type(model).__name__))

    def save(self) -> None:
        self.received.append(("save",))

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        saved = Path(checkpoint_callback.best_model_path)
        self.received.append(("saved", saved.name, saved.exists()))

    def finalize(self, status: str) -> None:
        self.received.append(("end", status))


class WithoutMetrics(Recorder):
    """A logger that takes no metrics."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "zero/peak_bytes" in metrics:
            raise NotImplementedError


@contextmanager
def listening(*names: str) -> Iterator[list[str]]:
    """What the loggers of that name say meanwhile."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener = Listener()
    for name in names:
        logging.getLogger(name).addHandler(listener)
    try:
        yield said
    finally:
        for name in names:
            logging.getLogger(name).removeHandler(listener)


class Logs(Classifier):
    """Logs the loss of each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def watch_in_turn(strategies: list[Any]) -> tuple[list[Any], list[Any]]:
    """What one monitor tells of fits in turn, and what a new one tells of the last of them: bytes that a step sends."""
    told: list[list[Any]] = []
    for turns in (strategies, strategies[-1:]):
        monitor, costs = ZeroMonitor(log=False), list[dict[str, Any]]()
        monitor.listeners.append(lambda costs=costs, **cost: costs.append(cost))
        for strategy in turns:
            trainer(strategy, 2, callbacks=[monitor], max_steps=STEPS).fit(Classifier(), loader())
        told.append([cost["wire_bytes_per_step"] for cost in costs])
    return told[0], told[1]


def watch(strategy: Any, *, asked: bool = True, summary: int | None = None, **kwargs: Any) -> dict[str, Any]:
    """A short fit, with a `ZeroMonitor` if `asked`: what was said, logged and counted. `summary` is the depth of a
    `ModelSummary`."""
    L.seed_everything(1, verbose=False)
    recorder, told = Recorder(), []
    monitor = ZeroMonitor()
    monitor.listeners.append(lambda **costs: told.append(costs))
    callbacks = [*([monitor] if asked else []), *([] if summary is None else [ModelSummary(summary)])]
    settings = {"logger": [recorder, WithoutMetrics()], "log_every_n_steps": 1, "max_steps": STEPS, **kwargs}
    if settings.get("enable_checkpointing"):
        callbacks.append(ModelCheckpoint(kwargs["default_root_dir"], every_n_train_steps=2, save_last=True))
    run = trainer(strategy, 2, callbacks=callbacks, **settings)
    with listening("lightning.pytorch") as said:
        run.fit(Logs(), loader())
    report = run.strategy.memory_report() if hasattr(run.strategy, "memory_report") else {}
    return {
        "monitors": sum(isinstance(callback, ZeroMonitor) for callback in run.callbacks),  # type: ignore[attr-defined]
        "said": said,
        "logged": recorder.logged,
        "received": recorder.received,
        "steps": recorder.steps,
        "metrics": {name: float(value) for name, value in run.callback_metrics.items()},
        "costs": told,
        "report": dict(report),
        "printed": str(report),
    }
