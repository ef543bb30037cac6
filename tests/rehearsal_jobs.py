"""Trains on real ranks as a rehearsal does, and takes down the same."""

import ctypes
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

import jobs
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


class Deep(L.LightningModule):
    """84M parameters, 336 MB: far more than what a process takes for other things while it trains."""

    def __init__(self, width: int = 1024, depth: int = 80) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch).tanh()
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def deep_batch_of() -> Tensor:
    return torch.zeros(64, 1024)


def resident_bytes(strategy: dict[str, Any]) -> int:
    """Returns what training has added at most to the resident memory of this rank."""
    # What a first fit leaves, modules that are imported and threads, is no tensor.
    jobs.trainer(strategy, 2, max_steps=2).fit(Deep(8, 3), DataLoader(cast(Any, [torch.zeros(2, 8)] * 2)))
    # glibc keeps freed blocks of tens of MB for later; with a fixed threshold what is resident is what is live.
    assert ctypes.CDLL(None).mallopt(jobs.M_MMAP_THRESHOLD, 1_000_000) == 1
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = jobs._resident_peak()
    peaks = []

    class Peaks(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            peaks.append(jobs._resident_peak())  # not that of the end, when the model is made whole

    run = jobs.trainer(strategy, 2, callbacks=[Peaks()])
    run.fit(Deep(), DataLoader(cast(Any, [deep_batch_of()] * STEPS), batch_size=None))
    return max(peaks) - before
