"""What the engine really does in a step, noted at the functions that do it, in the words of its `Program`."""

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import fabric_jobs
import jobs
from lightning_zero.run.engine import Engine, Options
from lightning_zero.run.journal import Journal
from lightning_zero.run.program import LOCAL, Among, Kind, Op, Program
from lightning_zero.shards.gradient import GroupGradient
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.staging import Staged
from lightning_zero.shards.unit import Unit
from lightning_zero.shards.whole import WholeWindow
from lightning_zero.shards.window import Window, by_group
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import CountingComm

BUCKET_BYTES = 2**12
STEPS_UNTIL_PLANNED = 6

Done = tuple[Kind, str, int, Among]  # kind, name of the unit or group, chunk or window, and which ranks do it

# The kind of a collective, by the beginning of its name.
_COLLECTIVES = {
    "all_reduce rendezvous": Kind.AGREE,
    "all_reduce settle": Kind.AGREE,
    "all_reduce norm": Kind.NORM,
    "all_reduce overflow": Kind.VERDICT,
    "broadcast buffers": Kind.CALL,
    "mark ": Kind.MARK,
    "reduce_scatter reduce ": Kind.REDUCE,
    "all_gather gather ": Kind.UNSHARD,
    "all_gather publish ": Kind.PUBLISH,
    "all_gather gradient ": Kind.GATHER,
    "all_gather read gradient ": Kind.CALL,
    "all_gather reduce ": Kind.REDUCE,
}


@dataclass
class Recorder:
    """Notes what an engine does, at each use that its journal notes."""

    engine: Engine
    done: list[list[Done]] = field(default_factory=list)  # at each use
    bytes_sent: int = 0

    def note(self, kind: Kind, name: str = "", part: int = 0, among: Among = Among.SHARD) -> None:
        if self.done:
            self.done[-1].append((kind, name, part, among))

    def _among(self, comm: Comm) -> Among:
        """Which ranks a communicator is of; that of ranks that share shards may be that of all."""
        mesh = self.engine.mesh
        comms = {Among.SHARD: mesh.shard, Among.REPLICAS: mesh.replicate, Among.TENSOR: mesh.tensor}
        comms |= {Among.WORLD: mesh.world, Among.DATA: mesh.data}
        return next(among for among, of in comms.items() if comm is of)

    def note_collective(self, comm: Comm, kind: str, name: str, tensor: Tensor | None, sent: int) -> None:
        if kind == "all_to_all":
            return  # see `note_exchange`
        found = next((known for begins, known in _COLLECTIVES.items() if f"{kind} {name}".startswith(begins)), None)
        assert found is not None, f"a collective that no program has: {kind} {name}"
        among = self._among(comm)
        self.bytes_sent += sent if found in (Kind.UNSHARD, Kind.REDUCE, Kind.GATHER, Kind.PUBLISH) else 0
        group = name.partition(" ")[2].rpartition("[")[0]
        if found is Kind.REDUCE:
            if kind == "reduce_scatter":  # between replicas, what is summed is gathered again
                self.note(Kind.SUM if among is Among.REPLICAS else found, group, self._chunk_of(group, name), among)
            return
        if found is Kind.UNSHARD:
            units = self.engine.loans.cache.units
            group = next(unit.name for unit in units if group in [one.name for one in unit.groups])
        is_begun = bool(self.done) and (found, group, 0, among) in self.done[-1]
        if not (is_begun and group):  # slice after slice, and group after group of a unit
            self.note(found, group, 0, among)

    def _chunk_of(self, group: str, name: str) -> int:
        start, column = map(int, re.findall(r"\d+", name.rpartition("[")[2]))
        chunks = next(one for one in self.engine.groups if one.name == group).layout.chunks
        return next(n for n, c in enumerate(chunks) if (c.of.start, c.start) == (start, column))

    def note_store(self, gradient: GroupGradient, _: Any, __: Any, chunk: Any, *___: Any) -> None:
        self.note(Kind.STORE, gradient.group.name, gradient.group.layout.chunks.index(chunk))

    def note_window(self, kind: Kind, window: Window | Staged) -> None:
        for group in by_group(window.slots):
            self.note(kind, group.name, self._part_of(group, window))

    def note_exchange(self, kind: Kind, window: WholeWindow) -> None:
        group = window.slots[0].group
        self.note(kind, group.name, self._part_of(group, window))

    def _part_of(self, group: ShardGroup, window: Window | Staged) -> int:
        """Returns how many windows of the group are stepped before this one."""
        (stepper,) = self.engine.runner.stepping.steppers.values()
        alike = [[*one.slots] for one in stepper.windows_apart() if group in by_group(one.slots)]
        return alike.index([*window.slots]) if alike else 0


def _before(function: Any, note: Callable[..., None]) -> Any:
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(self, *args, **kwargs)
        return function(self, *args, **kwargs)

    return noting


@contextmanager
def recording(engine: Engine) -> Iterator[Recorder]:
    recorder = Recorder(engine)

    def begin_fetch(staged: Staged) -> None:
        if staged and not staged.is_begun:
            recorder.note_window(Kind.FETCH, staged)

    def put(window: Window) -> None:
        if window.staged:
            recorder.note_window(Kind.PUT, window)

    noted: dict[tuple[Any, str], Callable[..., None]] = {
        (Journal, "note"): lambda *_: recorder.done.append([]),
        (Comm, "_issue"): recorder.note_collective,
        (Unit, "release"): lambda unit, _: recorder.note(Kind.RESHARD, unit.name),
        (GroupGradient, "_store"): recorder.note_store,
        (Staged, "begin"): begin_fetch,
        (Window, "prepare"): lambda window: recorder.note_window(Kind.STEP, window),
        (Window, "put_values"): put,
        (WholeWindow, "_bring_whole"): lambda window: recorder.note_exchange(Kind.COLLECT, window),
        (WholeWindow, "_send_back"): lambda window: recorder.note_exchange(Kind.RETURN, window),
    }
    with ExitStack() as stack:
        for (kind, name), note in noted.items():
            stack.enter_context(patch.object(kind, name, _before(getattr(kind, name), note)))
        yield recorder


def in_names(program: Program) -> list[list[Done]]:
    """Returns what a program says is done at each use."""

    def done(op: Op) -> Done:
        if op.kind in (Kind.UNSHARD, Kind.RESHARD):
            return op.kind, program.facts.units[op.target].name, 0, op.among
        named = op.target >= 0 and op.kind is not Kind.CALL
        return op.kind, program.facts.groups[op.target].name if named else "", op.part, op.among

    return [[*map(done, program.at(at))] for at in range(len(program.uses))]


def split(done: list[Done]) -> tuple[list[Done], list[Done]]:
    """Returns collectives, and what this rank does alone."""
    return [one for one in done if one[0] not in LOCAL], [one for one in done if one[0] in LOCAL]


def tower(depth: int, width: int = 64, *, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width, bias), nn.Tanh()) for _ in range(depth)])


def train(
    model: nn.Module,
    *,
    stage: int,
    micros: int = 1,
    clips: bool = False,
    clips_after: int = 0,
    scales: bool = False,
    at_once: bool = False,
    world: int = 2,
    frozen: int = 0,
    buffers: bool = False,
    in_order: bool = False,
    looks: Callable[[Engine], Any] | None = None,
    looks_after: int | None = None,
    make: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> tuple[Program, Recorder]:
    """Trains until every step is like the last one. Returns the program, and what the engine did in one more step."""
    for layer in list(model.children())[1 : 1 + frozen]:
        layer.requires_grad_(False)
    if buffers:
        model.register_buffer("steps", torch.zeros(()))
    optimizer = make(model.parameters())
    setting = Options(**{"bucket_bytes": BUCKET_BYTES, "unit_classes": ("Linear",) if stage == 3 else None} | options)
    comm = CountingComm(0, world)
    comm.keeps_order = in_order
    engine = Engine(model, [optimizer], stage=stage, comm=comm, options=setting)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    batch = torch.randn(4, next(model.parameters()).shape[1])

    def step() -> None:
        for micro in range(micros):
            with engine.accumulating() if micro < micros - 1 else nullcontext():
                with engine.forward(reduces=engine.runner.reductions.is_on):
                    loss = model(batch).square().mean()
                with engine.backward():
                    (scaler.scale(loss) if scales else loss).backward()
            if micro + 1 == clips_after:
                engine.gradients.clip_by_norm_(optimizer, 1.0)
            if looks is not None and micro + 1 == (looks_after or micros):
                looks(engine)
        if scales:
            engine.gradients.unscale_(scaler, optimizer)
            scaler.update()
        if clips:
            engine.gradients.clip_by_norm_(optimizer, 1.0)
            if at_once:
                engine.runner.expect_step()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS_UNTIL_PLANNED):
        step()
    program = engine.program()
    with recording(engine) as recorder:
        step()
    engine.close(whole=False)
    return program, recorder


def ask_for_gradients(engine: Engine) -> None:
    """Whether there are gradients, of which no values are read."""
    assert all(parameter.grad is not None for parameter in engine.module.parameters() if parameter.requires_grad)


def read_gradient(engine: Engine) -> None:
    *_, last = engine.module.parameters()
    last.grad.norm()  # type: ignore[union-attr]


def fit_and_ask(strategy: Any) -> dict[str, Any]:
    """What a Trainer's strategy says of its steps: before, in and after fit."""
    told: dict[str, Any] = {}

    class Ask(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            with pytest.raises(RuntimeError) as raised:
                trainer.strategy.program()
            told["before"] = str(raised.value)

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            if number == 3:
                told["in"] = trainer.strategy.program()

    L.seed_everything(1, verbose=False)
    run = jobs.trainer(strategy, 2, callbacks=[Ask()], gradient_clip_val=1.0, max_steps=6, limit_val_batches=0)
    run.fit(jobs.Classifier(), jobs.loader())
    return told | {"after": run.strategy.program()}


def train_with_fabric(strategy: Any) -> Program:
    made = fabric_jobs.fabric(strategy, 2)
    model, optimizer = fabric_jobs.set_up(made)
    for batch in itertools.islice(jobs.loader(), 5):
        made.backward(fabric_jobs.loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    found: Program = made.strategy.program(model)
    return found
