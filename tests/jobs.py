"""LightningModules and whole Trainer runs that the tests of the strategy call on real ranks."""

import ctypes
import functools
import logging
import multiprocessing as mp
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lightning_zero.pl.ranks
import lightning_zero.pl.sharded_strategy
from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint import Folder, StoredCheckpoint
from lightning_zero.run.serving import Serving
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.gloo import GlooComm
from lightning_zero.wire.links import ONLY_TCP, Links
from lightning_zero.wire.native import NativeComm, make_comm
from lightning_zero.wire.worlds import own_group
from ranks import PATIENCE

SAMPLES, FEATURES, CLASSES = 48, 12, 5


class Classifier(L.LightningModule):
    """BatchNorm, a tied layer, a frozen one, an unused one and a parameter of the LightningModule's own."""

    def __init__(self, lr: float = 1e-2, tied: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 19),
            nn.BatchNorm1d(19),
            nn.Tanh(),
            nn.Sequential(nn.Linear(19, 19), nn.LayerNorm(19)),
            nn.Linear(19, CLASSES),
        )
        self.again = nn.Linear(19, 19)
        if tied:
            self.again.weight = self.net[3][0].weight
        self.frozen = nn.Linear(FEATURES, FEATURES)
        self.frozen.requires_grad_(False)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Linear(4, 3)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net[3](self.net[:3](self.frozen(x)))
        return self.net[4](hidden + self.again(hidden)) * self.temperature

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x).float(), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if len(self.norms) < 2:  # each reads all gradients, one by one
            self.norms.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))

    def configure_optimizers(self) -> Any:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(seed: int = 0, batch_size: int = 4, shuffle: bool = False, samples: int = SAMPLES) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=shuffle)


def strategy_from(given: Any) -> Any:
    """A name, or the arguments of ZeroStrategy; made on the rank, since strategies do not travel."""
    # Small models stay whole at stage 3, unless every module is a unit; and their checkpoints would be single files.
    defaults = {"wait_timeout": PATIENCE, "units": "modules", "checkpoint": "sharded"}
    return ZeroStrategy(**{**defaults, **given}) if isinstance(given, dict) else given


def trainer(strategy: Any, world: int, **kwargs: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        # Two batches are enough to average over: a validation step costs what a training step does.
        "num_sanity_val_steps": 1,
        "limit_val_batches": 2,
    }
    if kwargs.get("precision") == "16-mixed":  # Lightning would make it bf16 on a CPU
        kwargs.pop("precision")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        kwargs["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    return L.Trainer(strategy=strategy_from(strategy), **{**defaults, **kwargs})


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What Lightning knows of a checkpoint, from a file or from a folder of shards."""
    saved = StoredCheckpoint(path).load() if path.is_dir() else torch.load(path, weights_only=False)
    saved.pop("lightning_zero", None)
    return saved


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def fit(strategy: Any, world: int, shuffle: bool = True, **kwargs: Any) -> dict[str, Any]:
    """One fit from a seed; everything a parity test compares."""
    L.seed_everything(1, verbose=False)
    # A weight used twice has its two gradients summed in fp32 under bf16-true: a declared deviation from DDP.
    model = Classifier(tied=kwargs.get("precision") != "bf16-true")
    run = trainer(strategy, world, **kwargs)
    run.fit(model, loader(shuffle=shuffle), loader(seed=1))
    return {
        "losses": model.losses,
        "norms": model.norms,
        "weights": state_of(model),
        "val_loss": float(run.callback_metrics["val_loss"]),
        "lr": [group["lr"] for group in run.optimizers[0].param_groups],
    }


def use_after_fit(strategy: Any, folder: Path, precision: str, host_bytes: int | None = None) -> dict[str, Any]:
    """What a model is used for after fit, on a machine with so much memory to spare."""
    L.seed_everything(2, verbose=False)
    earlier = trainer(strategy, 2, precision=precision, max_steps=2)
    earlier.fit(Classifier(), loader())
    earlier.save_checkpoint(folder / "earlier.ckpt")
    L.seed_everything(1, verbose=False)
    model = Classifier()
    run = trainer(strategy, 2, precision=precision)
    with patch.object(lightning_zero.tiers.host_memory, "available_host_bytes", lambda: host_bytes):
        run.fit(model, loader(), loader(seed=1))
        found = {
            "validated": run.validate(model, loader(seed=1), verbose=False),
            "tested": run.test(model, loader(seed=2), verbose=False),
            "predicted": torch.cat(run.predict(model, loader(seed=2))),
            "earlier": run.test(model, loader(seed=2), ckpt_path=folder / "earlier.ckpt", verbose=False),
            "norm": [float(value) for value in (model.temperature, model.net[0].weight.norm())],
        }
        run.save_checkpoint(folder / "after.ckpt", weights_only=True)
        run.strategy.barrier()
        found["saved"] = read_checkpoint(folder / "after.ckpt")["state_dict"]
        try:
            run.fit_loop.max_epochs = 2
            run.fit(model, loader())
        except RuntimeError as error:
            found["error"] = str(error)
    return found


def fits_where_one_rank_cannot_tell() -> bool:
    """Whether the model is whole after fit: rank 0 does not know its memory, rank 1 has next to none."""
    model = Classifier()
    known = None if os.environ["RANK"] == "0" else 1000
    with patch.object(lightning_zero.tiers.host_memory, "available_host_bytes", lambda: known):
        trainer({"stage": 3}, 2, max_steps=1).fit(model, loader())
    return type(model.temperature) is nn.Parameter


def save_at(path: Path, strategy: Any, world: int, **kwargs: Any) -> dict[str, Any]:
    """Fits for one epoch, saves, and fits for a second."""
    L.seed_everything(1, verbose=False)
    model = Classifier()
    run = trainer(strategy, world, **kwargs)
    run.fit(model, loader())
    run.save_checkpoint(path)
    return {"weights": state_of(model)}


def resume_from(path: Path, strategy: Any, world: int, **kwargs: Any) -> dict[str, Any]:
    L.seed_everything(2, verbose=False)
    model = Classifier()
    run = trainer(strategy, world, **{**kwargs, "max_epochs": 2})
    run.fit(model, loader(), ckpt_path=path)
    return {"losses": model.losses, "weights": state_of(model)}


def whole_life(strategy: Any, world: int) -> dict[str, Any]:
    """validate, fit, test, predict, save, fit again, in one process."""
    L.seed_everything(1, verbose=False)
    model = Classifier()
    calls: list[int] = []
    model.net[0].register_forward_hook(lambda *_: calls.append(1))
    run = trainer(strategy, world, limit_val_batches=2, limit_test_batches=2, limit_predict_batches=2)
    run.validate(model, loader(seed=1), verbose=False)
    run.fit(model, loader(), loader(seed=1))
    test_loss = run.test(model, loader(seed=2), verbose=False)[0]["test_loss"]
    predictions = run.predict(model, loader(seed=3))
    path = Path(run.strategy.broadcast(f"/tmp/lightning_zero_{id(model)}.ckpt"))
    run.save_checkpoint(path)
    checkpoint = read_checkpoint(path)
    run.strategy.barrier()
    if run.is_global_zero:
        Folder(path).remove()
    run.fit_loop.max_epochs = 2
    run.fit(model, loader(shuffle=True))
    assert predictions is not None
    return {
        "test_loss": test_loss,
        "predictions": torch.cat([torch.as_tensor(p) for p in predictions]),
        "losses": model.losses,
        "checkpoint": checkpoint["state_dict"] | _flatten(checkpoint["optimizer_states"][0]),
        "user_hook_calls": len(calls),
    }


def _flatten(optimizer_state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": torch.as_tensor(value)
        for index, state in optimizer_state["state"].items()
        for name, value in state.items()
    }


class ClippedClassifier(Classifier):
    """Clips by hand, through Lightning's own helper, in the hook that Lightning offers for it."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")


def clip_by_exact_norm(model: nn.Module, max_norm: float) -> None:
    """`clip_grad_norm_` with the one thing changed in which ZeroStrategy differs from it: sums in float64.

    Beside DDP with this, every bit must agree. Beside DDP as it is, the factor differs by one rounding on some CPUs and
    in some steps: harmless, but bf16, and Adam on a gradient that is 0 but for roundings, make it large.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients:
        return
    powers = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]).square()
    factor = torch.clamp(max_norm / (powers.sum().sqrt().float() + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


class ClipsByExactNorm(Classifier):
    """Clips under DDP by the norm that ZeroStrategy takes, so that bits can be compared."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if gradient_clip_val is None or isinstance(self.trainer.strategy, ZeroStrategy):
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        else:
            clip_by_exact_norm(self, gradient_clip_val)


def fit_clipped(strategy: Any, world: int, clip: str) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = ClippedClassifier() if clip == "override" else Classifier()
    after: list[float] = []

    class NormAfterClipping(L.Callback):
        def on_before_zero_grad(self, *_: Any) -> None:
            norm = grad_norm(model, 2)
            after.append(float(norm["grad_2.0_norm_total"]) if norm else 0.0)

    settings = {} if clip == "override" else {"gradient_clip_val": 0.05, "gradient_clip_algorithm": clip}
    trainer(strategy, world, callbacks=[NormAfterClipping()], **settings).fit(model, loader())
    return {"losses": model.losses, "norms_after": after}


class Looking(Classifier):
    """Rank 0 alone reads a weight between clipping and the step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def look(self) -> None:
        if self.global_rank == 0:
            self.seen.append(float(self.net[4].weight.norm()))


class LooksOnceClipped(Looking):
    def configure_gradient_clipping(self, optimizer: Any, *settings: Any, **named: Any) -> None:
        self.clip_gradients(optimizer, *settings, **named)
        self.look()


class LooksInAWrapper(Looking):
    """Lightning's own method, inside of a function of the user's."""

    def __init__(self) -> None:
        super().__init__()
        theirs = self.configure_gradient_clipping

        @functools.wraps(theirs)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            theirs(*args, **kwargs)
            self.look()

        self.configure_gradient_clipping = wrapper  # type: ignore[method-assign]


class LooksByHand(Looking):
    """Clips in a closure, in manual optimization: a hook comes between that and the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            self.losses.append(loss.item())
            return loss

        optimizer.step(closure)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look()


def exchanges_of_steps(
    strategy: Any, clip: float | None, kind: type[Classifier] = Classifier, accumulate: int = 1
) -> dict[str, Any]:
    """How often ranks tell each other what they want, in each batch of an epoch."""
    L.seed_everything(1, verbose=False)
    model = kind()
    counts: list[int] = []

    class Counts(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            counts.append(0)

    def counted(serving: Serving, *args: Any, **kwargs: Any) -> Any:
        if counts:
            counts[-1] += 1
        return exchange(serving, *args, **kwargs)

    exchange = Serving.exchange
    with patch.object(Serving, "exchange", counted):
        settings = {"gradient_clip_val": clip, "accumulate_grad_batches": accumulate}
        trainer(strategy, 2, callbacks=[Counts()], **settings).fit(model, loader(samples=SAMPLES * accumulate))
    return {"losses": model.losses, "seen": getattr(model, "seen", []), "exchanges": counts[2:]}


class OneBadGradient(Classifier):
    """Rank 1's gradient of one weight overflows in the steps that `at` names."""

    def __init__(self, at: tuple[int, ...]) -> None:
        super().__init__()
        self.at = at
        self.steps: list[float] = []

    def on_train_start(self) -> None:
        self.net[4].weight.register_hook(lambda grad: grad * float("inf") if self.overflows else grad)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps.append(float(self.lr_schedulers().last_epoch))
        self.overflows = self.global_rank == 1 and batch_idx in self.at
        return super().training_step(batch, batch_idx)


def fit_with_overflow(stage: int, at: tuple[int, ...], max_skipped_steps: int = 20) -> dict[str, Any]:
    """16-mixed on two ranks; says what was warned, logged and moved."""
    L.seed_everything(1, verbose=False)
    model = OneBadGradient(at)
    strategy = {"stage": stage, "max_skipped_steps": max_skipped_steps}
    run = trainer(strategy, 2, precision="16-mixed")
    error = None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            run.fit(model, loader())
        except RuntimeError as raised:
            error = str(raised)
    return {
        "error": error,
        "skipped": run.precision_plugin.skipped.total,
        "scale": run.precision_plugin.scaler.get_scale(),
        "warned": [str(item.message) for item in warned if "Skipped" in str(item.message)],
        "scheduler": model.steps,
        "losses": model.losses,
        "finite": error is not None or all(bool(value.isfinite().all()) for value in state_of(model).values()),
        "precision_state": run.precision_plugin.state_dict(),
    }


def fit_again_after_overflows(stage: int) -> list[str | None]:
    """The errors of two fits of one trainer: more steps in a row overflow than are allowed, and then one."""
    run = trainer({"stage": stage, "max_skipped_steps": 1}, 2, precision="16-mixed")
    errors: list[str | None] = []
    for at in ((0, 1), (0,)):
        L.seed_everything(1, verbose=False)
        try:
            run.fit(OneBadGradient(at), loader())
            errors.append(None)
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def skipped_before_and_after(folder: Path) -> list[int]:
    """Steps skipped since training began, when a fit has ended, and when the one that goes on from it has. In each of
    them one overflows."""
    found = []
    for epochs, path in ((1, None), (2, folder / "saved")):
        L.seed_everything(1, verbose=False)
        run = trainer({"stage": 2}, 2, precision="16-mixed", max_epochs=epochs)
        run.fit(OneBadGradient((2,)), loader(), ckpt_path=path)
        run.save_checkpoint(folder / "saved")
        found.append(run.precision_plugin.skipped.total)
    return found


def keep_an_override(strategy: Any, precision: str) -> tuple[bool, int]:
    """Whether a scheduler's step that the user has put on the module itself is there after runs, and its calls."""
    model, calls = Classifier(), []
    step = model.lr_scheduler_step

    def mine(*args: Any) -> None:
        calls.append(args)
        step(*args)

    model.lr_scheduler_step = mine  # type: ignore[method-assign]
    run = trainer(strategy, 2, precision=precision)
    run.validate(model, loader(), verbose=False)
    run.fit(model, loader())
    return model.lr_scheduler_step is mine, len(calls)


class NotFinite(Classifier):
    """Clips as PyTorch's documentation says, and asks for an error on NaN; rank 1 makes one at batch 2."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.global_rank == 1 and batch_idx == 2 else loss

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1, error_if_nonfinite=True)


def fit_until_not_finite(strategy: Any) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = NotFinite()
    try:
        trainer(strategy, 2).fit(model, loader())
    except RuntimeError as error:
        return {"error": str(error), "steps": len(model.losses), "norms": model.norms}
    return {"error": None, "steps": len(model.losses), "norms": model.norms}


class Precise(L.LightningModule):
    """Sees whether the batch keeps its bits, and whether tiny updates reach the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.ones = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.ones.weight)
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch[0].clone())
        return self.ones(torch.ones(1, 1, device=self.device)).float().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def fit_precisely(strategy: Any, precision: str, steps: int) -> dict[str, Any]:
    coordinates = torch.full((2 * steps, 3), 9999.0) + torch.arange(2 * steps)[:, None] / 1024
    model = Precise()
    data = DataLoader(TensorDataset(coordinates), batch_size=1)
    run = trainer(strategy, 2, precision=precision)
    run.fit(model, data)
    skipped = run.precision_plugin.skipped.total  # the loss scale grows until it overflows
    return {"seen": model.seen, "weight": model.ones.weight.item(), "sent": coordinates, "skipped": skipped}


@contextmanager
def listening() -> Iterator[list[str]]:
    """Inside, collects what is printed on this rank."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, listener = logging.getLogger("lightning.pytorch"), Listener()
    logger.addHandler(listener)
    try:
        yield said
    finally:
        logger.removeHandler(listener)


def what_fit_says(
    strategy: Any, precision: str, kind: type[L.LightningModule] | None = None, data: Any = None, **kwargs: Any
) -> list[str]:
    """The messages that fit prints on this rank."""
    with listening() as said:
        data = loader() if data is None else data
        run = trainer(strategy, 2, precision=precision, max_steps=1, enable_model_summary=True, **kwargs)
        run.fit((kind or Classifier)(), data)
    return [message for message in said if "ZeRO" in message]


class BufferHolder(Classifier):
    """Buffers of several dtypes beside BatchNorm's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("halves", torch.full((3,), 0.1, dtype=torch.float16))
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1 + self.global_rank  # differs by rank, as BatchNorm's statistics do
        return super().training_step(batch, batch_idx)


def fit_buffers(strategy: Any, path: Path, precision: str) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = BufferHolder()
    run = trainer(strategy, 2, precision=precision, accumulate_grad_batches=2)
    run.fit(model, loader(), loader(seed=1))
    run.save_checkpoint(path)
    run.strategy.barrier()
    return {
        "buffers": {name: value.clone() for name, value in model.named_buffers()},
        "saved": read_checkpoint(path)["state_dict"],
    }


def start_differently(strategy: Any) -> dict[str, Tensor]:
    """Every rank initialises by a seed of its own."""
    torch.manual_seed(100 + int(os.environ["RANK"]))
    model = Classifier()
    trainer(strategy, 2, max_steps=1).fit(model, loader())
    return state_of(model)


def where_batches_go(strategy: Any) -> list[int]:
    """The samples that this rank draws."""

    class Keep(Classifier):
        drawn: list[float] = []  # noqa: RUF012

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.drawn.extend(batch[0][:, 0].tolist())
            return super().training_step(batch, batch_idx)

    Keep.drawn = []
    trainer(strategy, 2).fit(Keep(), loader())
    return list(Keep.drawn)


MICRO = 64  # batches of a step


class ManyMicroGradients(L.LightningModule):
    """A gradient of 1, then many of 1e-3: in bf16 the small ones would vanish against the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False)
        self.total: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        size = 1.0 if batch_idx == 0 else 1e-3
        # The loss is divided by the number of micro-batches; the gradient is `size` exactly.
        return (self.layer.weight.float() * torch.full((1, 4), size, device=self.device)).sum() * MICRO

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.total = self.trainer.strategy.full_grad(self.layer.weight).clone()  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sum_micro_gradients(strategy: Any, precision: str) -> Tensor:
    model = ManyMicroGradients()
    data = DataLoader(TensorDataset(torch.zeros(2 * MICRO, 1)), batch_size=1)
    trainer(strategy, 2, precision=precision, accumulate_grad_batches=MICRO).fit(model, data)
    assert model.total is not None
    return model.total


class Retied(L.LightningModule):
    """A language model whose head shares the embedding, used through `F.linear`, tied again after loading."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.body = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.body[1][0].weight = self.body[0][0].weight  # tied across layers, too
        self.losses: list[float] = []

    def logits(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.body:
            hidden = hidden + layer(hidden)
        return nn.functional.linear(hidden, self.embedding.weight)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        loss = nn.functional.cross_entropy(self.logits(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit_retied(strategy: Any, path: Path, precision: str) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = Retied()
    tokens = torch.randint(0, 11, (32, 6), generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(tokens), batch_size=4)
    run = trainer(strategy, 2, precision=precision)
    run.fit(model, data)
    run.save_checkpoint(path)
    again = Retied()
    resumed = trainer(strategy, 2, precision=precision, max_epochs=2)
    resumed.fit(again, data, ckpt_path=path)
    tied = again.body[1][0].weight is again.body[0][0].weight
    return {"losses": model.losses + again.losses, "weights": state_of(again), "tied": tied}


def try_to_fit(strategy: Any, problem: str, path: Path | None = None) -> str | None:
    """The error that a misuse ends in, or None."""
    model = Classifier()
    if problem == "foreign optimizer":
        model.configure_optimizers = lambda: torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)  # type: ignore
    try:
        trainer(strategy, 2).fit(model, loader(), ckpt_path=path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def raise_on_rank_1(strategy: Any) -> None:
    class Raises(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.global_rank == 1 and batch_idx == 2:
                raise ValueError("rank 1 has had enough")
            return super().training_step(batch, batch_idx)

    trainer(strategy, 2).fit(Raises(), loader())


def sleep_on_rank_1(strategy: Any) -> None:
    class Sleeps(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.global_rank == 1 and batch_idx == 2:
                time.sleep(60)
            return super().training_step(batch, batch_idx)

    trainer(strategy, 2).fit(Sleeps(), loader())


def die_on_rank_1(strategy: Any) -> None:
    class Dies(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.global_rank == 1 and batch_idx == 2:
                os._exit(1)
            return super().training_step(batch, batch_idx)

    trainer(strategy, 2).fit(Dies(), loader())


class Wide(L.LightningModule):
    """Little to compute, much to send."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(depth)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = torch.ones(1, self.layers[0].in_features)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


WIDE_PSI = 4 * 512 * 512


def _loopback_bytes() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def bytes_on_loopback(strategy: Any, steps: int) -> float:
    """Bytes that cross the loopback device per step, between two barriers, of ranks that have not linked yet."""
    os.environ[ONLY_TCP] = "1"
    seen: list[int] = []

    class Count(L.Callback):
        def on_train_batch_start(self, run: L.Trainer, *_: Any) -> None:
            run.strategy.barrier()
            seen.append(_loopback_bytes())
            run.strategy.barrier()

    run = trainer(strategy, 2, max_steps=steps + 1, callbacks=[Count()])
    run.fit(Wide(512, 4), DataLoader(TensorDataset(torch.zeros(4 * steps, 1)), batch_size=1))
    return (seen[-1] - seen[1]) / (len(seen) - 2)


def _resident_peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


M_MMAP_THRESHOLD = -3  # of malloc.h


def peak_resident_bytes(strategy: Any) -> int:
    """What training adds to the peak of this process; 19M parameters, 75 MB."""
    # glibc keeps freed blocks of tens of MB for later; with a fixed threshold what is resident is what is live
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1_000_000) == 1
    model = Wide(1536, 8)  # a unit of 9 MB is an eighth of it: far more than a process differs by from run to run
    data = DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=1)
    before = _resident_peak()
    trainer(strategy, 2, max_steps=2).fit(model, data)
    return _resident_peak() - before


def on_native(job: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a job with torch's own collectives, as on NCCL, over gloo's."""

    def make_native(*args: Any, **kwargs: Any) -> Comm:
        control = make_comm(*args, **kwargs)
        assert isinstance(control, GlooComm)
        return NativeComm(own_group("gloo", range(control.size)), control)

    with patch.object(lightning_zero.pl.sharded_strategy, "make_comm", make_native):
        return job(*args, **kwargs)


def over_tcp(job: Callable[..., Any], *args: Any, but: Sequence[Collection[int]] = (), **kwargs: Any) -> Any:
    """`job` where ranks have no links, `but` within these groups: as if each of those were a machine."""

    class Within:
        def __init__(self, links: Links) -> None:
            self._own = next((group for group in but if dist.get_rank() in group), ())
            self.receive, self.send = links.receive, links.send

        def __contains__(self, peer: int) -> bool:
            return peer in self._own

    make = GlooComm.__init__

    def init(comm: GlooComm, group: Any, wait_timeout: Any, links: Any = None, **options: Any) -> None:
        make(comm, group, wait_timeout, None if links is None else Within(links), **options)

    with patch.object(GlooComm, "__init__", init):
        return job(*args, **kwargs)


class Watched(L.LightningModule):
    """Notes what a worker saw of its weights when it made a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)  # larger than what a message holds
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, seen = batch
        self.seen += seen.tolist()
        return self.layer(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class EditsWeights(Dataset[Any]):
    """Whoever makes an item of it reads and then clears the weights of a model, as far as it has them."""

    def __init__(self, model: Watched) -> None:
        self.model = model

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        with torch.no_grad():
            seen = float(self.model.layer.weight.abs().sum())
            self.model.layer.weight.zero_()
        return torch.full((64,), index / 8), seen


def fit_beside_a_worker_that_edits(strategy: Any) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = Watched()
    data = DataLoader(EditsWeights(model), num_workers=1, multiprocessing_context="fork")
    with patch.dict(mp.current_process()._config, daemon=False):  # a rank of a pool may have no children otherwise
        trainer(strategy, 2).fit(model, data)
    return {"seen": model.seen, "weights": state_of(model)}


class Exact(L.LightningModule):
    """All its numbers are small multiples of powers of two: sums have the same bits in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 4)])
        for number, parameter in enumerate(self.parameters()):
            values = torch.arange(parameter.numel()) % (5 + number) - 2.0
            parameter.data = (values / 4).view(parameter.shape)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, weights = batch
        for layer in self.layers:
            hidden = layer(hidden)
        return (hidden * weights).sum() / 8

    def configure_optimizers(self) -> Any:
        return RoundedSGD(self.parameters(), lr=2**-4, momentum=0.5)


class RoundedSGD(torch.optim.SGD):
    """Leaves multiples of 1/64, or products would soon have more bits than a number holds."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(64).round_().div_(64)
        return loss


def fit_exactly(strategy: Any, world: int) -> dict[str, Tensor]:
    """Five steps, each rank on its own rows."""
    model = Exact()
    start = state_of(model)
    rows = torch.arange(5 * world * 4 * 4).view(-1, 4)
    data = DataLoader(TensorDataset(rows % 7 - 3.0, rows % 5 - 2.0), batch_size=4)
    trainer(strategy, world, precision="64-true").fit(model, data)
    found = state_of(model)
    assert all(not torch.equal(found[name], start[name].double()) for name in found)
    return found
