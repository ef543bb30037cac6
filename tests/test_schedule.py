"""The order of collectives, and what is gathered when."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unit_jobs
from compare import differing
from lightning_zero.run.engine import Engine, Options
from lightning_zero.tiers.ledger import Category
from lightning_zero.wire.comm import Comm
from models import clone, seeded
from thread_world import ThreadComm, ThreadWorld

LAYERS, WIDTH = 6, 64


def tower() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def run(comm: Comm, start: nn.Module, forward: Any = None, steps: int = 3, **options: Any) -> dict[str, Any]:
    """Trains at stage 3 and keeps the order in which collectives were issued."""
    issued: list[str] = []
    begin = comm._issue

    def begin_and_note(kind: str, name: str, *args: Any, **kwargs: Any) -> str:
        issued.append(f"{kind} {name}")
        return begin(kind, name, *args, **kwargs)

    comm._issue = begin_and_note  # type: ignore[method-assign]
    model = clone(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, [optimizer], stage=3, comm=comm, options=Options(**options))
    for _ in range(steps):
        issued.clear()
        x = torch.ones(2, WIDTH)
        (model(x) if forward is None else forward(model, x, comm.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "issued": list(issued),
        "peak": engine.ledger.peak[Category.GATHERED],
        "now": engine.ledger.live[Category.GATHERED],
        "released": [not unit.is_gathered for unit in engine.loans.cache.units],
    }


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_every_unit_is_gathered_for_forward_and_for_backward_but_those_that_are_still_there(prefetch: int) -> None:
    start = tower()
    for result in ThreadWorld(2).run(lambda comm: run(comm, start, prefetch=prefetch)):
        gathers = [name for name in result["issued"] if "gather" in name]
        # what forward used last has room until backward, which uses it first, and looks at no weights of the first
        assert len(gathers) == 2 * LAYERS - (1 + prefetch) - 1
        assert sum(name.startswith("reduce_scatter") for name in result["issued"]) == LAYERS


@pytest.mark.parametrize("frozen", ["first", "last"])
def test_a_frozen_tower_takes_no_more_room_than_one_that_trains(frozen: str) -> None:
    """Backward passes through the frozen one, or does not come to it; neither way its units pile up."""
    halves = [tower(), tower()]
    halves[0 if frozen == "first" else 1].requires_grad_(False)
    start = nn.Sequential(*halves)
    for result in ThreadWorld(2).run(lambda comm: run(comm, start, prefetch=1)):
        assert result["peak"] == 2 * 4 * (WIDTH * WIDTH + WIDTH)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("frozen", [0, 3, 5])
def test_reductions_overlap_with_backward_where_an_optimizer_has_frozen_layers(stage: int, frozen: int) -> None:
    start = tower()

    def train(comm: Comm) -> list[int]:
        model = clone(start)
        model[frozen].requires_grad_(False)
        options = Options(bucket_bytes=2 * 4 * WIDTH * WIDTH, unit_classes=("Linear",), prefetch=0)
        engine = Engine(model, [torch.optim.SGD(model.parameters())], stage=stage, comm=comm, options=options)
        begun = []
        for _ in range(3):
            engine.optimizers[0].zero_grad()
            x = torch.ones(2, WIDTH, requires_grad=True)
            hidden = model[1](model[0](x))
            hidden.register_hook(lambda _: begun.append(engine.runner.reductions.started))
            model[2:](hidden).square().mean().backward()
            engine.optimizers[0].step()
        engine.close()
        return begun

    for first, *_, last in ThreadWorld(2).run(train):
        assert last >= 1  # in the second layer, of six
        assert stage == 3 or first >= 1  # where ranks have no plan yet


def test_a_step_has_one_message_beside_its_gathers_and_reductions() -> None:
    start = tower()
    for result in ThreadWorld(2).run(lambda comm: run(comm, start)):
        others = [name for name in result["issued"] if not name.startswith(("all_gather gather ", "reduce_scatter"))]
        assert others == ["all_reduce rendezvous"]


def test_backward_gathers_only_what_it_looks_at() -> None:
    """The gradient of an embedding needs no weights."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.words(x.long().clamp(max=5)))

    start = Words()
    for result in ThreadWorld(2).run(lambda comm: run(comm, start, prefetch=0)):
        assert sum("gather words" in name for name in result["issued"]) == 1


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_no_more_than_the_prefetched_units_are_gathered_at_once(prefetch: int) -> None:
    start, unit = tower(), 4 * (WIDTH * WIDTH + WIDTH)
    for result in ThreadWorld(2).run(lambda comm: run(comm, start, prefetch=prefetch)):
        assert result["peak"] <= (1 + prefetch) * unit * 1.01
        assert result["now"] == result["peak"]  # an arena, allocated once
        assert all(result["released"])


@pytest.mark.parametrize("cached", [False, True])
def test_an_autocast_keeps_no_units_gathered(cached: bool) -> None:
    def in_two_bytes(model: nn.Module, x: Tensor, rank: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            return model(x).float()

    for result in ThreadWorld(2).run(lambda comm: run(comm, tower(), in_two_bytes, autocast_dtype=torch.bfloat16)):
        assert result["peak"] <= 2 * (2 * WIDTH * WIDTH + 4 * WIDTH) * 1.01
        assert result["now"] == result["peak"]


def test_collectives_are_issued_in_one_order_whatever_is_ready_first() -> None:
    """Ranks add the branches in another order, so their backwards reach the layers in another order too."""

    def branches(model: nn.Module, x: Tensor, rank: int) -> Tensor:
        outputs = [layer(x) for layer in model]  # forward in one order: at stage 3 a gather is a collective
        return sum(outputs if rank == 0 else outputs[::-1])  # type: ignore[return-value]

    start = tower()
    first, second = ThreadWorld(2).run(lambda comm: run(comm, start, branches, prefetch=0))
    reductions = [[name for name in each["issued"] if name.startswith("reduce_scatter")] for each in (first, second)]
    assert reductions[0] == reductions[1]
    assert len(reductions[0]) == LAYERS


def test_a_failing_forward_leaves_hooks_that_work() -> None:
    start = tower()

    def fail_once(comm: Comm) -> float:
        assert isinstance(comm, ThreadComm)
        model = clone(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Engine(model, [optimizer], stage=3, comm=comm)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, WIDTH + 1))
        loss = model(torch.ones(2, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    first, second = ThreadWorld(2).run(fail_once)
    assert first == second


class Past(nn.Module):
    """Calls a layer of a block through the block, or past it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Sequential(nn.Linear(unit_jobs.WIDTH, unit_jobs.WIDTH)) for _ in range(2))

    def forward(self, hidden: Tensor, through: bool) -> Tensor:
        hidden = torch.tanh(self.first(hidden))
        return (self.last if through else self.last[0])(hidden)


def test_a_layer_that_is_called_past_its_block_does_not_read_what_is_on_its_way_for_the_block() -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        seen = {}
        for step in range(6):
            with engine.forward(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                loss = model(unit_jobs.x(), step not in (3, 5)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen[f"loss {step}"] = loss.detach()
        return seen | unit_jobs.state_of(model, engine)

    start, options = seeded(Past), {"autocast_dtype": torch.bfloat16, "unit_classes": ("Sequential",)}
    expected = unit_jobs.on_engine(start, act, 2, **options)  # type: ignore[arg-type]
    found = unit_jobs.on_engine(start, act, 3, **options)  # type: ignore[arg-type]
    assert [differing(mine, theirs) for mine, theirs in zip(found, expected, strict=True)] == [[], []]
