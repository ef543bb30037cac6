"""Rank 0 alone reads weights and gradients in all hooks of Lightning, a few of them in each run: on real ranks."""

import functools
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch import Tensor, nn

from compare import differing
from jobs import CLASSES, FEATURES, loader, state_of, trainer

# Before there is an engine, after it, or asked for data or a device alone.
_NOT_IN_A_RUN = {
    "configure_model",
    "configure_sharded_model",
    "prepare_data",
    "setup",
    "teardown",
    "transfer_batch_to_device",
}
_NOT_IN_A_RUN |= {
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
    "state_key",
    "state_dict",
}
_NOT_IN_A_RUN |= {"load_state_dict", "on_exception"}


def _hooks_of(*kinds: type) -> list[str]:
    named = {name for kind in kinds for name, value in vars(kind).items() if callable(value) and name[0] != "_"}
    return sorted(named - _NOT_IN_A_RUN)


OF_MODULE = [*_hooks_of(ModelHooks, DataHooks, CheckpointHooks), "forward", "training_step", "validation_step"]
OF_MODULE += [
    "test_step",
    "predict_step",
    "optimizer_step",
    "lr_scheduler_step",
    "configure_gradient_clipping",
    "backward",
]
OF_CALLBACK = _hooks_of(L.Callback)
PLACES = [*(f"module.{name}" for name in OF_MODULE), *(f"callback.{name}" for name in OF_CALLBACK)]


class Looking:
    """What looks, at some places."""

    def __init__(self, places: list[str]) -> None:
        self.places = places
        self.looked: list[str] = []

    def at(self, place: str, module: Any) -> None:
        if place in self.places:
            self.looked.append(place)
            if module.global_rank == 0:
                for parameter in list(module.parameters()):
                    parameter.detach().norm().item()
                    if parameter.grad is not None:
                        parameter.grad.norm().item()


def _looking_first(kind: type, prefix: str, hooks: list[str]) -> type:
    """A subclass of which every hook looks, and goes on as it does."""

    def hook(name: str) -> Any:
        theirs = getattr(kind, name)

        @functools.wraps(theirs)
        def ours(self: Any, *args: Any, **kwargs: Any) -> Any:
            module = self if isinstance(self, L.LightningModule) else args[1]
            self.looking.at(f"{prefix}.{name}", module)
            return theirs(self, *args, **kwargs)

        return ours

    return type(kind.__name__, (kind,), {name: hook(name) for name in hooks})


class Plain(L.LightningModule):
    """Nothing that would bring ranks together besides: no buffers, no metrics; and gradients in many buckets."""

    def __init__(self, looking: Looking) -> None:
        super().__init__()
        self.looking = looking
        self.net = nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(4)], nn.Linear(FEATURES, CLASSES))
        self.losses: list[float] = []

    def forward(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch)

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer), "interval": "step"}]


Module = _looking_first(Plain, "module", OF_MODULE)
Callback = _looking_first(L.Callback, "callback", OF_CALLBACK)


def run_and_look(
    strategy: Any, kind: str, places: list[str], folder: Path, **kwargs: Any
) -> tuple[Any, list[str], Any]:
    """Fits, or what is of that kind, while rank 0 looks at the places: the error, where it looked, and the numbers."""
    looking = Looking(places)
    L.seed_everything(1, verbose=False)
    module, callback = Module(looking), Callback()
    callback.looking = looking
    saves = ModelCheckpoint(folder, filename="-".join([kind, *places]), every_n_train_steps=1)
    kwargs |= {"callbacks": [callback, saves], "enable_checkpointing": True, "num_sanity_val_steps": 1}
    run = trainer(strategy, 2, val_check_interval=1, **kwargs)
    try:
        if kind == "test":
            run.test(module, loader(samples=8), verbose=False)
        elif kind == "predict":
            run.predict(module, loader(samples=8))
        else:
            run.fit(module, loader(samples=16), loader(seed=1, samples=8))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", looking.looked, None
    return None, looking.looked, {"losses": torch.tensor(module.losses), **state_of(module)}


def look_everywhere(strategy: Any, places: list[str], folder: Path, **kwargs: Any) -> dict[str, Any]:
    """At four places in a run, until one fails: its error, and whether the losses and weights are those of a run in
    which nobody looks. A place that a run does not come to is left out."""
    found: dict[str, Any] = {}
    of_kind: dict[str, list[str]] = {}
    for place in places:
        of_kind.setdefault(next((kind for kind in ("test", "predict") if kind in place), "fit"), []).append(place)
    for kind, theirs in of_kind.items():
        expected = run_and_look(strategy, kind, [], folder, **kwargs)[2]
        runs = -(-len(theirs) // 4)
        for first in range(runs):
            # Those with names alike are called one after the other: they are in different runs.
            error, looked, numbers = run_and_look(strategy, kind, theirs[first::runs], folder, **kwargs)
            if error is not None:
                return {**found, (looked or [kind])[-1]: (error, False)}  # a connection that has timed out is closed
            found |= dict.fromkeys(looked, (None, differing(numbers, expected) == []))
    return found
