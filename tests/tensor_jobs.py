"""What tests/test_tensor_parallel.py runs on real ranks, because torch's DTensor needs process groups.

Every job takes `tensor`, the number of neighbours that share modules; the other axis is data parallel.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from lightning_zero import ActivationCheckpointing, Offload
from lightning_zero.run.engine import Engine, Options
from lightning_zero.run.notices import TornStepError
from lightning_zero.shards.local import local_of
from lightning_zero.shards.offload import Machine
from lightning_zero.tiers.ledger import Category, Tier
from lightning_zero.views.intercept import METHODS_OF_DTENSOR
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.native import make_comm
from models import Maker, batch, clone, seeded, sgd
from ranks import PATIENCE
from reference import Run, ddp
from unit_jobs import Fails

WORDS, WIDTH = 16, 12
STEPS = 2  # the second has momentum, and at stage 3 a plan


class Block(nn.Module):
    """A residual layer that is wide inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Towers(nn.Module):
    """What a transformer has, but for attention; and a parameter of its own, frozen ones, and ones that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(4, 8)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden) * self.scale + self.frozen(self.norm(hidden)))


def parallelize(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Column, then row; vocabulary; with `sequence` the blocks' norms see each its part of the sequence, and have
    gradients that are to be summed over ranks."""
    layout = Shard(1) if sequence else Replicate()
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=layout),
        "blocks.*.up": ColwiseParallel(input_layouts=layout),
        "blocks.*.down": RowwiseParallel(output_layouts=layout),
        "frozen": ColwiseParallel(output_layouts=Replicate()),
        "unused": ColwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    if sequence:
        plan["blocks.*.norm"] = SequenceParallel()
        plan["blocks.1"] = PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),))
    parallelize_module(model, mesh, plan)


def towers(seed: int = 0) -> Towers:
    return seeded(Towers, seed)


@cache
def start() -> Comm:
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    return make_comm(torch.device("cpu"), timedelta(seconds=PATIENCE))


@cache
def mesh_of(tensor: int) -> DeviceMesh:
    start()
    shape = (dist.get_world_size() // tensor, tensor)
    return init_device_mesh("cpu", shape, mesh_dim_names=("data_parallel", "tensor_parallel"))


def whole(values: Tensor) -> Tensor:
    return values.full_tensor() if isinstance(values, DTensor) else values


def loss_of(model: nn.Module, rank: int, step: int, micro: int = 0) -> Tensor:
    tokens, targets = batch(rank, step, micro)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def make_engine(
    make: Maker,
    tensor: int,
    stage: int,
    *,
    sequence: bool = False,
    seed: int = 0,
    folder: Path | None = None,
    **options: Any,
) -> tuple[Any, Any, Engine]:
    mesh, comm = mesh_of(tensor), start()
    model = towers(seed + comm.rank // tensor)  # another initialisation along data parallel must not matter
    parallelize(model, mesh["tensor_parallel"], sequence=sequence)
    optimizer, _ = make(model)
    if "offload" in options:
        path = folder if "nvme" in options["offload"].values() else None
        options["offload"] = Offload(**options["offload"], path=path)
    if options.pop("compiles", False):
        for block in model.blocks:
            block.compile(backend="eager")
    if options.pop("recomputes", False):
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    made = Options(tensor_parallel_size=tensor, **options)
    return model, optimizer, Engine(model, [optimizer], stage=stage, comm=comm, options=made)


def train(make: Maker, tensor: int, stage: int, *, accumulate: int = 1, clip: str | None = None, **how: Any) -> Run:
    """As `models` and `reference.ddp`; whole weights and state of a run."""
    model, optimizer, engine = make_engine(make, tensor, stage, **how)
    rank, run = engine.mesh.world.rank // tensor, Run()
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(accumulate):
            with engine.accumulating() if micro < accumulate - 1 else nullcontext():
                with engine.forward(reduces=micro == accumulate - 1):
                    loss = loss_of(model, rank, step, micro) / accumulate
                with engine.backward():
                    loss.backward()
        run.losses.append(loss.item())
        if clip == "norm":
            run.grad_norms.append(engine.gradients.clip_by_norm_(optimizer, 0.5).item())
        if clip == "value":
            engine.gradients.clip_by_value_(optimizer, 0.01)
        optimizer.step()
    run.optimizer = engine.states.full_optimizer(optimizer)
    engine.close()
    run.weights = {name: whole(value).clone() for name, value in model.state_dict().items()}
    return run


def reference(make: Maker, data: int, *, accumulate: int = 1, clip: str | None = None) -> Run:
    """One process on the whole batch."""
    return ddp(clone(towers()), make, world=data, accumulate=accumulate, clip=clip, steps=STEPS)


def rests(tensor: int, stage: int) -> dict[str, int]:
    """Bytes by category after a step with AdamW, of layers in which every parameter is divided."""
    mesh, comm = mesh_of(tensor), start()
    model = seeded(lambda: nn.Sequential(*(nn.ModuleList([nn.Linear(64, 64)])[0] for _ in range(8))))
    plan = {f"{at}": ColwiseParallel() if at % 2 == 0 else RowwiseParallel() for at in range(8)}
    parallelize_module(model, mesh["tensor_parallel"], plan)
    for at in range(1, 8, 2):
        model[at].bias = None  # every rank would have all of it
    optimizer = torch.optim.AdamW(model.parameters())
    options = Options(tensor_parallel_size=tensor, unit_classes=("Linear",))
    engine = Engine(model, [optimizer], stage=stage, comm=comm, options=options)
    model(torch.ones(2, 64)).square().sum().backward()
    optimizer.step()
    return engine.bytes_by_category()


def what_users_see(tensor: int, stage: int, *, sequence: bool) -> dict[str, Any]:
    """Parameters and gradients between backward and step, as users read and edit them."""
    model, optimizer, engine = make_engine(torch_sgd, tensor, stage, sequence=sequence, **UNITS)
    rank = engine.mesh.world.rank // tensor
    for _ in range(2):  # stage 3 plans the second
        optimizer.zero_grad()
        loss_of(model, rank, 0).backward()
    named = dict(model.named_parameters())
    seen: dict[str, Any] = {
        "read": {name: whole(parameter.detach() + 1) for name, parameter in named.items()},
        "full_tensor": {name: whole(parameter).detach().clone() for name, parameter in named.items()},
        "kinds": {name: isinstance(parameter, DTensor) for name, parameter in named.items()},
        "grads": {name: None if p.grad is None else whole(p.grad + 0) for name, p in named.items()},
        "placements": all(
            p.grad.placements == p.placements for p in named.values() if isinstance(p, DTensor) and p.grad is not None
        ),
        "full_grad": {name: engine.gradients.full(parameter) for name, parameter in named.items()},
        "norms": engine.gradients.norms(),
        "largest": engine.gradients.norms(float("inf")),
        "repr": repr(named["blocks.0.up.weight"]),
    }
    with torch.no_grad():
        for parameter in named.values():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        named["blocks.0.up.weight"].add_(1.0)
    optimizer.step()
    with engine.full_parameters():
        seen["stepped"] = {name: whole(parameter).detach().clone() for name, parameter in named.items()}
    seen["same objects"] = all(
        parameter is own for parameter, own in zip(optimizer.param_groups[0]["params"], trainable(model), strict=True)
    ) and set(optimizer.state) <= set(named.values())
    engine.close()
    return seen


EDITS: dict[str, Callable[[Any, float], Any]] = {  # each multiplies a DTensor, in one of the ways in which users write
    "data": lambda p, by: p.data.mul_(by),
    "data, copied into": lambda p, by: p.data.copy_(p.data * by),
    "detached": lambda p, by: p.detach().mul_(by),
    "local part": lambda p, by: p.to_local().mul_(by),
    "local part of data": lambda p, by: p.data.to_local().mul_(by),
    "local part, detached": lambda p, by: p.detach().to_local().mul_(by),
    "data of the local part": lambda p, by: p.to_local().data.mul_(by),
    "array of the local part": lambda p, by: p.to_local().numpy().__imul__(by),
    "redistributed to where it is": lambda p, by: p.redistribute(placements=p.placements).mul_(by),
    "view": lambda p, by: p.t().mul_(by),
    "list": lambda p, by: torch._foreach_mul_([p], by),
    "list of data": lambda p, by: torch._foreach_mul_([p.data], by),
    "list of local parts": lambda p, by: torch._foreach_mul_([p.to_local()], by),
}
if hasattr(torch, "foreach"):  # since torch 2.15
    EDITS["list, by its public name"] = lambda p, by: torch.foreach.mul_([p], by)


def tied_across_blocks(stage: int, **how: Any) -> list[float]:
    """The losses of steps in which the first block, in its forward, reads weights of the second one beside its own."""
    model, optimizer, engine = make_engine(torch_sgd, 2, stage, **how)
    first, second = model.blocks
    beside, losses = list[Tensor](), list[float]()
    first.register_forward_hook(lambda *_: beside.append(whole((first.up.weight * second.up.weight).sum())))
    for step in range(STEPS):
        optimizer.zero_grad()
        with engine.forward():
            loss = loss_of(model, 0, step) + 0.1 * beside.pop()
        with engine.backward():
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
    engine.close()
    return losses


WHENS = ["before forward", "before step", "after a look"]  # stepped values are still to come, or there


def edited(stage: int, tier: str, folder: Path) -> dict[str, list[float]]:
    """The losses of steps in each of which a weight is edited in the next of these ways, or in place."""
    found, offload = {}, Offload("nvme", path=folder) if tier == "disk" else None
    for when in WHENS:
        found[f"edited {when}"] = _losses_around([*EDITS.values()], when, stage, offload)
        found[f"edited in place {when}"] = _losses_around([lambda p, by: p.mul_(by)] * len(EDITS), when, stage, offload)
        found[f"assigned {when}"] = _losses_around(
            [lambda p, by: setattr(p, "data", p.data * by)], when, stage, offload
        )
    found["untouched"] = _losses_around([lambda p, by: None], WHENS[0], stage, offload)
    return found


def read_of_plain() -> dict[str, tuple[bool, bool]]:
    """Of what each method of a DTensor returns, where there is no graph: whether it is the very tensor that the DTensor
    holds, and whether it shows later edits of that."""
    start()
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    for name, read in METHODS_OF_DTENSOR.items():
        tensor, placements = distribute_tensor(torch.ones(4, 2), mesh, [Replicate()]), {"redistribute": [Replicate()]}
        with torch.no_grad():
            local = local_of(read(tensor, **({"placements": placements[name]} if name in placements else {})))
            local_of(tensor).fill_(2)
        found[name] = local is local_of(tensor), bool((local == 2).all())
    return found


def edited_compiled(stage: int, backend: str | None, folder: Path) -> list[float]:
    return _losses_around([EDITS["data"]], WHENS[1], stage, Offload("nvme", path=folder), backend)


def _losses_around(
    edits: list[Callable[[Any, float], Any]], when: str, stage: int, offload: Offload | None, backend: str | None = None
) -> list[float]:
    model, comm = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))), start()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh_of(2)["tensor_parallel"], plan)
    if backend is not None:
        for linear in (model[0], model[2]):
            linear.compile(backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)
    options = Options(tensor_parallel_size=2, unit_classes=("Linear",), offload=offload)
    engine, losses = Engine(model, [optimizer], stage=stage, comm=comm, options=options), []

    def edit_if(now: str, step: int) -> None:
        if now == when and 0 < step <= len(edits):
            if when == "after a look":
                model[0].weight.sum()
            with torch.no_grad():
                edits[step - 1](model[0].weight, (0.5, 2.0)[step % 2])

    for step in range(len(edits) + 3):
        edit_if("before forward", step)
        edit_if("after a look", step)
        with engine.forward():
            loss = model(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH) + comm.rank // 2).square().sum()
        with engine.backward():
            loss.backward()
        edit_if("before step", step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    engine.close()
    return losses


def overflow_on_one(stage: int) -> dict[str, Any]:
    """Two steps under a scaler; in the first, one rank alone has the row whose gradient is not finite."""
    mesh, comm = mesh_of(2), start()
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4, bias=False)))
    parallelize_module(model, mesh["tensor_parallel"], {"0": ColwiseParallel(output_layouts=Replicate())})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, [optimizer], stage=stage, comm=comm, options=Options(tensor_parallel_size=2))
    scaler, found = torch.amp.GradScaler("cpu", init_scale=2.0**4), {}
    for number, last in enumerate((float("inf"), 1.0)):
        scaler.scale((model(torch.ones(1, 4)) * torch.tensor([1.0, 1.0, 1.0, last])).sum()).backward()
        found[f"overflow {number}"] = engine.gradients.unscale_(scaler, optimizer).ranks
        scaler.step(optimizer)
        scaler.update()
        found[f"scale {number}"] = scaler.get_scale()
        optimizer.zero_grad()
        with engine.full_parameters():
            found[f"weight {number}"] = whole(model[0].weight).detach().clone()
    engine.close()
    return found


def told_of_half_a_step(tensor: int, stage: int, who: set[int]) -> list[str]:
    """The errors that a rank hears of a step that raises in its middle, on some ranks, and of those after it."""
    model, optimizer, engine = make_engine(lambda model: (Fails(trainable(model)), None), tensor, stage)
    told = []
    for step in range(3):
        fails = step == 0 and engine.mesh.world.rank in who
        optimizer.fails = lambda changes, fails=fails: fails and changes == 3
        try:
            with engine.forward():
                loss = loss_of(model, 0, step)
            with engine.backward():
                loss.backward()
            with engine.calling_step():
                optimizer.step()
        except (ArithmeticError, TornStepError) as error:
            told.append(str(error))
    engine.close()
    return told


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def torch_sgd(model: nn.Module) -> tuple[torch.optim.Optimizer, None]:
    return torch.optim.SGD(trainable(model), lr=0.1, momentum=0.9), None


UNITS = {"unit_classes": ("Block",)}


def refused(kind: str, tensor: int) -> str:
    """The message for bad input; every rank raises."""
    world = start().size
    model, options = towers(), Options(tensor_parallel_size=tensor)
    if kind == "foreign mesh":
        parallelize(model, init_device_mesh("cpu", (world,)), sequence=False)
    if kind == "two axes":
        mesh = mesh_of(tensor)
        model.head.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Replicate(), Shard(0)]))
    if kind == "uneven":
        model.head = nn.Linear(WIDTH, 13)
        parallelize_module(model, mesh_of(tensor)["tensor_parallel"], {"head": ColwiseParallel()})
    if kind == "param_dtype":
        parallelize(model, mesh_of(tensor)["tensor_parallel"], sequence=False)
        options = Options(tensor_parallel_size=tensor, param_dtype=torch.bfloat16)
    optimizer, stage = torch_sgd(model)[0], 2
    if kind == "whole tensors":
        parallelize(model, mesh_of(tensor)["tensor_parallel"], sequence=False)
        optimizer, stage = torch.optim.Adafactor(trainable(model)), 0
    try:
        Engine(model, [optimizer], stage=stage, comm=start(), options=options)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return "nothing was refused"


def example_gpt(tie_head: bool) -> Any:
    sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
    from gpt import GPT

    return seeded(lambda: GPT(width=16, depth=2, heads=4, context=8, tie_head=tie_head))


def loss_of_gpt(model: nn.Module, rank: int) -> Tensor:
    tokens = torch.randint(0, 256, (4, 9), generator=torch.Generator().manual_seed(rank))
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def gradients_of_gpt(tensor: int, stage: int, *, sequence: bool, tie_head: bool) -> tuple[float, dict[str, Tensor]]:
    """The example's loss on this rank's batch, and the averaged gradients."""
    mesh, comm, model = mesh_of(tensor), start(), example_gpt(tie_head)
    model.parallelize(mesh["tensor_parallel"], sequence=sequence)
    options = Options(tensor_parallel_size=tensor, unit_classes=("Block",))
    engine = Engine(model, [torch_sgd(model)[0]], stage=stage, comm=comm, options=options)
    loss = loss_of_gpt(model, comm.rank // tensor)
    loss.backward()
    found = {name: engine.gradients.full(parameter) for name, parameter in model.named_parameters()}
    engine.close()
    return loss.item(), {name: grad for name, grad in found.items() if grad is not None}


def recompute(tensor: int, stage: int, policy: dict[str, bool] | None, *, sequence: bool) -> dict[str, Any]:
    """Three steps with, or for None without, activation checkpointing; and what is kept and sent for it in the last:
    the array of contiguous checkpoints is made in the second, and filled again in the third."""
    how: dict[str, Any] = {"machine": Machine(host_is_apart=True)}
    if policy is not None:
        how["activation_checkpointing"] = ActivationCheckpointing(modules="Block", **policy)
    model, optimizer, engine = make_engine(sgd, tensor, stage, sequence=sequence, **UNITS, **how)
    shared, losses = engine.mesh.tensor, []
    for step in range(3):
        optimizer.zero_grad()
        with engine.forward():
            loss = loss_of(model, engine.mesh.world.rank // tensor, step)
        kept = {tier: engine.ledger.live_in[Category.ACTIVATION_CHECKPOINT, tier] for tier in Tier}
        sent, calls = shared.bytes_sent["all_gather"], shared.calls["all_gather"]
        with engine.backward():
            loss.backward()
        sent, calls = shared.bytes_sent["all_gather"] - sent, shared.calls["all_gather"] - calls
        losses.append(loss.item())
        optimizer.step()
    engine.close()
    weights = {name: whole(value).clone() for name, value in model.state_dict().items()}
    return {"losses": losses, "weights": weights, "kept": kept, "sent": sent, "gathers": calls}
