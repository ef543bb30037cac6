"""Engines that train, save and resume on ranks as threads; and what they save, to be compared in every bit."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.checkpoint import Saver, StoredCheckpoint
from lightning_zero.config import Offload
from lightning_zero.run.engine import Engine, Options
from lightning_zero.shards.slot import slot_of
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from models import seeded
from thread_world import ThreadWorld

T = TypeVar("T")
Maker = Callable[[nn.Module], list[Optimizer]]


@dataclass(frozen=True)
class Place:
    """Where a run is saved or resumed."""

    stage: int
    world: int
    autocast: bool = False
    replicate_size: int = 1
    offload: Offload | None = None

    def options(self) -> Options:
        dtype = torch.bfloat16 if self.autocast else None
        return Options(autocast_dtype=dtype, replicate_size=self.replicate_size, offload=self.offload)

    def run(self, function: Callable[[Comm], T]) -> list[T]:
        """The results of all ranks."""
        return [function(LocalComm())] if self.world == 1 else ThreadWorld(self.world).run(function)


class Everything(nn.Module):
    """Tied and frozen parameters, both at once, one in bf16, one without dimensions, one without elements, one that is
    never used, one in another memory format; buffers of several dtypes, one of them twice, one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.third.weight = self.second.weight
        self.frozen, self.frozen_too = nn.Linear(7, 7), nn.Linear(7, 7)
        self.frozen_too.weight = self.frozen.weight
        self.frozen.requires_grad_(False)
        self.frozen_too.requires_grad_(False)
        self.convolution = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.halves = nn.Parameter(torch.randn(11).bfloat16())
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.nothing = nn.Parameter(torch.empty(0, 3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("table", torch.arange(6).view(2, 3).to(torch.int16))
        mean = torch.randn(7)
        self.register_buffer("mean", mean)
        self.register_buffer("same_mean", mean)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.count: Tensor

    def forward(self, signal: Tensor) -> Tensor:
        self.count += 1
        hidden = torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(signal))))))
        hidden = hidden + self.frozen_too(self.frozen(hidden))
        seen = self.convolution(signal[:1, :3, None, None].expand(1, 3, 2, 2)).sum()
        return hidden.sum() * self.scale * 0.1 + seen + self.halves.float().square().sum() + self.nothing.sum()


class Toy(Optimizer):
    """State of every kind: as long as the parameter, of shapes of its own, and plain values."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "name": "toy", "betas": (0.5, 0.9)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["trace"] = torch.zeros_like(parameter)
                    state["window"] = torch.zeros(2, 13, dtype=parameter.dtype)
                    state["cube"] = torch.full((3, 1, 2), float(number), dtype=parameter.dtype)
                    state["alone"] = torch.tensor(0.5, dtype=parameter.dtype)
                    state["hollow"] = torch.zeros(0, 4, dtype=parameter.dtype)
                    state |= {"seen": 0, "decay": 0.1, "knows": None, "warm": False}  # no text: torch itself loses it
                state["trace"].mul_(0.9).add_(parameter.grad)
                state["window"][:, state["seen"] % 13] = number + 1
                state["seen"] += 1
                state["decay"] /= 3
                state["warm"] = True
                parameter.sub_(state["trace"], alpha=group["lr"])


def trainable(model: nn.Module) -> list[Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


MAKERS: dict[str, Maker] = {
    "adamw": lambda model: [torch.optim.AdamW(trainable(model), lr=0.01, amsgrad=True)],
    "sgd": lambda model: [torch.optim.SGD(trainable(model), lr=0.01, momentum=0.9)],
    "toy": lambda model: [Toy(trainable(model))],
}


def one_of_each(model: nn.Module) -> list[Optimizer]:
    """Three optimizers that divide the parameters among them."""
    shares = [trainable(model)[number::3] for number in range(3)]
    return [
        torch.optim.AdamW(shares[0], lr=0.01),
        torch.optim.SGD([{"params": [p], "lr": 0.01 * (at + 1)} for at, p in enumerate(shares[1])], momentum=0.9),
        Toy(shares[2]),
    ]


def everything() -> nn.Module:
    return seeded(Everything)


def strange(model: nn.Module, rank: int) -> nn.Module:
    """A copy of it in which nothing is as it was, and every rank has something else."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(rank + 3)
    return model


def train(
    model: nn.Module, optimizers: Sequence[Optimizer], place: Place, steps: int = 2, start: int = 0
) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        signal = torch.linspace(-1, 1, 20).view(4, 5).sin() * (step + 1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=place.autocast, cache_enabled=False):
            loss = model(signal)
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def tree_of(engine: Engine, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """What Lightning would hand over to be saved."""
    return {
        "state_dict": engine.states.spread_model(),
        "optimizer_states": [engine.states.spread_optimizer(optimizer) for optimizer in optimizers],
    }


def save(comm: Comm, engine: Engine, optimizers: Sequence[Optimizer], path: Path) -> None:
    engine.loans.end_all()
    Saver(comm.board).save(tree_of(engine, optimizers), str(path), {})


def states_of(engine: Engine, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """All that a checkpoint must hold, whole and in storage of its own. A collective."""
    engine.loans.end_all()
    return {
        "state_dict": {name: value.clone() for name, value in engine.states.full_model().items()},
        "optimizer_states": copy.deepcopy([engine.states.full_optimizer(optimizer) for optimizer in optimizers]),
    }


def train_and_save(start: nn.Module, make: Maker, place: Place, path: Path, steps: int = 2) -> dict[str, Any]:
    """A run that ends with a save; what it had."""

    def on_rank(comm: Comm) -> dict[str, Any]:
        model = copy.deepcopy(start)
        optimizers = make(model)
        engine = Engine(model, optimizers, stage=place.stage, comm=comm, options=place.options())
        train(model, optimizers, place, steps)
        save(comm, engine, optimizers, path)
        return states_of(engine, optimizers)

    return place.run(on_rank)[0]


def resume(
    comm: Comm,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    place: Place,
    checkpoint: StoredCheckpoint,
    *,
    weights_only: bool = False,
) -> Engine:
    tree = checkpoint.tree()
    with checkpoint.reading_together(model, comm):
        model.load_state_dict(tree["state_dict"])
    engine = Engine(model, optimizers, stage=place.stage, comm=comm, options=place.options())
    if not weights_only:
        engine.states.load_optimizers(tree["optimizer_states"])
    return engine


def resumed_at(place: Place, start: nn.Module, make: Maker, path: Path) -> list[dict[str, Any]]:
    """What each rank goes on with, and has taken a step from."""

    def on_rank(comm: Comm) -> dict[str, Any]:
        model = strange(start, comm.rank)
        optimizers = make(model)
        engine = resume(comm, model, optimizers, place, StoredCheckpoint(path))
        found = states_of(engine, optimizers)
        train(model, optimizers, place, steps=1, start=2)
        engine.close()
        return found

    return place.run(on_rank)


def load_into(engine: Engine, comm: Comm, checkpoint: StoredCheckpoint) -> None:
    """What an engine that is there already takes from a checkpoint, range by range."""
    with engine.states.loading(lambda: checkpoint.verify_rest(comm.rank, comm.size)):
        engine.module.load_state_dict(checkpoint.tree()["state_dict"])


def differences(found: Any, expected: Any, place: str = "") -> list[str]:
    """Where two trees are not the same in type and in every bit."""
    if isinstance(expected, Tensor):
        is_same = isinstance(found, Tensor) and (found.dtype, found.shape) == (expected.dtype, expected.shape)
        return [] if is_same and torch.equal(bits(found), bits(expected)) else [f"{place}: {found} for {expected}"]
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or found.keys() != expected.keys():
            return [f"{place}: keys {sorted(found, key=repr)} for {sorted(expected, key=repr)}"]
        return [told for key in expected for told in differences(found[key], expected[key], f"{place}/{key}")]
    if isinstance(expected, list | tuple) and isinstance(found, type(expected)) and len(found) == len(expected):
        return [told for at, item in enumerate(expected) for told in differences(found[at], item, f"{place}/{at}")]
    is_same = type(found) is type(expected) and found == expected
    return [] if is_same else [f"{place}: {found!r} for {expected!r}"]


def bits(tensor: Tensor) -> Tensor:
    """So that a NaN is itself, and zeros have signs."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def wrong_pieces(engine: Engine, optimizers: Sequence[Optimizer], saved: Mapping[str, Any]) -> list[str]:
    """Where what this rank has is not its part of what was saved. Looks at this rank alone, and costs little.

    Args:
        saved: what `states_of` gave.
    """
    told: list[str] = []
    values = saved["state_dict"]
    for group in engine.groups:
        for slot in group.slots:
            within = slice(slot.piece.start, slot.piece.stop)
            master = slot.stepped(group.master).reshape(-1)
            told += differences(master, values[slot.name].reshape(-1)[within], slot.name)
            if group.stays_full:
                resting = values[slot.name].to(group.kind.resting)
                told += differences(slot.view(group.full_param), resting, f"what forward sees of {slot.name}")
        told += differences(
            group.owned_param.read(), group.master.read().to(group.kind.resting), f"what is sent of {group.name}"
        )
    for name, value in engine.module.state_dict(keep_vars=True).items():
        told += [] if slot_of(value) is not None else differences(value.detach(), values[name], name)
    for number, (optimizer, state_dict) in enumerate(zip(optimizers, saved["optimizer_states"], strict=True)):
        told += differences(optimizer.state_dict()["param_groups"], state_dict["param_groups"], f"optimizer {number}")
        for place, parameter in enumerate(p for param_group in optimizer.param_groups for p in param_group["params"]):
            slot = slot_of(parameter)
            told += _wrong_state(
                optimizer.state.get(parameter, {}),
                state_dict["state"].get(place, {}),
                slice(slot.piece.start, slot.piece.stop),
                slot.shape,
                f"state {place} of optimizer {number}",
            )
    return told


def _wrong_state(
    found: Mapping[str, Any], saved: Mapping[str, Any], piece: slice, shape: tuple[int, ...], place: str
) -> list[str]:
    is_elsewhere = piece.start == piece.stop and 0 not in shape
    told = [] if found.keys() == saved.keys() else [f"{place} has {list(found)} of {list(saved)}"]
    for name in found.keys() & saved.keys():
        mine, whole = found[name], saved[name]
        if isinstance(whole, Tensor) and whole.shape == shape and isinstance(mine, Tensor) and mine.shape != shape:
            whole = whole.reshape(-1)[piece]
        elif is_elsewhere and isinstance(whole, Tensor) and whole.dim():
            whole = whole.new_empty(0)
        told += differences(mine, whole, f"{place}: {name}")
    return told
