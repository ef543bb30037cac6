"""`set_up`: takes over a module's parameters, and decides where each rests and what optimizers step of it."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_zero.device import HOST, SideStream
from lightning_zero.run.recompute import Recompute, recompute_for
from lightning_zero.run.replicated import broadcast_states, refuse_uneven_freezing
from lightning_zero.shards import assembly, offload
from lightning_zero.shards.assembly import Assembly
from lightning_zero.shards.granularity import Stepped, choose_stepped
from lightning_zero.shards.local import local_of
from lightning_zero.shards.managed import foreign_parameters, managed_parameters, trainable_of
from lightning_zero.shards.options import Options
from lightning_zero.shards.setting import Setting
from lightning_zero.stage import STAGES, Partition
from lightning_zero.tiers.ledger import Ledger
from lightning_zero.wire.comm import Comm, failing_together
from lightning_zero.wire.mesh import Mesh


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine that `set_up` makes of a module and its optimizers."""

    setting: Setting
    assembly: Assembly
    stepped: Stepped
    foreign: dict[str, Parameter]  # tensors of a kind of their own, which every rank keeps whole
    recompute: Recompute | None  # not begun yet


def set_up(
    module: Module,
    optimizers: Sequence[Optimizer],
    stage: int,
    comm: Comm,
    device: torch.device,
    options: Options,
    ledger: Ledger,
) -> EngineParts:
    """Takes over the parameters of `module`, with rank 0's values; see `Engine`. Collective."""
    mesh = Mesh.of(comm, options.replicate_size, options.tensor_parallel_size)
    has_copies_only = options.replicate_size > 1 and mesh.replicate.size == 1  # no ranks divide a copy of the model
    partition = STAGES[0 if has_copies_only else stage]
    recompute = recompute_for(module, options, device, ledger, mesh.tensor)
    managed = managed_parameters(module, optimizers, mesh.tensor_ranks)
    foreign = foreign_parameters(module)
    _refuse_steps_in_backward(optimizers, partition, options)
    is_cut = partition.optimizer and mesh.shard.size > 1
    is_divided = any(local_of(parameter) is not parameter for parameter in managed)
    steps_on = device if options.offload is None else HOST
    stepped = choose_stepped(optimizers if is_cut or is_divided else [], options, is_divided, steps_on)
    broadcast_states(module, foreign, mesh)
    refuse_uneven_freezing(module, mesh.world)
    together = nullcontext if options.offload is None else partial(failing_together, mesh.world, "setting up")
    if options.offload is not None:
        ledger.pinned.give_back()  # of a training that has failed
    with together():
        places = offload.places_for(options.offload, device, partition, options.machine, mesh.world.limit)
    setting = Setting(
        partition,
        mesh,
        ledger,
        places,
        assembly.bucket_bytes_for(managed, options, mesh.shard.size),
        aside=SideStream.of(device),
        block=stepped.block,
        keeps_gradients=not options.step_in_backward,
    )
    trainable = trainable_of(managed, optimizers)
    with together():
        made = assembly.assemble(module, managed, trainable, setting, options)
    if options.offload is not None:
        with together():  # all ranks of the machine have allocated their groups: what is free now is for the state
            offload.refuse_too_little_room(options.offload, made.gradients, optimizers, setting, options.machine)
    return EngineParts(setting, made, stepped, foreign, recompute)


def _refuse_steps_in_backward(optimizers: Sequence[Optimizer], partition: Partition, options: Options) -> None:
    if options.step_in_backward and (len(optimizers) > 1 or not partition.gradient):
        raise ValueError(
            "step_in_backward=True needs gradients that are sharded (stage=2 or 3), and a single optimizer; here are "
            f"{len(optimizers)}. Leave step_in_backward out."
        )
