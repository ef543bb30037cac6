"""The price of an offloaded optimizer step beside torch's fused AdamW in memory, and what the hardware asks for (R61).

    python benchmarks/offload_step.py --millions 50 --path /a/folder/on/a/fast/disk

One process, AdamW over square layers; the ways take turns, round after round. For the tier on disk the same run
measures what the disk gives, in a file of its own, and tells the bound: the slower of the kernel and the transfers.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_zero.config import Offload
from lightning_zero.run.engine import Engine, Options
from lightning_zero.tiers.disk import Disk
from lightning_zero.wire.local import LocalComm

NVME = "offload='nvme'"
WIDTH = 1024
BYTES_READ, BYTES_WRITTEN = 16, 12  # per parameter: master, gradient and two moments; all but the gradient


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        ways = {
            "fused, in memory": plain(options),
            "offload='cpu'": offloaded(options, Offload(optimizer="cpu")),
            NVME: offloaded(options, Offload(optimizer="nvme", path=folder)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds + 1):
            for name, step in ways.items():
                seconds[name].append(step())
        read, written = rates(Path(folder), options.millions)
    print(f"{options.millions} million parameters, {torch.get_num_threads()} threads, torch {torch.__version__}")
    found = {name: statistics.median(times[1:]) for name, times in seconds.items()}  # the first makes the state
    for name, median in found.items():
        ratio = median / found["fused, in memory"]
        print(f"{name:<18}{1000 * median:>9.1f} ms{ratio:>7.2f} x fused   ({min(seconds[name]) * 1000:.1f} at best)")
    numel = options.millions * 10**6
    transfers = max(BYTES_READ * numel / read, BYTES_WRITTEN * numel / written)
    bound = max(found["fused, in memory"], transfers)
    print(f"disk: {read / 1e9:.2f} GB/s read, {written / 1e9:.2f} GB/s written; bound of 'nvme' {1000 * bound:.1f} ms,")
    print(f"which takes {found[NVME] / bound:.2f} x that")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=50, help="parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--path", type=Path, default=None, help="folder on the disk to measure; default: the system's")
    return parser.parse_args()


def layers(options: argparse.Namespace) -> nn.Module:
    count = max(1, options.millions * 10**6 // WIDTH**2)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)])


def plain(options: argparse.Namespace) -> Callable[[], float]:
    model = layers(options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return lambda: timed(optimizer.step)


def offloaded(options: argparse.Namespace, offload: Offload) -> Callable[[], float]:
    """A step, and what is postponed of it; the backward before is not timed."""
    model = layers(options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # where it is left out, torch's loop, as in memory
    engine = Engine(model, [optimizer], stage=2, comm=LocalComm(), options=Options(offload=offload))

    def step() -> float:
        with engine.backward():
            sum((parameter * 0.1).sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
        engine.averages.of(optimizer)

        def both() -> None:
            optimizer.step()
            engine.catch_up()

        seconds = timed(both)
        optimizer.zero_grad()
        return seconds

    return step


def timed(step: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def rates(folder: Path, millions: int) -> tuple[float, float]:
    """Bytes per second that one reader and one writer get, through the system's cache as the optimizer's state does; to
    room that has been written to before, as after a first step."""
    disk, block = Disk(folder), torch.zeros(2**25, dtype=torch.uint8)
    blocks = max(1, BYTES_READ * millions * 10**6 // block.numel())
    starts = [disk.reserve(block.numel()) for _ in range(blocks)]

    def each(move: Callable[[int, torch.Tensor], None]) -> None:
        for start in starts:
            move(start, block)

    each(disk.write)
    written, read = timed(lambda: each(disk.write)), timed(lambda: each(disk.read))
    disk.close()
    return blocks * block.numel() / read, blocks * block.numel() / written


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
