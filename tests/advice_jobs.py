"""Runs that run out of memory, on real ranks."""

import io
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fabric_jobs import fabric
from jobs import Classifier, loader, trainer
from lightning_zero import ZeroMonitor
from lightning_zero.device import allocated_bytes, held_bytes
from lightning_zero.pl.advice import BESIDE, bytes_beside, held_by, options_of
from lightning_zero.run.engine import Engine
from lightning_zero.wire.local import LocalComm
from monitor_jobs import listening

LOGGER = "lightning_zero.pl.advice"
WIDTH, BLOCKS, SPARE = 64, 40, 100 * 2**20  # SPARE: bytes that the limit leaves
ROWS = 64 * 2**10  # of a batch: a block keeps two activations, of 16 MiB each


class Greedy(Classifier):
    """Asks for more memory than there is address space, in the forward of its second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            torch.empty(10**15, dtype=torch.uint8)
        return super().training_step(batch, batch_idx)


def run_out(strategy: Any, *, asked: bool) -> dict[str, Any]:
    """A fit that asks for too much, with a `ZeroMonitor` if `asked`."""
    with listening(LOGGER) as said:
        try:
            trainer(strategy, 2, callbacks=[ZeroMonitor()] if asked else []).fit(Greedy(), loader())
        except RuntimeError as error:
            return {"said": said, "error": str(error)}
    return {"said": said, "error": None}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(WIDTH, WIDTH), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


class Deep(L.LightningModule):
    """Few weights, and many activations where batches are large. From the second step on memory is limited."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).mean()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1:
            limit_memory()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def limit_memory() -> None:
    """Leaves this process `SPARE` bytes, as a limit of the system's."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if line[:2] == "Vm")
    there = int(fields["VmData"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (there + SPARE, resource.RLIM_INFINITY))


@contextmanager
def limited() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def batches() -> list[Tensor]:
    """The first one is small."""
    return [torch.ones(8, WIDTH), torch.ones(ROWS, WIDTH)]


def fit_in_limited_memory(strategy: Any) -> dict[str, Any]:
    run = trainer(strategy, 2, max_steps=2, use_distributed_sampler=False)
    with listening(LOGGER) as said, limited():
        try:
            run.fit(Deep(), DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
        except RuntimeError as error:
            return {"said": said, "error": str(error), "kind": type(error), "steps": run.global_step}
    return {"said": said, "error": None}


class Fails(torch.autograd.Function):
    """Has no memory in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise MemoryError


class Places(nn.Module):
    """Blocks, between which forward or backward may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1 and self.fails == "forward":
                raise MemoryError
            if number == 1 and self.fails == "backward":
                x = Fails.apply(x)
        return x


def loop_that_runs_out(strategy: Any, where: str) -> dict[str, Any]:
    """A loop with Fabric whose second step has no memory somewhere, and what Python does with an error that nobody
    catches."""
    made, module = fabric(strategy, 2), Places()
    model, optimizer = made.setup(module, torch.optim.AdamW(module.parameters()))

    def train(fails: str) -> None:
        module.fails = fails
        loss = model(torch.ones(8, WIDTH)).mean()
        if fails == "loss":
            raise MemoryError
        made.backward(loss)
        if fails == "step":
            optimizer.register_step_pre_hook(_raise)
        optimizer.step()
        optimizer.zero_grad()

    train("")
    printed = io.StringIO()
    with listening(LOGGER) as said:
        try:
            train(where)
        except MemoryError as error:
            caught = [*said]
            with redirect_stderr(printed):
                sys.excepthook(type(error), error, error.__traceback__)
    return {"caught": caught, "said": said, "printed": printed.getvalue()}


def _raise(*_: Any) -> None:
    raise MemoryError


class OnDevice(torch.optim.SGD):
    """An optimizer of which nothing is known, and which the host cannot try."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.device.type != "cpu"
                self.state[parameter]["average"] = torch.zeros_like(parameter)
        return super().step(closure)


def held_on_a_full_device(device: torch.device) -> dict[str, Any]:
    """What is held, found out on a device on which nothing may be allocated meanwhile."""
    module = nn.Sequential(*(Block() for _ in range(3)))
    engine = Engine(module, [OnDevice(module.parameters(), lr=0.1)], stage=2, comm=LocalComm(), device=device)
    before = bytes_beside(engine.bytes_by_category(), device, device)
    activations = torch.empty(2**20, dtype=torch.uint8, device=device)
    torch.get_device_module(device).reset_peak_memory_stats()
    there = held_bytes(device)
    held = held_by([engine], device, device, before)
    options_of(engine, 2, held.planned, 10)
    return {
        "allocated": allocated_bytes(device) - there,
        "beside": held.grown[BESIDE],
        "activations": activations.untyped_storage().nbytes(),
        "planned": dict(held.planned),
    }
