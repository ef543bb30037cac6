"""Optimizers that step pieces: several of them, resumed elsewhere, with state of every shape; as on one device."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.run.engine import Engine
from lightning_zero.tiers.ledger import Category
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from models import seeded
from thread_world import ThreadWorld
from unit_jobs import assert_as_on_one_device, assert_same_bits, on_engine, on_one_device, state_of, tower, x

STAGES = [0, 1, 2, 3]
MAKERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),  # state from construction
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),  # a 0-d tensor beside the moments
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
}


class Small(nn.Module):
    """A 0-d parameter, one of a single element, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(1))
        self.layer = nn.Linear(8, 8)

    def forward(self, signal: Tensor) -> Tensor:
        return self.layer(signal).tanh() * self.scale + self.shift


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(x(1.0 + step)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_elementwise_optimizer_steps_as_on_one_device(stage: int, maker: str) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        train(model, optimizer, range(3))
        return state_of(model, engine)

    assert_as_on_one_device(seeded(Small), act, stage, MAKERS[maker])


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(("stage", "then"), [(1, 3), (3, 2), (0, 1), (2, 0)])
def test_training_resumed_at_another_stage_goes_on_as_if_never_stopped(stage: int, then: int, maker: str) -> None:
    def whole(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        train(model, optimizer, range(4))
        return state_of(model, engine)

    def first_half(model: Any, engine: Any, optimizer: Any, comm: Comm) -> Any:
        train(model, optimizer, range(2))
        return state_of(model, engine), engine.states.full_optimizer(optimizer)

    def second_half(model: Any, engine: Any, optimizer: Any, comm: Comm) -> dict[str, Tensor]:
        model.load_state_dict(weights)
        engine.states.load_optimizers([copy.deepcopy(state)])  # torch keeps the tensors it is given
        train(model, optimizer, range(2, 4))
        return state_of(model, engine)

    start = seeded(Small)
    weights, state = on_engine(start, first_half, stage, MAKERS[maker])[1]
    expected = on_one_device(start, whole, MAKERS[maker])
    for found in on_engine(start, second_half, then, MAKERS[maker]):
        assert_same_bits(found, expected)
    for found in on_engine(start, second_half, then, MAKERS[maker], world=4):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_gathered_state_has_the_shapes_of_one_device(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> Any:
        train(model, optimizer, range(2))
        return optimizer.state_dict() if engine is None else engine.states.full_optimizer(optimizer)

    for maker in ("NAdam", "ASGD", "Adagrad"):
        expected = on_one_device(seeded(Small), act, MAKERS[maker])
        for found in on_engine(seeded(Small), act, stage, MAKERS[maker], world=3):
            assert found["state"].keys() == expected["state"].keys()
            for index, state in expected["state"].items():
                for name, value in state.items():
                    mine = found["state"][index][name]
                    assert getattr(mine, "shape", None) == getattr(value, "shape", None), (maker, index, name)


def train_in_turns(model: Any, engine: Any, halves: list[Any]) -> dict[str, Tensor]:
    """As a GAN does: each turn runs a backward through all of the model and steps one half."""
    for step in range(4):
        for turn, optimizer in enumerate(halves):
            optimizer.zero_grad()
            (model(x(1.0 + step)).square().mean() * (1 - 2 * turn)).backward()
            optimizer.step()
    return state_of(model, engine)


def two_adams(model: Any) -> list[Any]:
    return [torch.optim.AdamW(part.parameters(), lr=0.01) for part in model]


@pytest.mark.parametrize("stage", STAGES)
def test_two_optimizers_over_halves_step_on_their_own(stage: int) -> None:
    def on_rank(comm: Comm) -> dict[str, Tensor]:
        model = copy.deepcopy(start)
        halves = two_adams(model)
        return train_in_turns(model, Engine(model, halves, stage=stage, comm=comm), halves)

    start, plain = tower(2), tower(2)
    expected = train_in_turns(plain, None, two_adams(plain))
    for found in ThreadWorld(2).run(on_rank):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_rests_in_pieces_that_sum_to_the_whole(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> tuple[int, int]:
        train(model, optimizer, range(1))
        assert all(any(key is parameter for parameter in model.parameters()) for key in optimizer.state)
        elements = sum(state["exp_avg"].numel() for state in optimizer.state.values())
        steps = 4 * len(optimizer.state)  # a step count for each
        return elements, engine.ledger.live[Category.OPTIMIZER_STATE] - steps

    numel = sum(parameter.numel() for parameter in tower().parameters())
    for world in (2, 3, 4):
        found = on_engine(tower(), act, stage, MAKERS["fused"], world=world)
        assert sum(elements for elements, _ in found) == numel
        assert all(nbytes == 8 * elements for elements, nbytes in found)


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_added_after_set_up_is_refused_with_the_remedy(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> None:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 2))]})
        model(x()).sum().backward()
        with pytest.raises(
            RuntimeError, match=r"shape \(3, 2\).*was added in the middle of a step.*configure_optimizers"
        ):
            optimizer.step()

    on_engine(tower(), act, stage)
    on_engine(tower(), act, stage, world=1)


class Special(nn.Parameter):
    pass


def test_a_parameter_of_another_class_trains_or_is_refused_at_set_up() -> None:
    """Not at the first step, as one that "was added"."""
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].weight = Special(torch.eye(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        Engine(model, [optimizer], stage=2, comm=LocalComm())
    except (TypeError, ValueError) as error:
        assert "Special" in str(error)  # noqa: PT017
    else:
        train(model, optimizer, range(1))


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_without_a_backward_moves_nothing(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        optimizer.step()
        train(model, optimizer, range(1))
        optimizer.zero_grad()
        optimizer.step()
        return state_of(model, engine)

    assert_as_on_one_device(tower(), act, stage, MAKERS["fused"])


@pytest.mark.parametrize("stage", STAGES)
def test_one_backward_may_be_stepped_twice(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        train(model, optimizer, range(1))
        optimizer.step()
        return state_of(model, engine)

    assert_as_on_one_device(tower(), act, stage, MAKERS["fused"])
