"""What the jobs of all packages look at."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from jobs import state_of
from lightning_zero import ZeroStrategy


def as_user(strategy: Any) -> Any:
    """A name; or arguments of ZeroStrategy or, without a stage, of DDPStrategy, beside which everything is as it is by
    default. Made on the rank, since strategies do not travel."""
    if not isinstance(strategy, dict):
        return strategy
    return (ZeroStrategy if "stage" in strategy else DDPStrategy)(**strategy)


def in_shards(strategy: Any) -> int:
    """Bytes of parameters that no rank holds whole between their uses."""
    engines = getattr(strategy, "_engines", [])  # DDP has none
    return sum(unit.nbytes for engine in engines for unit in engine.loans.cache.units)


class Watch(pl.Callback):
    """Each step's loss, as the trainer has it, and what was in shards at the end of training. Each batch draws its own
    random numbers, those that a resume goes on with and a package's own data loaders included."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.in_shards = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        torch.manual_seed(2 * (trainer.fit_loop.total_batch_idx + 1) + trainer.global_rank)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.in_shards = in_shards(trainer.strategy)


def kept(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """What a checkpoint has: buffers are each rank's own, and rank 0's are saved."""
    return state_of(model) if rank == 0 else {}


def files(folder: Path, rank: int) -> int:
    """How many checkpoints are single files, on the rank that writes them."""
    return sum(path.is_file() for path in folder.rglob("*.ckpt")) if rank == 0 else 0
