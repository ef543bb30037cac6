"""The user's own optimizer on pieces."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import Optimizer

from engine_checkpoints import save
from lightning_zero.checkpoint import StoredCheckpoint
from lightning_zero.config import Offload
from lightning_zero.run.engine import Engine, Options
from lightning_zero.shards.offload import Machine
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from models import adamw, assorted, clone, loss_of
from reference import ddp
from thread_world import ThreadWorld
from zoo import PIECES, WHOLE, count, made

STAGES = [0, 1, 2, 3]


def trained(comm: Comm, stage: int, start: Any, make: Any, steps: int = 3) -> tuple[Any, Engine, Optimizer]:
    model = clone(start)
    optimizer, scheduler = make(model)
    engine = Engine(model, [optimizer], stage=stage, comm=comm)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, comm.rank, step).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model, engine, optimizer


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_is_kept_for_the_users_parameters_in_pieces(stage: int) -> None:
    def check(comm: Comm) -> int:
        model, _, optimizer = trained(comm, stage, start, adamw)
        mine = {id(parameter) for parameter in model.parameters()}
        assert all(id(parameter) in mine for parameter in optimizer.state)
        return sum(state["exp_avg"].numel() for state in optimizer.state.values())

    start = assorted()
    used = sum(p.numel() for name, p in start.named_parameters() if "frozen" not in name and "unused" not in name)
    assert sum(ThreadWorld(3).run(check)) == used


def adagrad(model: Any) -> tuple[Optimizer, None]:
    return torch.optim.Adagrad(
        [p for p in model.parameters() if p.requires_grad], lr=0.05, initial_accumulator_value=0.1
    ), None


def rmsprop(model: Any) -> tuple[Optimizer, None]:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9, centered=True), None


def fused(model: Any) -> tuple[Optimizer, None]:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), None


def foreach(model: Any) -> tuple[Optimizer, None]:
    return torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True, amsgrad=True), None


@pytest.mark.parametrize("make", [adagrad, rmsprop, fused, foreach])
@pytest.mark.parametrize("stage", STAGES)
def test_elementwise_optimizers_step_pieces_as_they_step_the_whole(stage: int, make: Any) -> None:
    start = assorted()
    expected = ddp(start, make, world=2, steps=3).weights
    found = ThreadWorld(2).run(lambda comm: trained(comm, stage, start, make)[1].states.full_model())[0]
    assert not [name for name, value in expected.items() if not torch.equal(found[name], value)]


def lion(model: Any) -> tuple[Optimizer, None]:
    return made("Lion", lambda p, state: count(state) and PIECES["Lion"](p, state))(model.parameters(), lr=1e-3), None


def muon(model: Any) -> tuple[Optimizer, None]:
    return made("Muon", lambda p, state: count(state) and WHOLE["Muon"](p, state))(model.parameters(), lr=1e-3), None


def nadam(model: Any) -> tuple[Optimizer, None]:
    return torch.optim.NAdam(model.parameters(), lr=1e-3), None  # with a product of its momenta, beside the count


WHOSE_STATE: dict[str, tuple[Any, dict[str, Any]]] = {
    "fused": (fused, {}),
    "NAdam": (nadam, {}),
    "Adagrad, which makes it at construction": (adagrad, {}),
    "AdamW, whole": (adamw, {"granularity": "tensor"}),
    "Lion": (lion, {}),
    "Muon": (muon, {}),
}


@pytest.mark.parametrize("whose", WHOSE_STATE)
@pytest.mark.parametrize(
    ("stage", "offload"),
    [(1, None), (3, Offload(optimizer="cpu")), (2, Offload(optimizer="nvme", path="."))],
    ids=["in memory", "host", "disk"],
)
def test_state_has_the_same_keys_and_counts_on_all_ranks_and_is_empty_where_a_rank_steps_nothing(
    stage: int, offload: Offload | None, whose: str
) -> None:
    """Also where it was loaded."""
    make, options = WHOSE_STATE[whose]

    def seen(model: Any, optimizer: Optimizer) -> tuple[dict[Any, Any], Counter[Any]]:
        """Counts, and the dtypes of tensors; and how many elements of these this rank has."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        numbered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
        assert {numbered[at] for at in optimizer.state_dict()["state"]} == {names[p] for p in optimizer.state}
        items = {(names[p], key): value for p, state in optimizer.state.items() for key, value in state.items()}
        is_count = {at: at[1] in ("step", "count", "mu_product") for at in items}
        alike = {at: float(value) if is_count[at] else value.dtype for at, value in items.items()}
        return alike, Counter({at: value.clone().numel() for at, value in items.items() if not is_count[at]})

    def run(comm: Comm, load: Any = None) -> Any:
        model = clone(start)
        optimizer, _ = make(model)
        given = Options(**options, offload=offload, machine=Machine(host_is_apart=True))
        engine = Engine(model, [optimizer], stage=stage, comm=comm, options=given)
        if load is not None:
            engine.states.load_optimizers([load])
        for step in range(2 if load is None else 0):
            with engine.forward():
                loss = loss_of(model, comm.rank, step)
            optimizer.zero_grad()
            with engine.backward():
                loss.backward()
            optimizer.step()
        whole, found = engine.states.full_optimizer(optimizer), seen(model, optimizer)
        engine.close()
        return whole, *found

    start = assorted()
    alone = clone(start)
    optimizer, _ = make(alone)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(alone, 0, step).backward()
        optimizer.step()
    expected, elements = seen(alone, optimizer)
    stepped = ThreadWorld(4).run(run)
    loaded = ThreadWorld(3).run(lambda comm: run(comm, stepped[0][0]))
    for results in (stepped, loaded):
        assert all(found == expected for _, found, _ in results)
        assert sum((of_rank for _, _, of_rank in results), Counter()) == elements


class Rated(Optimizer):
    """Keeps four rates for each parameter, whatever its shape."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            rates = self.state[parameter].setdefault("rates", torch.arange(1.0, 5.0))
            parameter.sub_(parameter.grad, alpha=float(rates[0]))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_that_has_the_shape_of_a_piece_by_chance_is_not_taken_for_cut(stage: int) -> None:
    """Of 20 elements rank 0 steps 16, and rank 1 four, as many as there are rates."""

    def rates(comm: Comm) -> list[float]:
        model = torch.nn.Linear(20, 1, bias=False)
        optimizer = Rated(model.parameters())
        engine = Engine(model, [optimizer], stage=stage, comm=comm)
        model(torch.ones(1, 20)).sum().backward()
        optimizer.step()
        return engine.states.full_optimizer(optimizer)["state"][0]["rates"].tolist()

    assert ThreadWorld(2, 10).run(rates) == [[1.0, 2.0, 3.0, 4.0]] * 2


@settings(max_examples=12)
@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 3), st.integers(1, 4))
def test_full_state_loads_at_any_stage_and_world(stage: int, world: int, other_stage: int, other_world: int) -> None:
    start = assorted()

    def save(comm: Comm) -> Any:
        _, engine, optimizer = trained(comm, stage, start, adamw)
        return engine.states.full_optimizer(optimizer)

    def load(comm: Comm) -> Any:
        model = clone(start)
        optimizer, _ = adamw(model)
        engine = Engine(model, [optimizer], stage=other_stage, comm=comm)
        engine.states.load_optimizers([saved])
        return engine.states.full_optimizer(optimizer)

    saved = on(world, save)
    loaded = on(other_world, load)
    assert loaded["param_groups"] == saved["param_groups"]
    assert loaded["state"].keys() == saved["state"].keys()
    for index, state in saved["state"].items():
        assert all(torch.equal(loaded["state"][index][name], value) for name, value in state.items())


@pytest.mark.parametrize("kind", ["NAdam", "ASGD"])
@pytest.mark.parametrize("stage", STAGES)
def test_scalar_state_of_a_parameter_without_dimensions_stays_scalar(stage: int, kind: str) -> None:
    start = assorted()

    def make(model: Any) -> tuple[Optimizer, None]:
        return getattr(torch.optim, kind)(model.parameters(), lr=1e-3), None

    def load(comm: Comm) -> Any:
        model = clone(start)
        optimizer, _ = make(model)
        engine = Engine(model, [optimizer], stage=stage, comm=comm)
        engine.states.load_optimizers([saved])
        return engine.states.full_optimizer(optimizer)

    alone = clone(start)
    optimizer, _ = make(alone)
    loss_of(alone, 0, 0).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    assert any(not parameter.shape for parameter in alone.parameters())
    loaded = on(2, load)["state"]
    for index, state in saved["state"].items():
        assert not [name for name, value in state.items() if not torch.equal(loaded[index][name], value)]


def on(world: int, function: Any) -> Any:
    return function(LocalComm()) if world == 1 else ThreadWorld(world).run(function)[0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_closure_runs_on_whole_parameters(stage: int) -> None:
    start = assorted()

    def step_with_closure(comm: Comm) -> Any:
        model = clone(start)
        optimizer, _ = adamw(model)
        engine = Engine(model, [optimizer], stage=stage, comm=comm)

        def closure() -> torch.Tensor:
            assert model.embedding.weight.shape == (13, 10)
            optimizer.zero_grad()
            loss = loss_of(model, comm.rank, 0)
            loss.backward()
            return loss

        optimizer.step(closure)
        return engine.states.full_model()

    plain = ThreadWorld(2).run(lambda comm: trained(comm, stage, start, adamw, steps=1)[1].states.full_model())
    closed = ThreadWorld(2).run(step_with_closure)
    assert all(torch.equal(closed[0][name], value) for name, value in plain[0].items())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_has_state_of_a_parameter_without_elements(stage: int, tmp_path: Path) -> None:
    """Rank 0 writes it, as no rank owns a part of it: who loads the checkpoint finds what a single device saves."""

    def on_rank(comm: Comm) -> dict[str, tuple[int, ...]]:
        model = torch.nn.Linear(4, 4)
        model.register_parameter("nothing", torch.nn.Parameter(torch.empty(0, 3)))
        optimizer = torch.optim.AdamW(model.parameters())
        engine = Engine(model, [optimizer], stage=stage, comm=comm, options=Options())
        (model(torch.ones(2, 4)).sum() + model.nothing.sum()).backward()
        optimizer.step()
        save(comm, engine, [optimizer], tmp_path / "ckpt")
        full = engine.states.full_optimizer(optimizer)["state"]
        engine.close()
        return {f"{index} {name}": value.shape for index, state in full.items() for name, value in state.items()}

    expected, _ = ThreadWorld(2).run(on_rank)
    saved = StoredCheckpoint(tmp_path / "ckpt").load()["optimizer_states"][0]["state"]
    assert {f"{at} {name}": value.shape for at, state in saved.items() for name, value in state.items()} == expected
    assert (0, 3) in expected.values()
