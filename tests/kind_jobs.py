"""LightningModules with parameters of every kind, and with hooks, groups and optimizers of every kind on them."""

import collections
import gc
import logging
import math
import os
import types
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from edit_jobs import tensors_of
from jobs import CLASSES, FEATURES, loader, read_checkpoint, state_of, trainer
from models import recurrent_kernels

WIDTH = 9  # divides evenly by nothing
SAMPLES = 24  # three steps on two ranks


class Kind(L.LightningModule):
    """Two layers; what is special goes between them, in `inside`."""

    samples = 16  # two steps on two ranks

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.losses: list[float] = []
        self.seen: dict[str, list[Tensor]] = collections.defaultdict(list)

    def inside(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inside(torch.tanh(self.first(x).float())))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]).float(), batch[1])
        self.losses.append(loss.item())
        return loss

    def see(self, name: str, value: Tensor) -> None:
        self.seen[name].append(value.detach().clone())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                # of a two-byte parameter it is in fp32 here: a declared deviation from DDP
                self.see(f"gradient of {name}", parameter.grad.to(parameter.dtype))

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.trainable, lr=1e-2)


# -- shapes, dtypes and layouts


class NoDimensions(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shifts = nn.ParameterList([torch.tensor(0.1 * index) for index in range(5)])

    def inside(self, hidden: Tensor) -> Tensor:
        return sum((self.scale * hidden + shift for shift in self.shifts), torch.zeros(()))


class NoElements(Kind):
    """A layer of nothing, a unit of nothing, a table of nothing; one that is used, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(WIDTH, 0)
        self.wide = nn.Linear(0, WIDTH)
        self.nothing = nn.ParameterDict({"flat": torch.zeros(0), "box": torch.zeros(3, 0, 2)})
        self.table = nn.Embedding(0, 5)

    def inside(self, hidden: Tensor) -> Tensor:
        return hidden + self.wide(self.narrow(hidden)) + self.nothing["flat"].sum() * self.nothing["box"].sum()


class SmallerThanTheWorld(Kind):
    """Units of one element, of one that no rank but one can own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.PReLU(), nn.Linear(1, 1, bias=False)) for _ in range(3)])

    def inside(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden[..., None]).squeeze(-1)
        return hidden


class MixedDtypes(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in (torch.bfloat16, torch.float64, torch.float16)
        )
        self.codes = nn.Parameter(torch.arange(WIDTH, dtype=torch.int8), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(WIDTH) % 2 == 0, requires_grad=False)

    def inside(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden.to(layer.weight.dtype)).float()
        return hidden * self.mask + 0.01 * self.codes

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.trainable, lr=1e-2, eps=1e-3)  # the usual one is 0 in fp16


class Complex(Kind):
    """A filter in frequency space, and a phase."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
        self.mixing = nn.Linear(WIDTH // 2 + 1, WIDTH // 2 + 1, dtype=torch.complex128)
        self.phase = nn.Parameter(torch.tensor(0.3 + 0.1j))

    def inside(self, hidden: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(hidden) * self.filter * self.phase
        return torch.fft.irfft(self.mixing(spectrum.to(torch.complex128)), n=WIDTH).float()


class Turned(Kind):
    """A layer whose weight came the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight = nn.Parameter(self.first.weight.detach().t().contiguous().t())


class NotContiguous(Kind):
    """Transposed, with gaps, and in the middle of something else."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH, _weight=torch.randn(WIDTH, 4).t())
        self.gaps = nn.Parameter(torch.randn(2 * WIDTH, WIDTH)[::2])
        parts = torch.randn(3, WIDTH)
        self.up, self.down = nn.Parameter(parts[1]), nn.Parameter(parts[2])

    def inside(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.gaps + self.table(torch.arange(len(hidden)) % 4)) * self.up + self.down


class ChannelsLast(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1))
        self.flat = self.flat.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.deep = nn.Conv3d(2, 3, 2).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]

    def inside(self, hidden: Tensor) -> Tensor:
        image = hidden[:, None, :, None] * torch.linspace(-1, 1, 4 * WIDTH).view(4, 1, WIDTH)
        planes = self.flat(image.contiguous(memory_format=torch.channels_last))
        boxes = self.deep(image.view(-1, 2, 2, WIDTH, WIDTH).contiguous(memory_format=torch.channels_last_3d))
        return hidden + planes.float().mean((1, 2, 3))[:, None] + boxes.float().mean((1, 2, 3, 4))[:, None]


class Recurrent(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.projected = nn.LSTM(8, 6, proj_size=2, batch_first=True)
        self.gru = nn.GRU(2, 3, batch_first=True)
        self.rnn = nn.RNN(3, 3, batch_first=True)
        self.cell = nn.GRUCell(3, WIDTH)

    def inside(self, hidden: Tensor) -> Tensor:
        sequence = hidden.view(-1, 3, 3)
        with recurrent_kernels():
            for layer in (self.lstm, self.projected, self.gru, self.rnn):
                sequence, _ = layer(sequence)
        for item in sequence.unbind(1):
            hidden = self.cell(item.to(hidden.dtype), hidden)
        return hidden


# -- what does not train, or not by itself


class Adapted(nn.Module):
    """LoRA: a frozen layer and two thin ones that train."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + nn.functional.linear(nn.functional.linear(x, self.down), self.up)


class Adapters(Kind):
    def __init__(self, width: int = WIDTH, frozen: int = 1) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)
        self.first.requires_grad_(False)
        self.blocks = nn.ModuleList([Adapted(nn.Linear(width, width)) for _ in range(3)])
        self.blocks.extend(nn.Linear(width, width).requires_grad_(False) for _ in range(frozen))

    def inside(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden).float())
        return hidden


class Quantised(Tensor):
    """A weight in one byte per element, as libraries for quantisation make them."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> "Quantised":
        self = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)
        self.codes, self.scale = codes, scale
        return self

    @classmethod
    def of(cls, values: Tensor) -> "Quantised":
        scale = values.abs().amax() / 127
        return cls((values / scale).round().to(torch.int8), scale)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Quantised({self.codes}, {self.scale})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            return cls(args[0].codes, args[0].scale.to((kwargs or {}).get("dtype")))
        whole = [arg.codes * arg.scale if isinstance(arg, cls) else arg for arg in args]
        return func(*whole, **(kwargs or {}))


class OnQuantised(Kind):
    """Adapters on quantised weights."""

    def __init__(self) -> None:
        super().__init__()
        base = nn.Linear(WIDTH, WIDTH)
        base.weight = nn.Parameter(Quantised.of(base.weight.detach()), requires_grad=False)
        self.adapted = Adapted(base)
        self._ddp_params_and_buffers_to_ignore = ["adapted.base.weight"]  # DDP cannot send them either

    def inside(self, hidden: Tensor) -> Tensor:
        return hidden + self.adapted(hidden).float()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["adapted.base.weight"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.strict_loading = False


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).t()

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.triu()


class Parametrised(Kind):
    """Weights that are computed: once, twice over, and once for many uses."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.symmetric = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.symmetric, "weight", Symmetric())
        self.both = parametrizations.spectral_norm(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))

    def inside(self, hidden: Tensor) -> Tensor:
        with parametrize.cached():
            for _ in range(2):
                for layer in (self.orthogonal, self.symmetric, self.both):
                    hidden = torch.tanh(layer(hidden).float())
        return hidden

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.see("symmetric weight", self.symmetric.weight)


class Scale(nn.Parameter):
    """A parameter with a class, a method and an attribute of its own."""

    weight_decay = 0.1

    def applied_to(self, x: Tensor) -> Tensor:
        return x * self


class Codes(nn.Parameter):
    pass


class Subclassed(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale(torch.linspace(0.5, 1.5, WIDTH))
        self.scale.note = "mine"
        self.codes = Codes(torch.arange(WIDTH, dtype=torch.int8), requires_grad=False)
        self.first.weight.is_first = True

    def inside(self, hidden: Tensor) -> Tensor:
        return self.scale.applied_to(hidden) + 0.01 * self.codes

    def check(self) -> None:
        assert [parameter for parameter in self.parameters() if isinstance(parameter, Scale)] == [self.scale]
        assert isinstance(self.codes, Codes)
        assert self.scale.note == "mine"
        assert self.scale.weight_decay == 0.1
        assert self.first.weight.is_first

    def on_train_batch_start(self, *_: Any) -> None:
        self.check()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.check()
        super().on_before_optimizer_step(optimizer)

    def on_train_end(self) -> None:
        self.check()

    def configure_optimizers(self) -> Any:
        groups = [{"params": [p], "weight_decay": getattr(p, "weight_decay", 0.0)} for p in self.trainable]
        return torch.optim.AdamW(groups, lr=1e-2)


class Decoder(nn.Module):
    """A decoder that holds its encoder's weight."""

    def __init__(self, encoder: nn.Linear) -> None:
        super().__init__()
        self.weight = encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Shared(Kind):
    """One weight in two modules, in one module twice, in a dictionary; one module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 4)
        self.decoder = Decoder(self.encoder)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        self.blocks = nn.ModuleList([self.block, nn.Sequential(self.block, nn.Linear(WIDTH, WIDTH))])
        self.alias = self.block[0].bias
        self.table = nn.ParameterDict({"scale": self.block[1].weight})

    def inside(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.decoder(self.encoder(hidden))
        for block in self.blocks:
            hidden = block(hidden)
        return hidden * self.table["scale"] + self.alias


# -- hooks of the user's


class HookedParameters(Kind):
    """Hooks on parameters from before set-up, from after, and for a while."""

    samples = SAMPLES

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda grad: grad * 2)
        self.first.weight.register_post_accumulate_grad_hook(self.note_gradient)
        self.first.bias.register_post_accumulate_grad_hook(self.halve)

    def on_train_start(self) -> None:
        self.last.weight.register_hook(self.note_hook)
        self.last.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        self.last.bias.register_post_accumulate_grad_hook(self.halve)
        self.last.bias.register_post_accumulate_grad_hook(self.note_gradient)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.for_a_while = self.first.bias.register_hook(lambda grad: grad.sign())
        if batch_idx == 2:
            self.for_a_while.remove()

    def note_hook(self, grad: Tensor) -> None:
        self.see("gradient in a hook", grad)

    def note_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.see("accumulated gradient", parameter.grad)
        self.see("weight in a hook", parameter)

    @staticmethod
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


class HookedModules(Kind):
    """Hooks on modules from before set-up and from after; some look at the weights, some change what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)])
        self.hook(self.blocks[0])

    def on_train_start(self) -> None:
        self.hook(self.blocks[1][0])
        self.hook(self.last)

    def hook(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))
        module.register_forward_hook(self.note_weights)
        module.register_forward_hook(lambda module, args, output: output * 0.9, prepend=True)
        module.register_full_backward_pre_hook(lambda module, grad: (grad[0] * 1.2,))
        module.register_full_backward_hook(self.note_gradients)

    def note_weights(self, module: nn.Module, args: Any, output: Tensor) -> None:
        for parameter in module.parameters():
            self.see("weight in a forward hook", parameter)
        self.see("output", output)

    def note_gradients(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        for parameter in module.parameters():
            self.see("weight in a backward hook", parameter)
        self.see("gradient of the output", grad_output[0])
        return (grad_input[0] * 0.5,)

    def inside(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.float()


class GradData(Kind):
    """Writes `p.grad.data` in all ways."""

    def on_after_backward(self) -> None:
        for number, parameter in enumerate(self.trainable):
            assert parameter.grad is not None
            if number == 0:
                parameter.grad.data = parameter.grad.data.sign() * 0.1
            elif number == 1:
                parameter.grad.data.mul_(2)
            elif number == 2:
                parameter.grad.data.copy_(torch.ones_like(parameter.grad))
            else:
                parameter.grad.data = torch.full_like(parameter, 0.3)


# -- optimizers


class StateAtConstruction(Kind):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.trainable, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.2)


class Groups(Kind):
    """A group for each parameter, with a learning rate, a decay and a schedule of its own."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [parameter], "lr": 10.0 ** -(1 + number), "weight_decay": 0.1 * number, "amsgrad": number == 2}
            for number, parameter in enumerate(self.trainable)
        ]
        optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9))
        schedules = [lambda step, number=number: 1 / (1 + number * step) for number in range(len(groups))]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedules)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class TwoOptimizers(Kind):
    """Of two classes; one backward for both, and one of them steps every other time."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        slow, fast = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        fast.step()
        if batch_idx % 2:
            slow.step()
        self.zero_grad()

    def configure_optimizers(self) -> Any:
        slow = torch.optim.SGD(self.first.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        return [slow, torch.optim.AdamW(self.last.parameters(), lr=1e-2)]


class TwoOptimizersOfOneParameter(TwoOptimizers):
    """Each has a state of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.manual_backward(Kind.training_step(self, batch, batch_idx))
            optimizer.step()
            self.zero_grad()

    def configure_optimizers(self) -> Any:
        some = torch.optim.SGD([self.first.weight, self.last.bias], lr=0.1, momentum=0.9)
        return [torch.optim.Adam(self.parameters(), lr=1e-2), some]


MODULES = {
    module.__name__: module
    for module in (
        *(MixedDtypes, NotContiguous, ChannelsLast, Recurrent),
        *(OnQuantised, Shared, HookedParameters, HookedModules, GradData),
        *(NoDimensions, NoElements, SmallerThanTheWorld, Complex),
        *(Adapters, Parametrised, Subclassed),
        *(StateAtConstruction, Groups, TwoOptimizers, TwoOptimizersOfOneParameter),
    )
}
IN_TWO_BYTES_TOO = list(MODULES)[: list(MODULES).index("NoDimensions")]


def fit(strategy: Any, name: str, precision: str, path: Path) -> dict[str, Any]:
    """An epoch, a checkpoint, and a second epoch of another model and another trainer from that file."""
    path = path.with_suffix(".folder" if isinstance(strategy, dict) else ".file")
    L.seed_everything(1 + int(os.environ["RANK"]), verbose=False)  # all start from rank 0's
    model = MODULES[name]()
    run = trainer(strategy, 2, precision=precision)
    run.fit(model, loader(samples=model.samples))
    run.save_checkpoint(path)
    run.strategy.barrier()
    checkpoint = read_checkpoint(path)
    L.seed_everything(2, verbose=False)
    again = MODULES[name]()
    resumed = trainer(strategy, 2, precision=precision, max_epochs=2)
    resumed.fit(again, loader(samples=again.samples), ckpt_path=path)
    resumed.strategy.barrier()
    return {
        "losses": model.losses + again.losses,
        "seen": dict(tensors_of([model.seen, again.seen])),
        "weights": state_of(again),
        "strides": {name: torch.empty_like(p, device="meta").stride() for name, p in again.named_parameters()},
        "saved": {f"{part}.{name}": value for part in checkpoint for name, value in tensors_of(checkpoint[part])},
    }


def fit_adapters(strategy: Any, frozen: int, steps: int) -> dict[str, Any]:
    """Adapters on wide layers, and `frozen` layers more; how much there is after the third step and at the end."""
    L.seed_everything(1, verbose=False)
    model = Adapters(width=64, frozen=frozen)
    model.see = lambda *_: None  # type: ignore[method-assign]
    found: list[dict[str, int]] = []

    class Look(L.Callback):
        def on_train_batch_end(self, run: L.Trainer, *_: Any) -> None:
            if run.global_step in (3, steps):
                while gc.collect():  # what earlier jobs have left may hold more, which a next collection finds
                    pass
                kinds = collections.Counter(map(type, gc.get_objects()))
                peak = sum(run.strategy.engine.ledger.peak.values())  # type: ignore[attr-defined]
                tensors = sum(count for kind, count in kinds.items() if issubclass(kind, Tensor))
                found.append({"peak": peak, "tensors": tensors, "functions": kinds[types.FunctionType]})

    run = trainer(strategy, 2, max_steps=steps, callbacks=[Look()])
    run.fit(model, loader(samples=8 * steps))
    report = run.strategy.memory_report()  # type: ignore[attr-defined]
    return {"found": found, "report": report, "trainable": sum(p.numel() for p in model.trainable)}


def losses_of_turned(strategy: Any) -> list[float]:
    L.seed_everything(1, verbose=False)
    model = Turned()
    trainer(strategy, 2).fit(model, loader(samples=SAMPLES))
    return model.losses


def what_fit_says_of(strategy: Any, name: str) -> list[str]:
    """Messages about tensors of their own kind, on this rank."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, listener = logging.getLogger("lightning.pytorch"), Listener()
    logger.addHandler(listener)
    try:
        model = MODULES[name]()
        trainer(strategy, 2, max_steps=2, enable_model_summary=True).fit(model, loader(samples=SAMPLES))
    finally:
        logger.removeHandler(listener)
    return [message for message in said if "of their own kind" in message]
