"""Whole Trainer runs that save and resume, called on real ranks by the tests of checkpoints."""

import ctypes
import os
import random
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import numpy
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import jobs
import lightning_zero.checkpoint.save
import lightning_zero.pl.engine_strategy
import lightning_zero.pl.single_file
from callback_jobs import Uploads
from jobs import Classifier, Wide, read_checkpoint, state_of
from lightning_zero.views.lazy import LazyTensor

GLOBAL_BATCH, STEPS = 24, 5  # per epoch
FEATURES, WIDTH, CLASSES = 7, 13, 5


def trainer(strategy: Any, world: int, **kwargs: Any) -> L.Trainer:
    return jobs.trainer(strategy, world, use_distributed_sampler=False, **kwargs)


class Everything(L.LightningModule):
    """Tied and frozen weights, a parameter without dimensions, one in bf16, buffers of several kinds."""

    def __init__(self, dropout: float = 0.0, optimizer: str = "adamw") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.inner = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.blocks[1].weight = self.blocks[0].weight
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.halves = nn.Parameter(torch.randn(3).bfloat16(), requires_grad=False)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.losses: list[float] = []
        self.started: dict[str, Any] = {}  # states when fit began

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.inner(x)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        hidden = self.norm(hidden + self.frozen(hidden)) * self.scale
        if self.hparams.dropout:  # every generator that a user may draw from
            hidden = hidden * (1 + 0.1 * random.random() + 0.1 * numpy.random.rand() + 0.1 * torch.rand(()))
        loss = nn.functional.cross_entropy(self.head(hidden), y)
        self.losses.append(loss.item())
        self.count += 1
        self.log("loss", loss.detach(), sync_dist=True)
        self.log("improving", -float(self.global_step))
        return loss

    def on_train_start(self) -> None:
        strategy = self.trainer.strategy
        engine = getattr(strategy, "engine", None)
        if engine is not None:
            self.started = {
                "state_dict": {name: value.clone() for name, value in engine.states.full_model().items()},
                "optimizer": [engine.states.full_optimizer(optimizer) for optimizer in strategy.optimizers],
            }

    def configure_optimizers(self) -> Any:
        trainable = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer: torch.optim.Optimizer
        if self.hparams.optimizer == "adamw":
            optimizer = torch.optim.AdamW(groups, lr=1e-2)
        else:
            optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ResumableLoader(DataLoader):
    """Goes on with the batch after the last one it gave, as torchdata's StatefulDataLoader does."""

    given, skip = 0, 0

    def __iter__(self) -> Any:
        self.given, skip, self.skip = self.skip, self.skip, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= skip:
                self.given += 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["given"]


def data(world: int, *, steps: int = STEPS, kind: type[DataLoader] = DataLoader) -> DataLoader:
    """Global batches that do not depend on the number of ranks."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(GLOBAL_BATCH * steps, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (GLOBAL_BATCH * steps,), generator=generator)
    dataset = TensorDataset(x, y)
    sampler: Any = DistributedSampler(dataset, num_replicas=world, rank=int(os.environ["RANK"]), shuffle=False)
    return kind(dataset, batch_size=GLOBAL_BATCH // world, sampler=sampler)


def fit(
    strategy: Any,
    world: int,
    epochs: int,
    *,
    resume: Any = None,
    save: Any = None,
    loader: DataLoader | None = None,
    module: dict[str, Any] | None = None,
    seed: int = 1,
    **kwargs: Any,
) -> dict[str, Any]:
    """Fits to the end of `epochs`, from a checkpoint or anew, and saves."""
    L.seed_everything(seed, verbose=False)
    model = Everything(**(module or {}))
    run = trainer(strategy, world, max_epochs=epochs, **kwargs)
    run.fit(model, data(world) if loader is None else loader, ckpt_path=resume)
    if save is not None:
        run.save_checkpoint(save)
    return {
        "losses": model.losses,
        "weights": state_of(model),
        "started": model.started,
        "lr": run.optimizers[0].param_groups[0]["lr"],
        "step": run.global_step,
        "ties": model.blocks[1].weight is model.blocks[0].weight,
    }


class SaveAt(L.Callback):
    """Saves in the middle of fit, when the optimizer has taken `step` steps."""

    def __init__(self, step: int, path: Any) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, run: L.Trainer, *_: Any) -> None:
        if run.global_step == self.step:
            run.save_checkpoint(self.path)


def fit_saving_at(strategy: Any, world: int, epochs: int, step: int, path: Any, **kwargs: Any) -> dict[str, Any]:
    return fit(strategy, world, epochs, callbacks=[SaveAt(step, path)], **kwargs)


def resumable(world: int, steps: int) -> DataLoader:
    return data(world, steps=steps, kind=ResumableLoader)


def fit_with_dropout(strategy: Any, world: int, epochs: int, **kwargs: Any) -> dict[str, Any]:
    """Each rank draws from every generator in every step."""
    return fit(strategy, world, epochs, module={"dropout": 0.3}, **kwargs)


def fit_in_mid_epoch(
    strategy: Any, world: int, steps: int, *, save: Any = None, resume: Any = None, seed: int = 1
) -> dict[str, Any]:
    """An epoch of `steps` with a loader that can be resumed; saves after half of them."""
    callbacks = [] if save is None else [SaveAt(steps // 2, save)]
    loader = resumable(world, steps)
    return fit_with_dropout(strategy, world, 1, resume=resume, callbacks=callbacks, loader=loader, seed=seed)


# -- ModelCheckpoint


def fit_keeping(
    strategy: Any, world: int, folder: Any, *, epochs: int = 2, seed: int = 1, resume: Any = None, logger: Any = False,
    dropout: float = 0.0, **kwargs: Any,
) -> dict[str, Any]:  # fmt: skip
    """Ten steps with a `ModelCheckpoint(**kwargs)`; where everything is afterwards."""
    L.seed_everything(seed, verbose=False)
    model = Everything(dropout)
    callback = ModelCheckpoint(dirpath=folder, **kwargs)
    how = {"max_epochs": epochs, "callbacks": [callback], "enable_checkpointing": True, "logger": logger}
    run = trainer(strategy, world, **how)
    run.fit(model, data(world), ckpt_path=resume)
    run.strategy.barrier()
    return {
        "best": callback.best_model_path,
        "last": callback.last_model_path,
        "kept": sorted(callback.best_k_models),
        "losses": model.losses,
        "step": run.global_step,
    }


def evaluate_from(strategy: Any, world: int, path: Any) -> dict[str, Tensor]:
    """The weights that `test` sees when it starts from a checkpoint."""
    seen: dict[str, Tensor] = {}

    class Looks(Everything):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            with self.trainer.strategy.full_parameters():
                seen.update(state_of(self))

    trainer(strategy, world).test(Looks(), data(world), ckpt_path=path, verbose=False)
    return seen


def error_of(function: Any, *args: Any, **kwargs: Any) -> str | None:
    """What a function raises, or None."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def fit_from_weights_only(strategy: Any, world: int, path: Any) -> str | None:
    return error_of(fit, strategy, world, 2, resume=path)


def resume_from_last(strategy: Any, world: int, folder: Any, *, epochs: int = 3) -> dict[str, Any]:
    """A job that was started again: where it looks for its checkpoints is all it is told."""
    return fit_keeping(strategy, world, folder, epochs=epochs, resume="last", save_top_k=1, every_n_train_steps=100)


class Tunable(Classifier):
    """Has a learning rate to be found."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-2

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def find_a_learning_rate(strategy: Any, folder: Path) -> dict[str, Any]:
    """Lightning's finder saves, trains, and goes back to what it saved, in the middle of fit."""
    L.seed_everything(1, verbose=False)
    model = Tunable()
    finder = LearningRateFinder(num_training_steps=6, min_lr=1e-5, max_lr=1e-1, early_stop_threshold=None)
    jobs.trainer(strategy, 2, callbacks=[finder], default_root_dir=folder).fit(model, jobs.loader())
    return {"losses": model.losses, "left": sorted(os.listdir(folder))}


def go_on_from_the_best(strategy: Any, folder: Path) -> dict[str, Any]:
    """fit, test and validate from the best checkpoint, and fit from it again, in one process."""
    L.seed_everything(1, verbose=False)
    model = Classifier()
    keep = ModelCheckpoint(dirpath=folder, monitor="val_loss", save_top_k=1)
    run = jobs.trainer(strategy, 2, callbacks=[keep], max_epochs=2, enable_checkpointing=True)
    training, validation, test = (jobs.loader(seed, samples=24) for seed in range(3))
    run.fit(model, training, validation)
    assert "epoch=0" in keep.best_model_path  # what the model has is another one
    tested = run.test(model, test, ckpt_path="best", verbose=False)[0]["test_loss"]
    validated = run.validate(dataloaders=validation, verbose=False)[0]["val_loss"]  # of the best, too
    run.fit_loop.max_epochs = 3
    run.fit(model, training, validation, ckpt_path="best")
    return {"test": tested, "validation": validated, "losses": model.losses, "best": Path(keep.best_model_path).name}


class Worsening(Classifier):
    """The first epoch is its best."""

    def on_train_epoch_end(self) -> None:
        self.log("worse", float(self.current_epoch))


def go_on_from_the_last(strategy: Any, folder: Path) -> dict[str, Any]:
    """Two runs, the second from the last checkpoint of the first; only the first epoch is kept for what it is worth."""
    kept: dict[str, Any] = {}
    for number, last in enumerate((None, folder / "last.ckpt")):
        L.seed_everything(1, verbose=False)
        model = Worsening()
        keep = ModelCheckpoint(dirpath=folder, filename="{epoch}", monitor="worse", save_last=True)
        epochs = 2 * (number + 1)
        run = jobs.trainer(strategy, 2, callbacks=[keep], max_epochs=epochs, enable_checkpointing=True)
        run.fit(model, jobs.loader(samples=24), ckpt_path=last)
        run.strategy.barrier()
        kept[f"after {epochs} epochs"] = sorted(found.name for found in folder.iterdir())
        kept[f"losses of {epochs}"] = model.losses
        kept[f"last of {epochs}"] = Path(keep.last_model_path).name
    kept["step of the last"] = read_checkpoint(folder / "last.ckpt")["global_step"]
    return kept


# -- user hooks


class Lora(Everything):
    """Keeps only what trains, under other names, as adapters are saved; and an addition of its own."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        assert isinstance(state["inner.0.weight"], LazyTensor | nn.Parameter | Tensor)
        del state["frozen.weight"], state["frozen.bias"]
        state["renamed.weight"] = state.pop("head.weight")
        checkpoint["moved"] = {"inner.0.bias": state.pop("inner.0.bias")}
        state["scale"] = state["scale"] * 2
        checkpoint["mine"] = {"list": [1, 2.5, None, "x"], "tensor": torch.arange(3)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert "lightning_zero" not in checkpoint  # under DDP there is none
        state = checkpoint["state_dict"]
        state["head.weight"] = state.pop("renamed.weight")
        state.update(checkpoint["moved"])
        state["scale"] = state["scale"] / 2
        self.strict_loading = False
        self.mine = checkpoint["mine"]


def fit_with_hooks(strategy: Any, world: int, path: Path) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = Lora()
    run = trainer(strategy, world, callbacks=[SaveAt(3, path)])
    run.fit(model, data(world))
    run.strategy.barrier()
    saved = read_checkpoint(path)
    L.seed_everything(1, verbose=False)
    again = Lora()
    trainer(strategy, world, max_epochs=2).fit(again, data(world), ckpt_path=path)
    return {"saved": saved["state_dict"], "moved": saved["moved"], "mine": again.mine, "losses": again.losses}


class Counting(L.LightningModule):
    """Has a buffer that counts, and no optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.layer(batch[0]).sum()
        self.seen += loss.detach()
        return loss

    def configure_optimizers(self) -> None:
        return None


def fit_without_optimizer(strategy: Any, path: Path) -> list[float]:
    """What the buffer comes to in two epochs, with a save and a resume between them."""
    counted = []
    data = DataLoader(TensorDataset(torch.arange(24.0).view(8, 3)), batch_size=2)
    for epochs in (1, 2):
        L.seed_everything(1, verbose=False)
        model = Counting()
        run = trainer(strategy, 2, max_epochs=epochs)
        run.fit(model, data, ckpt_path=path if epochs == 2 else None)
        run.save_checkpoint(path)
        run.strategy.barrier()
        counted.append(float(model.seen))
    return counted


# -- memory and wire


def cost_of_saving(strategy: Any, path: Path) -> dict[str, int]:
    """Of a save in mid-fit: bytes it puts on the wire, and what it adds to the peak of memory. 32 MB of parameters."""
    cost: dict[str, int] = {}

    class Measure(L.Callback):
        def on_train_batch_end(self, run: L.Trainer, *_: Any) -> None:
            if run.global_step != 2:
                return
            sent = sum(run.strategy.communication_report().values())  # type: ignore[attr-defined]
            before = peak_resident_bytes()
            run.save_checkpoint(path)
            cost["peak"] = peak_resident_bytes() - before
            cost["wire"] = sum(run.strategy.communication_report().values()) - sent  # type: ignore[attr-defined]

    run = trainer(strategy, 2, max_steps=3, callbacks=[Measure()])
    run.fit(Wide(1024, 8), DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=1))
    return cost


def peak_resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


# -- saves in the background


def save_and_overwrite(strategy: Any, path: Path) -> dict[str, Any]:
    """Every parameter changes right after an asynchronous save has returned, and before anything is written."""
    found: dict[str, Any] = {}
    changed = threading.Event()

    class Overwrite(L.Callback):
        def on_train_batch_end(self, run: L.Trainer, model: Any, *_: Any) -> None:
            if run.global_step != 2:
                return
            found["before"] = {name: p.detach().clone() for name, p in model.named_parameters()}
            run.save_checkpoint(path)
            found["was_there"] = path.exists()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(7.0)
            changed.set()

    L.seed_everything(1, verbose=False)
    late = partial(ThreadPoolExecutor, initializer=changed.wait, initargs=(60.0,))
    with patch.object(lightning_zero.checkpoint.save, "ThreadPoolExecutor", late):
        trainer(strategy, 2, callbacks=[Overwrite()]).fit(Everything(), data(2))
    return found


def save_in_background_to(strategy: Any, path: Any, *, then: str) -> dict[str, Any]:
    """The error of an asynchronous save that fails, and the step at which it came."""
    model = Everything()
    callbacks = [SaveAt(2 if then == "goes on" else STEPS, path)]
    run = trainer(strategy, 2, callbacks=callbacks)

    class Slowly(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            time.sleep(0.3)

    if then == "goes on":
        run.callbacks.append(Slowly())
    return {"error": error_of(run.fit, model, data(2)), "step": len(model.losses)}


def save_fifty_times(strategy: Any, path: Path) -> list[int]:
    """Resident bytes after each of fifty asynchronous saves of 13 MB, without what the C library keeps for later."""
    resident: list[int] = []

    class Often(L.Callback):
        def on_train_batch_end(self, run: L.Trainer, *_: Any) -> None:
            run.save_checkpoint(path)
            run.strategy._checkpoints.saver.wait()  # type: ignore[attr-defined]
            ctypes.CDLL(None).malloc_trim(0)  # free pages of the heap are no leak, and they come and go by many MB
            resident.append(resident_bytes())

    run = trainer(strategy, 2, max_steps=50, callbacks=[Often()])
    run.fit(Wide(512, 4), DataLoader(TensorDataset(torch.zeros(100, 1)), batch_size=1))
    return resident


def save_as_last_after_fit(strategy: Any, folder: Path, save_last: Any) -> None:
    """Parameters change after fit, and are saved where `ModelCheckpoint` has its last checkpoint."""
    keep = ModelCheckpoint(dirpath=folder, save_last=save_last, every_n_train_steps=1)
    model = Wide(4, 2)
    run = trainer(strategy, 2, max_steps=2, callbacks=[keep], enable_checkpointing=True)
    run.fit(model, DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    run.save_checkpoint(keep.last_model_path)


# -- the choice between a single file and shards


def fit_and_tell(
    strategy: Any, folder: Path, small: int = 10**9, *, uploads: bool = False, **kwargs: Any
) -> dict[str, Any]:
    """A fit that keeps all its checkpoints: what it says of them, and which of them are files."""
    counts = 0 if os.environ["RANK"] == "0" else 10**12  # on rank 1, which must not decide by itself
    counted = lightning_zero.pl.engine_strategy.bytes_to_save
    with (
        patch.object(lightning_zero.pl.single_file, "SMALL_BYTES", small),
        patch.object(lightning_zero.pl.engine_strategy, "bytes_to_save", lambda *of: counted(*of) + counts),
        warnings.catch_warnings(record=True) as warned,
        jobs.listening() as said,
    ):
        warnings.simplefilter("always")
        kwargs = {"every_n_train_steps": 5, "save_top_k": -1, "logger": Uploads() if uploads else False, **kwargs}
        found = fit_keeping(strategy, 2, folder, **kwargs)
    return {
        "said": [message for message in said if "Checkpoints are" in message],
        "warned": [str(one.message) for one in warned if "log_model" in str(one.message)],
        "are files": {path.name: path.is_file() for path in sorted(folder.iterdir())},
        "losses": found["losses"],
    }


def save_twice_and_fit_again(folder: Path) -> list[str]:
    """What two fits of one trainer say of their checkpoints, which they save where there are others: of both kinds."""
    with jobs.listening() as said:
        for strategy in ({"stage": 1}, {"stage": 3, "checkpoint": None}):
            run = trainer(strategy, 2, max_epochs=1)
            for _ in range(2):
                run.fit_loop.max_epochs = (run.fit_loop.max_epochs or 0) + 1
                run.fit(Everything(), data(2))
                run.save_checkpoint(folder / "a.ckpt")
                run.save_checkpoint(folder / "a.ckpt")
                run.strategy.barrier()
    return [message.partition(":")[0] for message in said if "Checkpoints are" in message]


# -- preemption


class Signal(L.Callback):
    """Sends a signal to this process in the middle of a step, on one rank."""

    def __init__(self, number: int, rank: int, step: int) -> None:
        self.number, self.rank, self.step = number, rank, step

    def on_before_zero_grad(self, run: L.Trainer, *_: Any) -> None:
        if run.global_rank == self.rank and run.global_step == self.step:
            os.kill(os.getpid(), self.number)


def fit_until_told_to_stop(
    strategy: Any, folder: Path, number: int, rank: int, step: int, **kwargs: Any
) -> dict[str, Any]:
    """How a job ends that gets a signal at the beginning of a step, and where it left its checkpoint."""
    before = signal.getsignal(number)
    L.seed_everything(1, verbose=False)
    model = Everything()
    keep = ModelCheckpoint(dirpath=folder, save_last=True)
    callbacks = [keep, Signal(number, rank, step - 1)]
    run = trainer(strategy, 2, max_epochs=2, callbacks=callbacks, enable_checkpointing=True, **kwargs)
    code: Any = "it went on"
    try:
        run.fit(model, resumable(2, STEPS))
    except SystemExit as leaving:
        code = leaving.code
    return {
        "code": code,
        "losses": model.losses,
        "step": run.global_step,
        "handler_is_back": signal.getsignal(number) == before,
    }


def fit_from_last(strategy: Any, folder: Path, **kwargs: Any) -> dict[str, Any]:
    """The same job, started again."""
    L.seed_everything(7, verbose=False)
    model = Everything()
    keep = ModelCheckpoint(dirpath=folder, save_last=True)
    run = trainer(strategy, 2, max_epochs=2, callbacks=[keep], enable_checkpointing=True, **kwargs)
    run.fit(model, resumable(2, STEPS), ckpt_path="last")
    return {"losses": model.losses, "weights": state_of(model)}


def logged_losses(strategy: Any, world: int, epochs: int) -> list[float]:
    """Of the global batches, as they are logged."""
    logged: list[float] = []

    class Listen(L.Callback):
        def on_train_batch_end(self, run: L.Trainer, *_: Any) -> None:
            logged.append(run.callback_metrics["loss"].item())

    fit(strategy, world, epochs, callbacks=[Listen()])
    return logged


def fit_undisturbed(strategy: Any, **kwargs: Any) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = Everything()
    trainer(strategy, 2, max_epochs=2, **kwargs).fit(model, resumable(2, STEPS))
    return {"losses": model.losses, "weights": state_of(model)}
