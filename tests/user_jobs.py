"""LightningModules as users write them: manual optimization, penalties, checkpointing, callbacks that read weights."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import grad_norm
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.tensorboard.summary import histogram

from jobs import CLASSES, FEATURES, Classifier, ClipsByExactNorm, loader, read_checkpoint, state_of, trainer
from models import recurrent_kernels
from opened import left_open, opened


class Gan(L.LightningModule):
    """Two optimizers, manual optimization, `toggle_optimizer`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0][:, :8]
        noise = real[:, :4] * 0.3
        for optimizer, loss_of in zip(self.optimizers(), (self.fooling, self.telling), strict=True):
            self.toggle_optimizer(optimizer)
            loss = loss_of(noise, real)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

    def fooling(self, noise: Tensor, real: Tensor) -> Tensor:
        return -self.critic(self.generator(noise)).mean()

    def telling(self, noise: Tensor, real: Tensor) -> Tensor:
        fake = self.critic(self.generator(noise).detach())
        return fake.square().mean() + (1 - self.critic(real)).square().mean()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (self.generator, self.critic)]


class Penalised(Classifier):
    """The loss reads every parameter outside any module's forward."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch) + 0.01 * sum(parameter.square().sum() for parameter in self.parameters())
        self.losses.append(loss.item())
        return loss


class ManyLayers(Classifier):
    """Convolution, LSTM, attention, weight norm, a zero-element layer and a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(8, 5))
        self.empty = nn.Linear(8, 0)

    def forward(self, x: Tensor) -> Tensor:
        image = x[:, None, :10, None] * torch.ones(10)
        features = self.bn(self.conv(image)).flatten(2)[:, :, :8]
        with recurrent_kernels():
            features = self.lstm(features)[0]
        hidden = self.encoder(features)
        return self.out(hidden.mean(1)) * self.temperature + self.empty(hidden).sum()


class Checkpointed(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.net[3], self.net[:3](self.frozen(x)), use_reentrant=False)
        return self.net[4](hidden + self.again(hidden)) * self.temperature


class ClippedByHand(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        optimizer.step()


class ClippedInBackward(Classifier):
    """Reads and edits gradients where it has just made them."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        self.losses.append(sum(p.grad.sum().item() for p in self.parameters() if p.grad is not None))


class Factored(Classifier):
    """Its optimizer looks at whole tensors."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adafactor([p for p in self.parameters() if p.requires_grad], lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


class Edited(Classifier):
    """Weights are edited in hooks, and between two forwards of one step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            with torch.no_grad():
                self.net[4].weight.mul_(0.9)
            loss = self.loss(batch)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.load_state_dict({name: value * 0.98 for name, value in self.state_dict().items()})
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.2, 0.2)
            self.temperature.data.mul_(1.01)


class Assigned(Classifier):
    """Puts tensors of its own into `p.grad` and `p.data`."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.sign() * 0.1

    def on_train_batch_end(self, *_: Any) -> None:
        self.net[0].weight.data = self.net[0].weight.data * 0.9
        self.net[1].bias.data = self.net[1].bias.data + 0.01


# Since torch 2.13 weights that rest in shards intercept every collective; before, `all_reduce` alone.
INTERCEPTS_ALL = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


class Synchronised(Classifier):
    """Averages gradients and weights by hand, and sends those of the first rank, though all ranks have them."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters() if batch_idx == 1 else ():
            parameter.data.mul_(1 + self.global_rank)  # what follows makes it the same again
            dist.broadcast(parameter if INTERCEPTS_ALL else parameter.data, 0)
        with torch.no_grad():
            for parameter in self.parameters() if batch_idx == 2 else ():
                dist.all_reduce(parameter)
                parameter.div_(2)

    def on_after_backward(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
        for work, gradient in zip(works, gradients, strict=True):
            work.wait()
            gradient.div_(2)
        for gradient in gradients:
            dist.broadcast(gradient, 0)
            dist.all_reduce(gradient)
            gradient /= 2


_KINDS = [Gan, Penalised, ManyLayers, Checkpointed, ClippedByHand, ClippedInBackward, Factored, Edited, Assigned]
MODULES = {module.__name__: module for module in [*_KINDS, Synchronised]}


def fit_module(strategy: Any, name: str, **kwargs: Any) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = MODULES[name]()
    trainer(strategy, 2, **kwargs).fit(model, loader(samples=32))  # four steps, of which the third has edits
    return {"losses": model.losses, "weights": state_of(model)}


def average_weights(strategy: Any) -> dict[str, Tensor]:
    """An exponential moving average in a callback, read after every batch."""
    average: dict[str, Tensor] = {}

    class Ema(L.Callback):
        def on_train_batch_end(self, run: L.Trainer, module: L.LightningModule, *_: Any) -> None:
            for name, parameter in module.named_parameters():
                before = average.get(name, parameter.detach().clone())
                average[name] = before * 0.9 + parameter.detach() * 0.1

    L.seed_everything(1, verbose=False)
    trainer(strategy, 2, callbacks=[Ema()]).fit(Classifier(), loader(samples=32))
    return average


def accumulate_by_epoch(strategy: Any) -> list[float]:
    L.seed_everything(1, verbose=False)
    model = Classifier()
    schedule = GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})  # of four batches
    trainer(strategy, 2, max_epochs=3, callbacks=[schedule]).fit(model, loader(samples=32))
    return model.losses


def evaluate_only(strategy: Any) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = Classifier()
    run = trainer(strategy, 2)
    loss = run.validate(model, loader(), verbose=False)
    predictions = run.predict(model, loader())
    assert predictions is not None
    return {"loss": loss[0]["val_loss"], "predictions": torch.cat([torch.as_tensor(p) for p in predictions])}


class Uneven(Classifier):
    """Rank 1 evaluates two batches more than rank 0, and logs a metric that is summed over ranks at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def val_dataloader(self) -> Any:
        return DataLoader(list(loader(seed=1))[: 2 + 2 * self.global_rank], batch_size=None)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append(self(batch[0]))
        self.log("val_loss", self.loss(batch), sync_dist=True)

    predict_dataloader = test_dataloader = val_dataloader


def evaluate_unevenly(strategy: Any, precision: str) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = Uneven()
    all_batches = {"use_distributed_sampler": False, "limit_val_batches": 1.0}
    run = trainer(strategy, 2, precision=precision, max_epochs=2, **all_batches)
    run.fit(model, loader(samples=8))
    val_loss = float(run.callback_metrics["val_loss"])
    run.test(model, verbose=False)
    predictions: Any = run.predict(model)
    return {"outputs": [*model.outputs, *predictions], "val_loss": val_loss, "losses": model.losses}


class Talkative(Classifier):
    """Calls methods that are not `forward`, uses another module's weight, and generates with a length of its own on
    every rank, in training and in validation."""

    def encode(self, x: Tensor) -> Tensor:
        return self.net[3](self.net[:3](self.frozen(x)))

    @torch.no_grad()
    def generate(self, x: Tensor, length: int) -> Tensor:
        for _ in range(length):
            hidden = self.encode(x)
            x = torch.tanh(nn.functional.linear(self.again(hidden), self.net[0].weight.t()))
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        sample = self.generate(x, 1 + 2 * self.global_rank)
        logits = self.net[4](self.encode(x)) + nn.functional.linear(self.encode(sample), self.net[4].weight)
        loss = nn.functional.cross_entropy(logits.float(), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.generate(batch[0], 3 - 2 * self.global_rank).float().sum(), sync_dist=True)


def fit_talkative(strategy: Any, precision: str) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = Talkative()
    run = trainer(strategy, 2, precision=precision)
    run.fit(model, loader(samples=24), loader(seed=1, samples=16))
    return {
        "losses": model.losses,
        "val_loss": float(run.callback_metrics["val_loss"]),
        "weights": state_of(model),
        "generated": model.generate(next(iter(loader()))[0], 2),
    }


class CompiledBlocks(L.LightningModule):
    """Blocks that are compiled one by one, around an embedding and a head that are not."""

    def __init__(self, compiles: bool = True, depth: int = 2) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 16)
        blocks = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(depth)]
        wrap: Any = (lambda block: torch.compile(block, backend="aot_eager")) if compiles else (lambda block: block)
        self.blocks = nn.ModuleList([wrap(block) for block in blocks])
        self.outer = nn.Linear(16, 5)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.inner(batch[0])[:, None]
        for block in self.blocks:
            hidden = block(hidden)
        loss = nn.functional.cross_entropy(self.outer(hidden[:, 0]).float(), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_compiled(strategy: Any, path: Path) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    L.seed_everything(1, verbose=False)
    model = CompiledBlocks()
    run = trainer(strategy, 2)
    run.fit(model, loader())
    run.save_checkpoint(path)
    run.strategy.barrier()
    return {
        "losses": model.losses,
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "saved": read_checkpoint(path)["state_dict"],
    }


def resume_compiled(strategy: Any, path: Path, *, compiles: bool) -> list[float]:
    torch._dynamo.reset()
    model = CompiledBlocks(compiles)
    trainer(strategy, 2, max_epochs=2).fit(model, loader(), ckpt_path=path)
    return model.losses


def fit_compiled_module(strategy: Any) -> list[float]:
    torch._dynamo.reset()
    L.seed_everything(1, verbose=False)
    model = CompiledBlocks(compiles=False, depth=1)
    run = trainer(strategy, 2, max_steps=2)
    run.fit(torch.compile(model, backend="aot_eager"), loader())  # type: ignore[arg-type]
    return model.losses


class CompiledMethod(CompiledBlocks):
    """Its loss is compiled: the calls of its layers, and a penalty on weights that no layer reads there."""

    def __init__(self) -> None:
        super().__init__(compiles=False, depth=1)
        self.loss = torch.compile(self.penalised, backend="aot_eager")

    def penalised(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x))
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return nn.functional.cross_entropy(self.outer(hidden).float(), y) + 0.01 * penalty

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.losses.append(loss.item())
        return loss


def fit_compiled_method(strategy: Any, precision: str) -> list[float]:
    torch._dynamo.reset()
    L.seed_everything(1, verbose=False)
    model = CompiledMethod()
    trainer(strategy, 2, max_steps=3, precision=precision).fit(model, loader())
    return model.losses


class GradientReader(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        is_ours = hasattr(strategy, "engine")
        named = dict(self.named_parameters())
        with_grad = {name: parameter for name, parameter in named.items() if parameter.grad is not None}
        self.seen = {
            "none": sorted(named.keys() - with_grad.keys()),
            "grads": {name: parameter.grad.clone() for name, parameter in with_grad.items()},
            "grad_norm": {name: float(value) for name, value in grad_norm(self, 2).items()},
        }
        if is_ours:
            self.seen["full_grads"] = {name: strategy.full_grad(parameter) for name, parameter in with_grad.items()}
            self.seen["grad_norms"] = {name: float(value) for name, value in strategy.grad_norms().items()}


def read_gradients(strategy: Any, precision: str) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = GradientReader()
    trainer(strategy, 2, precision=precision, max_steps=3).fit(model, loader())
    return model.seen


class AccumulatedByHand(Classifier):
    """Three backwards for each step, the first two inside `no_sync`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, strategy = self.optimizers(), self.trainer.strategy
        alone: Any = strategy.no_sync if hasattr(strategy, "engine") else strategy.model.no_sync
        optimizer.zero_grad()
        for scale in (1.0, 0.5):
            with alone():
                self.manual_backward(scale * self.loss(batch))
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.item())


def accumulate_by_hand(strategy: Any) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = AccumulatedByHand()
    trainer(strategy, 2).fit(model, loader())
    return {"losses": model.losses, "weights": state_of(model)}


class Curious(Classifier):
    """Rank 0 alone reads a weight, draws a sample and copies a layer, at each of the places where users do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def look(self, *_: Any) -> None:
        if self.global_rank == 0:
            self.seen.append(self.net[0].weight.norm().item())
            with torch.no_grad():
                self.seen.append(self(torch.ones(3, FEATURES)).float().sum().item())
            self.seen.append(copy.deepcopy(self.net[3]).state_dict()["0.weight"].sum().item())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.look()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.look()
        self.log("loss", loss := super().training_step(batch, batch_idx), sync_dist=True)
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.look()

    on_before_backward = on_after_backward = on_validation_epoch_end = on_train_end = look


def look_on_rank_0_only(strategy: Any, precision: str) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = Curious()
    trainer(strategy, 2, precision=precision).fit(model, loader(), loader(seed=1, samples=16))
    return {"losses": model.losses, "seen": model.seen}


class Exporting(Classifier):
    """Writes files of its own while it trains: of a copy as those packages do that ask each weight for memory of its
    own, and of its head alone."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.found: dict[str, Any] = {}

    def on_train_end(self) -> None:
        place = self.folder / str(self.global_rank)
        place.mkdir(parents=True)
        head = self.net[4]
        save_file(self.net.state_dict(), place / "state")
        save_model(copy.deepcopy(self.net), str(place / "model"))
        torch.save(copy.deepcopy(head).state_dict(), place / "head")
        self.found = {name: load_file(place / name) for name in ("state", "model")}
        self.found |= {"head": torch.load(place / "head"), "bytes": (place / "head").stat().st_size}


def export_at_the_end(strategy: Any, folder: Path) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = Exporting(folder)
    trainer(strategy, 2).fit(model, loader())
    return model.found


class Routed(L.LightningModule):
    """Ranks go different ways by their data: experts inside blocks, a head for each rank, a branch some steps take, and
    a unit that one rank runs twice."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList([Experts(width) for _ in range(5)])
        self.heads = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, width), nn.Linear(width, CLASSES)) for _ in range(3)]
        )
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = torch.tanh(self.inner(batch[0]))
        for number, block in enumerate(self.blocks):
            if number != 2 or (batch_idx + self.global_rank) % 3:
                x = x + block(x, 1 + (batch_idx + number + self.global_rank) % 2)
            if number == 3 and self.global_rank == batch_idx % 2:
                x = x + block(x, 1)
        head = self.heads[(batch_idx // 2 * self.global_rank) % 3]
        loss = nn.functional.cross_entropy(head(x).float(), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])

    def forward(self, x: Tensor, used: int) -> Tensor:
        x = torch.tanh(self.before(x))
        return sum((expert(x) for expert in self.experts[:used]), torch.zeros_like(x))


def fit_routed(strategy: Any, **kwargs: Any) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = Routed()
    trainer(strategy, 2, **kwargs).fit(model, loader(samples=64))
    return {"losses": model.losses, "weights": state_of(model)}


def read_on_rank_0_after_each_batch(
    strategy: Any, others_wait_for_it: bool = False, **kwargs: Any
) -> list[list[float]]:
    """The losses and what rank 0 read; where `others_wait_for_it`, they are in a collective of the user's own."""

    class Reader(Classifier):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_rank == 0:
                norms.extend(parameter.norm().item() for parameter in self.net.parameters())
            if others_wait_for_it:
                torch.distributed.barrier()

    L.seed_everything(1, verbose=False)
    norms: list[float] = []
    model = Reader()
    trainer(strategy, 2, **kwargs).fit(model, loader(samples=32))
    return [model.losses, norms]


class CuriousOfGradients(ClipsByExactNorm):
    """Rank 0 alone looks at gradients, where most people log them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def look(self, *_: Any) -> None:
        if self.global_rank == 0:
            grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            self.seen += [torch.from_numpy(np.histogram(grad.numpy(), 4)[1]) for grad in grads]
            self.seen += [torch.tensor(histogram("", grad, bins="auto").value[0].histo.bucket) for grad in grads]
            self.seen += [grad.norm() for grad in grads[::-1]]

    on_after_backward = on_before_optimizer_step = look


def look_at_gradients_on_rank_0_only(strategy: Any, **kwargs: Any) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = CuriousOfGradients()
    trainer(strategy, 2, **kwargs).fit(model, loader(samples=32))
    return {"losses": model.losses, "seen": model.seen}


class Skipping(ClipsByExactNorm):
    """Has no loss in some batches: `without(rank, batch)`. Where `told`, it says 0 instead."""

    def __init__(self, without: Callable[[int, int], bool], told: bool) -> None:
        super().__init__()
        self.without, self.told = without, told

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.without(self.global_rank, batch_idx):
            return super().training_step(batch, batch_idx)
        return 0 * self.loss(batch) if self.told else None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class SkippingInBackward(Skipping):
    """Has a backward of its own."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)


class KeepsGradients(Classifier):
    """Lets gradients of earlier batches stay, in automatic optimization: all of them, or those of every other batch."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.always = always

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if not self.always and batch_idx % 2 == 0:
            optimizer.zero_grad()


def fit_keeping_gradients(strategy: Any, always: bool) -> list[float]:
    L.seed_everything(1, verbose=False)
    model = KeepsGradients(always=always)
    trainer(strategy, 2).fit(model, loader(samples=48))
    return [float(loss) for loss in model.losses]


def rank_1_skips_one(rank: int, batch_idx: int) -> bool:
    return rank == 1 and batch_idx == 1


def all_skip_the_last_two(rank: int, batch_idx: int) -> bool:
    return batch_idx in (2, 3)


def fit_skipping(
    strategy: Any,
    without: Callable[[int, int], bool],
    told: bool = False,
    kind: type[Skipping] = Skipping,
    **kwargs: Any,
) -> Any:
    """Four batches on each rank."""
    L.seed_everything(1, verbose=False)
    model, batches = kind(without, told), loader(samples=32)
    model.on_before_optimizer_step = lambda *_: None  # type: ignore[method-assign]  # which would log norms of nothing
    run = trainer(strategy, 2, **kwargs)
    run.fit(model, batches)
    return {"losses": model.losses, "weights": state_of(model), "steps": run.global_step}


class WithoutLoss(Classifier):
    """Says what hooks are told of a step that returns nothing."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        self.told: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None

    def on_after_backward(self) -> None:
        self.told.append("a backward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        pass

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.told.append(outputs)


def told_of_steps_without_a_loss(strategy: Any, world: int, by_hand: bool) -> list[Any]:
    model = WithoutLoss(by_hand=by_hand)
    trainer(strategy, world, max_steps=-1, max_epochs=1).fit(model, loader(samples=16))
    return model.told


def add_a_group_while_training(strategy: Any) -> str | None:
    """Thaws what was frozen at set-up and gives it to the optimizer, in the middle of a step."""

    class Thaws(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 1:
                self.frozen.requires_grad_(True)
                self.optimizers().add_param_group({"params": list(self.frozen.parameters())})
            return super().training_step(batch, batch_idx)

    try:
        trainer(strategy, 2).fit(Thaws(), loader())
    except RuntimeError as error:
        return str(error)
    return None


def what_a_fit_leaves_open(strategy: Any) -> list[str]:
    before = opened()
    trainer(strategy, 2).fit(Classifier(), loader(samples=24))
    gc.collect()
    return left_open(before)
