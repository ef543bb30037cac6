"""What a step costs this process does not grow with the number of ranks."""

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_zero
from lightning_zero.run.engine import Engine, Options
from lightning_zero.wire.local import CountingComm

PACKAGE = str(Path(lightning_zero.__file__).parent)
WORLDS = [2, 64, 1024]
STEPS_UNTIL_PLANNED = 4
BUCKET_BYTES = 2**20

SLICED, BLOCKS, SMALL = "one matrix larger than three buckets", "blocks of a bucket and a half", "many small modules"


class Copies(TorchDispatchMode):
    """Counts the operations of torch that move or make values."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function.overloadpacket)
        if name in ("aten.copy_", "aten._to_copy", "aten.clone", "aten.cat", "aten.zero_"):
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def calls_of_the_package() -> Iterator[Counter[str]]:
    """Counts calls of Python functions by name, of this package alone.

    Nothing is collected meanwhile: what earlier tests left behind would be freed at some call, and its memory taken
    out of a ledger's books, in the middle of the step that is counted.
    """
    counts: Counter[str] = Counter()
    gc.collect()
    gc.disable()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            counts[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        yield counts
    finally:
        sys.setprofile(None)
        gc.enable()


def model_of(kind: str, layers: int) -> nn.Module:
    if kind == SLICED:
        return nn.Sequential(nn.Linear(8, 1024, bias=False), nn.Linear(1024, 1024, bias=False))
    if kind == BLOCKS:
        return nn.Sequential(nn.Linear(16, 16), *[nn.Sequential(nn.Linear(16, 16), Wide()) for _ in range(3)])
    return nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(16, 16), nn.Tanh())])


class Wide(nn.Module):
    """Three matrices of half a bucket, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.through, self.out = nn.Linear(16, 8192), nn.Linear(16, 8192), nn.Linear(8192, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.into(x)) * self.through(x))


def cost_of_a_step(
    kind: str, stage: int, world: int, layers: int = 12
) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Copies, collectives and calls of Python in one step of the first rank."""
    torch.manual_seed(0)
    model, comm = model_of(kind, layers), CountingComm(0, world)
    # Plain SGD keeps no state and, for one tensor after another, costs the same whatever a rank owns.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    engine = Engine(model, [optimizer], stage=stage, comm=comm, options=Options(bucket_bytes=BUCKET_BYTES))
    batch = torch.randn(4, next(model.parameters()).shape[1])

    def step() -> None:
        with engine.forward():
            loss = model(batch).square().mean()
        with engine.backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS_UNTIL_PLANNED):
        step()
    before = comm.calls.copy()
    with calls_of_the_package() as calls:
        step()
    with Copies() as copies:
        step()
    sent = {kind: (count - before[kind]) // 2 for kind, count in comm.calls.items()}
    engine.close()
    return copies.counts, Counter(sent), calls


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", [SLICED, BLOCKS, SMALL])
def test_a_step_takes_as_many_copies_collectives_and_calls_on_1024_ranks_as_on_two(kind: str, stage: int) -> None:
    costs = {world: cost_of_a_step(kind, stage, world) for world in WORLDS}
    for what, of_worlds in zip(("copies", "collectives", "calls"), zip(*costs.values(), strict=True), strict=True):
        at_two, *at_more = of_worlds
        assert at_two
        for world, found in zip(WORLDS[1:], at_more, strict=True):
            differ = {name: (at_two[name], found[name]) for name in at_two | found if at_two[name] != found[name]}
            if what == "calls" and kind == SMALL:  # one of many ranks owns fewer of the parameters, and steps fewer
                differ = {name: counts for name, counts in differ.items() if counts[0] < counts[1]}
            assert not differ, f"{what} differ at {world} ranks"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_calls_in_a_step_grow_with_the_layers_and_not_with_their_square(stage: int) -> None:
    few, many = (cost_of_a_step(SMALL, stage, 2, layers)[2] for layers in (16, 64))
    differ = {name: (few[name], many[name]) for name in many if many[name] > 5 * max(few[name], 1)}
    assert not differ
