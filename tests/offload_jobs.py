"""Whole Trainer runs with offload to disk, which is a real tier on a CPU, too."""

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import jobs
from compare import assert_same_bits


class Inattentive(jobs.Classifier):
    """Looks at no gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class Onlooker(L.Callback):
    """Looks at weights and state wherever Lightning lets it."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def _look(self, trainer: L.Trainer, model: L.LightningModule) -> None:
        self.seen.append(sum(float(parameter.detach().double().sum()) for parameter in model.parameters()))

    def on_train_batch_start(self, trainer: L.Trainer, model: L.LightningModule, *_: Any) -> None:
        self._look(trainer, model)

    def on_after_backward(self, trainer: L.Trainer, model: L.LightningModule) -> None:
        self._look(trainer, model)

    def on_train_batch_end(self, trainer: L.Trainer, model: L.LightningModule, *_: Any) -> None:
        self._look(trainer, model)

    def on_validation_start(self, trainer: L.Trainer, model: L.LightningModule) -> None:
        self._look(trainer, model)


class GoesBack(L.Callback):
    """Loads after the third step the weights from before the first, as Lightning's finder of learning rates does."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "first.ckpt")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.strategy.load_model_state_dict(trainer.strategy.load_checkpoint(self.path))


def go_back(strategy: Any, folder: Path) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = Inattentive()
    jobs.trainer(strategy, 2, callbacks=[GoesBack(folder)]).fit(model, jobs.loader())
    return {"losses": model.losses, "weights": jobs.state_of(model)}


def fit(strategy: Any, world: int, looks: bool = False, clips: bool = True, **kwargs: Any) -> dict[str, Any]:
    """One fit from a seed, with validation in between; everything a parity test compares."""
    L.seed_everything(1, verbose=False)
    model, onlooker = jobs.Classifier(tied=kwargs.get("precision") != "bf16-true"), Onlooker()
    model.on_before_optimizer_step = lambda optimizer: None  # type: ignore[method-assign]  # it looks at gradients
    more = {"gradient_clip_val": 0.5} if clips else {}
    run = jobs.trainer(strategy, world, val_check_interval=3, callbacks=[onlooker] if looks else [], **more, **kwargs)
    run.fit(model, jobs.loader(shuffle=True), jobs.loader(seed=1, samples=16))
    return {
        "losses": model.losses,
        "weights": jobs.state_of(model),
        "val_loss": float(run.callback_metrics["val_loss"]),
        "lr": [group["lr"] for group in run.optimizers[0].param_groups],
        "seen": onlooker.seen,
    }


def assert_same_fit(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_same_bits(found.pop("weights"), expected["weights"])
    assert found == {name: value for name, value in expected.items() if name != "weights"}


def trainer_of(strategy: Any, **kwargs: Any) -> L.Trainer:
    return jobs.trainer(strategy, 1, **kwargs)


loader, Classifier = jobs.loader, jobs.Classifier


def train(folder: Path, strategy: Any, world: int, epochs: int, resume: Path | None = None) -> dict[str, Any]:
    """Saves in `folder` after every epoch."""
    L.seed_everything(1, verbose=False)
    model = Classifier()
    keep = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    run = jobs.trainer(strategy, world, callbacks=[keep], enable_checkpointing=True, max_epochs=epochs)
    run.fit(model, jobs.loader(), ckpt_path=resume)
    return {"losses": model.losses, "weights": jobs.state_of(model)}


def wait_in_the_second_epoch(folder: Path, strategy: Any) -> None:
    """Until the rank is killed; each leaves a file that says it waits."""

    class Waits(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, model: L.LightningModule, *_: Any) -> None:
            if trainer.current_epoch == 1:
                (folder / f"rank {trainer.global_rank} waits").touch()
                time.sleep(600)

    L.seed_everything(1, verbose=False)
    keep = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    run = jobs.trainer(strategy, 2, callbacks=[keep, Waits()], enable_checkpointing=True, max_epochs=2)
    run.fit(Classifier(), jobs.loader())


def lose_the_disk(folder: Path, strategy: Any) -> list[str]:
    """Training on one rank whose disk fails in the second epoch; what the error says."""

    class Failure(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.current_epoch == 1:
                failing.start()

    def broken(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    failing = patch.object(os, "pwritev", broken)
    keep = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    run = jobs.trainer(strategy, 1, callbacks=[keep, Failure()], enable_checkpointing=True, max_epochs=2)
    try:
        run.fit(Classifier(), jobs.loader())
    except Exception as error:
        return [str(error), *getattr(error, "__notes__", [])]
    finally:
        failing.stop()
    return []


def try_to_fit(strategy: Any, path_of_rank_1: str | None = None) -> str | None:
    """The error that a misuse ends in, or None."""
    if path_of_rank_1 is not None and os.environ.get("RANK") == "1":
        strategy = {**strategy, "offload": {**strategy["offload"], "path": path_of_rank_1}}
    try:
        jobs.trainer(strategy, 2).fit(Classifier(), jobs.loader())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def rests(strategy: Any) -> dict[str, int]:
    """The memory report after a fit."""
    L.seed_everything(1, verbose=False)
    run = jobs.trainer(strategy, 2, max_steps=2)
    run.fit(Classifier(), jobs.loader())
    return run.strategy.memory_report()


def what_fit_says(strategy: Any, **kwargs: Any) -> list[str]:
    return jobs.what_fit_says(strategy, "32-true", **kwargs)


def read_state_after_fit(strategy: Any) -> list[torch.Size]:
    """Optimizer state can be looked at when the engine is gone."""
    run = jobs.trainer(strategy, 2, max_steps=2)
    run.fit(Classifier(), jobs.loader())
    return [state["exp_avg"].clone().shape for state in run.optimizers[0].state.values()]
