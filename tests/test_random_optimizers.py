"""Random optimizers: what `granularity="auto"` makes of one is DDP's training in every bit, or refused; never another.

A campaign: RANDOM_OPTIMIZERS=5000 pytest --timeout=0 tests/test_random_optimizers.py. Otherwise the same few, always.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from compare import differing
from lightning_zero.run.engine import Engine
from lightning_zero.wire.comm import Comm
from models import seeded
from reference import average_gradients
from thread_world import ThreadWorld

CAMPAIGN = int(os.environ.get("RANDOM_OPTIMIZERS", 0))
STEPS = 9


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An optimizer that changes gradients in a way of its own, before SGD or AdamW steps them."""

    looks_at: Literal["element", "row", "tensor", "all"]
    base: type[Optimizer] = SGD
    of: Literal["gradient", "value", "average"] = "gradient"  # whose size is looked at
    dims: int = 0  # tensors of fewer are left alone
    above: float = 0.0  # a size that is smaller is left alone
    option: bool = False  # a group's option switches it on, of the second group alone
    since: int = 1  # step
    every: int = 1  # steps
    counts_in: Literal["state", "group", "self"] = "state"

    @property
    def may_be_refused(self) -> bool:
        return self.looks_at == "all"


def made(recipe: Recipe) -> type[Optimizer]:
    class Unheard(recipe.base):  # type: ignore[name-defined, misc]
        taken = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            self.taken += 1
            noted: dict[nn.Parameter, dict[str, Any]] = {}  # AdamW begins with what has no state
            everything = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            size_of_all = torch.stack([p.grad.norm() for p in everything]).norm() if everything else None
            for group in self.param_groups:
                group["taken"] = group.get("taken", 0) + 1
                for p in group["params"]:
                    if p.grad is not None:
                        noted[p] = self.change(p, group, size_of_all)
            super().step(closure)
            for p, state in noted.items():
                self.state[p].update(state)

        def change(self, p: Tensor, group: dict[str, Any], size_of_all: Any) -> dict[str, Any]:
            before = self.state.get(p, {})
            state = {"own": before.get("own", 0) + 1}
            state["average"] = 0.5 * before.get("average", torch.zeros_like(p)) + p.grad
            number = {"state": state["own"], "group": group["taken"], "self": self.taken}[recipe.counts_in]
            is_on = number >= recipe.since and number % recipe.every == 0 and p.dim() >= recipe.dims
            if not is_on or (recipe.option and not group.get("special")):
                return state
            looked_at = {"gradient": p.grad, "value": p, "average": state["average"]}[recipe.of]
            rows = looked_at.norm(dim=-1, keepdim=True) if p.dim() else looked_at.abs()
            size = {"element": looked_at.abs(), "row": rows, "tensor": looked_at.norm(), "all": size_of_all}
            sizes = size[recipe.looks_at]
            p.grad.div_(torch.where(sizes > recipe.above, sizes + 0.1, torch.ones_like(sizes)))
            return state

    return Unheard


class Model(nn.Module):
    """Parameters of no to three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 7), nn.Linear(7, 3)
        self.cube, self.scale = nn.Parameter(torch.randn(2, 3, 4)), nn.Parameter(torch.tensor(1.3))

    def forward(self, signal: Tensor) -> Tensor:
        hidden = torch.tanh(self.outer(torch.tanh(self.inner(signal))))
        return (hidden @ torch.tanh(self.cube) * self.scale).square().sum()


def groups_of(model: Model) -> Iterable[dict[str, Any]]:
    return [
        {"params": list(model.inner.parameters())},
        {"params": [*model.outer.parameters(), model.cube, model.scale]},
    ]


def optimizer_of(model: Model, recipe: Recipe) -> Optimizer:
    optimizer = made(recipe)(groups_of(model), lr=0.01)  # type: ignore[call-arg]
    optimizer.param_groups[1]["special"] = True
    return optimizer


def loss_of(model: Model, rank: int, step: int) -> Tensor:
    return model(torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank)))


def under_ddp(recipe: Recipe, world: int) -> dict[str, Tensor]:
    model = seeded(Model)
    optimizer = optimizer_of(model, recipe)
    for step in range(STEPS):
        average_gradients(model, [partial(loss_of, model, rank, step) for rank in range(world)])
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def under_the_engine(comm: Comm, recipe: Recipe, stage: int) -> dict[str, Tensor] | str:
    """What was refused, if it was."""
    model = seeded(Model)
    optimizer = optimizer_of(model, recipe)
    try:
        engine = Engine(model, [optimizer], stage=stage, comm=comm)
    except ValueError as error:
        return str(error)
    for step in range(STEPS):
        with engine.forward():
            loss = loss_of(model, comm.rank, step)
        with engine.backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    return {name: value.detach() for name, value in model.state_dict().items()}


recipes = st.builds(
    Recipe,
    looks_at=st.sampled_from(["tensor", "row", "element", "all"]),
    base=st.sampled_from([SGD, AdamW]),
    of=st.sampled_from(["gradient", "value", "average"]),
    dims=st.integers(0, 3),
    above=st.sampled_from([0.0, 0.5, 50.0]),
    option=st.booleans(),
    since=st.sampled_from([1, 1, 3, 6, 8]),
    every=st.sampled_from([1, 1, 2, 5, 7]),
    counts_in=st.sampled_from(["state", "group", "self"]),
)


@settings(
    max_examples=CAMPAIGN or 20,
    derandomize=not CAMPAIGN,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(recipes, st.sampled_from([(2, 1), (2, 2), (2, 3), (3, 2)]))
@example(Recipe(looks_at="tensor", since=8), (2, 2))
@example(Recipe(looks_at="row", dims=3, option=True, every=7, counts_in="group"), (2, 3))
@example(Recipe(looks_at="all", since=6, counts_in="self"), (2, 1))
def test_r31_auto_gives_a_random_optimizer_ddps_numbers_or_refuses_it(recipe: Recipe, place: tuple[int, int]) -> None:
    world, stage = place
    found = ThreadWorld(world, 60).run(lambda comm: under_the_engine(comm, recipe, stage))
    if recipe.may_be_refused and isinstance(found[0], str):
        assert set(found) == {found[0]}
        assert found[0].startswith("Unheard looks at all parameters together")
        return
    expected = under_ddp(recipe, world)
    for of_rank in found:
        assert isinstance(of_rank, dict), of_rank
        assert differing(of_rank, expected) == []
