"""Fits with Lightning's own callbacks, loggers and profilers; what each of them is told, writes and leaves behind."""

import csv
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    DeviceStatsMonitor,
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from jobs import FEATURES, Classifier, loader, state_of, trainer


class Watched(Classifier):
    """Logs at every step and epoch, and has what throughput and graphs ask for."""

    flops_per_batch = 1000

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(2, FEATURES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True, prog_bar=True, on_step=True, on_epoch=True)
        return loss


class Summarises(ModelSummary):
    """Keeps what it would print."""

    said: tuple[Any, ...] = ()

    def summarize(self, *told: Any, **others: Any) -> None:  # type: ignore[override]
        self.said = (*told, sorted(others.items(), key=str))


class SummarisesRichly(RichModelSummary):
    said: tuple[Any, ...] = ()

    def summarize(self, *told: Any, **others: Any) -> None:  # type: ignore[override]
        self.said = (*told, sorted(others.items(), key=str))
        super().summarize(*told, **others)


class Writes(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[Any] = []

    def write_on_batch_end(self, run: Any, module: Any, prediction: Any, indices: Any, batch: Any, *at: int) -> None:
        self.written.append((prediction.clone(), indices, at))

    def write_on_epoch_end(self, run: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.written.append((torch.cat(predictions), indices, ()))


class Uploads(Logger):
    """As WandbLogger, MLFlowLogger and CometLogger with ``log_model="all"``: uploads checkpoints that are files."""

    name, version = "uploads", 0

    def __init__(self) -> None:
        super().__init__()
        self._log_model = "all"
        self.uploaded: list[str] = []

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.uploaded += [Path(path).name for path in [checkpoint_callback.best_model_path] if Path(path).is_file()]

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


def profilers(folder: Path) -> dict[str, Profiler]:
    """All that Lightning has, the last with everything that it can record."""
    everything = {"record_shapes": True, "profile_memory": True, "record_module_names": True}
    return {
        "simple": SimpleProfiler(folder, "simple"),
        "advanced": AdvancedProfiler(folder, "advanced"),
        "pytorch": PyTorchProfiler(folder, "pytorch", **everything),  # type: ignore[arg-type]
    }


def fit_watched(strategy: Any, folder: Path, profiler: str, bar: str) -> dict[str, Any]:
    """One run with all callbacks that only look, save or stop: a fit, a test, a prediction."""
    L.seed_everything(1, verbose=False)
    calls: list[str] = []
    hooks = ["setup", "on_train_start", "on_validation_end", "on_train_epoch_end", "on_fit_end", "teardown"]
    summary = (Summarises if bar == "tqdm" else SummarisesRichly)(max_depth=-1)
    writer, timer, uploads = Writes(), Timer({"hours": 1}), Uploads()
    best = ModelCheckpoint(folder, "{epoch}-{val_loss:.4f}", monitor="val_loss", save_top_k=2, save_last=True)
    every = ModelCheckpoint(folder / "every", "{step}", every_n_train_steps=4, save_top_k=-1)
    stopping = EarlyStopping("val_loss", patience=0, stopping_threshold=-math.inf)
    callbacks: list[L.Callback] = [
        *(summary, writer, timer, best, every, stopping),
        LambdaCallback(**{hook: partial(lambda name, *_, **__: calls.append(name), hook) for hook in hooks}),  # type: ignore[arg-type]
        LearningRateMonitor(log_momentum=True, log_weight_decay=True),
        DeviceStatsMonitor(cpu_stats=True),
        ThroughputMonitor(lambda batch: len(batch[0]), length_fn=lambda batch: FEATURES),
        SpikeDetection(rtol=1e9),
        OnExceptionCheckpoint(folder),
        TQDMProgressBar(refresh_rate=0) if bar == "tqdm" else RichProgressBar(refresh_rate=0),
    ]
    model = Watched()
    run = trainer(
        strategy,
        2,
        max_epochs=2,
        callbacks=callbacks,
        logger=[CSVLogger(folder, "csv", ""), TensorBoardLogger(folder, "board", "", log_graph=True), uploads],
        profiler=profilers(folder)[profiler],
        log_every_n_steps=1,
        enable_checkpointing=True,
        enable_model_summary=True,
        enable_progress_bar=True,
        default_root_dir=folder,
    )
    # Four steps at least, for `every`. PyTorch's profiler takes longer to tell of a step than the step took.
    run.fit(model, loader(samples=16 if profiler == "pytorch" else 24), loader(seed=1, samples=8))
    metrics = {name: value.clone() for name, value in run.callback_metrics.items()}
    tested = run.test(model, loader(seed=2, samples=8), verbose=False)
    run.predict(model, loader(seed=2, samples=8), return_predictions=False)
    run.strategy.barrier()
    found = {
        "losses": model.losses,
        "weights": state_of(model),
        "metrics": metrics,
        "tested": tested,
        "summary": summary.said,
        "written": writer.written,
        "calls": calls,
        "timed": [timer.time_elapsed(stage) > 0 for stage in ("train", "validate", "test")],
        "stopped": (stopping.stopped_epoch, run.current_epoch, run.global_step),
        "best": [Path(path).name for path in (best.best_model_path, best.last_model_path, *sorted(best.best_k_models))],
        "uploaded": uploads.uploaded,
        "profiled": {_plain(name) for name in _recorded(run.profiler)},
    }
    if run.is_global_zero:
        board = EventAccumulator(str(folder / "board")).Reload()
        found["graph"] = len(board.Graph().node) if board.Tags()["graph"] else 0
        found["scalars"] = sorted(board.Tags()["scalars"])
        found["csv"] = _rows_of(folder / "csv" / "metrics.csv")
        kept = [path.relative_to(folder) for path in folder.rglob("*") if not _is_inside_checkpoint(path)]
        found["files"] = sorted(_plain(str(path)) for path in kept if "events.out" not in path.name)
    return found


def _plain(name: str) -> str:
    """Without the name of the strategy, and without the time."""
    return re.sub(r"(DDP|Zero)Strategy|\.\d+\.pt\.trace", "", name)


def _recorded(profiler: Any) -> list[str]:
    """The names of what a profiler has timed."""
    if isinstance(profiler, SimpleProfiler):
        return list(profiler.recorded_durations)
    return list(profiler.profiled_actions) if isinstance(profiler, AdvancedProfiler) else []


def _is_inside_checkpoint(path: Path) -> bool:
    return any(parent.suffix == ".ckpt" for parent in path.parents)


def _rows_of(path: Path) -> list[dict[str, str]]:
    """What does not depend on time, of the rows that have some of it."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    timed = ("time", "per_sec", "DeviceStatsMonitor", "utilization")
    kept = [{key: value for key, value in row.items() if value and not any(t in key for t in timed)} for row in rows]
    return [row for row in kept if row.keys() - {"step", "epoch"}]


def fit_until_a_spike(strategy: Any, folder: Path) -> dict[str, Any]:
    """All ranks end when one of them sees a spike, and save on the way."""

    class Spikes(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * 1e3 if self.global_rank == 1 and batch_idx == 4 else loss

    L.seed_everything(1, verbose=False)
    model = Spikes()
    saver = ModelCheckpoint(folder, save_on_exception=True)
    callbacks = [SpikeDetection(exclude_batches_path=folder / "skip.json"), saver]
    run = trainer(strategy, 2, callbacks=callbacks, enable_checkpointing=True, default_root_dir=folder)
    error = error_of(lambda: run.fit(model, loader()))
    skipped = (folder / "skip.json").read_text()
    saved = sorted(path.name for path in folder.glob("*.ckpt"))
    return {"error": error, "skipped": skipped, "saved": saved, "losses": model.losses, "step": run.global_step}


def error_of(function: Callable[[], Any]) -> str | None:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def fit_in_time(strategy: Any, interval: str) -> Any:
    """A timer that is over at once, at the end of a step or an epoch; and saves by time."""
    L.seed_everything(1, verbose=False)
    model, timer = Classifier(), Timer({"microseconds": 1}, interval=interval)
    run = trainer(strategy, 2, max_epochs=3, callbacks=[timer])
    run.fit(model, loader(), loader(seed=1))
    return run.global_step, run.current_epoch, model.losses, sorted(timer.state_dict())
