"""`calibrate`: the rates of this machine, measured in training steps of some ranks that are at work together."""

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from typing_extensions import override

from lightning_zero.device import HOST, is_host, module_of
from lightning_zero.rehearsal.cost import Rates, Work, work_of
from lightning_zero.rehearsal.imagined import Rank, WatchedStrategy
from lightning_zero.rehearsal.rehearsal import Module, quiet, train
from lightning_zero.wire.comm import Comm

STEPS, COUNTED = 7, 4  # steps that are taken; the last of them, which are measured
NUMEL = 2**20  # elements of a large collective, of each rank
ROUNDS = 20  # of a collective or a copy
LEAST = 0.1  # of the time of operations that calculate: what is counted as calculating, however much they move


@final
class Timed(Rank):
    """A rank that computes its steps, and times every operation of torch in the last of them."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks, steps=STEPS, computes=True)
        self._done, self._took = [Work(), Work()], [0.0, 0.0]  # of operations without FLOPs, and with them

    @override
    def _ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        super()._ran(func, args, kwargs, result)
        if self._engine is not None and self._batches_left < COUNTED:
            work = work_of(func, args, kwargs, result)
            self._done[work.flops > 0] += work
            self._took[work.flops > 0] += self.hollow.took

    @property
    def memory_rate(self) -> float:
        """Bytes per second of operations that only move them."""
        return self._done[False].nbytes / self._took[False]

    @property
    def flops_rate(self) -> float:
        """FLOPs per second, beside the time that their bytes take."""
        work, seconds = self._done[True], self._took[True]
        return work.flops / max(seconds - work.nbytes / self.memory_rate, LEAST * seconds)


def calibrate(module: Module, batch: Any, *, ranks: int = 2, accelerator: str = "cpu", **trainer: Any) -> Rates:
    """Trains for some steps at stage 2 on ranks of this machine, and measures how fast each operation is while all
    ranks are at work, and then how fast they send and copy.

    Args:
        module: as `rehearse` takes it, and such that it can be sent to another process: an import path, or a function
            or class of a module.
        batch: as `rehearse` takes it.
        ranks: processes, one for each GPU or CPU core.
        accelerator: ``"cpu"`` or ``"gpu"``, as the Trainer takes it.
        trainer: what else the Trainer would be given.

    Raises:
        ValueError: for less than two ranks, which send nothing.
    """
    if ranks < 2:
        raise ValueError(f"ranks={ranks}: a rank alone sends nothing. Calibrate with at least 2.")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rates.json"
        spawn(_measure, (ranks, find_free_network_port(), path, module, batch, accelerator, trainer), nprocs=ranks)
        return Rates(**json.loads(path.read_text()))


def _measure(
    rank: int, ranks: int, port: int, path: Path, module: Module, batch: Any, accelerator: str, trainer: dict[str, Any]
) -> None:
    """Is one of the ranks."""
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in where.items()})
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    played = Timed(rank, ranks)
    strategy = Measuring(played, 2, units="modules", cluster_environment=LightningEnvironment())
    with quiet(), played.tracking():
        train(module, batch, strategy, STEPS, devices=ranks, accelerator=accelerator, **trainer)
    if rank == 0:
        path.write_text(json.dumps(asdict(strategy.found(played))))


@final
class Measuring(WatchedStrategy):
    """Also measures collectives and copies, at the end, while the other ranks are there."""

    _link = _latency = _host = 0.0

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if not is_host(self.root_device):

            def clock() -> float:
                module_of(self.root_device).synchronize(self.root_device)
                return time.perf_counter()

            self.played.hollow.clock = clock

    @override
    def teardown(self) -> None:
        engine = self.engine
        if engine is not None and not engine.closed and engine.runner.journal.has_step:
            self._link, self._latency = _rates_of(engine.mesh.world, self.root_device, self.played.hollow.clock)
            here, there = (torch.ones(NUMEL, device=device) for device in (self.root_device, HOST))
            seconds = _seconds_of(lambda: there.copy_(here), self.played.hollow.clock)
            self._host = here.nbytes / seconds
        super().teardown()

    def found(self, played: Timed) -> Rates:
        """Returns what was measured."""
        return Rates(
            flops=played.flops_rate,
            memory=played.memory_rate,
            link=self._link,
            latency=self._latency,
            host=self._host,
            shares=is_host(self.root_device),
        )


def _rates_of(comm: Comm, device: torch.device, clock: Callable[[], float]) -> tuple[float, float]:
    """Returns the bytes per second that a rank sends in large all-gathers and reduce-scatters, and the seconds of a
    small one."""

    def both(numel: int) -> Callable[[], None]:
        full = comm.empty(comm.size * numel, torch.float32, device).view(comm.size, numel).zero_()
        shard: Tensor = torch.zeros(numel, device=device)
        scratch = torch.zeros(comm.scratch_rows, numel, device=device)

        def run() -> None:
            comm.all_gather(full, full[comm.rank], "calibration").wait()
            comm.reduce_scatter(shard, full, scratch, "calibration").wait()

        return run

    small, large = (_seconds_of(both(numel), clock) / 2 for numel in (16, NUMEL))  # of one of the two
    sent = 4 * NUMEL * (comm.size - 1)
    return sent / max(large - small, LEAST * large), small


def _seconds_of(do: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Returns the seconds of one of `ROUNDS` calls."""
    do()
    begun = clock()
    for _ in range(ROUNDS):
        do()
    return (clock() - begun) / ROUNDS
