"""Whole Trainer runs of tensor-parallel models, for tests/test_tensor_training.py."""

import os
import signal
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.demos.boring_classes import RandomDataset
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import jobs
from ema_jobs import Midway
from lightning_zero import ZeroEMA
from lightning_zero.checkpoint import StoredCheckpoint
from lightning_zero.checkpoint.resume import load_state_dict
from lightning_zero.run.engine import Engine, Options
from lightning_zero.run.notices import Notice
from models import seeded
from tensor_jobs import WORDS, Towers, mesh_of, parallelize, start, trainable, whole

SAMPLES = 16


def loader(data: int, seed: int = 0, shuffle: bool = False, samples: int = SAMPLES) -> DataLoader:
    """Batches of 8 over all data-parallel ranks; sequences of 8, which 2 and 4 tensor-parallel ranks can divide."""
    tokens = torch.randint(0, WORDS, (samples, 9), generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(tokens), batch_size=8 // data, shuffle=shuffle)


class Language(L.LightningModule):
    """`Towers` with dropout, parallelized where there are tensor-parallel ranks."""

    def __init__(self, *, sequence: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.sequence = sequence
        self.towers = seeded(Towers)
        self.dropout = nn.Dropout(dropout)
        self.losses: list[float] = []
        self.seen: list[Tensor] = []
        self.norms: list[float] = []

    def configure_model(self) -> None:
        if self.device_mesh is None or isinstance(self.towers.head.weight, DTensor):  # Lightning calls it for each run
            return
        mesh = self.device_mesh["tensor_parallel"]
        if mesh.size() > 1:
            parallelize(self.towers, mesh, sequence=self.sequence)

    def loss(self, batch: Any) -> Tensor:
        (tokens,) = batch
        logits = self.towers(tokens[:, :-1])
        return nn.functional.cross_entropy(self.dropout(logits).flatten(0, 1).float(), tokens[:, 1:].flatten())

    def training_step(self, batch: Any, _: int) -> Tensor:
        self.seen.append(batch[0])
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(trainable(self), lr=1e-2, eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


class Alike(Language):
    """Does not call parallelize_module."""

    def configure_model(self) -> None:
        pass


def told_at_start(kind: type[Language]) -> tuple[list[str], str]:
    """The warnings of a fit on two ranks that are to share modules, and its table in one line."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        said = jobs.what_fit_says(
            {"stage": 2, "tensor_parallel_size": 2}, "32-true", kind, data=loader(1), limit_val_batches=0
        )
    own = [str(one.message) for one in warned if "tensor_parallel_size" in str(one.message)]
    return own, " ".join(" ".join(said).split())


def strategy_of(stage: int, tensor: int, **others: Any) -> Any:
    return jobs.strategy_from({"stage": stage, "tensor_parallel_size": tensor, **others})


def fit(
    stage: int, world: int, tensor: int, *, epochs: int = 1, save: Path | None = None, resume: Any = None,
    shuffle: bool = False, validates: bool = True, model: Any = None, strategy: Any = None, **kwargs: Any,
) -> dict[str, Any]:  # fmt: skip
    L.seed_everything(1, verbose=False)
    model = Language(**(model or {}))
    strategy = strategy_of(stage, tensor, **(strategy or {}))
    sizes = {"max_epochs": epochs, "num_sanity_val_steps": 0, "limit_val_batches": int(validates)}
    run = jobs.trainer(strategy, world, **sizes, **kwargs)
    data = world // tensor
    run.fit(model, loader(data, shuffle=shuffle), loader(data, seed=1), ckpt_path=resume)
    if save is not None:
        run.save_checkpoint(save)
    return {
        "losses": model.losses,
        "seen": torch.cat(model.seen),
        "weights": {name: whole(value).clone() for name, value in model.state_dict().items()},
        "val_loss": float(run.callback_metrics["val_loss"]) if validates else None,
        "mesh": dict(zip(model.device_mesh.mesh_dim_names, model.device_mesh.shape, strict=True)),
        "report": run.strategy.memory_report(),
        "to save": run.strategy._bytes_to_save(),
    }


class FeedForward(nn.Module):
    """As in Lightning's documentation of ModelParallelStrategy."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Documented(L.LightningModule):
    """The example there; it also keeps its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.model = FeedForward(32, 64)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        tp_mesh = self.device_mesh["tensor_parallel"]
        plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel(), "w3": ColwiseParallel()}
        parallelize_module(self.model, tp_mesh, plan)

    def training_step(self, batch: Tensor) -> Tensor:
        output = self.model(batch)
        loss = output.square().sum()
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self) -> DataLoader:
        return DataLoader(seeded(lambda: RandomDataset(32, 64)), batch_size=8)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3)


def fit_documented(stage: int | None) -> dict[str, Any]:
    """Under Lightning's own strategy (stage None), or with that one line changed."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    L.seed_everything(1, verbose=False)
    lightnings = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    strategy = lightnings if stage is None else strategy_of(stage, 2)
    model = Documented()
    run = jobs.trainer(strategy, 2)
    run.fit(model)
    return {
        "losses": model.losses,
        "weights": {name: whole(value).clone() for name, value in model.state_dict().items()},
    }


def seed_of_workers(world: int, tensor: int) -> int:
    """The rank by which the workers of a loader are seeded. (Ranks of these tests cannot start workers.)"""
    L.seed_everything(1, workers=True, verbose=False)
    run = jobs.trainer(strategy_of(2, tensor), world, max_steps=0)
    run.fit(Language(), loader(world // tensor))
    L.seed_everything(1, verbose=False)
    return run.train_dataloader.worker_init_fn.keywords["rank"]


def fit_unseeded(stage: int, world: int, tensor: int) -> dict[str, Any]:
    """With dropout, from another random state on each rank."""
    with patch.object(L, "seed_everything", lambda *_, **__: _seed_by_rank()):
        return fit(stage, world, tensor, model={"dropout": 0.5}, validates=False)


def _seed_by_rank() -> None:
    os.environ.pop("PL_GLOBAL_SEED", None)
    torch.manual_seed(int(os.environ["RANK"]))


def save_without(strategy: Any, path: Path) -> None:
    """An epoch of two ranks that share nothing."""
    L.seed_everything(1, verbose=False)
    run, model = jobs.trainer(strategy, 2), Plain()
    run.fit(model, loader(2))
    run.save_checkpoint(path)


class Plain(Language):
    """Under any strategy."""

    def configure_model(self) -> None:
        pass


def use_after_fit(stage: int, folder: Path) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model, run = Language(), jobs.trainer(strategy_of(stage, 2), 4, limit_val_batches=1)
    run.fit(model, loader(2), loader(2, seed=1))
    found = {
        "val_loss": float(run.callback_metrics["val_loss"]),
        "weights": {name: whole(value).clone() for name, value in model.state_dict().items()},
        "validated": run.validate(model, loader(2, seed=1), verbose=False)[0]["val_loss"],
    }
    run.save_checkpoint(folder / "after.ckpt")
    run.strategy.barrier()
    again = jobs.trainer(strategy_of(stage, 2), 4, limit_val_batches=1)
    found["from file"] = again.validate(Language(), loader(2, seed=1), ckpt_path=folder / "after.ckpt", verbose=False)[
        0
    ]["val_loss"]
    return found


class Initialised(Language):
    """Sets its values after it was parallelized, by the ways that users have."""

    def configure_model(self) -> None:
        super().configure_model()
        nn.init.constant_(self.towers.blocks[0].up.weight, 0.25)
        with torch.no_grad():
            self.towers.head.weight.mul_(2.0)


def initialised(stage: int) -> dict[str, Any]:
    model = Initialised()
    run = jobs.trainer(strategy_of(stage, 2), 4, max_steps=0)
    run.fit(model, loader(2))
    weights = {name: whole(value) for name, value in model.state_dict().items()}
    return {
        "filled": weights["towers.blocks.0.up.weight"],
        "scaled": weights["towers.head.weight"],
        "expected": seeded(Towers).head.weight.detach() * 2,
    }


def fit_averaged(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return fit(*args, callbacks=[EMAWeightAveraging(decay=0.5)], **kwargs)


def fit_averaged_in_shards(*args: Any, midway: Path, **kwargs: Any) -> dict[str, Any]:
    return fit(*args, callbacks=[ZeroEMA(decay=0.5), Midway(midway, step=3)], **kwargs)


class KeepsOptimizer(Language):
    """One optimizer serves every fit."""

    kept: list[torch.optim.Optimizer] | None = None

    def configure_optimizers(self) -> Any:
        if self.kept is None:
            self.kept = [torch.optim.AdamW(trainable(self), lr=1e-2)]
        return self.kept[0]


def fit_in_turn(stages: list[int]) -> list[tuple[Any, ...]]:
    """Fits of ranks that share modules, with one optimizer. Returns the shapes of parameters that have a state, and
    shapes and steps of the whole state after the last one."""
    model: Any = KeepsOptimizer()
    for stage in stages:
        run = jobs.trainer(strategy_of(stage, 2), 2, num_sanity_val_steps=0, limit_val_batches=0)
        run.fit(model, loader(1))
    state = run.strategy.full_optimizer_state()["state"]  # type: ignore[attr-defined]
    trained = trainable(model)
    return [(tuple(trained[at].shape), tuple(own["exp_avg"].shape), int(own["step"])) for at, own in state.items()]


def fit_copied(stage: int) -> None:
    fit(stage, 2, 2, callbacks=[StochasticWeightAveraging(swa_lrs=1e-2)])


class Undivided(Documented):
    """The same model as one device has it."""

    def configure_model(self) -> None:
        pass


def fit_alone(stage: int | None, **kwargs: Any) -> dict[str, Any]:
    """The documented example on one rank, whose DTensors are whole; or (stage None) without any of this."""
    L.seed_everything(1, verbose=False)
    model = Undivided() if stage is None else Documented()
    strategy = "auto" if stage is None else strategy_of(stage, 1)
    jobs.trainer(strategy, 1, **kwargs).fit(model)
    weights = {name: whole(value).cpu().clone() for name, value in model.state_dict().items()}
    return {"losses": model.losses, "weights": weights}


class StopsOne(L.Callback):
    """In the second batch one rank is told to stop."""

    def on_train_batch_start(self, run: L.Trainer, _: Any, __: Any, batch_idx: int) -> None:
        if batch_idx == 1 and run.global_rank == 1:
            run.strategy._notices.here.add(Notice.STOP)


def stopped(stage: int, world: int, folder: Path) -> int:
    """After how many of three steps each rank has left, all with a checkpoint of the same."""
    L.seed_everything(1, verbose=False)
    how = {"enable_checkpointing": True, "default_root_dir": folder}
    run = jobs.trainer(strategy_of(stage, 2), world, callbacks=[StopsOne()], **how)
    with suppress(SIGTERMException, SystemExit):
        run.fit(Language(), loader(world // 2, samples=3 * 8))
    return run.global_step


class KillsOne(L.Callback):
    """At the start of the second epoch a rank ends as a machine does, without a word."""

    def on_train_batch_start(self, run: L.Trainer, _: Any, __: Any, batch_idx: int) -> None:
        if run.current_epoch == 1 and batch_idx == 0 and run.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def fit_until_killed(stage: int, world: int, tensor: int, folder: Path) -> None:
    """With a checkpoint after every step."""
    keep = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_last=True, save_top_k=0)
    fit(stage, world, tensor, epochs=2, callbacks=[keep, KillsOne()], enable_checkpointing=True)


def load_into_engine(stage: int, path: Path) -> dict[str, Tensor]:
    """A checkpoint of a `Language`, read while an engine holds the model in shards."""
    mesh, comm = mesh_of(2), start()
    model = Language()
    parallelize(model.towers, mesh["tensor_parallel"], sequence=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    options = Options(tensor_parallel_size=2, unit_classes=("Block",))
    optimizer = torch.optim.AdamW(trainable(model))
    engine = Engine(model, [optimizer], stage=stage, comm=comm, options=options)
    stored = StoredCheckpoint(path)
    with engine.states.loading(lambda: None):
        load_state_dict(model, stored.tree()["state_dict"], strict=True)
    engine.states.load_optimizers(stored.tree()["optimizer_states"])
    with engine.full_parameters():
        found = {name: whole(value).detach().clone() for name, value in model.named_parameters()}
    state = engine.states.full_optimizer(optimizer)["state"]
    return found | {f"{index} {name}": value for index, each in state.items() for name, value in each.items()}
