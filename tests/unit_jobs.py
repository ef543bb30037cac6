"""What the unit tests run: one function on an ordinary model and on ranks of an engine.

The ranks get the same data, so the mean of their gradients is each one's own, and every bit must agree with the
ordinary model's.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from compare import assert_same_bits
from lightning_zero.run.engine import Engine, Options
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from models import seeded
from ranks import PATIENCE
from thread_world import ThreadWorld
from watched import check_program

Act = Callable[[Any, Engine | None, Optimizer, Comm | None], Any]  # model, engine, optimizer, comm
WIDTH = 8


def x(scale: float = 1.0) -> Tensor:
    return scale * torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).sin()


def tower(depth: int = 3) -> nn.Module:
    return seeded(lambda: nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)]))


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def on_one_device(start: nn.Module, act: Act, make: Callable[[Any], Optimizer] = sgd) -> Any:
    model = copy.deepcopy(start)
    return act(model, None, make([p for p in model.parameters() if p.requires_grad]), None)


def on_engine(
    start: nn.Module,
    act: Act,
    stage: int,
    make: Callable[[Any], Optimizer] = sgd,
    *,
    world: int = 2,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    wait_timeout: float = PATIENCE,
    **options: Any,
) -> list[Any]:
    """The results of all ranks, in order. Each rank's copy of the model goes through `prepare` first."""

    def rank_main(comm: Comm) -> Any:
        model = prepare(copy.deepcopy(start))
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        engine = Engine(model, [optimizer], stage=stage, comm=comm, options=Options(**options))
        found = act(model, engine, optimizer, comm)
        if not engine.closed:
            check_program(engine)
        return found

    return [rank_main(LocalComm())] if world == 1 else ThreadWorld(world, wait_timeout).run(rank_main)


def state_of(model: nn.Module, engine: Engine | None) -> dict[str, Tensor]:
    """Whole weights."""
    if engine is not None and not engine.closed:
        engine.loans.end_all()
        return engine.states.full_model()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_as_on_one_device(
    start: nn.Module, act: Act, stage: int, make: Callable[[Any], Optimizer] = sgd, *, world: int = 2, **options: Any
) -> None:
    """`act` returns a dict of tensors, the same bits on one device and on every rank."""
    expected = on_one_device(start, act, make)
    for found in on_engine(start, act, stage, make, world=world, **options):
        assert_same_bits(found, expected)


class Fails(Optimizer):
    """SGD with a count for each parameter. `fails` says whether to raise after so many changes of parameters in a step;
    `None` is after all of them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.fails: Callable[[int | None], bool] = lambda changes: False
        self.changed: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in [p for p in self.param_groups[0]["params"] if p.grad is not None]:
            self._raise_if(self.fails(len(self.changed)))
            self.changed.append(parameter)
            state = self.state[parameter]
            state["seen"] = state.get("seen", 0) + 1
            parameter.sub_(parameter.grad, alpha=0.1 / state["seen"])
        self._raise_if(self.fails(None))

    def _raise_if(self, fails: bool) -> None:
        if fails:
            raise ArithmeticError


def take_step(model: Any, engine: Engine | None, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    optimizer.changed.clear()
    with nullcontext() if engine is None else engine.forward():
        loss = model(x(1.0 + number)).square().mean()
    with nullcontext() if engine is None else engine.backward():
        loss.backward()
    optimizer.step()
