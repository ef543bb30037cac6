"""Rank 0 alone reads weights and gradients in one hook of Lightning after the other: on real ranks."""

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
    """What looks, at one place."""

    place = ""

    def __init__(self) -> None:
        self.calls = 0

    def at(self, place: str, module: Any) -> None:
        if place == self.place:
            self.calls += 1
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


def run_and_look(strategy: Any, place: str, folder: Path, **kwargs: Any) -> tuple[str | None, int, Any]:
    """Fits, or what the place is of, while rank 0 looks there: the error, how often it looked, and the numbers."""
    looking = Looking()
    looking.place = place
    L.seed_everything(1, verbose=False)
    module, callback = Module(looking), Callback()
    callback.looking = looking
    saves = ModelCheckpoint(folder, filename=place, every_n_train_steps=1)
    kwargs |= {"callbacks": [callback, saves], "enable_checkpointing": True, "num_sanity_val_steps": 1}
    run = trainer(strategy, 2, val_check_interval=1, **kwargs)
    try:
        if "_test" in place or ".test" in place:
            run.test(module, loader(samples=8), verbose=False)
        elif "predict" in place:
            run.predict(module, loader(samples=8))
        else:
            run.fit(module, loader(samples=16), loader(seed=1, samples=8))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", looking.calls, None
    return None, looking.calls, {"losses": torch.tensor(module.losses), **state_of(module)}


def look_everywhere(strategy: Any, places: list[str], folder: Path, **kwargs: Any) -> dict[str, Any]:
    """At each place in a run of its own, until one fails: its error, and whether the losses and weights are those of a
    run in which nobody looks. A place that a run does not come to is left out."""
    found = {}
    expected: dict[str, Any] = {}
    for place in places:
        kind = next((kind for kind in ("test", "predict") if kind in place), "fit")
        if kind not in expected:
            expected[kind] = run_and_look(strategy, f"nowhere.{kind}", folder, **kwargs)[2]
        error, calls, numbers = run_and_look(strategy, place, folder, **kwargs)
        if calls:
            found[place] = (error, numbers is not None and differing(numbers, expected[kind]) == [])
        if error is not None:
            break  # a connection that has timed out is closed
    return found
