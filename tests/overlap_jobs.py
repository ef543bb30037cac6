"""Steps on real ranks whose computation and communication take times that are known: both are slept, so that no core is
needed for them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import construction_jobs
from lightning_zero.rehearsal.cost import Rates, Work, timing_of
from lightning_zero.run.engine import Engine, Options
from lightning_zero.run.journal import Journal
from lightning_zero.wire.comm import Comm, Gather
from lightning_zero.wire.comm import Work as Pending

WIDTH, LAYERS = 64, 24
LAYER_BYTES = 4 * WIDTH**2
FORWARD_S = 0.02  # of a layer's forward, at least; its backward takes twice as long
APART = 3  # times that the forwards of all layers take what the engine's own step does, at least
ROUNDS = 10  # at most


@dataclass
class Link:
    """What arrays of a rank pass: one after another, each for a time by its bytes. Who waits for one, waits until it
    has passed; nobody else does. It has no latency: small messages, which carry hardly a byte, are as they are."""

    rate: float = float("inf")  # bytes per second that a rank sends
    _free: float = 0.0  # when the last array has passed, by `time.monotonic`

    @contextmanager
    def under(self, comm: Comm) -> Iterator[None]:
        """Inside, arrays of `comm` pass it."""
        begin_gather, begin_sum = comm._all_gather, comm._reduce_scatter

        def all_gather(full: Tensor, shard: Tensor, *others: Any) -> Gather:
            gather = begin_gather(full, shard, *others)
            return Gather(self._after(gather, (comm.size - 1) * shard.nbytes), gather.has_divergence)

        def reduce_scatter(shard: Tensor, full: Tensor, *others: Any) -> Pending:
            return Pending(self._after(begin_sum(shard, full, *others), (comm.size - 1) * shard.nbytes))

        with patch.object(comm, "_all_gather", all_gather), patch.object(comm, "_reduce_scatter", reduce_scatter):
            yield

    def _after(self, work: Pending, nbytes: int) -> Any:
        self._free = arrives = max(self._free, time.monotonic()) + nbytes / self.rate

        def finish() -> None:
            time.sleep(max(0.0, arrives - time.monotonic()))
            work.wait()

        return finish


@dataclass
class Computer:
    """Computes for a stated time, and notes at which use of the step it did. What the system sleeps too long, the next
    computation takes less: on a busy machine that would add up."""

    seconds: float = 0.0  # of a layer's forward
    journal: Journal | None = None
    done: dict[int, float] = field(default_factory=dict)  # use -> seconds
    _late: float = 0.0

    def compute(self, share: int) -> None:
        assert self.journal is not None
        use = self.journal.count - 1
        self.done[use] = self.done.get(use, 0.0) + share * self.seconds
        until = time.monotonic() + share * self.seconds - self._late
        time.sleep(max(0.0, until - time.monotonic()))
        self._late = (time.monotonic() - until) if self.seconds else 0.0


class _Product(torch.autograd.Function):
    """What a layer computes, between the use of its weight and its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, computer: Computer) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.computer = computer
        computer.compute(1)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        ctx.computer.compute(2)
        return grad @ weight, grad.t() @ x, None


class Layer(nn.Module):
    def __init__(self, computer: Computer) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.computer = computer

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight, self.computer)


def seconds_of_steps(stage: int, enough: float) -> dict[str, float]:
    """Seconds of a layer's forward, of a step that neither computes nor sends, that does one, and both; and what the
    model says of that.

    What else a machine does makes steps longer, and never shorter than they could be. So of the steps that do both the
    fastest counts, and there are more of them until `enough` is hidden on every rank.
    """
    computer, link, comm = Computer(), Link(), construction_jobs.comm()
    module = nn.Sequential(*(Layer(computer) for _ in range(LAYERS)))
    # Each layer is a unit and a reduction; large models, which these layers stand for, wait for new weights where they
    # are used.
    options = Options(unit_classes=(Layer,), bucket_bytes=LAYER_BYTES, late_publish_bytes=0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    engine = Engine(module, [optimizer], stage=stage, comm=comm, options=options)
    computer.journal = engine.runner.journal

    def step() -> float:
        began = time.monotonic()
        computer.done.clear()
        with engine.forward():
            loss = module(torch.ones(1, WIDTH)).mean()
        with engine.backward():
            loss.backward()
        optimizer.step()
        return time.monotonic() - began

    def timed(*, computes: bool, sends: bool) -> float:
        computer.seconds, link.rate = computes * forward, rate if sends else float("inf")
        return step()

    with link.under(comm):
        found = {"neither": min(step() for _ in range(3))}
        # A slow machine gets a slow computer and a slow link: else it would be the engine that is measured.
        own = comm.all_reduce(torch.tensor(found["neither"]), "own", "max").item()
        forward = found["forward"] = max(FORWARD_S, APART * own / LAYERS)
        rate = LAYER_BYTES / comm.size / forward  # what is sent of a layer takes as long as its forward
        found["computation"] = timed(computes=True, sends=False)
        timed(computes=False, sends=True)  # a step waits for what the one before has left
        found["communication"] = timed(computes=False, sends=True)
        found["both"] = timed(computes=True, sends=True)
        work = {use: Work(flops=seconds) for use, seconds in computer.done.items()}  # type: ignore[arg-type]
        timing = timing_of(engine.program(), work, Rates(flops=1.0, memory=1e30, link=rate, latency=0.0))
        found |= {"model": timing.seconds, "sent": timing.sent, "computed": timing.compute}
        for _ in range(ROUNDS):
            if comm.all_reduce(torch.tensor(hidden_in(found)), "hidden", "min") >= enough:
                break
            found["both"] = min(found["both"], timed(computes=True, sends=True))
    engine.close()
    return found


def hidden_in(found: dict[str, float]) -> float:
    """The part of min(communication, computation) that is hidden: what a step that does both is shorter than the two
    together. By the times for which link and computer were made, as those that were measured have the engine's in them,
    twice."""
    both = found["both"] - found["neither"]  # without the engine's own time
    return (found["sent"] + found["computed"] - both) / min(found["sent"], found["computed"])
