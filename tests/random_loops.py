"""Carries out the training loops of `random_programs`: with Fabric, or in a Trainer, as manual optimization.

Under `Plain` and `PlainInTrainer`, ranks average gradients by hand after each backward, as DDP does, and nothing else
is done.
"""

import copy
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch.strategies import DDPStrategy as TrainerDDP
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fabric_jobs import fabric
from jobs import trainer
from models import seeded
from random_changes import OF_DATA, OF_GRADIENTS
from random_programs import (
    WIDTH,
    Backward,
    Clip,
    Copy,
    Edit,
    EditState,
    EditWeight,
    Evaluate,
    Freeze,
    Hook,
    Load,
    LoadFile,
    Net,
    Program,
    Rate,
    Read,
    Save,
    SaveFile,
    Step,
    Whole,
    ZeroGrad,
)  # fmt: skip


class Plain(DDPStrategy):
    """Averages gradients by hand after each backward, where DDP does, and broadcasts buffers where it does."""

    def setup_module(self, module: nn.Module) -> Any:
        self.averaging = Averaging(module)
        self._backward_sync_control = self.averaging
        return self.averaging

    def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor, module, *args, **kwargs)
        self.averaging.average()


class PlainInTrainer(TrainerDDP):
    """The same for a Trainer. There DDP broadcasts buffers before the first step alone, if users optimize by hand."""

    def configure_ddp(self) -> None:
        assert self.lightning_module is not None
        self.averaging = Averaging(self.lightning_module)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = super().backward(closure_loss, *args, **kwargs)
        self.averaging.average()
        return made

    def no_sync(self) -> AbstractContextManager[None]:
        return self.averaging.no_backward_sync(self.averaging, enabled=True)


class Averaging(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.reduces, self.is_stale = True, True
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.data, 0)

    def forward(self, *args: Any) -> Any:
        if self.is_stale:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, 0)
        output = self.module(*args)
        self.is_stale = self.reduces and torch.is_grad_enabled()
        return output

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        self.reduces = not enabled
        yield
        self.reduces = True

    def average(self) -> None:
        if not self.reduces:
            return
        for parameter in self.module.parameters():
            grad = parameter.grad
            used = torch.tensor(grad is not None, dtype=torch.uint8)
            dist.all_reduce(used, dist.ReduceOp.MAX)
            if used:
                rows = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
                dist.all_gather(rows, torch.zeros_like(parameter) if grad is None else grad)
                total = sum(rows[1:], start=rows[0].clone()) / len(rows)
                if grad is None:
                    parameter.grad = total
                else:
                    grad.copy_(total)


class Loop(NamedTuple):
    """What a user's loop calls."""

    model: Any  # what is called
    module: Net
    optimizers: list[Any]  # whose `step` is called
    backward: Callable[..., None]
    no_sync: Callable[[], AbstractContextManager[Any]]
    clip: Callable[[Any, Clip], Any]
    strategy: Any
    save: Callable[[], Any] = tuple  # in a Trainer, nothing
    load: Callable[[], Any] = tuple

    @property
    def inner(self) -> list[Optimizer]:
        return [getattr(one, "optimizer", one) for one in self.optimizers]


def run_with_fabric(program: Program, how: Any) -> dict[str, Tensor]:
    """All that the program reads, and what it leaves, on this rank. `how` is a strategy, or the arguments of ours."""
    made = fabric(Plain() if how == "plain" else how, program.world, program.precision)
    rank = made.global_rank
    module = seeded(lambda: Net(running=program.running, tied=program.precision != "bf16-true"), rank)
    model, *optimizers = made.setup(module, *optimizers_of(program, module))
    model.mark_forward_method("score")

    def clip(optimizer: Any, op: Clip) -> Any:
        if op.how == "norm":
            return made.clip_gradients(model, optimizer, max_norm=op.limit, error_if_nonfinite=False)
        return made.clip_gradients(model, optimizer, clip_val=op.limit)

    folder = made.broadcast(tempfile.mkdtemp() if rank == 0 else None)
    state = {"model": model, **{f"optimizer {number}": one for number, one in enumerate(optimizers)}}
    file = f"{folder}/saved.ckpt"
    save, load = partial(made.save, file, state), partial(made.load, file, state)
    no_sync = partial(made.no_backward_sync, model)
    loop = Loop(model, module, optimizers, made.backward, no_sync, clip, made.strategy, save, load)
    try:
        seen: dict[str, Tensor] = {}
        carry_out(program, loop, rank, seen, [], range(len(program.ops)))
        read_state(loop, Notes(seen, "at the end", 0, []))
        return seen
    finally:
        made.strategy.teardown()
        shutil.rmtree(folder, ignore_errors=True)


class Manual(L.LightningModule):
    """Carries out operations up to the next step in each `training_step`."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.program, self.net = program, seeded(lambda: Net(running=program.running))
        self.seen: dict[str, Tensor] = {}
        self.kept: list[Any] = []
        ends = [number + 1 for number, op in enumerate(program.ops) if isinstance(op, Step)]
        self.chunks = list(itertools.pairwise(sorted({0, *ends, len(program.ops)})))

    def configure_optimizers(self) -> Any:
        return optimizers_of(self.program, self.net)

    def setup(self, stage: str) -> None:
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.add_(self.global_rank)  # rank 0's take the place of the others'

    def call(self, x: Tensor, way: int, name: str = "forward") -> Tensor:
        return getattr(self.net, name)(x.to(torch.get_default_dtype()), way)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        carry_out(self.program, self.loop(), self.global_rank, self.seen, self.kept, range(*self.chunks[batch_idx]))

    def loop(self) -> Loop:
        strategy, optimizers = self.trainer.strategy, self.optimizers()

        def clip(optimizer: Any, op: Clip) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=op.limit, gradient_clip_algorithm=op.how)

        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        call = Called(self.call, partial(self.call, name="score"), self.net.train, self.net.eval)
        return Loop(call, self.net, optimizers, self.manual_backward, strategy.no_sync, clip, strategy)

    def on_train_end(self) -> None:
        read_state(self.loop(), Notes(self.seen, "at the end", 0, self.kept))


class Called(NamedTuple):
    """What is called in a loop as a model of Fabric's is."""

    forward: Callable[..., Tensor]
    score: Callable[..., Tensor]
    train: Callable[[], Any]
    eval: Callable[[], Any]

    def __call__(self, x: Tensor, way: int) -> Tensor:
        return self.forward(x, way)


def run_with_trainer(program: Program, how: Any) -> dict[str, Tensor]:
    """As `run_with_fabric`, with a Trainer."""
    module = Manual(program)
    run = trainer(
        PlainInTrainer() if how == "plain" else how, program.world, precision=program.precision, limit_val_batches=0
    )
    run.fit(module, DataLoader(range(program.world * len(module.chunks))))  # type: ignore[arg-type]
    after = {f"after fit: {name}": value.clone() for name, value in module.net.state_dict().items()}
    return {**module.seen, **after}


def optimizers_of(program: Program, module: nn.Module) -> list[Optimizer]:
    """The first has what each forward uses."""
    own = list(module.parameters())
    shares = [own] if program.optimizers == 1 else [own[:5], own[5:]]
    make: Callable[[Any], Optimizer] = {
        "momentum": lambda share: torch.optim.SGD(share, lr=0.2, momentum=0.5, weight_decay=0.01),
        "sgd": lambda share: torch.optim.SGD(share, lr=0.5),
        "adam": lambda share: torch.optim.AdamW(share, lr=0.05, eps=1e-3),
    }[program.kind]
    return [make(share) for share in shares]


def carry_out(
    program: Program, loop: Loop, rank: int, seen: dict[str, Tensor], kept: list[Any], numbers: Iterable[int]
) -> None:
    """Operations, by their numbers. They write what they read into `seen`, and what they save into `kept`."""
    for number in numbers:
        op = program.ops[number]
        CARRY_OUT[type(op)](op, loop, rank, Notes(seen, f"{number} {type(op).__name__}", number, kept))


class Notes(NamedTuple):
    """Where an operation writes down what it reads."""

    seen: dict[str, Tensor]
    place: str
    number: int
    kept: list[Any]

    def note(self, name: str, value: Any) -> None:
        self.seen[f"{self.place}: {name}"] = torch.as_tensor(value).detach().clone()


def backward(op: Backward, loop: Loop, rank: int, notes: Notes) -> Any:
    with nullcontext() if op.syncs else loop.no_sync():
        losses = []
        for at, forward in enumerate(op.forwards):
            generator = torch.Generator().manual_seed(1000 * notes.number + 10 * at + rank)
            x = torch.randn(3, WIDTH, generator=generator)
            call = loop.model.score if forward.scores else loop.model
            handle = None
            if op.inside == "forward":
                handle = loop.module.mid.register_forward_hook(partial(_look, loop, notes))
            output = call(x, forward.ways[rank % len(forward.ways)])
            if handle is not None:
                handle.remove()
            if op.inside == "backward" and at == 0:
                output.register_hook(lambda grad: _look(loop, notes))
            losses.append(output.float().square().mean())
        if op.penalty is not None:
            parameters = [parameter for parameter in loop.module.parameters() if parameter.requires_grad]
            losses.append(parameters[op.penalty % len(parameters)].float().square().mean() * (1 + rank))
        loss = torch.stack(losses).sum()
        notes.note("loss", loss)
        if op.looks is not None:
            read(op.looks, loop, rank, notes)
        if op.overflows and rank == 0:
            loss = loss * float("inf")
        trained = [parameter for parameter in loop.module.parameters() if parameter.requires_grad]
        if op.differs is not None and isinstance(loop.model, Called):  # Fabric has every backward go through it
            (found,) = torch.autograd.grad(
                loss, trained[op.differs % len(trained)], retain_graph=True, allow_unused=True
            )
            if found is not None:
                notes.note("differs", found)
        of = [*trained[: (op.only or 0) % len(trained)], loop.module.up.weight]  # the last always has a gradient
        more = {} if op.only is None else {"inputs": of}
        for repeat in range(op.repeats):
            loop.backward(loss, **more, **({"retain_graph": True} if repeat < op.repeats - 1 else {}))
    return loss


def _look(loop: Loop, notes: Notes, *_: Any) -> None:
    notes.note("inside", loop.module.left.weight.sum())


def read(op: Read, loop: Loop, rank: int, notes: Notes) -> None:
    if op.who not in (None, rank):
        return
    for name, parameter in loop.module.named_parameters():
        if op.what == "weights":
            notes.note(name, parameter)
        elif op.what == "sums":
            notes.note(name, parameter.sum())
        elif parameter.grad is not None:
            notes.note(f"{name}.grad", parameter.grad.norm() if op.what == "norms" else parameter.grad)


def edit(op: Edit, loop: Loop, rank: int, notes: Notes) -> None:
    parameters = list(loop.module.parameters())
    for parameter in parameters if op.which is None else [parameters[op.which % len(parameters)]]:
        if op.how == "drop":
            parameter.grad = None
        elif op.how == "replace":
            parameter.grad = torch.full_like(parameter, 0.125, dtype=parameter.grad_dtype)
        elif op.how == "scaled copy" and parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5
        elif parameter.grad is not None and op.how in OF_GRADIENTS:
            OF_GRADIENTS[op.how](parameter.grad)


def edit_weight(op: EditWeight, loop: Loop, rank: int, notes: Notes) -> None:
    parameters = list(loop.module.parameters())
    parameter = parameters[op.which % len(parameters)]
    if op.how in OF_DATA:
        OF_DATA[op.how](parameter)
        return
    with torch.no_grad():
        if op.how == "foreach":
            torch._foreach_mul_(parameters, 0.75)
        elif op.how == "from another":
            parameter.mul_(0.5).add_(parameters[0].sum() * 0.125)
        else:
            parameter.clamp_(-0.25, 0.25)


def clip(op: Clip, loop: Loop, rank: int, notes: Notes) -> None:
    for optimizer in loop.optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if all(parameter.grad is None for parameter in parameters):
            continue  # torch's own raises
        if op.how in ("norm", "value"):
            found = loop.clip(optimizer, op)
        else:
            found = (nn.utils.clip_grad_norm_ if "norm" in op.how else nn.utils.clip_grad_value_)(parameters, op.limit)
        if found is not None:
            notes.note("norm", found)


def step(op: Step, loop: Loop, rank: int, notes: Notes) -> None:
    for number, optimizer in enumerate(loop.optimizers):
        if op.which is not None and op.which % len(loop.optimizers) != number:
            continue
        if op.closure is None:
            optimizer.step()
            continue

        def closure(number: int = number, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            return backward(op.closure, loop, rank, notes._replace(place=f"{notes.place} {number}"))

        optimizer.step(closure)


def zero_grad(op: ZeroGrad, loop: Loop, rank: int, notes: Notes) -> None:
    for number, optimizer in enumerate(loop.optimizers):
        if op.which in (None, number):
            optimizer.zero_grad(set_to_none=op.to_none)


def hook(op: Hook, loop: Loop, rank: int, notes: Notes) -> None:
    parameters = [parameter for parameter in loop.module.parameters() if parameter.requires_grad]
    parameter = parameters[op.which % len(parameters)]
    if op.how == "halves":
        parameter.register_hook(lambda grad: grad * 0.5)
    else:
        parameter.register_post_accumulate_grad_hook(partial(_when_accumulated, op.how, notes))
    with torch.no_grad():  # in a backward without any forward since, the engine's hook would come first
        loop.model(torch.ones(2, WIDTH), 7)


def _when_accumulated(how: str, notes: Notes, parameter: Tensor) -> None:
    grad = parameter.grad
    if grad is None:
        return  # another hook has dropped it
    if how == "halves what has accumulated":
        grad.view(-1).mul_(0.5)
    elif how == "replaces it":
        parameter.grad = grad * 0.5
    elif how == "reads it":
        notes.note("sum of gradients", notes.seen.get(f"{notes.place}: sum of gradients", 0) + grad.sum())
    else:
        parameter.grad = None


def edit_state(op: EditState, loop: Loop, rank: int, notes: Notes) -> None:
    parameters = list(loop.module.parameters())
    parameter = parameters[op.which % len(parameters)]
    for optimizer in loop.inner:
        for name, value in optimizer.state.get(parameter, {}).items():
            if name in ("momentum_buffer", "exp_avg") and value is not None:
                value.mul_(0.5)


def copied(op: Copy, loop: Loop, rank: int, notes: Notes) -> None:
    made = copy.deepcopy(loop.module)
    with torch.no_grad():
        x = torch.full((2, WIDTH), 0.5 + rank, dtype=made.gate.dtype)
        notes.note("sum", made(x, 7).float().square().mean())


def save_file(op: SaveFile, loop: Loop, rank: int, notes: Notes) -> None:
    loop.save()


def load_file(op: LoadFile, loop: Loop, rank: int, notes: Notes) -> None:
    loop.load()


def freeze(op: Freeze, loop: Loop, rank: int, notes: Notes) -> None:
    layer = getattr(loop.module, op.layer)
    layer.requires_grad_(op.thaws)


def set_rate(op: Rate, loop: Loop, rank: int, notes: Notes) -> None:
    for optimizer in loop.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = op.lr


def evaluate(op: Evaluate, loop: Loop, rank: int, notes: Notes) -> None:
    if op.who in (None, rank):
        loop.model.eval()
        with torch.no_grad():
            notes.note("loss", loop.model(torch.full((2, WIDTH), 0.5 + rank), 7).float().square().mean())
        loop.model.train()


def whole(op: Whole, loop: Loop, rank: int, notes: Notes) -> None:
    parameters = list(loop.module.parameters())
    full = getattr(loop.strategy, "full_parameters", lambda *_, **__: nullcontext())
    with full(loop.module, write=op.which is not None):
        notes.note("sum", sum(parameter.double().sum() for parameter in parameters))
        if op.which is not None:
            with torch.no_grad():
                parameters[op.which % len(parameters)].view(-1)[0] = 0.5


def save(op: Save, loop: Loop, rank: int, notes: Notes) -> None:
    notes.kept[:] = [copy.deepcopy(loop.module.state_dict()), [state_of(loop, one) for one in loop.inner]]


def load(op: Load, loop: Loop, rank: int, notes: Notes) -> None:
    loop.module.load_state_dict(notes.kept[0])
    for optimizer, state in zip(loop.inner, notes.kept[1], strict=True):
        optimizer.load_state_dict(copy.deepcopy(state))


def state_of(loop: Loop, optimizer: Optimizer) -> dict[str, Any]:
    whole = getattr(loop.strategy, "full_optimizer_state", lambda one: one.state_dict())
    return copy.deepcopy(whole(optimizer))


def read_state(loop: Loop, notes: Notes) -> None:
    for name, value in loop.module.state_dict().items():
        notes.note(name, value)
    for number, optimizer in enumerate(loop.inner):
        for index, state in state_of(loop, optimizer)["state"].items():
            for name, value in state.items():
                if value is not None:
                    notes.note(f"{name} {index} of optimizer {number}", value)


CARRY_OUT: dict[type, Callable[[Any, Loop, int, Notes], Any]] = {
    Backward: backward, Read: read, Edit: edit, EditWeight: edit_weight, Clip: clip, Step: step, ZeroGrad: zero_grad,
    Freeze: freeze, Rate: set_rate, Evaluate: evaluate, Whole: whole, Save: save, Load: load, SaveFile: save_file,
    LoadFile: load_file, Hook: hook, EditState: edit_state, Copy: copied,
}  # fmt: skip
