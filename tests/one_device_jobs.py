"""What Lightning does on one device: hooks and their arguments, loops, errors, files. Each job returns all that can be
compared."""

import copy
import functools
import gc
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringDataModule
from torch import Tensor, nn

from jobs import state_of, trainer

# -- what is run


class Net(L.LightningModule):
    """A buffer that counts, a metric at every step, and values that depend on the order of all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))
        self.register_buffer("count", torch.zeros(()))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def loss(self, batch: Tensor) -> Tensor:
        self.count += 1
        return self(batch).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "index": batch_idx}

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("val_loss", loss := self.loss(batch))
        return {"value": loss}

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.1, "value")
        optimizer.step()
        self.losses.append(loss.item())
        return {"loss": loss}


def run_of(strategy: Any, folder: Path, **kwargs: Any) -> L.Trainer:
    limits = {f"limit_{kind}_batches": 2 for kind in ("val", "test", "predict")}
    return trainer(strategy, 1, **{"default_root_dir": folder, "limit_train_batches": 4, **limits, **kwargs})


# -- what is told of it


def kind_of(value: Any) -> Any:
    """What can be said of an argument without its values."""
    if isinstance(value, Tensor):
        return type(value).__name__, tuple(value.shape), str(value.dtype), value.requires_grad
    if isinstance(value, dict):
        return {key: kind_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [kind_of(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return "callable" if inspect.isfunction(value) else type(value).__name__


def hooks_of(*classes: type) -> set[str]:
    return {name for one in classes for name, _ in inspect.getmembers(one, inspect.isfunction) if name[0] != "_"}


# `to` moves the model, which the engine does by itself. Loading asks for the module's names.
_OF_MODULE = hooks_of(L.LightningModule) - hooks_of(nn.Module) - {"log", "log_dict", "print"}
_OF_MODULE |= {"forward", "train", "eval", "zero_grad", "load_state_dict", "requires_grad_"}


def noted(owner: Any, names: Iterable[str], calls: list[Any]) -> Any:
    """`owner`, with each of these methods noting its call, its arguments and what it returns."""
    for name in sorted(names):
        method = getattr(owner, name)

        def call(*args: Any, _name: str = name, _method: Callable[..., Any] = method, **kwargs: Any) -> Any:
            calls.append((type(owner).__name__, _name, kind_of(args), kind_of(kwargs)))
            returned = _method(*args, **kwargs)
            calls.append((type(owner).__name__, _name, kind_of(returned)))
            return returned

        setattr(owner, name, functools.update_wrapper(call, method))
    return owner


class Noting(L.Callback):
    def state_dict(self) -> Any:
        return {"of": "a callback"}


def outcome(function: Callable[[], Any]) -> Any:
    """What it returns, or its error."""
    try:
        return function()
    except BaseException as error:
        return type(error).__name__, str(error)


def told(run: L.Trainer, model: Net) -> dict[str, Any]:
    """Where a run has come to."""
    metrics = {**run.callback_metrics, **run.logged_metrics}
    return {
        "losses": model.losses,
        "weights": state_of(model),
        "grads": [None if p.grad is None else (type(p.grad).__name__, p.grad.clone()) for p in model.parameters()],
        "classes": [type(parameter).__name__ for parameter in model.parameters()],
        "metrics": {name: value.clone() for name, value in metrics.items()},
        "loops": run.fit_loop.state_dict(),
        "state": (run.global_step, run.current_epoch, str(run.state), run.should_stop, run.interrupted, model.training),
        "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in run.optimizers],
        "random": torch.rand(1),
    }


# -- jobs


def hooks_in_a_life(strategy: Any, folder: Path, by_hand: bool) -> Any:
    """A fit that accumulates and clips, and saves; evaluations; a fit that goes on. All hooks with their arguments."""
    calls: list[Any] = []
    options = {} if by_hand else {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    options["gradient_clip_algorithm"] = "value"
    path = folder / "a.ckpt"
    for epochs in (1, 2):
        L.seed_everything(1, verbose=False)
        model = noted((ByHand if by_hand else Net)(), _OF_MODULE, calls)
        data = noted(BoringDataModule(), hooks_of(L.LightningDataModule) - {"from_datasets"}, calls)
        callback = noted(Noting(), hooks_of(L.Callback), calls)
        run = run_of(strategy, folder, max_epochs=epochs, callbacks=[callback], enable_checkpointing=True, **options)
        run.fit(model, datamodule=data, ckpt_path=path if epochs == 2 else None, weights_only=False)
        run.save_checkpoint(path)
        run.validate(model, datamodule=data, verbose=False)
        run.test(model, datamodule=data, ckpt_path=path, verbose=False, weights_only=False)
        run.predict(model, datamodule=data)
    return calls, told(run, model)


def runs_by_flags(strategy: Any, folder: Path) -> Any:
    """Fits by flags of the trainer that change what the loops do."""
    kinds: list[dict[str, Any]] = [
        {"max_epochs": 2, "check_val_every_n_epoch": 2},
        {"val_check_interval": 2, "num_sanity_val_steps": 0},
        {"overfit_batches": 2, "max_epochs": 2},
        {"fast_dev_run": 2},
        {"max_steps": 3, "max_epochs": -1, "accumulate_grad_batches": 2},
        {"limit_train_batches": 0},
        {"max_time": {"seconds": 0}, "max_epochs": 3},
        {"precision": "bf16-mixed"},
        {"precision": "64-true", "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"inference_mode": False, "reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
    ]
    found = []
    for kind in kinds:
        L.seed_everything(3, verbose=False)
        model, run = Net(), run_of(strategy, folder, **kind)
        module = noted(model, [], [])
        error = outcome(lambda run=run, module=module: run.fit(module, datamodule=BoringDataModule()))  # type: ignore[misc]
        found.append((error, told(run, model)))
    return found


def files_of_checkpoints(strategy: Any, folder: Path) -> Any:
    """What `ModelCheckpoint` writes and calls the best, and what is in the files."""
    kinds: list[dict[str, Any]] = [
        {"monitor": "val_loss", "save_top_k": 2, "save_last": True, "filename": "{epoch}-{val_loss:.4f}"},
        {"save_top_k": -1, "every_n_train_steps": 3, "save_last": "link"},
        {"save_weights_only": True},
    ]
    found = []
    for number, kind in enumerate(kinds):
        place = folder / str(number)
        L.seed_everything(3, verbose=False)
        saver = ModelCheckpoint(place, **kind)
        model, run = Net(), run_of(strategy, folder, max_epochs=3, callbacks=[saver], enable_checkpointing=True)
        run.fit(model, datamodule=BoringDataModule())
        saved = sorted(place.iterdir())
        found.append([(path.name, path.is_symlink()) for path in saved])
        found.append([Path(path).name for path in (saver.best_model_path, saver.last_model_path)])
        for path in saved[:2]:
            contents = torch.load(path, weights_only=False)
            contents["callbacks"] = list(contents.get("callbacks", {}))
            state = contents["state_dict"]
            found.append((contents, list(contents), type(state).__name__, dict(state._metadata)))
        for name in ("best", "last"):
            found.append(outcome(lambda run=run, name=name: run.test(ckpt_path=name, verbose=False)))  # type: ignore[misc]
    return _without(found, str(folder))


def _without(value: Any, folder: str) -> Any:
    if isinstance(value, str):
        return value.replace(folder, "")
    return type(value)(_without(item, folder) for item in value) if type(value) in (list, tuple) else value


def runs_that_end_early(strategy: Any, folder: Path) -> Any:
    """An error in each of many hooks, an interrupt or a stop in some, and the fit after it."""
    found = []
    for place in (
        *("setup", "configure_optimizers", "on_train_start", "training_step", "backward", "on_before_zero_grad"),
        *("validation_step", "on_train_epoch_end", "on_fit_end", "teardown", "optimizer_step", "on_save_checkpoint"),
    ):
        for error in (
            (ValueError, KeyboardInterrupt) if place in ("training_step", "validation_step") else (ValueError,)
        ):
            calls: list[Any] = []
            L.seed_everything(1, verbose=False)
            callback = noted(Noting(), hooks_of(L.Callback), calls)
            run = run_of(strategy, folder, callbacks=[callback], num_sanity_val_steps=0, enable_checkpointing=True)
            model = Net()
            setattr(model, place, functools.partial(_raise, error))
            ended = outcome(lambda run=run, model=model: run.fit(model, datamodule=BoringDataModule()))  # type: ignore[misc]
            found.append((place, ended, str(run.state), run.interrupted, run.global_step, calls))
        after = Net()
        run.fit_loop.max_epochs = 2
        found.append(
            (outcome(lambda run=run, after=after: run.fit(after, datamodule=BoringDataModule())), after.losses)
        )  # type: ignore[misc]
    for place in ("on_train_batch_start", "on_validation_end", "on_before_optimizer_step"):
        stops = L.pytorch.callbacks.LambdaCallback(**{place: lambda run, *_: setattr(run, "should_stop", True)})
        model, run = Net(), run_of(strategy, folder, max_epochs=4, min_epochs=2, callbacks=[stops])
        run.fit(model, datamodule=BoringDataModule())
        found.append(told(run, model))
    return found


def _raise(error: type[BaseException], *_: Any, **__: Any) -> None:
    raise error("had enough")


def steps_of_every_kind(strategy: Any, folder: Path) -> Any:
    """What `training_step` may return, and what a user may do in `optimizer_step`."""
    returned: dict[str, Callable[[Tensor], Any]] = {
        "nothing": lambda loss: None,
        "a dictionary without a loss": lambda loss: {"x": loss},
        "a string": lambda loss: "loss",
        "what needs no gradient": lambda loss: loss.detach(),
        "a vector": lambda loss: torch.stack([loss, loss]),
        "not a number": lambda loss: loss * torch.nan,
    }
    found = []
    for name, returns in returned.items():
        L.seed_everything(1, verbose=False)
        model, run = Net(), run_of(strategy, folder)
        model.training_step = lambda batch, _, model=model, returns=returns: returns(model.loss(batch))  # type: ignore[method-assign]
        found.append((name, outcome(lambda run=run, model=model: run.fit(model, datamodule=BoringDataModule()))))  # type: ignore[misc]
        found.append(told(run, model) if name != "not a number" else run.global_step)

    def every_other(epoch: int, number: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure) if number % 2 else closure()

    def without_closure(epoch: int, number: int, optimizer: Any, closure: Any) -> None:
        closure()
        optimizer.step()

    for way in (every_other, without_closure):
        L.seed_everything(1, verbose=False)
        model, run = Net(), run_of(strategy, folder)
        model.optimizer_step = way  # type: ignore[assignment, method-assign]
        found.append(
            (outcome(lambda run=run, model=model: run.fit(model, datamodule=BoringDataModule())), told(run, model))
        )  # type: ignore[misc]
    return found


class Filed(Net):
    """Overrides `state_dict` without arguments, and has a layer that asks of which version it was saved."""

    class Versioned(nn.Linear):
        _version = 7
        seen: list[Any] = []  # noqa: RUF012

        def _load_from_state_dict(self, state: Any, prefix: str, local_metadata: Any, *others: Any) -> None:
            self.seen.append(local_metadata.get("version"))
            super()._load_from_state_dict(state, prefix, local_metadata, *others)

    def __init__(self) -> None:
        super().__init__()
        self.net[3] = self.Versioned(8, 2)

    def state_dict(self) -> Any:  # type: ignore[override]
        return super().state_dict()


def versions_of_modules(strategy: Any, folder: Path) -> Any:
    """What a module is told when it is loaded, from what was saved by this strategy and by one device."""
    seen = Filed.Versioned.seen
    seen.clear()
    L.seed_everything(1, verbose=False)
    run, path = run_of(strategy, folder), folder / "a.ckpt"
    run.fit(Filed(), datamodule=BoringDataModule())
    run.save_checkpoint(path)
    model = Filed()
    again = run_of(strategy, folder, max_epochs=2)
    again.fit(model, datamodule=BoringDataModule(), ckpt_path=path)
    run_of("auto", folder, max_epochs=2).fit(Filed(), datamodule=BoringDataModule(), ckpt_path=path)
    return (
        [*seen],
        state_of(Filed.load_from_checkpoint(path)),
        state_of(Filed.load_from_checkpoint(path, "cpu")),
        model.losses,
    )


def left_by_a_fit(strategy: Any, folder: Path) -> Any:
    """Threads, references and devices, in a fit and after it; savers that remove what they saved."""
    devices: list[Any] = []

    class Elsewhere(Net):
        def on_train_start(self) -> None:
            devices.append(self.device)

    def fit() -> Any:
        model = Elsewhere()
        model._device = torch.device("meta")  # as if it came from another one
        savers: list[Any] = [
            ModelCheckpoint(folder, save_top_k=1, monitor="val_loss", mode="max"),
            EarlyStopping("val_loss"),
        ]
        savers.append(L.pytorch.callbacks.OnExceptionCheckpoint(folder))
        run = run_of(strategy, folder, max_epochs=3, callbacks=savers, enable_checkpointing=True)
        run.fit(model, datamodule=BoringDataModule())
        run.save_checkpoint(folder / "b.ckpt")
        return weakref.ref(run), weakref.ref(model)

    before = set(threading.enumerate())
    references = fit()
    gc.collect()
    threads = sorted(one.name for one in threading.enumerate() if one not in before)
    return devices, threads, [reference() is None for reference in references]
