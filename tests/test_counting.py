"""Parameters of which a rank has nothing: their steps are counted, and the optimizer is not given them."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.config import Offload
from lightning_zero.run.notices import TornStepError
from lightning_zero.shards.counting import StepCounts
from lightning_zero.shards.offload import Machine
from lightning_zero.wire.comm import Comm
from models import seeded
from unit_jobs import WIDTH, assert_as_on_one_device, on_engine, state_of, x

LAYERS = 4
MAKES: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD, momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.3),
    "SGD, momentum of some": lambda params: torch.optim.SGD(
        [{"params": [one], "momentum": 0.9 * (at % 3 == 2)} for at, one in enumerate(params)], lr=0.1
    ),
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": partial(torch.optim.Adagrad, lr_decay=0.1),
    "Adam": partial(torch.optim.Adam, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, weight_decay=0.1),
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "AdamW, foreach": partial(torch.optim.AdamW, foreach=True),
    "Adamax": torch.optim.Adamax,
    "RAdam": torch.optim.RAdam,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
}
NUMBERS = ("step", "mu", "eta", "mu_product")
NOT_ONLY = {"ASGD", "NAdam"}  # keep more numbers than a count


def tower() -> nn.Module:
    return seeded(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]))


def train(model: Any, optimizer: Optimizer, steps: int = 5) -> None:
    """Layer 2 has no gradient in the first two steps, nor in the fourth."""
    for step in range(steps):
        optimizer.zero_grad()
        hidden = x(1.0 + step)
        for at, layer in enumerate(model):
            hidden = hidden if at == 2 and step in (0, 1, 3) else torch.tanh(layer(hidden))
        hidden.square().mean().backward()
        optimizer.step()


def numbers_in(optimizer: Optimizer) -> dict[str, Tensor]:
    """The names of what is kept for each parameter, and the values of what are single numbers."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{name} {at}": torch.as_tensor(float(value) if name in NUMBERS else 0.0)
        for at, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
    }


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_rank_has_the_counts_of_one_device_and_its_bits(stage: int, name: str) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Any]:
        train(model, optimizer)
        return {**state_of(model, engine), **numbers_in(optimizer)}

    assert_as_on_one_device(tower(), act, stage, MAKES[name], world=4, bucket_bytes=2**20)


def test_a_step_that_is_taken_when_its_gradients_are_gone_is_counted_all_the_same() -> None:
    """Offloaded, it is taken in the next forward, before which users drop the gradients."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Any]:
        train(model, optimizer)
        optimizer.zero_grad()
        if engine is not None:
            engine.catch_up()
        return {**state_of(model, engine), **numbers_in(optimizer)}

    offload = {"offload": Offload(optimizer="cpu"), "machine": Machine(host_is_apart=True)}
    assert_as_on_one_device(tower(), act, 2, MAKES["AdamW"], world=4, bucket_bytes=2**20, **offload)


@pytest.mark.parametrize("offload", [None, Offload(optimizer="cpu")], ids=["resting", "offloaded"])
@pytest.mark.parametrize("stage", [1, 2])
def test_an_optimizer_is_given_the_pieces_of_its_rank_alone(stage: int, offload: Offload | None) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> list[tuple[int, int]]:
        given: list[int] = []
        look = type(optimizer)._init_group

        def init_group(group: Any, params: list[Tensor], *args: Any) -> Any:
            found = look(optimizer, group, params, *args)
            given.append(len(params))
            return found

        optimizer._init_group = init_group
        train(model, optimizer)
        own = sum(slot.steps_any for gradient in engine.parts.assembly.gradients for slot in gradient.group.slots)
        return [(count, own) for count in given]

    ranks = on_engine(tower(), act, stage, MAKES["AdamW"], world=4, offload=offload, bucket_bytes=2**20)
    assert sum(own for (_, own), *_ in ranks) < 2 * LAYERS + 4  # hardly any is cut in two
    for first, *_, last in ranks:
        assert first[0] == 2 * LAYERS - 2  # all that have a gradient: their state is made
        assert last[0] == last[1]


@pytest.mark.parametrize("name", MAKES)
def test_those_that_keep_other_numbers_are_given_empty_pieces(name: str) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = MAKES[name]([parameter])
    slots: Any = [SimpleNamespace(parameter=parameter, steps_any=True)]
    assert (StepCounts.of(optimizer, slots) is None) == (name in NOT_ONLY)
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]  # as a scaler does
    assert StepCounts.of(optimizer, slots) is None


def test_an_error_in_a_step_is_raised_on_ranks_that_step_nothing_too() -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> bool:
        owns = any(slot.steps_any for gradient in engine.parts.assembly.gradients for slot in gradient.group.slots)
        for decay in (0.1, "a word"):
            optimizer.param_groups[0]["weight_decay"] = decay
            model(torch.ones(1, 2)).sum().backward()
            with pytest.raises(TypeError) if decay == "a word" else nullcontext():
                optimizer.step()
        return owns

    ranks = on_engine(seeded(lambda: nn.Linear(2, 1)), act, 2, MAKES["AdamW"], world=4)
    assert set(ranks) == {True, False}


@pytest.mark.parametrize("offload", [None, Offload("cpu", state_dtype="bfloat16")], ids=["resting", "staged"])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_that_raised_after_it_had_counted_itself_is_told_of_on_every_rank(
    foreach: bool, steps: int, offload: Offload | None
) -> None:
    """One rank counts what the others do not, and on one device a count is ahead for other parameters."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> None:
        def step() -> None:
            with engine.forward():
                loss = model(x()).square().mean()
            loss.backward()
            optimizer.step()

        for _ in range(steps):
            step()
        optimizer.param_groups[0]["weight_decay"] = "a word"
        with pytest.raises(TypeError):
            step()
        optimizer.param_groups[0]["weight_decay"] = 0.1
        with pytest.raises(
            TornStepError, match=r"AdamW.step\(\) had changed 0 of \d parameters and some of their state"
        ):
            step()
        step()

    on_engine(tower(), act, 2, partial(torch.optim.AdamW, foreach=foreach), world=2, offload=offload)


class Clears(torch.optim.Adam):
    """Drops the gradients that it has stepped."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.zero_grad()
        return result


def test_every_parameter_has_a_count_of_its_own_where_a_rank_has_no_piece_of_it() -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> int:
        model(x(1.0)).square().mean().backward()
        optimizer.step()
        return len({id(state["step"]) for state in optimizer.state.values()})

    assert on_engine(tower(), act, 2, Clears, world=2, bucket_bytes=2**20) == [2 * LAYERS] * 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_a_step_has_dropped_stay_so_where_a_rank_has_no_piece_of_them(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Any]:
        for step in range(3):
            model(x(1.0 + step)).square().mean().backward()
            optimizer.step()
            assert all(parameter.grad is None for parameter in model.parameters())
        return state_of(model, engine)

    assert_as_on_one_device(tower(), act, stage, Clears, bucket_bytes=2**20)


def test_state_that_was_cleared_is_made_again() -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        train(model, optimizer, 3)
        optimizer.state.clear()
        train(model, optimizer, 3)
        return {**state_of(model, engine), **numbers_in(optimizer)}

    assert_as_on_one_device(tower(), act, 2, MAKES["AdamW"], world=4, bucket_bytes=2**20)


@pytest.mark.parametrize("foreach", [False, True])
def test_a_count_that_parameters_share_is_what_it_is_on_one_device(foreach: bool) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        train(model, optimizer, 3)
        count = torch.zeros(())
        for state in optimizer.state.values():
            state["step"] = count
        train(model, optimizer, 3)
        return {**state_of(model, engine), **numbers_in(optimizer)}

    make = partial(torch.optim.AdamW, foreach=foreach)
    assert_as_on_one_device(tower(), act, 2, make, world=4, bucket_bytes=2**20)


@pytest.mark.parametrize("entry", ["momentum_buffer", "mine"])
def test_momentum_is_made_on_every_rank_where_a_user_has_taken_it_or_has_added_entries(entry: str) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for parameter in model.parameters():
            optimizer.state[parameter][entry] = None
        train(model, optimizer, 3)
        made = [isinstance(optimizer.state[p]["momentum_buffer"], Tensor) for p in model.parameters()]
        return {**state_of(model, engine), "made": torch.tensor(made)}

    assert_as_on_one_device(tower(), act, 2, MAKES["SGD, momentum"], world=4, bucket_bytes=2**20)
