"""How far a value walks through the package: counted in the running code, shown in `ARCHITECTURE.md`, held here.

A number may fall, and then it is written down there. One may rise for a reason, up to what is asked here.
"""

import copy
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_zero.checkpoint.save
from engine_checkpoints import save
from lightning_zero.checkpoint import StoredCheckpoint
from lightning_zero.checkpoint.shard import ShardReader
from lightning_zero.checkpoint.spread import SpreadParameter
from lightning_zero.config import Offload
from lightning_zero.run.engine import Engine, Options
from lightning_zero.run.loans import Loans
from lightning_zero.shards.gradient import GroupGradient
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.offload import Machine
from lightning_zero.shards.staging import Staged
from lightning_zero.shards.window import PieceWindow, Window
from lightning_zero.wire.comm import Comm
from models import seeded
from thread_world import ThreadWorld
from walks import Walk, walking

APART = Machine(host_is_apart=True)
PAGE = Path(__file__).parents[1] / "ARCHITECTURE.md"


class Ranks(threading.local):
    """Two ranks that train a tower. In the third step, which is like the second, each says what it is `doing`."""

    doing = ""

    def train(self, stage: int, then: Callable[[Comm, Engine, Any], None] = lambda *_: None, **options: Any) -> None:
        start = seeded(lambda: nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]))
        settings = Options(unit_classes=("Linear",), **options)
        ThreadWorld(2).run(lambda comm: self._train(comm, copy.deepcopy(start), stage, settings, then))

    def _train(self, comm: Comm, model: nn.Module, stage: int, options: Options, then: Callable[..., None]) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        engine = Engine(model, [optimizer], stage=stage, comm=comm, options=options)
        for number in range(3):
            self.doing = "forward" if number == 2 else ""
            with engine.forward():
                loss = model(torch.ones(2, 16)).sum()
            self.doing = "backward" if number == 2 else ""
            with engine.backward():
                loss.backward()
            self.doing = "step" if number == 2 else ""
            optimizer.step()
            optimizer.zero_grad()
        self.doing = "then"
        then(comm, engine, optimizer)
        self.doing = ""
        engine.close()


def gradient(stage: int) -> Walk:
    ranks = Ranks()
    moves = {GroupGradient: ("collect", "_pack", "_store"), Comm: ("reduce_scatter",)}
    with walking(moves, lambda: bool(ranks.doing)) as walk:
        ranks.train(stage)
    return walk


def parameter(doing: str) -> Walk:
    ranks = Ranks()
    with walking({Comm: ("all_gather",)}, lambda: ranks.doing == doing) as walk:
        ranks.train(3)
    return walk


def step(**options: Any) -> Walk:
    ranks = Ranks()
    moves = {
        Staged: ("_read", "_write"),
        Window: ("show_piece", "show_whole"),
        PieceWindow: ("put_values",),
        Comm: ("all_gather",),
    }
    with walking(moves, lambda: ranks.doing in ("forward", "step")) as walk:
        ranks.train(2, **options)
    return walk


def saving(folder: Path) -> Walk:
    ranks = Ranks()
    moves = {SpreadParameter: ("pieces",), lightning_zero.checkpoint.save: ("write_shard",)}
    with walking(moves, lambda: ranks.doing == "then") as walk:
        ranks.train(3, lambda comm, engine, optimizer: save(comm, engine, [optimizer], folder))
    return walk


def loading(folder: Path) -> Walk:
    def load(_: Comm, engine: Engine, __: Any) -> None:
        with engine.states.loading(lambda: None):
            engine.module.load_state_dict(StoredCheckpoint(folder).tree()["state_dict"])

    saving(folder)
    ranks = Ranks()
    moves = {Loans: ("load",), ShardReader: ("_read_at",), ShardGroup: ("take_masters",)}
    with walking(moves, lambda: ranks.doing == "then") as walk:
        ranks.train(3, load)
    return walk


WALKS: dict[str, Callable[[Path], Walk]] = {
    "a gradient, stage 1": lambda _: gradient(1),
    "a gradient, stage 2": lambda _: gradient(2),
    "a parameter in forward, stage 3": lambda _: parameter("forward"),
    "a parameter in backward, stage 3": lambda _: parameter("backward"),
    "a step, stage 2": lambda _: step(),
    "an offloaded step, stage 2": lambda _: step(offload=Offload("cpu"), machine=APART),
    "a tensor that is saved, stage 3": saving,
    "a tensor that is loaded, stage 3": loading,
}

# What a newcomer can follow: calls, files.
MOST = {
    "a gradient": (10, 6),
    "a parameter": (10, 7),
    "a step": (12, 8),
    "an offloaded step": (14, 9),
    "a tensor": (14, 10),
}


def told(name: str, walk: Walk) -> str:
    calls, files, back_up = walk.counts
    return f"| {name} | {calls} | {files} | {back_up} |"


@pytest.fixture(scope="module", params=WALKS)
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Walk]:
    return request.param, WALKS[request.param](tmp_path_factory.mktemp("walk") / "saved")


def test_the_page_shows_how_far_each_value_walks(named: tuple[str, Walk]) -> None:
    name, walk = named
    shown = re.findall(rf"^\| {re.escape(name)} .*$", PAGE.read_text(), re.MULTILINE)
    assert shown == [told(name, walk)], "\n".join(map(": ".join, walk.calls))


def test_no_value_walks_further_than_a_newcomer_can_follow(named: tuple[str, Walk]) -> None:
    name, walk = named
    calls, files, back_up = walk.counts
    most_calls, most_files = next(most for kind, most in MOST.items() if name.startswith(kind))
    assert calls <= most_calls
    assert files <= most_files
    assert back_up == 0
