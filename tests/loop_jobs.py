"""What users put into a Trainer beside the model: plugins for precision, loaders, the tuner, modules of TorchScript."""

import copy
import io
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from jobs import CLASSES, FEATURES, loader, state_of, trainer
from lightning_zero import ZeroStrategy
from lightning_zero.pl.callbacks import SIGNALS

WIDTH = 7  # divides evenly by nothing


class Net(L.LightningModule):
    """Every parameter is used and trains."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.first, self.norm = nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH)
        self.inner: Any = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)
        self.losses: list[float] = []
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(torch.tanh(self.norm(self.first(x)))))

    def loss(self, batch: Any) -> Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        return torch.stack([cross_entropy(self(x).float(), y) for x, y in (part for part in parts if part)]).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


# -- plugins for precision, of the user's own


class Autocasts(Precision):
    precision = "bf16-mixed"

    def forward_context(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16)


class Converts(Precision):
    precision = "bf16-true"

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module.to(torch.bfloat16)

    def convert_input(self, data: Any) -> Any:
        return [item.bfloat16() if item.is_floating_point() else item for item in data]


class ScalesByHand(Precision):
    """By a constant: in `pre_backward`, and back in `post_backward`."""

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        return super().pre_backward(8 * tensor, module)

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        for parameter in module.parameters():
            parameter.grad.mul_(1 / 4)
        return super().post_backward(tensor, module)


class ClipsAllByItself(Precision):
    def clip_gradients(self, optimizer: Any, *_: Any, **__: Any) -> None:
        for parameter in self.main_params(optimizer):
            parameter.grad.clamp_(-0.01, 0.01)


class StepsAlone(Precision):
    """Asks nobody else for a backward and a step."""

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        (3 * tensor).backward(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:  # type: ignore[override]
        closure()
        return optimizer.step(**kwargs)


class ScalerOfItsOwn(Precision):
    precision = "16-mixed"

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

    def forward_context(self) -> Any:
        return torch.autocast("cpu", torch.float16)

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        return super().pre_backward(self.scaler.scale(tensor), module)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:  # type: ignore[override]
        closure()
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        stepped = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return stepped


class MixedThatClips(MixedPrecision):
    def clip_grad_by_value(self, optimizer: Any, clip_val: Any) -> None:
        nn.utils.clip_grad_value_(self.main_params(optimizer), clip_val / 2)


class HalfThatDoubles(HalfPrecision):
    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        return super().pre_backward(2 * tensor, module)


class ClipsTheLast(Precision):
    """What is clipped are its `main_params`."""

    def main_params(self, optimizer: Any) -> Iterator[Any]:
        yield from list(super().main_params(optimizer))[-2:]


BY_VALUE: dict[str, Any] = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
PLUGINS: dict[str, tuple[Callable[[], Precision], dict[str, Any]]] = {
    "Autocasts": (Autocasts, {}),
    "Converts": (Converts, {}),
    "ScalesByHand": (ScalesByHand, {}),
    "ClipsAllByItself": (ClipsAllByItself, {"gradient_clip_val": 0.3}),
    "StepsAlone": (StepsAlone, {}),
    "ScalerOfItsOwn": (ScalerOfItsOwn, {}),
    "MixedThatClips": (lambda: MixedThatClips("bf16-mixed", "cpu"), BY_VALUE),
    "HalfThatDoubles": (lambda: HalfThatDoubles("bf16-true"), {}),
    "ClipsTheLast": (ClipsTheLast, BY_VALUE),
}


def fit_with_plugin(strategy: Any, name: str) -> dict[str, Any]:
    make, settings = PLUGINS[name]
    return fit(strategy, Net, plugins=[make()], **settings)


# -- TorchScript


class Repeats(nn.Module):
    """Calls a module in a loop, and holds a parameter and statistics itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.gamma = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.tanh(self.linear(x)) * self.gamma
        return self.norm(x)

    @torch.jit.export
    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Scripted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(Repeats())


class ScriptedMethod(Scripted):
    """Calls an exported method; copies the module and writes it to a file in mid-training."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner.encode(torch.tanh(self.norm(self.first(x)))))

    def on_train_batch_end(self, *_: Any) -> None:
        file, x = io.BytesIO(), torch.ones(2, WIDTH)
        torch.jit.save(self.inner, file)
        file.seek(0)
        self.seen[f"copied {self.global_step}"] = copy.deepcopy(self.inner).encode(x).detach()
        self.seen[f"saved {self.global_step}"] = torch.jit.load(file).encode(x).detach()


class ScriptedInBlocks(Net):
    """Half of each block is frozen, and of TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(torch.jit.script(Repeats()), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
        for block in blocks:
            for parameter in block[0].parameters():
                parameter.requires_grad_(False)
        self.inner = nn.Sequential(*blocks)


class Traced(Net):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), torch.ones(2, WIDTH))


SCRIPTED = {kind.__name__: kind for kind in (Scripted, ScriptedMethod, ScriptedInBlocks, Traced)}


def fit_scripted(strategy: Any, name: str, **kwargs: Any) -> dict[str, Any]:
    with torch.jit.optimized_execution(False):  # else what is fused differs from run to run
        return fit(strategy, SCRIPTED[name], **kwargs)


# -- loaders


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = loader(seed=10 + int(os.environ["RANK"]), samples=12).dataset
        return iter([data[index] for index in range(12)])


def combined(mode: str) -> CombinedLoader:
    return CombinedLoader({"a": loader(0, samples=24), "b": loader(1, samples=16)}, mode)  # type: ignore[arg-type]


class OverLoaders(Net):
    """Data of all kinds: in training combined as `mode` says, in validation several, and both made anew each epoch."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    def train_dataloader(self) -> Any:
        if self.mode == "stream":
            return DataLoader(Stream(), batch_size=4)
        if self.mode == "sequential":  # which Lightning has for evaluation alone
            return loader(seed=self.current_epoch, samples=16 + 8 * self.current_epoch)
        return combined(self.mode)

    def val_dataloader(self) -> Any:
        if self.mode == "stream":
            return [
                loader(2, samples=16),
                loader(3 + self.current_epoch, samples=8),
                DataLoader(Stream(), batch_size=4),
            ]
        return combined(self.mode)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", loss := self.loss(batch), sync_dist=True)
        self.seen[f"{self.current_epoch} {batch_idx} {dataloader_idx}"] = loss.detach()

    def on_train_end(self) -> None:
        self.seen.update({name: torch.as_tensor(value) for name, value in self.trainer.callback_metrics.items()})


MODES = ["min_size", "max_size_cycle", "max_size", "sequential", "stream"]


def fit_over_loaders(strategy: Any, mode: str) -> dict[str, Any]:
    all_batches = {"reload_dataloaders_every_n_epochs": 1, "limit_val_batches": 1.0}  # loaders differ in their length
    return fit(strategy, lambda: OverLoaders(mode), max_epochs=2, **all_batches)


# -- the tuner


def find_lr_and_fit(strategy: Any, folder: str) -> dict[str, Any]:
    """With what was tried, and how the state was before and after."""
    L.seed_everything(1, verbose=False)
    model = Net(lr=1e-3)
    run = trainer(strategy, 2, enable_checkpointing=True, default_root_dir=folder)
    before, handlers = state_of(model), [signal.getsignal(number) for number in SIGNALS]
    found: Any = Tuner(run).lr_find(model, loader(), num_training=8)
    restored = all(torch.equal(value, before[name]) for name, value in state_of(model).items())
    handled = [signal.getsignal(number) is before for number, before in zip(SIGNALS, handlers, strict=True)]
    run.fit(model, loader())
    return {
        "losses": model.losses + found.results["loss"] + found.results["lr"] + [model.lr],
        "weights": state_of(model),
        "seen": {"restored": torch.tensor(restored), "handled": torch.tensor(handled)},
        "left": sorted(name for name in os.listdir(folder) if name.startswith(".lr_find")),
    }


def find_batch_size(strategy: Any) -> str:
    try:
        Tuner(trainer(strategy, 2)).scale_batch_size(Net(), train_dataloaders=loader(), mode="binsearch")
    except ValueError as error:
        return str(error)
    return "found one"


# -- steps without a loss


class Scheduled(Net):
    """The second and third batch have no loss, on any rank; the gradients of the first may overflow."""

    def __init__(self, overflows: bool = False, interval: str = "step") -> None:
        super().__init__()
        self.overflows, self.interval = overflows, interval
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx in (1, 2):
            return None
        return super().training_step(batch, batch_idx) * (float("inf") if self.overflows and batch_idx == 0 else 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def rates_of_steps_without_a_loss(
    strategy: Any, world: int, overflows: bool = False, **kwargs: Any
) -> tuple[list[float], int]:
    """Four batches on each rank."""
    model = Scheduled(overflows)
    run = trainer(strategy, world, **kwargs)
    run.fit(model, loader(samples=16 * world))
    return model.rates, run.global_step


def rates_of_epochs_that_overflow(strategy: Any, world: int) -> list[float]:
    """Of one batch on each rank."""
    model = Scheduled(overflows=True, interval="epoch")
    run = trainer(strategy, world, max_epochs=3, precision="16-mixed")
    run.fit(model, loader(samples=4 * world))
    return model.rates


# -- optimizers and losses that cannot work, or seem not to


class InTwoOptimizers(Net):
    """One steps all parameters, another one some of them again."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        all_of_them, some = torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.AdamW(self.last.parameters())
        return [all_of_them, some]

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        super().training_step(batch, batch_idx)
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()


class WithoutGradient(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx).detach()


class SearchesALine(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")


class OverSomeoneElses(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *nn.Linear(3, 3).parameters()], lr=0.1)


class WithoutGradientOnRank1(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss.detach() if (self.global_rank, batch_idx) == (1, 1) else loss


INPUTS = {
    kind.__name__: kind
    for kind in (InTwoOptimizers, WithoutGradient, SearchesALine, OverSomeoneElses, WithoutGradientOnRank1)
}


def fit_input(strategy: Any, name: str) -> Any:
    """What a fit comes to, or its error."""
    try:
        return fit(strategy, INPUTS[name])
    except (RuntimeError, ValueError) as error:
        return str(error)


def fit(strategy: Any, make: Callable[[], Net], **kwargs: Any) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = make()
    is_own = isinstance(model, OverLoaders)
    trainer(strategy, 2, num_sanity_val_steps=0, **kwargs).fit(model, None if is_own else loader(samples=24))
    return {"losses": model.losses, "weights": state_of(model), "seen": model.seen}


# -- steps that fail


class FailingSGD(torch.optim.SGD):
    """Raises after so many parameters, if any."""

    fails_after: int | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for number, parameter in enumerate(p for p in self.param_groups[0]["params"] if p.grad is not None):
            if number == self.fails_after:
                raise ArithmeticError("the optimizer's own")
            parameter.sub_(parameter.grad, alpha=0.1)
        return loss


class FailingNet(Net):
    """Its second step fails, on one rank or on all."""

    def __init__(self, fails_after: int, rank: int | None = None) -> None:
        super().__init__()
        self.fails_after, self.rank = fails_after, rank

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.rank in (None, self.global_rank):
            self.trainer.optimizers[0].fails_after = self.fails_after

    def configure_optimizers(self) -> Any:
        return FailingSGD(self.parameters())


class CatchesIt(FailingNet):
    """Notes what its parameters are where it catches the error, and trains on."""

    def __init__(self) -> None:
        super().__init__(fails_after=0)
        self.automatic_optimization = False
        self.shapes: list[list[torch.Size]] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        try:
            optimizer.step()
        except ArithmeticError:
            self.shapes += [[p.shape for p in self.parameters()], [p.grad.shape for p in self.parameters()]]
            optimizer.optimizer.fails_after = None


class CatchesThatOfBackward(Net):
    """Trains on after a backward that fails in the middle; under DDP, which cannot, after one that fails at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        try:
            loss = self.loss(batch)
            self.manual_backward(loss)
            if batch_idx == 1:
                raise KeyboardInterrupt
            optimizer.step()
        except KeyboardInterrupt:
            pass
        self.losses.append(loss.item())
        optimizer.zero_grad()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(torch.tanh(self.norm(self.first(x))))
        if len(self.losses) == 1 and isinstance(self.trainer.strategy, ZeroStrategy):
            hidden.register_hook(interrupt)
        return self.last(hidden)


def interrupt(_: Tensor) -> None:
    raise KeyboardInterrupt


def shapes_where_an_error_is_caught(strategy: Any) -> list[list[torch.Size]]:
    """With those of a model that does not train."""
    model = CatchesIt()
    trainer(strategy, 2).fit(model, loader())
    return [*model.shapes, [parameter.shape for parameter in CatchesIt().parameters()]]


def errors_of_a_fit_that_fails_on_one_rank(strategy: Any, rank: int, folder: str) -> list[str]:
    """The error that ends the fit, and those before it."""
    try:
        trainer(strategy, 2, callbacks=[OnExceptionCheckpoint(folder)], enable_checkpointing=True).fit(
            FailingNet(1, rank), loader()
        )
    except Exception as error:
        told: list[BaseException | None] = [error]
        while told[-1] is not None:
            told.append(told[-1].__context__)
        return [f"{type(one).__name__}: {one}" for one in told[:-1]]
    return []


def fit_that_fails(strategy: Any, fails_after: int, folder: str | None) -> dict[str, Any]:
    """What the fit raised, warned of and saved, and whether the module is whole."""
    model = FailingNet(fails_after)
    callbacks = [] if folder is None else [OnExceptionCheckpoint(folder)]
    run = trainer(strategy, 2, callbacks=callbacks, enable_checkpointing=folder is not None)
    told: dict[str, Any] = {"raised": None}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            run.fit(model, loader())
        except Exception as error:
            told["raised"] = [type(error).__name__, type(error.__context__).__name__]
    told["warned"] = sum("ended with an error in the middle" in str(warning.message) for warning in warned)
    told["whole"] = [p.shape for p in model.parameters()] == [p.shape for p in FailingNet(0).parameters()]
    told["saved"] = [] if folder is None else sorted(path.name for path in Path(folder).glob("*"))
    return told
