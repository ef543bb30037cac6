"""Trains on real ranks as a rehearsal does, and takes down the same."""

import ctypes
import os
import sys
import time
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, cast

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.data import DataLoader

import jobs
from lightning_zero.rehearsal import rehearsal
from lightning_zero.rehearsal.imagined import Rank, WatchedStrategy
from lightning_zero.rehearsal.rehearsal import STEPS
from lightning_zero.torch_private import TorchDispatchMode, is_faking, storage_key

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


class Layer(nn.Module):
    """A block of few operations."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Small(Model):
    """For many trainings in one job."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(2))


class HalfFrozen(Small):
    """Its optimizer has all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.words.requires_grad_(False)
        self.blocks[0].requires_grad_(False)


class SmallDivided(Small):
    configure_model = Divided.configure_model


class NormedLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class InSequence(Small):
    """Between its divided layers each rank has a part of every sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NormedLayer() for _ in range(2))

    def configure_model(self) -> None:
        mesh = self.device_mesh
        assert mesh is not None
        into = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        plan: dict[str, Any] = {
            "words": into,
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        for number in range(len(self.blocks)):
            plan[f"blocks.{number}.norm"] = SequenceParallel()
            plan[f"blocks.{number}.up"] = ColwiseParallel(input_layouts=Shard(1))
            plan[f"blocks.{number}.down"] = RowwiseParallel(output_layouts=Shard(1))
        parallelize_module(self, mesh["tensor_parallel"], plan)


def batch_of() -> Tensor:
    return torch.arange(4 * LENGTH).view(4, LENGTH) % WORDS


class Settled(TorchDispatchMode):
    """Inside, who has waited for an all-reduce of DTensor's goes on when gloo's thread has let go of its tensor, too.

    The thread tells the waiter that the work is done, and drops the work after that. By then the waiter may have
    dropped the tensor, whose memory then stays for as long as the system has something else to do: of two runs one has
    more bytes at its peak. Other collectives keep parts of tensors, of which nobody can ask who has them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._results: dict[int, weakref.ref[Tensor]] = {}  # of collectives that nobody has waited for, by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_faking():
            return func(*args, **(kwargs or {}))
        if any(one.__torch_dispatch__ is not Tensor.__torch_dispatch__ for one in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.wait_tensor.default:
            self._settle(args[0])
        elif func is torch.ops._c10d_functional.all_reduce.default:
            self._results[storage_key(result.untyped_storage())] = weakref.ref(result)
        return result

    def _settle(self, waited: Tensor) -> None:
        result = self._results.pop(storage_key(waited.untyped_storage()), lambda: None)()
        until = time.monotonic() + 10.0
        while result is not None and _is_held(result, is_waited=result is waited) and time.monotonic() < until:
            time.sleep(1e-4)


def _is_held(result: Tensor, *, is_waited: bool) -> bool:
    """Whether gloo's thread has the result of a collective, besides Python and, if it `is_waited`, the call that waits.

    As long as torch refers to it twice, torch also keeps its object of Python. The thread first gives up its reference,
    and then, when it gets the interpreter, the object: without its second look, that would keep the memory, too.
    """
    if is_waited:
        return result._use_count() > 3
    return result._use_count() > 1 or sys.getrefcount(result) > 4  # the tensor around it, `_settle`, this and the call


def train(
    strategy: dict[str, Any], world: int, make: type[Model] = Model, *, is_told: bool = True, **trainer: Any
) -> dict[str, Any]:
    """Trains for real, and returns what `rehearse` returns of it; nothing if it `is_told` by other ranks alone."""
    micro = trainer.get("accumulate_grad_batches", 1)
    played = Rank(0, world, steps=STEPS, micro_batches=micro, host_is_apart=False, computes=True)
    watched = WatchedStrategy(played, **strategy)
    with ExitStack() as following:
        if is_told:
            following.enter_context(played.tracking())
        if is_told and "tensor_parallel_size" in strategy:
            following.enter_context(Settled())
        rehearsal.train(make, batch_of, watched, STEPS, devices=world, **trainer)
    if not is_told:
        return {}
    return {**played.outcome, "peaks": played.memory.peaks, "program": str(played.outcome["program"])}


class Run(NamedTuple):
    """A training."""

    strategy: dict[str, Any]
    make: type[Model]


def train_each(runs: list[Run], world: int) -> list[dict[str, Any]]:
    """Trains one after the other, and returns what `train` returns of each of which this rank tells: ranks tell in
    turn, as to follow all tensors takes longer than to train."""
    rank = int(os.environ["RANK"])
    return [train(run.strategy, world, run.make, is_told=at % world == rank) for at, run in enumerate(runs)]


class Constant(nn.Linear):
    """Takes no time to draw its weights."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.01)


class Deep(L.LightningModule):
    """42M parameters, 168 MB: far more than what a process takes for other things while it trains."""

    def __init__(self, width: int = 1024, depth: int = 40) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Constant(width, width, bias=False) for _ in range(depth))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch).tanh()
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def deep_batch_of() -> Tensor:
    return torch.zeros(4, 1024)  # few rows: what is compared is memory, nearly all of it that of states


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


class Marks(L.Callback):
    """Leaves a file, by which is seen that a Trainer was given it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_start(self, *_: Any) -> None:
        self.path.touch()
