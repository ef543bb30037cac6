"""Whole runs with an exponential moving average: Lightning's under ddp, `ZeroEMA` under our strategy."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, OnExceptionCheckpoint
from torch import Tensor

from edit_jobs import Trained, tensors_of
from jobs import loader, read_checkpoint, state_of, trainer
from lightning_zero import ZeroEMA


class Model(Trained):
    """With BatchNorm; its optimizer has the kernel that offload takes."""

    def __init__(self) -> None:
        super().__init__()
        self.tested: list[float] = []

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.tested.append(self.loss(batch).item())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2, fused=True)


class Midway(L.Callback):
    """Saves in the middle of training, and says how much the average takes then."""

    def __init__(self, path: Path, step: int = 5) -> None:
        self.path, self.step = path, step
        self.nbytes = 0

    def on_train_batch_end(self, run: L.Trainer, *_: Any) -> None:
        if run.global_step == self.step:
            run.save_checkpoint(self.path)
            if hasattr(run.strategy, "memory_report"):
                self.nbytes = sum(n for name, n in run.strategy.memory_report().items() if name.startswith("average"))


class Beginning(L.Callback):
    """What a resumed run begins with."""

    def __init__(self, average: Any) -> None:
        self.average = average

    def on_train_start(self, run: L.Trainer, model: L.LightningModule) -> None:
        self.averaged = self.average.averaged_state_dict()
        self.own = {name: value.clone() for name, value in model.state_dict().items()}


def average_for(strategy: Any, **arguments: Any) -> Any:
    kind = ZeroEMA if isinstance(strategy, dict) else EMAWeightAveraging
    return kind(**{"decay": 0.8, **arguments})


def place(strategy: Any, path: Path) -> Path:
    is_folder = isinstance(strategy, dict) and strategy.get("checkpoint") != "full"
    return path.with_suffix(".folder" if is_folder else ".file")


def saved_tensors(run: L.Trainer, path: Path) -> dict[str, Tensor]:
    run.strategy.barrier()
    checkpoint = read_checkpoint(path)
    run.strategy.barrier()
    return {f"{part}.{name}": value for part in checkpoint for name, value in tensors_of(checkpoint[part])}


def fit(strategy: Any, precision: str, path: Path, **arguments: Any) -> dict[str, Any]:
    """Two epochs with a validation after each, a checkpoint on the way and one at the end, and a test."""
    L.seed_everything(1, verbose=False)
    model, midway = Model(), Midway(place(strategy, path))
    callbacks = [average_for(strategy, **arguments), midway]
    run = trainer(strategy, 2, precision=precision, max_epochs=2, callbacks=callbacks, num_sanity_val_steps=0)
    run.fit(model, loader(samples=32), loader(seed=1, samples=16))
    saved = saved_tensors(run, midway.path)
    end = midway.path.with_stem("end")
    run.save_checkpoint(end)
    at_end = saved_tensors(run, end)
    run.test(model, loader(seed=2, samples=16), verbose=False)
    return {
        "losses": model.losses,
        "tested": model.tested,
        "seen": model.seen,
        "weights": state_of(model),
        "saved": saved,
        "at the end": at_end,
        "nbytes": midway.nbytes,
    }


def resume(strategy: Any, world: int, path: Path) -> dict[str, Any]:
    """Goes on from a checkpoint that any of the runs has saved."""
    L.seed_everything(2, verbose=False)
    model, average = Model(), average_for(strategy)
    beginning = [Beginning(average)] if isinstance(average, ZeroEMA) else []
    callbacks = [average, *beginning]
    run = trainer(strategy, world, max_epochs=3, callbacks=callbacks)
    run.fit(model, loader(samples=32), loader(seed=1, samples=16), ckpt_path=path, weights_only=False)
    began = {"averaged": beginning[0].averaged, "own": beginning[0].own} if beginning else {}
    saved: dict[str, Any] = {"state_dict": {}}
    average.on_save_checkpoint(run, model, saved)
    updates = int(saved["averaging_state"]["n_averaged"])
    return {"losses": model.losses, "seen": model.seen, "weights": state_of(model), "updates": updates, **began}


class Thaws(Model):
    """Its first layer is frozen; a run that goes on changes it, and has it train from the second step on."""

    def __init__(self, averaged_by: ZeroEMA | None = None) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)
        self.averaged_by = averaged_by

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([parameter for parameter in self.parameters() if parameter.requires_grad], lr=1e-2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.averaged_by is not None and batch_idx == 1:
            with torch.no_grad():
                self.net[0].weight.fill_(0.5)
            self.net[0].requires_grad_(True)
            self.optimizers().add_param_group({"params": list(self.net[0].parameters())})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.averaged_by is not None and batch_idx == 1:
            self.averaged = self.averaged_by.averaged_state_dict()


def thaw_in_a_run_that_goes_on(strategy: Any, path: Path) -> Tensor:
    """The average, before its first update, of a layer that begins to train in the second step."""
    L.seed_everything(1, verbose=False)
    run = trainer(strategy, 2, max_epochs=1, callbacks=[average_for(strategy)])
    run.fit(Thaws(), loader(samples=16))
    run.save_checkpoint(path)
    average = average_for(strategy, update_starting_at_step=100)
    model = Thaws(average)
    run = trainer(strategy, 2, max_epochs=2, callbacks=[average])
    run.fit(model, loader(samples=16), ckpt_path=path, weights_only=False)
    return model.averaged["net.0.weight"]


def evaluate(strategy: Any, path: Path) -> dict[str, Any]:
    """What a test has of a checkpoint, after a fit of its own. Also whether checkpoints say that they have an average:
    one after the fit and a validation, and one after that test."""
    L.seed_everything(3, verbose=False)
    model, average = Model(), average_for(strategy)
    run = trainer(strategy, 2, callbacks=[average])
    run.fit(model, loader(samples=16))
    run.validate(model, loader(seed=1, samples=16), verbose=False)
    averages = [is_averaged(average, run)]
    run.test(model, loader(seed=2, samples=16), ckpt_path=path, weights_only=False, verbose=False)
    return {"weights": state_of(model), "averages": [*averages, is_averaged(average, run)]}


def is_averaged(average: Any, run: L.Trainer) -> bool:
    saved: dict[str, Any] = {"state_dict": {}}
    average.on_save_checkpoint(run, run.lightning_module, saved)
    return "averaging_state" in saved


def without(strategy: Any, path: Path, **kwargs: Any) -> None:
    """A checkpoint of a run that averages nothing."""
    L.seed_everything(1, verbose=False)
    run = trainer(strategy, 2)
    run.fit(Model(), loader(samples=16))
    run.save_checkpoint(path)


def twice(strategy: Any) -> dict[str, Any]:
    """Another fit of the same model with the same callback begins another average."""
    L.seed_everything(1, verbose=False)
    model, average = Model(), average_for(strategy)
    for _ in range(2):
        run = trainer(strategy, 2, max_epochs=1, callbacks=[average])
        run.fit(model, loader(samples=32), loader(seed=1, samples=16))
    return {"losses": model.losses, "weights": state_of(model)}


class Fails(Model):
    """In the middle of a validation."""

    def on_validation_start(self) -> None:
        if self.current_epoch == 1:
            (average,) = [callback for callback in self.trainer.callbacks if isinstance(callback, ZeroEMA)]
            self.own = {name: value.detach().clone() for name, value in self.state_dict().items()}
            self.averaged = average.averaged_state_dict()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.current_epoch == 1:
            raise ValueError("so much for that")


def fail(strategy: Any, folder: Path) -> dict[str, Any]:
    """What is saved when a validation fails, beside what was there before it."""
    L.seed_everything(1, verbose=False)
    model, callbacks = Fails(), [average_for(strategy), OnExceptionCheckpoint(folder)]
    run = trainer(strategy, 2, max_epochs=2, callbacks=callbacks, enable_checkpointing=True)
    with suppress(ValueError):
        run.fit(model, loader(samples=32), loader(seed=1, samples=16))
    saved = read_checkpoint(folder / "on_exception.ckpt")
    return {"own": model.own, "averaged": model.averaged, "saved": saved}


def error_of(strategy: Any, **arguments: Any) -> str:
    try:
        trainer(strategy, 2, max_steps=1, callbacks=[average_for(strategy, **arguments)]).fit(Model(), loader())
    except ValueError as error:
        return str(error)
    return ""


def on_one_device(kind: type[EMAWeightAveraging]) -> dict[str, Any]:
    """Without any strategy of ours."""
    L.seed_everything(1, verbose=False)
    model = Model()
    run = trainer("auto", 1, max_epochs=1, callbacks=[kind(decay=0.8)])
    run.fit(model, loader(samples=16), loader(seed=1, samples=16))
    return {"seen": model.seen, "weights": state_of(model)}
