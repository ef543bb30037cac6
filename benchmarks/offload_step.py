"""The price of an offloaded optimizer step beside torch's fused AdamW in memory, and what the hardware asks for (R61).

    python benchmarks/offload_step.py --millions 50 --path /a/folder/on/a/fast/disk

One process, AdamW over square layers; the ways take turns, round after round. Each round also measures what this
machine gives, and from it a bound for that round. A step is told beside its bound: the median of the rounds' ratios.

The bound of 'cpu' is the step in memory. The bound of 'nvme' assumes that everything overlaps except what cannot. It is
the longest of

    compute   the step in memory and the copy of new weights from a window to where they rest, after the first window
              has been read and before the last one is written
    disk      all reads and writes of a step, both directions at once: the package's own `Disk`, with as many bytes in
              pieces as large, in a file of its own, on the disk or in the system's cache as the state itself
    cores     the processor time of both, which is the kernel's for the disk, on all cores that this process may use:
              where the system caches the file, both directions are copies

So it counts what is moved as necessary: a master, a gradient and two moments are read, all but the gradient written.
Where other processes use the cores meanwhile, the bound is too low: run it on an idle machine.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero.config import Offload
from lightning_zero.run.engine import Engine, Options
from lightning_zero.tiers.disk import Disk, Move
from lightning_zero.wire.local import LocalComm

MEMORY, CPU, NVME = "fused, in memory", "offload='cpu'", "offload='nvme'"
WIDTH = 1024
ITEM = 4 * WIDTH**2  # bytes of a tensor, which is read or written at once
BUCKET = 25 * 2**20  # bytes of masters in a window: so many, or a sixteenth of the model
READ, WRITTEN = 4, 3  # tensors for each parameter: master, gradient and two moments; all but the gradient


class Cost(NamedTuple):
    """Seconds."""

    wall: float
    processor: float  # of all threads


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        ways = {
            MEMORY: plain(options),
            CPU: offloaded(options, Offload(optimizer="cpu")),
            NVME: offloaded(options, Offload(optimizer="nvme", path=folder)),
        }
        transfers = Transfers(Path(folder), layers_of(options))
        ways |= {"read": transfers.read, "written": transfers.write, "both at once": transfers.both}
        ways["weights"] = transfers.copy
        rounds = [{name: step() for name, step in ways.items()} for _ in range(options.rounds + 1)]
        transfers.disk.close()
    print(f"{options.millions} million parameters, {torch.get_num_threads()} threads, torch {torch.__version__}")
    tell(rounds[1:], transfers)  # the first makes the state
    return 0


def tell(rounds: list[dict[str, Cost]], transfers: "Transfers") -> None:
    found = {name: statistics.median(costs[name].wall for costs in rounds) for name in rounds[0]}
    for name in (MEMORY, CPU, NVME):
        best = min(costs[name].wall for costs in rounds)
        print(f"{name:<18}{1000 * found[name]:>9.1f} ms{found[name] / found[MEMORY]:>7.2f} x fused   ", end="")
        print(f"({1000 * best:.1f} at best)")
    for name, nbytes in (("read", transfers.bytes_read), ("written", transfers.bytes_written)):
        print(f"disk, {name:<12}{1000 * found[name]:>9.1f} ms{nbytes / found[name] / 1e9:>7.2f} GB/s alone")
    print(f"disk, both at once{1000 * found['both at once']:>9.1f} ms")
    ratio = statistics.median(costs[CPU].wall / costs[MEMORY].wall for costs in rounds)
    print(f"bound of 'cpu'    {1000 * found[MEMORY]:>9.1f} ms, of which it takes {ratio:.2f} x")
    lanes = [transfers.lanes(costs) for costs in rounds]
    bound = statistics.median(max(one.values()) for one in lanes)
    ratio = statistics.median(costs[NVME].wall / max(one.values()) for costs, one in zip(rounds, lanes, strict=True))
    parts = ", ".join(f"{name} {1000 * statistics.median(one[name] for one in lanes):.1f}" for name in lanes[0])
    print(f"bound of 'nvme'   {1000 * bound:>9.1f} ms, of which it takes {ratio:.2f} x: the longest of {parts} ms")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=50, help="parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--path", type=Path, default=None, help="folder on the disk to measure; default: the system's")
    return parser.parse_args()


def layers_of(options: argparse.Namespace) -> int:
    return max(1, options.millions * 10**6 // WIDTH**2)


def model_of(options: argparse.Namespace) -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers_of(options))])


def plain(options: argparse.Namespace) -> Callable[[], Cost]:
    model = model_of(options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return lambda: cost_of(optimizer.step)


def offloaded(options: argparse.Namespace, offload: Offload) -> Callable[[], Cost]:
    """A step, and what is postponed of it; the backward before is not timed."""
    model = model_of(options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # where it is left out, torch's loop, as in memory
    engine = Engine(
        model, [optimizer], stage=2, comm=LocalComm(), options=Options(offload=offload, bucket_bytes=BUCKET)
    )

    def step() -> Cost:
        with engine.backward():
            sum((parameter * 0.1).sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
        engine.gradients.slots_with_gradients(optimizer)

        def both() -> None:
            optimizer.step()
            engine.catch_up()

        cost = cost_of(both)
        optimizer.zero_grad()
        return cost

    return step


def cost_of(call: Callable[[], Any]) -> Cost:
    begin, processor = time.perf_counter(), time.process_time()
    call()
    return Cost(time.perf_counter() - begin, time.process_time() - processor)


class Transfers:
    """What a step of `layers` tensors reads and writes, and nothing else, by the package's own `Disk`.

    Args:
        folder: on the disk to measure.
        layers: tensors of a model.
    """

    def __init__(self, folder: Path, layers: int) -> None:
        self.disk = Disk(folder)
        self.bytes_read, self.bytes_written = READ * layers * ITEM, WRITTEN * layers * ITEM
        self._starts = [self.disk.reserve(ITEM) for _ in range(READ * layers)]
        # As many bytes as the windows that are read and written: values that stay in a processor's cache move faster.
        self._window = max(1, min(BUCKET, layers * ITEM // 16) // ITEM)
        self._rooms = torch.zeros(2, READ * self._window, ITEM, dtype=torch.uint8)
        self._weights = torch.zeros(layers, ITEM, dtype=torch.uint8)
        self._layers = layers
        for start in self._starts:
            self.disk.write(start, self._rooms[0, 0])

    def read(self) -> Cost:
        return cost_of(lambda: self._wait(self._begin_reads()))

    def write(self) -> Cost:
        return cost_of(lambda: self._wait(self._begin_writes()))

    def both(self) -> Cost:
        return cost_of(lambda: self._wait([*self._begin_reads(), *self._begin_writes()]))

    def copy(self) -> Cost:
        def each() -> None:
            for weight, master in zip(self._weights, itertools.cycle(self._rooms[0]), strict=False):
                weight.copy_(master)

        return cost_of(each)

    def _begin_reads(self) -> "list[Future[None]]":
        return [self.disk.begin_read(moves) for moves in self._windows(READ, self._rooms[0])]

    def _begin_writes(self) -> "list[Future[None]]":
        return [self.disk.begin_write(moves) for moves in self._windows(WRITTEN, self._rooms[1])]

    def _windows(self, tensors: int, room: Tensor) -> Iterator[list[Move]]:
        """Yields what moves of each window, where so many tensors of each layer do."""
        most = tensors * self._window
        for first in range(0, tensors * self._layers, most):
            starts = self._starts[first : min(first + most, tensors * self._layers)]
            yield [*zip(starts, room, strict=False)]

    def _wait(self, moves: "list[Future[None]]") -> None:
        for move in moves:
            move.result()
        self.disk.drain()

    def lanes(self, costs: dict[str, Cost]) -> dict[str, float]:
        """Returns how long each lane of an offloaded step is busy at least, given what was measured of its parts."""
        compute, weights, both = costs[MEMORY], costs["weights"], costs["both at once"]
        ends = (costs["read"].wall + costs["written"].wall) * self._window / self._layers
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return {
            "compute": compute.wall + weights.wall + ends,
            "disk": both.wall,
            "cores": (compute.processor + weights.processor + both.processor) / cores,
        }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
