"""`forecast`: how many bytes a rank will hold once training is under way, by category, and how many under DDP."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_zero.device import HOST
from lightning_zero.run.engine import Engine
from lightning_zero.shards.local import local_of
from lightning_zero.shards.optimizer import training_slot
from lightning_zero.shards.probe import state_tensors_of
from lightning_zero.shards.slot import no_interception, slot_of
from lightning_zero.tiers.ledger import Category, Tier, category_in

STATES = (Category.PARAMETER, Category.GRADIENT, Category.MASTER, Category.OPTIMIZER_STATE)


def states_in(report: Mapping[str, int]) -> int:
    """Returns the bytes of model states on the device in a memory report. These states are what ZeRO divides."""
    return sum(report.get(category, 0) for category in STATES)


@dataclass(frozen=True)
class Forecast:
    """Bytes on a rank by category, under an engine and under Lightning's DDP."""

    numel: int  # elements of the model's parameters; with tensor parallelism, of this rank's part of them
    here: Mapping[str, int]  # under the engine
    ddp: Mapping[str, int]


def forecast(
    engine: Engine, optimizers: Iterable[Optimizer], averages: Sequence[Mapping[tuple[Category, Tier], int]] = ()
) -> Forecast:
    """Returns the bytes of training that is about to begin, or under way: what is in memory, and what is still to come.
    That is gradients that autograd will leave, state that each optimizer makes when it is tried, and `averages` of the
    model (see `average.room_for_average`)."""
    optimizers = list(optimizers)
    here = bytes_to_rest(engine, optimizers)
    for room in averages:
        here.update({category_in(*where): nbytes for where, nbytes in room.items()})
    numel = sum(local_of(parameter).numel() for parameter in engine.module.parameters())
    return Forecast(numel, here, bytes_under_ddp(engine.module, optimizers, averages=len(averages)))


def bytes_to_rest(
    engine: Engine, optimizers: Iterable[Optimizer], tried_on: torch.device | None = None
) -> Counter[str]:
    """Returns the bytes of `Forecast.here` without averages that are still to come. Optimizers are tried on the device
    `tried_on`; None: where each one steps."""
    here = Counter(engine.bytes_by_category())
    for gradient in engine.runner.reductions.gradients:
        if not gradient.travels and not engine.options.step_in_backward:
            with no_interception():
                slots = [slot for slot in gradient.group.slots if slot.parameter.requires_grad]
                to_come = [slot for slot in slots if slot.parameter.grad is None]
            here[Category.GRADIENT] += sum(slot.numel for slot in to_come) * gradient.dtype.itemsize
    for optimizer in optimizers:
        tensors, made = _state_tensors_of(optimizer, tried_on), optimizer.state
        for parameter in _stepped(optimizer):
            if isinstance(made, dict) and dict.get(made, parameter):  # not `made.get`: it may take postponed steps
                continue
            slot = training_slot(parameter)
            if slot is None:
                tier, nbytes = Tier.DEVICE, parameter.nbytes
            else:
                places = slot.group.places
                itemsize = (places.state_dtype or slot.group.kind.declared).itemsize
                tier, nbytes = places.optimizer.tier, slot.state_piece.numel * itemsize
            here[category_in(Category.OPTIMIZER_STATE, tier)] += tensors * nbytes
    return here


def bytes_under_ddp(
    module: Module, optimizers: Iterable[Optimizer], *, averages: int = 0, buckets: bool = True
) -> dict[str, int]:
    """Returns the bytes on each rank under Lightning's DDP, whose `buckets` are a second copy of all gradients. Each of
    Lightning's `averages` is a copy of the whole module."""
    parameters = list(module.parameters())
    gradients = sum(_nbytes_of(parameter) for parameter in parameters if parameter.requires_grad)
    whole = sum(map(_nbytes_of, parameters))
    found: dict[str, int] = {
        Category.PARAMETER: whole,
        Category.GRADIENT: gradients,
        Category.OPTIMIZER_STATE: sum(
            _state_tensors_of(optimizer) * sum(map(_nbytes_of, _stepped(optimizer))) for optimizer in optimizers
        ),
        Category.BUCKET: gradients if buckets else 0,
    }
    if averages:
        found[Category.AVERAGE] = averages * (whole + sum(buffer.nbytes for buffer in module.buffers()))
    return found


def bytes_to_save(module: Module, optimizers: Iterable[Optimizer]) -> int:
    """Returns the bytes of a whole model, and of the state that its optimizers will keep for parameters, as one device
    would save them; the same on every rank. Call it before training, as it tries the optimizers."""
    tensors = [*module.parameters(), *module.buffers()]
    stepped = [(_state_tensors_of(optimizer), _stepped(optimizer)) for optimizer in optimizers]
    return sum(map(_whole_nbytes_of, tensors)) + sum(
        times * sum(map(_whole_nbytes_of, parameters)) for times, parameters in stepped
    )


def _whole_nbytes_of(tensor: Tensor) -> int:
    """Returns the bytes of a tensor, of all tensor-parallel ranks, in the dtype that the user made it in."""
    slot = slot_of(tensor) if isinstance(tensor, Parameter) else None
    itemsize = tensor.dtype.itemsize if slot is None else slot.group.kind.declared.itemsize
    return math.prod(tensor.shape) * itemsize


def _state_tensors_of(optimizer: Optimizer, tried_on: torch.device | None = None) -> int:
    device = tried_on or next((parameter.device for parameter in _stepped(optimizer)), HOST)
    return state_tensors_of(optimizer, device)


def _stepped(optimizer: Optimizer) -> list[Parameter]:
    """Returns what an optimizer steps; it makes no state of what is frozen."""
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter for parameter in given if parameter.requires_grad]


def _nbytes_of(parameter: Parameter) -> int:
    """Returns the bytes of a parameter in the dtype that the user made it in."""
    slot = slot_of(parameter)
    return local_of(parameter).nbytes if slot is None else slot.numel * slot.group.kind.declared.itemsize
