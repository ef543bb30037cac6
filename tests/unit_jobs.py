"""What the unit tests run: one function on an ordinary model and on ranks of an engine; and jobs for real ranks.

The ranks get the same data, so the mean of their gradients is each one's own, and every bit must agree with the
ordinary model's.
"""

import copy
import datetime
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.comm import CollectiveMismatchError, Comm, LocalComm, RankTimeoutError, make_comm
from lightning_zero.engine import Engine, Options
from lightning_zero.threads import ThreadWorld

Act = Callable[[Any, Engine | None, Optimizer, Comm | None], Any]  # model, engine, optimizer, comm
WIDTH = 8


def x(scale: float = 1.0) -> Tensor:
    return scale * torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).sin()


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model made before the ranks start: as threads they share the random generator."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


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
    **options: Any,
) -> list[Any]:
    """The results of all ranks, in order. Each rank's copy of the model goes through `prepare` first."""

    def rank_main(comm: Comm) -> Any:
        model = prepare(copy.deepcopy(start))
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        engine = Engine(model, [optimizer], stage=stage, comm=comm, options=Options(**options))
        return act(model, engine, optimizer, comm)

    return [rank_main(LocalComm())] if world == 1 else ThreadWorld(world, 10).run(rank_main)


def state_of(model: nn.Module, engine: Engine | None) -> dict[str, Tensor]:
    """Whole weights."""
    if engine is not None and not engine.closed:
        engine.loans.settle()
        return engine.states.full_model(copy=True)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def assert_as_on_one_device(
    start: nn.Module, act: Act, stage: int, make: Callable[[Any], Optimizer] = sgd, *, world: int = 2, **options: Any
) -> None:
    """`act` returns a dict of tensors, the same bits on one device and on every rank."""
    expected = on_one_device(start, act, make)
    for found in on_engine(start, act, stage, make, world=world, **options):
        assert_same_bits(found, expected)


# -- for real ranks


def gloo(wait_timeout: float = 20.0, *, sanitize: bool = False) -> Comm:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return make_comm(torch.device("cpu"), datetime.timedelta(seconds=wait_timeout), sanitize=sanitize)


def bytes_of_each_operation(comm: Comm | None = None) -> dict[str, int]:
    comm = comm or gloo()
    rank, size = comm.rank, comm.size
    comm.all_gather(torch.zeros(size, 5), torch.zeros(5), "g").wait()
    comm.reduce_scatter(torch.zeros(5), torch.zeros(size, 5), torch.empty(size - 1, 5), "r").wait()
    comm.broadcast(torch.zeros(3, dtype=torch.float64), "b", source=size - 1)
    comm.all_reduce(torch.zeros(4, dtype=torch.uint8), "a", "max")
    comm.all_gather_host(torch.zeros(size, 2), torch.full((2,), float(rank)), "h").wait()
    return dict(comm.bytes_sent)


def sum_in_rank_order(comm: Comm | None = None) -> list[float]:
    """Values whose sum depends on the order; the first rank comes last."""
    comm = comm or gloo()
    value = [1.0, 1e8, -1e8, 1.0][comm.rank]
    time.sleep(0.02 * (comm.size - comm.rank))
    total = torch.empty(1)
    comm.reduce_scatter(total, torch.full((comm.size, 1), value), torch.empty(comm.size - 1, 1), "order").wait()
    return [total.item(), comm.all_reduce(torch.tensor([value]), "order").item()]


def broadcast_from_the_last(comm: Comm | None = None) -> list[float]:
    comm = comm or gloo()
    sent = torch.full((2, 3), float(comm.rank))
    comm.broadcast(sent, "last", source=comm.size - 1)
    return sent.flatten().tolist()


def wait_for_nobody() -> str | None:
    """Rank 0 enters a collective that rank 1 never issues."""
    comm = gloo(wait_timeout=1.0)
    error = None
    if comm.rank == 0:
        try:
            comm.all_reduce(torch.ones(1), "alone")
        except RankTimeoutError as raised:
            error = str(raised)
    dist.barrier()
    return error


def reduce_in_other_dtypes() -> str | None:
    comm = gloo(sanitize=True)
    full = torch.zeros(2, 3, dtype=torch.float32 if comm.rank == 0 else torch.bfloat16)
    try:
        comm.reduce_scatter(torch.zeros(3), full, full[1:].clone(), "same").wait()
    except CollectiveMismatchError as error:
        return str(error)
    return None
