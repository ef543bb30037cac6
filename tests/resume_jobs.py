"""What users do around loading: a run is saved, and another goes on from it. Returned is what must be as under DDP."""

import random
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import HalfPrecision
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import jobs


class Net(L.LightningModule):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.lr = 0.05
        self.net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, 9), nn.Tanh())
        self.head = nn.Linear(9, 3)
        self.losses: list[float] = []

    def loss_of(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.net(batch[0])), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch) * (1 + 0.1 * random.random() * (self.net[2].p > 0))
        self.losses.append(loss.item())
        self.log("train", loss, sync_dist=True)
        self.log("worse", float(-self.global_step))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss_of(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss_of(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def batches() -> DataLoader:
    draw = torch.Generator().manual_seed(3)
    return DataLoader(TensorDataset(torch.randn(24, 6, generator=draw), torch.randint(3, (24,), generator=draw)), 4)


def fit(strategy: Any, model: Net, epochs: int, ckpt_path: Any = None, **kwargs: Any) -> L.Trainer:
    run = jobs.trainer(strategy, 2, max_epochs=epochs, **kwargs)
    run.fit(model, batches(), ckpt_path=ckpt_path, weights_only=False)
    return run


def saved(strategy: Any, path: Path, **kwargs: Any) -> None:
    """A run of one epoch, saved."""
    L.seed_everything(1, verbose=False)
    fit(strategy, Net(), 1, **kwargs).save_checkpoint(path)
    L.seed_everything(5, verbose=False)


def saved_by(strategy: Any, path: Path) -> Path:
    """A run of one epoch, saved once for all who only read it: beside the folders of theirs."""
    shared = path.parents[2] / "shared" / path.parent.name / path.name
    if not shared.exists():  # on no rank: a rank that saves has trained with the others
        saved(strategy, shared)
    L.seed_everything(5, verbose=False)
    return shared


def go_on(strategy: Any, path: Path, model: Net, epochs: int = 2) -> list[float]:
    """The losses of a run that goes on from one that was saved."""
    fit(strategy, model, epochs, saved_by(strategy, path))
    return model.losses


class Edits(L.Callback):
    """Reads and edits weights when a checkpoint is loaded."""

    def __init__(self, rank: int | None = None) -> None:
        self.rank = rank
        self.seen: list[float] = []

    def on_load_checkpoint(self, trainer: L.Trainer, model: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        assert isinstance(model, Net)
        if self.rank in (None, trainer.global_rank):
            self.seen.append(model.head.weight.sum().item())
            with torch.no_grad():
                model.head.weight.mul_(0.5)
                model.net[0].bias.data = torch.ones(9)


class Overrides(Net):
    assigns = False

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        left = super().load_state_dict(state, strict=strict, assign=self.assigns)
        nn.init.constant_(self.head.bias, 0.25)
        return left


class Assigns(Overrides):
    assigns = True


class LoadsApart(Net):
    """Uses what it is given to load more than once, and on rank 0 alone."""

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        left = super().load_state_dict(state, strict=strict, assign=assign)
        with torch.no_grad():
            self.head.weight.zero_()
            for module in (self.net[0], self.net[3]):
                module.bias.data.copy_(state["net.0.bias"])
            if self.global_rank == 0:
                torch.empty(3, 9).copy_(state["head.weight"])
                torch.empty(9, 9).copy_(state["net.3.weight"])
        self.head.load_state_dict({name: state[f"head.{name}"] for name in ("weight", "bias")})
        return left


class Rewinds(Net):
    """Goes back to the weights that it has been loaded with, before each epoch and in the midst of a step."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.weights = dict(checkpoint["state_dict"])

    def on_train_epoch_start(self) -> None:
        self.load_state_dict(self.weights)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step % 3 == 0:
            self.load_state_dict(self.weights)


class EditsTheCheckpoint(Net):
    """Operates on what it is given before it is loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["head.bias"].zero_()
        state["head.weight"][0] = 0.5
        state["net.0.bias"].data.mul_(2)
        state["net.3.weight"] *= 0.5
        nn.init.constant_(state["net.3.bias"], 0.1)
        moments = checkpoint["optimizer_states"][0]["state"]
        moments[0]["exp_avg"].zero_()
        moments[4]["exp_avg_sq"].view(-1)[1:].mul_(4)


class SavesInBetween(Net):
    """Saves between a forward and its backward, of a graph that reads weights in other places than their modules: in
    each of three steps at another place. What that does to a step shows in the loss of the next."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.path = path

    def loss_of(self, batch: Any) -> Tensor:
        out = self.head(self.net(batch[0])) * self.scale
        out = out + nn.functional.linear(torch.tanh(out @ self.head.weight), self.head.weight)
        return nn.functional.cross_entropy(out, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self._save_at(1)
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self._save_at(2)

    def on_before_backward(self, loss: Tensor) -> None:
        self._save_at(3)

    def _save_at(self, step: int) -> None:
        if self.trainer.global_step == step:
            self.trainer.save_checkpoint(self.path)


class Looks(Net):
    """Its optimizer depends on the weights."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.head.weight.detach().abs().mean().item())


class Resets(L.Callback):
    """Has optimizers begin anew."""

    def on_load_checkpoint(self, trainer: Any, model: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []
        checkpoint["lr_schedulers"] = []


def average_weights(strategy: Any, path: Path) -> Any:
    saved(strategy, path, callbacks=[EMAWeightAveraging(decay=0.9)])
    model = Net()
    fit(strategy, model, 2, path, callbacks=[EMAWeightAveraging(decay=0.9)])
    return model.losses


def edit_in_a_callback(strategy: Any, path: Path) -> Any:
    path = saved_by(strategy, path)
    model, edits = Net(), Edits()
    fit(strategy, model, 2, path, callbacks=[edits])
    return model.losses, edits.seen


def edit_the_checkpoint_in_place(strategy: Any, path: Path) -> Any:
    path = saved_by(strategy, path)
    model = EditsTheCheckpoint()
    fit(strategy, model, 2, path)
    return model.losses


def save_between_forward_and_backward(strategy: Any, path: Path) -> Any:
    losses = []
    for precision in ("32-true", "bf16-mixed"):
        L.seed_everything(1, verbose=False)
        model = SavesInBetween(path)
        fit(strategy, model, 2, precision=precision)
        losses.append(model.losses)
    return losses


def edit_on_rank_0_only(strategy: Any, path: Path) -> Any:
    path = saved_by(strategy, path)
    model = Net()
    fit(strategy, model, 2, path, callbacks=[Edits(rank=0)])
    return model.losses


def edit_before_a_test(strategy: Any, path: Path) -> Any:
    path = saved_by(strategy, path)
    run = jobs.trainer(strategy, 2, callbacks=[Edits()])
    return run.test(Net(), batches(), ckpt_path=path, verbose=False)


def edit_in_a_hook(strategy: Any, path: Path) -> Any:
    path = saved_by(strategy, path)
    model = Net()
    model.head.register_load_state_dict_post_hook(edit_head)
    fit(strategy, model, 2, path)
    return model.losses


def edit_head(head: nn.Module, _: Any) -> None:
    nn.init.constant_(head.bias, head.weight.sum().item())


def override_load_state_dict(strategy: Any, path: Path) -> Any:
    return go_on(strategy, path, Overrides())


def assign_what_is_loaded(strategy: Any, path: Path) -> Any:
    return go_on(strategy, path, Assigns())


def load_parts_again(strategy: Any, path: Path) -> Any:
    return go_on(strategy, path, LoadsApart())


def rewind_to_the_checkpoint(strategy: Any, path: Path) -> Any:
    return go_on(strategy, path, Rewinds(), epochs=3)


def read_in_configure_optimizers(strategy: Any, path: Path) -> Any:
    L.seed_everything(1, verbose=False)
    fit(strategy, Looks(), 1).save_checkpoint(path)
    model = Looks()
    run = fit(strategy, model, 2, path, callbacks=[Resets()])
    return model.losses, run.optimizers[0].defaults["lr"]


def take_the_optimizers_out(strategy: Any, path: Path) -> Any:
    path = saved_by(strategy, path)
    model = Net()
    fit(strategy, model, 2, path, callbacks=[Resets()])
    return model.losses


def go_on_from_what_was_saved_after_a_test(strategy: Any, path: Path) -> Any:
    L.seed_everything(1, verbose=False)
    run = jobs.trainer(strategy, 2)
    run.test(Net(), batches(), verbose=False)
    run.save_checkpoint(path)
    model = Net()
    fit(strategy, model, 1, path)
    return model.losses


def evaluate_a_checkpoint_and_fit_another_model(strategy: Any, path: Path) -> Any:
    """The checkpoint is one of the middle of an epoch, with its random numbers, and gone when the fit begins."""
    L.seed_everything(1, verbose=False)
    keep = ModelCheckpoint(dirpath=path.parent, filename=path.stem, every_n_train_steps=2)
    fit(strategy, Net(0.3), 1, max_steps=2, callbacks=[keep], enable_checkpointing=True)
    run = jobs.trainer(strategy, 2)
    run.test(Net(), batches(), ckpt_path=path, verbose=False)
    run.strategy.remove_checkpoint(path)
    run.strategy.barrier()
    L.seed_everything(9, verbose=False)
    model = Net(0.3)
    fit(strategy, model, 1)
    return model.losses


def find_a_learning_rate_first(strategy: Any, path: Path) -> Any:
    L.seed_everything(1, verbose=False)
    model = Net()
    run = jobs.trainer(strategy, 2, default_root_dir=path.parent)
    Tuner(run).lr_find(model, batches(), num_training=5)
    L.seed_everything(2, verbose=False)
    model.losses.clear()
    run.fit(model, batches())
    return model.losses


def hold_a_module_as_hyper_parameter(strategy: Any, path: Path) -> Any:
    class Holds(Net):
        def __init__(self, head: nn.Module) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.head = head

    L.seed_everything(1, verbose=False)
    fit(strategy, Holds(nn.Linear(9, 3)), 1).save_checkpoint(path)
    model = Holds(nn.Linear(9, 3))
    fit(strategy, model, 2, path)
    found = Holds.load_from_checkpoint(path, weights_only=False)
    return model.losses, found.head.weight.tolist(), found.hparams["head"].weight.tolist()


def keep_the_best_of_two(strategy: Any, path: Path) -> Any:
    """Two callbacks whose checkpoints have one name."""
    L.seed_everything(1, verbose=False)
    folder = path.parent / "kept"
    callbacks = [ModelCheckpoint(dirpath=folder, monitor=name) for name in ("train", "worse")]
    fit(strategy, Net(), 4, callbacks=callbacks, enable_checkpointing=True).strategy.barrier()
    names = sorted(entry.name for entry in folder.iterdir())
    return names, [Path(callback.best_model_path).name for callback in callbacks]


def keep_the_last_behind_early_stopping(strategy: Any, path: Path) -> Any:
    """The last checkpoint is of the end of an epoch; another callback saved at the same step, before the validation."""
    L.seed_everything(1, verbose=False)
    folder = path.parent / "kept"
    callbacks = [
        EarlyStopping("val", patience=50),
        ModelCheckpoint(dirpath=folder, every_n_train_steps=6, save_top_k=-1),
        ModelCheckpoint(dirpath=folder, save_top_k=0, save_last=True),
    ]
    run = jobs.trainer(strategy, 2, max_epochs=2, callbacks=callbacks, enable_checkpointing=True)
    run.fit(Net(), batches(), batches())
    run.strategy.barrier()
    last = jobs.read_checkpoint(folder / "last.ckpt")
    (stopping,) = [state for key, state in last["callbacks"].items() if key.startswith("EarlyStopping")]
    return stopping["best_score"].item(), last["loops"]["fit_loop"]["epoch_progress"]["total"]["completed"]


class SavesNewest(ModelCheckpoint):
    CHECKPOINT_NAME_LAST = "newest-{epoch}"


def keep_two_last_ones(strategy: Any, path: Path) -> Any:
    """The last checkpoints of two callbacks have names of their own, and one of them changes its name."""
    folder = path.parent / "kept"
    L.seed_everything(1, verbose=False)
    for epochs, ckpt_path in ((2, None), (3, folder / "last.ckpt")):
        callbacks = [
            ModelCheckpoint(dirpath=folder, filename="a", save_last=True),
            SavesNewest(dirpath=folder, filename="b", monitor="worse", save_last=True),
            ModelCheckpoint(dirpath=folder, filename="c", monitor="train"),
        ]
        run = fit(strategy, Net(), epochs, ckpt_path, callbacks=callbacks, enable_checkpointing=True)
        run.strategy.barrier()
    names = sorted(entry.name for entry in folder.iterdir())
    return names, [Path(callback.last_model_path).name for callback in callbacks]


class ReplacesHead(HalfPrecision):
    """A precision of the user's own, which makes a new layer of the old one's weights."""

    def __init__(self) -> None:
        super().__init__("bf16-true")

    def convert_module(self, module: nn.Module) -> nn.Module:
        assert isinstance(module, Net)
        head = nn.Linear(9, 3)
        head.weight.data = module.head.weight.data.clone()
        module.head = head
        return super().convert_module(module)


def replace_a_layer_in_a_precision_plugin(strategy: Any, path: Path) -> Any:
    path = saved_by(strategy, path)
    model = Net()
    fit(strategy, model, 2, path, plugins=[ReplacesHead()], callbacks=[Resets()])
    return model.losses


def remove_a_checkpoint_on_rank_0_only(strategy: Any, path: Path) -> Any:
    class Removes(L.Callback):
        def on_train_start(self, trainer: L.Trainer, model: L.LightningModule) -> None:
            if trainer.is_global_zero:
                trainer.strategy.remove_checkpoint(path)

    saved(strategy, path)
    model = Net()
    fit(strategy, model, 1, callbacks=[Removes()])
    return model.losses, path.exists()


def save_where_that_fails(strategy: Any, path: Path) -> Any:
    """A folder with something else in it; a module among the hyper-parameters, which all ranks gather."""

    class Tries(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, model: L.LightningModule) -> None:
            try:
                trainer.save_checkpoint(path)
            except Exception:
                failed.append(trainer.current_epoch)

    class Holds(Net):
        def __init__(self, head: nn.Module) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.head = head

    failed: list[int] = []
    path.mkdir(parents=True, exist_ok=True)
    (path / "cat.jpeg").touch()
    L.seed_everything(1, verbose=False)
    model = Holds(nn.Linear(9, 3))
    fit(strategy, model, 2, callbacks=[Tries()])
    return model.losses, failed
