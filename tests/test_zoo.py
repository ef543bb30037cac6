"""Every optimizer of the zoo and of torch in one run, each with a small model of its own, against DDP in every bit.

What reduces a tensor reduces the same whole tensor as under DDP, so that no reduction's order differs, either.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from compare import assert_same_bits
from lightning_zero.run.engine import Engine
from lightning_zero.shards import granularity
from lightning_zero.shards.probe import BY_TENSOR, ELEMENT_WISE, Findings, find
from lightning_zero.wire.comm import Comm
from models import seeded
from reference import average_gradients
from thread_world import ThreadWorld
from zoo import PIECES, WHOLE, Trusting, made

STEPS = 5  # one of them begins to look at whole tensors with the fifth


def formula(name: str) -> Callable[[Any], Optimizer]:
    kind = made(name, {**WHOLE, **PIECES}[name])
    return lambda parameters: kind(parameters, lr=0.01)


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    **{name: formula(name) for name in {**WHOLE, **PIECES}},
    **{
        kind.__name__: functools.partial(kind, lr=0.01)
        for kind in sorted(ELEMENT_WISE - {torch.optim.SparseAdam}, key=lambda kind: kind.__name__)
    },
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
    "torch's Muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01),
    "Trusting": functools.partial(Trusting, lr=0.01),
}


class Cage(nn.Module):
    """Parameters of every number of dimensions; a matrix of which 8-bit state is kept in blocks where it is wanted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, width), nn.Linear(width, 3)
        self.cube, self.scale = nn.Parameter(torch.randn(2, 3, 4)), nn.Parameter(torch.tensor(1.3))

    def forward(self, signal: Tensor) -> Tensor:
        hidden = torch.tanh(self.outer(torch.tanh(self.inner(signal))))
        return (hidden @ torch.tanh(self.cube) * self.scale).square().sum()


def zoo() -> nn.ModuleDict:
    return seeded(lambda: nn.ModuleDict({name: Cage(1536 if name == "EightBits" else 7) for name in MAKERS}))


def optimizers_of(model: nn.ModuleDict) -> list[Optimizer]:
    return [make(list(model[name].parameters())) for name, make in MAKERS.items()]


def loss_of(model: nn.ModuleDict, rank: int, step: int) -> Tensor:
    signal = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
    return torch.stack([cage(signal) for cage in model.values()]).sum()


def found_in(model: nn.ModuleDict, states: list[dict[str, Any]]) -> dict[str, Any]:
    """Weights, and optimizer state by optimizer, parameter and name."""
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for maker, state in zip(MAKERS, states, strict=True):
        for index, entries in state["state"].items():
            found |= {f"{maker}: {index} {name}": value for name, value in entries.items()}
    return found


@functools.cache
def under_ddp(world: int) -> dict[str, Any]:
    """Gradients of all ranks, averaged in their order, and steps of torch alone."""
    model = zoo()
    optimizers = optimizers_of(model)
    for step in range(STEPS):
        average_gradients(model, [functools.partial(loss_of, model, rank, step) for rank in range(world)])
        for optimizer in optimizers:
            optimizer.step()
    return found_in(model, [optimizer.state_dict() for optimizer in optimizers])


@functools.cache
def findings() -> dict[type, Findings]:
    """Of each, tried once: ranks try for themselves, which threads of one process need not."""
    return {type(optimizer): find(optimizer) for optimizer in optimizers_of(zoo())}


def under_the_engine(comm: Comm, stage: int) -> dict[str, Any]:
    model = zoo()
    optimizers = optimizers_of(model)
    engine = Engine(model, optimizers, stage=stage, comm=comm)
    for step in range(STEPS):
        with engine.forward():
            loss = loss_of(model, comm.rank, step)
        with engine.backward():
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    states = [engine.states.full_optimizer(optimizer) for optimizer in optimizers]
    engine.close()
    return found_in(model, states)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_r31_every_optimizer_of_the_zoo_trains_as_under_ddp(
    world: int, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, expected = findings(), under_ddp(world)
    assert sum(found.why_not_in_pieces == BY_TENSOR for found in known.values()) == len(WHOLE) + 3
    monkeypatch.setattr(granularity, "find", lambda optimizer, _: known[type(optimizer)])
    for found in ThreadWorld(world, 60).run(lambda comm: under_the_engine(comm, stage)):
        assert_same_bits(found, expected)
