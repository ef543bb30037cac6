"""Training loops written with Fabric, which the tests call on real ranks."""

from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn

from jobs import FEATURES, Classifier, loader, state_of, strategy_from


def fabric(strategy: Any, world: int, precision: str = "32-true", **kwargs: Any) -> Fabric:
    if precision == "16-mixed":  # Lightning would make it bf16 on a CPU
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        kwargs["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    else:
        kwargs["precision"] = precision
    made = Fabric(accelerator="cpu", devices=world, strategy=strategy_from(strategy), **kwargs)
    made.launch()
    return made


def loss_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).float(), y)


def whole(made: Fabric, model: Any) -> dict[str, Tensor]:
    return state_of(model.module)


def set_up(made: Fabric, how: str = "setup", lr: float = 1e-2) -> tuple[Any, Any]:
    """A model and its optimizer; ranks begin with values of their own, and all take those of rank 0."""
    torch.manual_seed(made.global_rank)
    model = Classifier(lr, tied=made._precision.precision != "bf16-true")
    model.frozen.bias.data.add_(made.global_rank)
    if how == "setup":
        return made.setup(model, model.configure_optimizers()["optimizer"])
    if how == "optimizer first":
        optimizer = made.setup_optimizers(model.configure_optimizers()["optimizer"])
        return made.setup_module(model), optimizer
    if how == "evaluated before":
        wrapped = made.setup_module(model).eval()
        with torch.inference_mode():
            wrapped(torch.ones(2, FEATURES))
        wrapped.train()
        return wrapped, made.setup_optimizers(model.configure_optimizers()["optimizer"])
    wrapped = made.setup_module(model)
    return wrapped, made.setup_optimizers(model.configure_optimizers()["optimizer"])


def steps(
    made: Fabric, model: Any, optimizer: Any, *, clip: str = "norm", accumulate: int = 1, overflow_at: int = -1
) -> dict[str, list[float]]:
    """An epoch, and a validation in the midst of it."""
    batches = made.setup_dataloaders(loader(shuffle=True))
    told: dict[str, list[float]] = {"losses": [], "norms": [], "val": []}
    for number, batch in enumerate(batches):
        last = (number + 1) % accumulate == 0
        with made.no_backward_sync(model, enabled=not last):
            loss = loss_of(model, batch)
            made.backward(loss * float("inf") if number == overflow_at and made.global_rank == 0 else loss)
        told["losses"].append(loss.item())
        if not last:
            continue
        if clip == "norm":
            told["norms"].append(
                made.clip_gradients(model, optimizer, max_norm=0.3, error_if_nonfinite=overflow_at < 0).item()
            )
        elif clip == "value":
            made.clip_gradients(model, optimizer, clip_val=0.01)
        optimizer.step()
        optimizer.zero_grad()
        if number == 2:
            model.eval()
            with torch.no_grad():
                told["val"] = [made.all_reduce(loss_of(model, batch)).item() for batch in loader(seed=1)]
            model.train()
    return told


def train(strategy: Any, world: int, how: str = "setup", precision: str = "32-true", **kwargs: Any) -> dict[str, Any]:
    made = fabric(strategy, world, precision)
    made.seed_everything(1, verbose=False)
    model, optimizer = set_up(made, how)
    told = steps(made, model, optimizer, **kwargs)
    found = {**told, "weights": whole(made, model)}
    found["state"] = optimizer.state_dict()
    made.strategy.teardown()
    return found


def save_and_go_on(strategy: Any, world: int, path: Path) -> dict[str, Any]:
    """Trains, saves, and trains on."""
    made = fabric(strategy, world)
    made.seed_everything(1, verbose=False)
    model, optimizer = set_up(made)
    steps(made, model, optimizer, clip="value")
    made.save(path, {"model": model, "optimizer": optimizer, "epoch": 3, "state_dict": model})
    steps(made, model, optimizer, clip="value")
    found = {"weights": whole(made, model), "state": optimizer.state_dict()}
    made.strategy.teardown()
    return found


def load_and_go_on(strategy: Any, world: int, path: Path, how: str = "load") -> dict[str, Any]:
    """Goes on from what was saved, in a model of other values."""
    made = fabric(strategy, world)
    made.seed_everything(7, verbose=False)
    model, optimizer = set_up(made, how="apart")
    if how == "load":
        state = {"model": model, "optimizer": optimizer, "epoch": 0}
        left = made.load(path, state)
        epoch, others = state["epoch"], sorted(left)
    else:  # by hand, from what every rank has read whole
        saved = made.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        epoch, others = saved["epoch"], ["state_dict"]
    made.seed_everything(1, verbose=False)
    steps(made, model, optimizer, clip="value")
    found = {"weights": whole(made, model), "state": optimizer.state_dict(), "epoch": epoch, "others": others}
    made.strategy.teardown()
    return found
