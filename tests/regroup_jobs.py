"""LightningModules of which something begins to train in the middle of training, beside a DDP that averages it."""

import copy
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from jobs import CLASSES, FEATURES, loader, read_checkpoint, state_of, trainer

WIDTH = 7  # divides evenly by nothing


class WholeDDP(DDPStrategy):
    """Averages also what is frozen at set-up, should it train later: DDP leaves every rank its own gradient of it."""

    def configure_ddp(self) -> None:
        frozen = [p for p in self.lightning_module.parameters() if not p.requires_grad]  # type: ignore[union-attr]
        for parameter in frozen:
            parameter.requires_grad_(True)
        super().configure_ddp()
        for parameter in frozen:
            parameter.requires_grad_(False)


class Net(L.LightningModule):
    """A backbone with a normalisation, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.backbone(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self(batch[0]).float(), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    @property
    def optimizer(self) -> Any:
        return self.trainer.optimizers[0]

    def callbacks_of_the_run(self) -> list[L.Callback]:
        return []


class Thaw(BaseFinetuning):
    """The last layer of the backbone after one epoch, the first after two, with its own rate."""

    def __init__(self, train_bn: bool) -> None:
        super().__init__()
        self.train_bn = train_bn

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone, train_bn=self.train_bn)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone[1:], optimizer, train_bn=self.train_bn)
        if epoch == 2:
            self.unfreeze_and_add_param_group(module.backbone[0], optimizer, lr=3e-3)


class FineTuned(Net):
    def callbacks_of_the_run(self) -> list[L.Callback]:
        return [Thaw(train_bn=True)]


class FineTunedWithFrozenStatistics(Net):
    def callbacks_of_the_run(self) -> list[L.Callback]:
        return [Thaw(train_bn=False)]


class FineTunedBackbone(Net):
    def callbacks_of_the_run(self) -> list[L.Callback]:
        return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda _: 1.5)]


class FineTunedWhole(FineTuned):
    """Its optimizer steps whole tensors."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class GivenWhole(Net):
    """To an optimizer that looks at whole tensors; they have asked for gradients all along."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.backbone.parameters(), lr=1e-2)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.optimizer.add_param_group({"params": self.head.parameters()})


class GivenLate(Net):
    """Saved after fit; what the optimizer is given late has asked for gradients all along."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.backbone.parameters(), lr=1e-2)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.optimizer.add_param_group({"params": self.head.parameters()})


class GivenInMidEpoch(Net):
    """By hand, before the second batch; another layer, which the optimizer has had frozen, at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.backbone[2].parameters(), *self.head.parameters()], lr=0.1, momentum=0.9)

    def on_train_start(self) -> None:
        self.backbone[2].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch == 0 and batch_idx == 1:
            self.backbone.requires_grad_(True)
            self.optimizer.add_param_group({"params": self.backbone[0].parameters(), "lr": 0.05})


class GivenFrozen(Net):
    """The optimizer has had the backbone frozen; it trains from the third batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.batches == 2:
            self.thaw()

    def thaw(self) -> None:
        self.backbone.requires_grad_(True)

    @property
    def batches(self) -> int:
        return len(self.losses)


class GivenFrozenToSGD(GivenFrozen):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class GivenFrozenWhole(GivenFrozen):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=1e-2)


class ThawedInForward(GivenFrozen):
    """In the middle of a step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        if self.batches == 2:
            self.thaw()
        return super().forward(x)


class ThawedOneByOne(GivenFrozen):
    """And frozen again."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.backbone[2].requires_grad_(self.batches in (1, 2, 3, 5))
        self.backbone[0].requires_grad_(self.batches in (3, 4))


class ThawedAtAnEpoch(GivenFrozen):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.thaw()


class UsedByOneRank(GivenFrozen):
    """In the first batch in which it trains, and in the next one by the other rank."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.backbone(x)
        if self.batches in (2, 3) and self.global_rank != self.batches % 2:
            hidden = hidden.detach()
        return self.head(torch.tanh(hidden))


class Grown(Net):
    """A layer is made after the first epoch: the same on every rank, as rank 0 makes it."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            torch.manual_seed(3 + self.global_rank)
            self.more = nn.Linear(CLASSES, CLASSES)
            self.optimizer.add_param_group({"params": self.more.parameters()})

    def forward(self, x: Tensor) -> Tensor:
        return self.more(super().forward(x)) if hasattr(self, "more") else super().forward(x)


class GrownFromTheStart(Net):
    """What `Grown` is to equal: the layer is there, and neither used nor stepped at first."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.more = nn.Linear(CLASSES, CLASSES)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.backbone.parameters(), *self.head.parameters()], lr=1e-2)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.optimizer.add_param_group({"params": self.more.parameters()})

    def forward(self, x: Tensor) -> Tensor:
        return self.more(super().forward(x)) if self.current_epoch else super().forward(x)


class Assigned(Net):
    """`load_state_dict(assign=True)` puts other parameters into the module, which the optimizer is then given."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.load_state_dict(smaller(self.state_dict()), assign=True)
            self.optimizer.state.clear()
            self.optimizer.param_groups[0]["params"] = list(self.parameters())


class AssignedFromTheStart(Net):
    """What `Assigned` is to equal."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.load_state_dict(smaller(self.state_dict()))
            self.optimizer.state.clear()


def smaller(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: 0.9 * value if value.is_floating_point() else value.clone() for name, value in state.items()}


MODULES: dict[str, type[Net]] = {
    module.__name__: module
    for module in (
        *(FineTuned, FineTunedWithFrozenStatistics, FineTunedBackbone, FineTunedWhole, GivenWhole, GivenInMidEpoch),
        *(Grown, GrownFromTheStart, Assigned, AssignedFromTheStart),
        *(GivenFrozen, GivenFrozenToSGD, GivenFrozenWhole, ThawedInForward, ThawedOneByOne, ThawedAtAnEpoch),
        UsedByOneRank,
    )
}


def fit(strategy: Any, name: str, world: int = 2, **kwargs: Any) -> dict[str, Any]:
    """Three epochs, with the rates of each."""
    given = WholeDDP(find_unused_parameters=True) if strategy == "ddp" else strategy
    L.seed_everything(1, verbose=False)
    model, rates = MODULES[name](), LearningRates()
    callbacks = [*model.callbacks_of_the_run(), rates]
    run = trainer(given, world, **{"max_epochs": 3, "callbacks": callbacks, **kwargs})
    run.fit(model, loader(samples=8 * world))
    return {"losses": model.losses, "weights": state_of(model), "rates": rates.seen}


def state_saved_after_fit(strategy: Any, path: Path) -> dict[str, Tensor]:
    """Of an optimizer that was given a group in the second epoch."""
    L.seed_everything(1, verbose=False)
    run = trainer(strategy, 2, max_epochs=2)
    run.fit(GivenLate(), loader(samples=16))
    run.save_checkpoint(path)
    run.strategy.barrier()
    state = read_checkpoint(path)["optimizer_states"][0]["state"]
    return {f"{number}.{name}": value for number, entries in state.items() for name, value in entries.items()}


class LearningRates(L.Callback):
    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_epoch_end(self, run: L.Trainer, *_: Any) -> None:
        self.seen.append([group["lr"] for group in run.optimizers[0].param_groups])


def resume(strategy: Any, folder: Path) -> dict[str, Any]:
    """Two epochs, and as many from the checkpoint, the last layer to be thawed in the third."""
    given = WholeDDP(find_unused_parameters=True) if strategy == "ddp" else strategy
    path, losses = folder / ("file.ckpt" if strategy == "ddp" else "folder.ckpt"), []
    for epochs, start in ((2, None), (4, path)):
        L.seed_everything(1, verbose=False)
        model = FineTuned()
        made = copy.deepcopy(given) if isinstance(given, dict) else WholeDDP(find_unused_parameters=True)
        run = trainer(made, 2, max_epochs=epochs, callbacks=model.callbacks_of_the_run())
        run.fit(model, loader(samples=16), ckpt_path=start)
        run.save_checkpoint(path)
        run.strategy.barrier()
        losses += model.losses
    return {
        "losses": losses,
        "weights": state_of(model),
        "groups": [len(g["params"]) for g in run.optimizers[0].param_groups],
    }
