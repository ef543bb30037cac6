"""Optimizers that do more than `super().step()`, or whose step fails: one call is one step, from begin to end."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from compare import assert_same_bits
from lightning_zero.config import Offload
from lightning_zero.run.engine import Engine
from lightning_zero.shards.offload import Machine
from lightning_zero.wire.comm import Comm
from thread_world import ThreadWorld
from unit_jobs import assert_as_on_one_device, state_of, tower, x

BATCHES = [torch.linspace(-1, number, 32).view(2, 16) for number in range(4)]


class Nudges(AdamW):
    """Goes on along its average of gradients, which it has, as its parameters and gradients, in pieces."""

    nudges = 0
    fails_in = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.nudge()
        return loss

    @torch.no_grad()
    def nudge(self) -> None:
        self.nudges += 1
        if self.nudges == self.fails_in:
            raise ArithmeticError
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.addcmul_(self.state[parameter]["exp_avg"], parameter.grad, value=0.1)


class NudgesThoughTheParentFails(Nudges):
    def step(self, closure: Any = None) -> Any:
        with suppress(TypeError):
            super(Nudges, self).step(closure, "an argument too many")
        return super().step(closure)


class NudgesBefore(Nudges):
    """Calls the closure by itself, and the parent's step without one."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        AdamW.step(self)
        self.nudge()
        return loss if closure is not None else None


def train(
    comm: Comm,
    start: nn.Module,
    make: Callable[..., Nudges],
    stage: int,
    closes: bool,
    fails_in: int = 0,
    compiles: bool = False,
) -> dict[str, Tensor]:
    model = copy.deepcopy(start)
    optimizer = make(model.parameters(), lr=0.1)
    engine = Engine(model, [optimizer], stage=stage, comm=comm)
    optimizer.fails_in = fails_in
    step = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step
    for batch in BATCHES:

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            with engine.forward():
                loss: Tensor = model(batch).square().sum()
            with engine.backward():
                loss.backward()
            return loss

        try:
            if closes:
                step(closure)
            else:
                closure()
                step()
        except ArithmeticError:
            pass
    with engine.full_parameters():
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine.close()
    return weights


@pytest.mark.parametrize("closes", [False, True], ids=["no closure", "closure"])
@pytest.mark.parametrize("make", [Nudges, NudgesBefore, NudgesThoughTheParentFails])
def test_what_follows_the_parents_step_is_in_the_same_step(make: Callable[..., Nudges], closes: bool) -> None:
    AdamW([Parameter(torch.zeros(1))])  # from here on torch has hooks around the parent's step, too
    act = partial(train, start=nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), make=make, closes=closes)
    expected, *found = (ThreadWorld(2).run(partial(act, stage=stage))[0] for stage in range(4))
    for weights in found:
        assert_same_bits(weights, expected)


@pytest.mark.usefixtures("ranks_in_turn")
@pytest.mark.parametrize("closes", [False, True], ids=["no closure", "closure"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_compiled_step_is_the_same_step(stage: int, closes: bool) -> None:
    torch.compiler.reset()  # what has been compiled often enough runs as it is, which rounds in another way
    act = partial(train, start=nn.Linear(16, 16), make=Nudges, closes=closes, compiles=True)
    expected = ThreadWorld(2).run(partial(act, stage=0))[0]
    assert_same_bits(ThreadWorld(2).run(partial(act, stage=stage))[0], expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_closure_may_run_its_backward_in_another_thread(stage: int) -> None:
    """As autograd does on a GPU, where nobody has announced the backward to the engine."""

    def train_in_threads(comm: Comm, stage: int) -> dict[str, Tensor]:
        model = copy.deepcopy(start)
        optimizer = Nudges(model.parameters(), lr=0.1)
        engine = Engine(model, [optimizer], stage=stage, comm=comm)
        for batch in BATCHES:

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                with engine.forward():
                    loss: Tensor = model(batch).square().sum()
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(loss.backward).result()
                return loss

            optimizer.step(closure)
        with engine.full_parameters():
            weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        engine.close()
        return weights

    start = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    expected = ThreadWorld(2).run(partial(train_in_threads, stage=0))[0]
    assert_same_bits(ThreadWorld(2).run(partial(train_in_threads, stage=stage))[0], expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_call_after_one_that_failed_is_a_step_again(stage: int) -> None:
    AdamW([Parameter(torch.zeros(1))])
    act = partial(train, start=nn.Linear(16, 16), make=Nudges, closes=False, fails_in=2)
    expected = ThreadWorld(2).run(partial(act, stage=0))[0]
    assert_same_bits(ThreadWorld(2).run(partial(act, stage=stage))[0], expected)


class Clears(Nudges):
    def nudge(self) -> None:
        self.zero_grad()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_a_step_clears_are_not_there_after_it(stage: int) -> None:
    def gradients(comm: Comm, stage: int) -> tuple[dict[str, Tensor], list[bool]]:
        model = copy.deepcopy(start)
        optimizer = Clears(model.parameters(), lr=0.1)
        engine = Engine(model, [optimizer], stage=stage, comm=comm)
        for batch in BATCHES:
            with engine.forward():
                loss = model(batch).square().sum()
            with engine.backward():
                loss.backward()
            optimizer.step()
        are_left = [parameter.grad is not None for parameter in model.parameters()]
        with engine.full_parameters():
            weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        engine.close()
        return weights, are_left

    start = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    expected, _ = ThreadWorld(2).run(partial(gradients, stage=0))[0]
    for weights, are_left in ThreadWorld(2).run(partial(gradients, stage=stage)):
        assert_same_bits(weights, expected)
        assert not any(are_left)


@torch.no_grad()
def _bound_gradients(optimizer: Optimizer, *_: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.div_(parameter.grad.norm())


@torch.no_grad()
def _bound_weights(optimizer: Optimizer, *_: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.div_(parameter.norm())
        optimizer.state[parameter]["momentum_buffer"].mul_(0.5)


@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_users_hooks_on_the_step_find_whole_tensors_whenever_they_came_in(stage: int, is_offloaded: bool) -> None:
    def hooked(optimizer: Optimizer) -> Optimizer:
        optimizer.register_step_pre_hook(_bound_gradients)
        optimizer.register_step_post_hook(_bound_weights)
        return optimizer

    def make(parameters: Any) -> Optimizer:
        return hooked(torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True))

    def act(model: Any, engine: Any, optimizer: Optimizer, comm: Any) -> dict[str, Tensor]:
        for step in range(3):
            optimizer.zero_grad()
            model(x()).square().mean().backward()
            if step:
                hooked(optimizer)
            optimizer.step()
        return state_of(model, engine)

    offload, machine = Offload("cpu") if is_offloaded else None, Machine(host_is_apart=True)
    assert_as_on_one_device(tower(), act, stage, make, offload=offload, machine=machine)
