"""Whether modelled times hold: calibrated on two ranks, predicts other stages, offload and more ranks, then measures.

    python benchmarks/calibration.py --size large

Each line is a training of its own under `lightning.Trainer`; its time is the median of the steps after the first ones.
More ranks than processor cores share them, and each is counted as so much slower. fp32, AdamW, CPU ranks over gloo.
"""

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

from benchmark_models import SIZES, Size, model_of
from lightning_zero import ZeroStrategy, rehearse
from lightning_zero.rehearsal.calibration import calibrate
from lightning_zero.rehearsal.cost import Rates
from lightning_zero.rehearsal.rehearsal import quiet, train

CALIBRATED = 2  # ranks
WARM_UP = 3  # steps before anything is measured
OFFLOAD = {"optimizer": "cpu"}
LINES: list[tuple[int, dict[str, Any]]] = [
    (2, {"stage": 1}),
    (2, {"stage": 2}),
    (2, {"stage": 3}),
    (2, {"stage": 2, "offload": OFFLOAD}),
    (2, {"stage": 3, "activation_checkpointing": True}),
    (4, {"stage": 1}),
    (4, {"stage": 2}),
    (4, {"stage": 3}),
]


class Module(L.LightningModule):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = model_of(size)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def batch_of(size: Size) -> Tensor:
    return torch.randint(size.vocabulary, (size.batch, size.length), generator=torch.Generator().manual_seed(1))


def measured(size: Size, ranks: int, strategy: dict[str, Any], steps: int) -> float:
    """Returns the median seconds of a step."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as found:
        found.bind(("localhost", 0))
        path, port = Path(folder) / "seconds.json", found.getsockname()[1]
        found.close()
        spawn(one_rank, (size, ranks, strategy, steps, port, path), nprocs=ranks)
        return statistics.median(json.loads(path.read_text()))


def one_rank(rank: int, size: Size, ranks: int, strategy: dict[str, Any], steps: int, port: int, path: Path) -> None:
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in where.items()})
    times: list[float] = []

    class Clock(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            times.append(time.perf_counter())

    made = ZeroStrategy(**strategy)
    made.cluster_environment = LightningEnvironment()
    with quiet():
        train(partial(Module, size), partial(batch_of, size), made, WARM_UP + steps, devices=ranks, callbacks=[Clock()])
    if rank == 0:
        path.write_text(json.dumps([after - before for before, after in pairwise(times[WARM_UP - 1 :])]))


def among(rates: Rates, more: float) -> Rates:
    """Returns the rates of one of so many times as many ranks on the same machine."""
    slower = {name: getattr(rates, name) / more for name in ("flops", "memory", "link", "host")}
    return replace(rates, **slower, latency=rates.latency * more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each line")
    parser.add_argument("--lines", type=int, default=len(LINES), help="how many of the table")
    options = parser.parse_args()
    size = SIZES[options.size]
    rates = calibrate(partial(Module, size), partial(batch_of, size), ranks=CALIBRATED)
    print(rates)
    print(f"{'ranks':>5}  {'modelled':>9}  {'measured':>9}  {'off by':>7}  strategy")
    for ranks, strategy in LINES[: options.lines]:
        shared = among(rates, max(1.0, ranks / max(CALIBRATED, os.cpu_count() or 1)))
        told = rehearse(
            partial(Module, size), partial(batch_of, size), strategy, ranks=ranks, host_is_apart=False, rates=shared
        )
        found, seconds = measured(size, ranks, strategy, options.steps), told.timing().seconds
        print(f"{ranks:5}  {seconds:7.3f} s  {found:7.3f} s  {seconds / found - 1:+7.1%}  {strategy}", flush=True)


if __name__ == "__main__":
    main()
