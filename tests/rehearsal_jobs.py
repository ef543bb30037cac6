"""Trains on real ranks as a rehearsal does, and takes down the same."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_zero.rehearsal import rehearsal
from lightning_zero.rehearsal.imagined import Rank, WatchedStrategy
from lightning_zero.rehearsal.rehearsal import STEPS

WIDTH, LENGTH, WORDS = 64, 16, 96


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("mask", torch.ones(LENGTH, dtype=torch.bool))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.words(batch)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Divided(Model):
    def configure_model(self) -> None:
        mesh = self.device_mesh
        assert mesh is not None
        for block in self.blocks:
            plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tensor_parallel"], plan)


def batch_of() -> Tensor:
    return torch.arange(4 * LENGTH).view(4, LENGTH) % WORDS


def train(strategy: dict[str, Any], world: int, make: type[Model] = Model, **trainer: Any) -> dict[str, Any]:
    """Trains for real, and returns what `rehearse` returns of it."""
    micro = trainer.get("accumulate_grad_batches", 1)
    played = Rank(0, world, steps=STEPS, micro_batches=micro, host_is_apart=False, computes=True)
    watched = WatchedStrategy(**strategy)
    watched.played = played
    with played.watching():
        rehearsal.train(make, batch_of, watched, STEPS, devices=world, **trainer)
    outcome = played.outcome
    assert outcome is not None
    return {**vars(outcome), "peaks": played.memory.peaks, "program": str(outcome.program)}
