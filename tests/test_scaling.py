"""What a step costs this process does not grow with the number of ranks.

First the engine alone, on models of several kinds. Then a step as it is rehearsed, on up to 4096 ranks: its
collectives, bytes, copies and lines of Python as functions of ranks and layers, which `docs/speed.md` has in a
table. At last the two ways on which collectives travel, in a world of torch's in which nobody else is.
"""

import functools
import gc
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_zero
from lightning_zero.config import Offload
from lightning_zero.distributed_private import leave_imagined_world
from lightning_zero.rehearsal.rehearsal import Rehearsal, rehearse
from lightning_zero.run.engine import Engine, Options
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.gloo import GlooComm
from lightning_zero.wire.local import CountingComm
from lightning_zero.wire.native import NativeComm

PACKAGE = str(Path(lightning_zero.__file__).parent)
REHEARSAL = f"{PACKAGE}/rehearsal"  # which takes part in no training
WORLDS = [2, 64, 1024]
STEPS_UNTIL_PLANNED = 4
BUCKET_BYTES = 2**20

SLICED, BLOCKS, SMALL = "one matrix larger than three buckets", "blocks of a bucket and a half", "many small modules"
TOWER = "layers of one matrix"
SIDE = 256  # of such a matrix: 4096 ranks divide it with nothing left over


class Copies(TorchDispatchMode):
    """Counts the operations of torch that move or make values, the bytes that they write, and the tensors that all
    operations return, views among them: one for each rank would be too many."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.nbytes = self.tensors = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = str(function.overloadpacket), function(*args, **(kwargs or {}))
        if name in ("aten.copy_", "aten._to_copy", "aten.clone", "aten.cat", "aten.zero_"):
            self.counts[name] += 1
            self.nbytes += result.nbytes
        self.tensors += len(result) if isinstance(result, list | tuple) else 1
        return result


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


@contextmanager
def lines_of_the_package() -> Iterator[Counter[str]]:
    """Counts lines of Python that run, by function: of this package alone, but for what rehearses. A loop over ranks
    shows here even if it calls nothing, and on one line. Nothing is collected meanwhile, see `calls_of_the_package`."""
    counts: Counter[str] = Counter()
    gc.collect()
    gc.disable()

    def inside(frame: FrameType, event: str, _: Any) -> Any:
        counts[frame.f_code.co_qualname] += event == "line"  # "opcode" is not told by all releases of CPython 3.12
        return inside

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        return None if not file.startswith(PACKAGE) or file.startswith(REHEARSAL) else inside

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield counts
    finally:
        sys.settrace(before)
        gc.enable()


def model_of(kind: str, layers: int) -> nn.Module:
    if kind == SLICED:
        return nn.Sequential(nn.Linear(8, 1024, bias=False), nn.Linear(1024, 1024, bias=False))
    if kind == BLOCKS:
        return nn.Sequential(nn.Linear(16, 16), *[nn.Sequential(nn.Linear(16, 16), Wide()) for _ in range(3)])
    if kind == TOWER:
        return nn.Sequential(*[nn.Sequential(nn.Linear(SIDE, SIDE, bias=False), nn.Tanh()) for _ in range(layers)])
    return nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(16, 16), nn.Tanh())])


class Wide(nn.Module):
    """Three matrices of half a bucket, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.through, self.out = nn.Linear(16, 8192), nn.Linear(16, 8192), nn.Linear(8192, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.into(x)) * self.through(x))


@pytest.fixture(autouse=True)
def agreements_take_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an imagined world. Else they take what messages take there; their rounds are counted over gloo, below."""
    monkeypatch.setattr(CountingComm, "_all_reduce", lambda self, value, combine, key: value.clone())


def cost_of_a_step(
    kind: str,
    stage: int,
    world: int,
    layers: int = 12,
    *,
    make: Callable[[int, int], Comm] = CountingComm,
    counting: Callable[[], AbstractContextManager[Counter[str]]] = calls_of_the_package,
    offload: Offload | None = None,
) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Copies, collectives and calls of Python in one step of the first rank."""
    torch.manual_seed(0)
    model, comm = model_of(kind, layers), make(0, world)
    # Plain SGD keeps no state and, for one tensor after another, costs the same whatever a rank owns.
    make_optimizer = torch.optim.SGD if offload is None else torch.optim.AdamW
    optimizer = make_optimizer(model.parameters(), lr=1e-3, foreach=False)
    options = Options(bucket_bytes=BUCKET_BYTES if offload is None else LAYER_BYTES, offload=offload)
    engine = Engine(model, [optimizer], stage=stage, comm=comm, options=options)
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
    with counting() as calls:
        step()
    with Copies() as copies:
        step()
    sent = {kind: (count - before[kind]) // 2 for kind, count in comm.calls.items()}
    engine.close()
    return copies.counts, Counter(sent), calls


COUNTED = ("StepCounts.", "Window._hide")  # what is called for each parameter whose steps are only counted


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", [SLICED, BLOCKS, SMALL])
def test_a_step_takes_as_many_copies_collectives_and_calls_on_1024_ranks_as_on_two(kind: str, stage: int) -> None:
    costs = {world: cost_of_a_step(kind, stage, world) for world in WORLDS}
    for what, of_worlds in zip(("copies", "collectives", "calls"), zip(*costs.values(), strict=True), strict=True):
        at_two, *at_more = of_worlds
        assert at_two
        for world, found in zip(WORLDS[1:], at_more, strict=True):
            differ = {name: (at_two[name], found[name]) for name in at_two | found if at_two[name] != found[name]}
            if (
                what == "calls" and kind == SMALL
            ):  # one of many ranks owns fewer of the parameters, and counts the others
                assert found.total() <= at_two.total()
                differ = {name: counts for name, counts in differ.items() if counts[0] < counts[1]}
                differ = {name: counts for name, counts in differ.items() if not name.startswith(COUNTED)}
            assert not differ, f"{what} differ at {world} ranks"


# Of functions of the package, at most, for each parameter of a model of small modules; at stage 3 each is a unit.
CALLS = {0: 49, 1: 63, 2: 62, 3: 205}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_calls_in_a_step_grow_with_the_layers_and_not_with_their_square(stage: int) -> None:
    few, many = (cost_of_a_step(SMALL, stage, 2, layers)[2] for layers in (16, 64))
    differ = {name: (few[name], many[name]) for name in many if many[name] > 5 * max(few[name], 1)}
    assert not differ
    parameters = 2 * (64 - 16)
    assert (many.total() - few.total()) / parameters <= CALLS[stage]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lines_of_an_offloaded_step_grow_with_the_layers_and_not_with_their_square(stage: int, tmp_path: Path) -> None:
    """Each layer is a window, which is stepped by itself: for none may all of them be looked at."""
    cost = functools.partial(cost_of_a_step, TOWER, stage, 2, offload=Offload("nvme", path=tmp_path))
    few, many = (cost(layers, counting=lines_of_the_package)[2] for layers in (8, 32))
    assert {name: (few[name], many[name]) for name in many if many[name] > 5 * max(few[name], 5)} == {}


# -- a step as it is rehearsed

RANKS = (8, 64, 512, 4096)
LAYERS = (2, 4, 8, 12)
LAYER_BYTES = 4 * SIDE**2
KEPT = 2  # units that forward has used last, which are still gathered when backward uses them

REHEARSED: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3, "units": "modules"},
    "stage 2, two replicas": {"stage": 2, "replicate_size": 2},
}
LINES = 700  # of Python that run, at most, for each layer; at stage 3 twice as many


class Counting(L.Callback):
    """Counts lines of Python in the first step that follows a plan, and copies in the one after it."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        self.copies = Copies()
        self._under_way = ExitStack()

    def on_train_batch_start(self, *args: Any) -> None:
        step = args[-1]
        if step == STEPS_UNTIL_PLANNED:
            self.lines = self._under_way.enter_context(lines_of_the_package())
        elif step > STEPS_UNTIL_PLANNED:
            self._under_way.enter_context(self.copies)

    def on_train_batch_end(self, *_: Any) -> None:
        self._under_way.close()


class Tower(L.LightningModule):
    """Layers of one matrix, each of which is a group and fills a bucket."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = model_of(TOWER, layers)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, foreach=False)


class Told(NamedTuple):
    """What one step takes of the first rank."""

    step: Rehearsal
    copies: Copies
    lines: Counter[str]


@functools.cache
def told_of(setting: str, ranks: int, layers: int) -> Told:
    strategy, counting = {**REHEARSED[setting], "bucket_size_mb": LAYER_BYTES / 2**20}, Counting()
    step = rehearse(
        lambda: Tower(layers),
        torch.zeros(4, SIDE),
        strategy,
        ranks=ranks,
        steps=STEPS_UNTIL_PLANNED + 2,
        callbacks=[counting],
    )
    return Told(step, counting.copies, counting.lines)


def on_all_ranks(setting: str, layers: int) -> dict[int, Told]:
    """The same step on numbers of ranks: on all for the most layers, on the fewest and the most for others."""
    return {ranks: told_of(setting, ranks, layers) for ranks in (RANKS if layers == LAYERS[-1] else RANKS[::3])}


def gathers_of(setting: str, layers: int) -> int:
    """How often a step gathers a layer. At stage 3 backward does so too, but for what is kept, and for the first layer,
    whose weights no gradient asks for."""
    return layers + (max(0, layers - KEPT - 1) if setting == "stage 3" else 0)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("setting", REHEARSED)
def test_collectives_are_a_function_of_layers_alone(setting: str, layers: int) -> None:
    levels = 2 if "replicas" in setting else 1  # a layer is reduced and published among shards, and among replicas
    # Collectives of a device keep their order, so before the first reduction all ranks must be about to reduce.
    agreements = 1 if setting == "stage 3" else 2
    for ranks, told in on_all_ranks(setting, layers).items():
        assert {kind: sent.calls for kind, sent in told.step.sent.items()} == {
            "reduce_scatter": levels * layers,
            "all_gather": levels * gathers_of(setting, layers),
            "all_reduce": agreements,  # replicas agree with the ranks that share shards, where no units are gathered
        }, ranks


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("setting", REHEARSED)
def test_a_rank_sends_the_parts_of_all_others_once(setting: str, layers: int) -> None:
    """And receives as much, as in any all-gather and reduce-scatter of equal parts. Replicas do it in two legs, which
    together send what a single group does."""
    for ranks, told in on_all_ranks(setting, layers).items():
        sent, others = told.step.sent, (ranks - 1) / ranks
        assert sent["reduce_scatter"].nbytes == others * layers * LAYER_BYTES
        assert sent["all_gather"].nbytes == others * gathers_of(setting, layers) * LAYER_BYTES


@pytest.mark.parametrize("setting", REHEARSED)
def test_an_agreement_takes_one_short_message_more_when_ranks_double(setting: str) -> None:
    layers = LAYERS[-1]
    sent = [told.step.sent["all_reduce"] for told in on_all_ranks(setting, layers).values()]
    (agreements,) = {one.calls for one in sent}
    (more,) = {many.nbytes - few.nbytes for few, many in itertools.pairwise(sent)}
    doublings = 3  # from each number of ranks to the next
    assert more % doublings == 0
    assert 0 < more // doublings < 256 * agreements


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("setting", REHEARSED)
def test_what_a_rank_does_in_a_step_is_the_same_on_all_numbers_of_ranks(setting: str, layers: int) -> None:
    """Each line of Python and operation of torch, each byte that is copied, and the program."""
    few, *more = on_all_ranks(setting, layers).values()
    assert few.lines
    assert few.copies.nbytes > layers * LAYER_BYTES
    for many in more:
        assert changed(few.lines, many.lines) == {}
        assert changed(few.copies.counts, many.copies.counts) == {}
        assert (many.copies.nbytes, many.copies.tensors) == (few.copies.nbytes, few.copies.tensors)
        here, there = ([replace(op, nbytes=0) for op in told.step.program.ops] for told in (few, many))
        assert here == there


@pytest.mark.parametrize("setting", REHEARSED)
def test_every_layer_adds_the_same(setting: str) -> None:
    """From four layers on: of two the buckets hold all gradients, and an agreement less is needed."""
    four, eight, twelve = (told_of(setting, RANKS[0], layers) for layers in LAYERS[1:])
    for one, two, three in (
        (four.lines, eight.lines, twelve.lines),
        (four.copies.counts, eight.copies.counts, twelve.copies.counts),
    ):
        second, third = (Counter({name: b[name] - a[name] for name in three}) for a, b in ((one, two), (two, three)))
        assert changed(second, third) == {}
    added = [(b.copies.nbytes - a.copies.nbytes) / 4 for a, b in ((four, eight), (eight, twelve))]
    assert added[0] == added[1] == pytest.approx(LAYER_BYTES, rel=1e-3)  # into the bucket; and a few of the messages
    most = LINES * (2 if setting == "stage 3" else 1)
    assert twelve.lines.total() - eight.lines.total() < 4 * most


# -- the ways on which collectives travel


@pytest.fixture
def says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks say what this one says."""

    def swap(self: GlooComm, mine: Tensor, theirs: Tensor | None, peer: int, key: str) -> Tensor | None:
        return None if theirs is None else mine

    monkeypatch.setattr(GlooComm, "_exchange", swap)


def cost_in_an_imagined_world(way: str, stage: int, world: int) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """`cost_of_a_step`, in lines of Python, where messages go to a group of torch in which nobody else is."""

    def make(_: int, __: int) -> Comm:
        group = dist.group.WORLD
        assert group is not None
        gloo = GlooComm(group, timedelta(seconds=60))
        return NativeComm(group, gloo) if way == "native" else gloo

    dist.init_process_group("fake", rank=0, world_size=world)
    try:
        return cost_of_a_step(TOWER, stage, world, make=make, counting=lines_of_the_package)
    finally:
        leave_imagined_world()


def changed(few: Counter[str], many: Counter[str]) -> dict[str, tuple[int, int]]:
    return {name: (few[name], many[name]) for name in few | many if few[name] != many[name]}


AGREEMENT = {"in_tree", "GlooComm._all_reduce.<locals>.swap"}  # takes a round more when ranks double


@pytest.mark.usefixtures("says_the_same")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_over_collectives_of_torchs_own_nothing_grows_but_the_rounds_of_agreements(stage: int) -> None:
    (*few, lines), (*many, more) = (cost_in_an_imagined_world("native", stage, world) for world in (8, 4096))
    assert many == few
    found = changed(lines, more)
    assert found.keys() == AGREEMENT
    assert all(there <= 12 / 3 * here for here, there in found.values())


@pytest.mark.usefixtures("says_the_same")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_over_gloo_messages_to_and_from_each_peer_grow_and_nothing_else(stage: int) -> None:
    """A collective that is made of messages has one to each peer and one from each, which are started and awaited."""
    (*few, lines), (*many, more) = (cost_in_an_imagined_world("gloo", stage, world) for world in (8, 64))
    assert many == few
    found = changed(lines, more)
    assert {name.split(".")[0] for name in found} == {"GlooComm", "in_tree"}
    here, there = found["GlooComm._start_message"]
    assert there * (8 - 1) == here * (64 - 1)
    assert all(there * (8 - 1) <= here * (64 - 1) for here, there in found.values())
