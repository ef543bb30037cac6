"""The 8-bit and 4-bit optimizers of two packages, as they are installed, train as under DDP."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes.optim
import pytest
import torch
import torchao.optim
from torch import Tensor, nn
from torch.optim import Optimizer

from engine_checkpoints import Place, differences, resume, save, train
from lightning_zero.checkpoint import StoredCheckpoint
from lightning_zero.checkpoint.export import consolidate
from lightning_zero.run.engine import Engine
from lightning_zero.shards.probe import BY_TENSOR, find
from lightning_zero.tiers.composed import is_composed, taken_apart
from lightning_zero.tiers.ledger import Category
from lightning_zero.views.lazy import materialize
from lightning_zero.wire.comm import Comm
from models import seeded

ONE_AT_A_TIME = threading.Lock()  # ranks are threads here, and bitsandbytes' library is not made for several


class AdamW8bit(bitsandbytes.optim.AdamW8bit):
    def update_step(self, *args: Any) -> None:
        with ONE_AT_A_TIME:
            super().update_step(*args)


class Lion8bit(bitsandbytes.optim.Lion8bit):
    def update_step(self, *args: Any) -> None:
        with ONE_AT_A_TIME:
            super().update_step(*args)


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "bitsandbytes AdamW8bit": lambda parameters: AdamW8bit(parameters, lr=0.01),
    "bitsandbytes Lion8bit": lambda parameters: Lion8bit(parameters, lr=0.01),
    "torchao AdamW8bit": lambda parameters: torchao.optim.AdamW8bit(parameters, lr=0.01),
    "torchao Adam4bit": lambda parameters: torchao.optim.Adam4bit(parameters, lr=0.01),
}


class Quantizable(nn.Module):
    """Both packages keep state of at least 4096 elements in few bits; of the smaller ones in full."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 64), nn.Linear(64, 96)

    def forward(self, signal: Tensor) -> Tensor:
        return torch.tanh(self.outer(torch.tanh(self.inner(signal)))).square().sum()


@pytest.fixture(autouse=True)
def _as_written() -> Any:
    """What torchao compiles is the same on every rank, and takes half a minute to compile."""
    with torch.compiler.set_stance("force_eager"):
        yield


def plain(state: Any) -> Any:
    """With tensors that are made of others as dictionaries of these."""
    if is_composed(state):
        parts, context = taken_apart(state)
        return {"class": type(state).__name__, "context": context, **plain(parts)}
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list):
        return [plain(value) for value in state]
    return state.clone() if isinstance(state, Tensor) else copy.copy(state)


def states_of(engine: Engine, optimizer: Optimizer) -> dict[str, Any]:
    engine.loans.end_all()
    return plain({"model": engine.states.full_model(), "optimizer": engine.states.full_optimizer(optimizer)})


def trained(name: str, place: Place, path: Path) -> tuple[dict[str, Any], list[int]]:
    """All that is there after four steps, which is also saved; and the bytes of optimizer state of each rank."""
    start = seeded(Quantizable)

    def on_rank(comm: Comm) -> tuple[dict[str, Any], int]:
        model = copy.deepcopy(start)
        optimizer = MAKERS[name](list(model.parameters()))
        engine = Engine(model, [optimizer], stage=place.stage, comm=comm, options=place.options())
        train(model, [optimizer], place, steps=4)
        save(comm, engine, [optimizer], path)
        return states_of(engine, optimizer), engine.ledger.live[Category.OPTIMIZER_STATE]

    results = place.run(on_rank)
    return results[0][0], [nbytes for _, nbytes in results]


def resumed(name: str, place: Place, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run goes on with, and what it has after another step."""
    start = seeded(Quantizable)

    def on_rank(comm: Comm) -> tuple[dict[str, Any], dict[str, Any]]:
        model = copy.deepcopy(start)
        optimizer = MAKERS[name](list(model.parameters()))
        engine = resume(comm, model, [optimizer], place, StoredCheckpoint(path))
        begun = states_of(engine, optimizer)
        train(model, [optimizer], place, steps=1, start=4)
        return begun, states_of(engine, optimizer)

    return place.run(on_rank)[0]


@pytest.mark.parametrize("name", MAKERS)
def test_r64_eight_bit_optimizers_train_as_under_ddp_and_are_resumed_anywhere(name: str, tmp_path: Path) -> None:
    """Ranks see the same data, and of two or four equal gradients the average is that of one, in every bit."""
    expected, whole = trained(name, Place(0, 2), tmp_path / "0")
    _, expected_next = resumed(name, Place(0, 2), tmp_path / "0")

    for stage, world in [(1, 2), (2, 4), (3, 2)]:
        found, of_ranks = trained(name, Place(stage, world), tmp_path / f"{stage}")
        assert differences(found, expected) == []
        assert max(of_ranks) < whole[0]
        for place in (Place(0, 1), Place(3, 4), Place(2, 2)):
            begun, after = resumed(name, place, tmp_path / f"{stage}")
            assert differences(begun, expected) == []
            assert differences(after, expected_next) == []


@pytest.mark.parametrize("name", MAKERS)
def test_r64_they_are_found_to_look_at_whole_tensors(name: str) -> None:
    """Of what has fewer than 4096 elements, as a piece may, they keep state in full."""
    made = MAKERS[name]([nn.Parameter(torch.ones(shape)) for shape in [(64, 96), (5,)]])
    assert find(made).why_not_in_pieces == BY_TENSOR


def test_the_single_file_of_such_a_checkpoint_is_read_by_torch(tmp_path: Path) -> None:
    saved, _ = trained("torchao AdamW8bit", Place(2, 2), tmp_path / "ckpt")

    consolidate(tmp_path / "ckpt", tmp_path / "model.ckpt")

    found = torch.load(tmp_path / "model.ckpt", weights_only=True)
    assert differences(plain(found["optimizer_states"][0]), saved["optimizer"]) == []


def test_state_of_a_class_that_nobody_has_imported_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained("torchao AdamW8bit", Place(2, 2), tmp_path / "ckpt")
    monkeypatch.setattr("lightning_zero.checkpoint.tree.get_safe_globals", list)

    tree = StoredCheckpoint(tmp_path / "ckpt").tree()  # weights and all else can be read
    states = tree["optimizer_states"][0]["state"]
    with pytest.raises(ValueError, match="OptimState8bit' can be read when its package has been imported"):
        [materialize(value) for state in states.values() for value in state.values()]
