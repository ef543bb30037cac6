"""What every rank holds whole of a module: its buffers, metrics, and the parameters that no group holds."""

import itertools
from collections.abc import Container, Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_zero.shards.early import early_of
from lightning_zero.shards.local import local_of
from lightning_zero.shards.optimizer import PieceStepper
from lightning_zero.shards.slot import no_interception, slot_of
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.mesh import Mesh


def broadcast_states(module: Module, foreign: Container[str], mesh: Mesh) -> None:
    """Every rank takes rank 0's values, as under DDP: otherwise each would hold the shard of another model. Of what
    tensor-parallel ranks share it takes those of the first rank with the same part. Tensors of their own kind, the
    `foreign` ones, stay as they are."""
    if mesh.world.size == 1:
        return
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if early_of(tensor) is not None:  # ranks agree on those one by one
            continue
        if (isinstance(tensor, Parameter) and name not in foreign) or type(tensor) in (Tensor, DTensor):
            local = local_of(tensor).detach()
            values = local.contiguous()
            for comm in (mesh.world,) if type(tensor) is not DTensor else (mesh.replicate, mesh.shard):
                if comm.size > 1:
                    comm.broadcast(values, f"initial {name}")
            with torch.no_grad():
                local.copy_(values)


def broadcast_new(parameters: Mapping[str, Parameter], known: Container[int], mesh: Mesh) -> None:
    """The same for parameters that have been made since (whose ids are not `known`)."""
    for name, parameter in parameters.items():
        if id(parameter) not in known and mesh.world.size > 1 and not isinstance(parameter, DTensor):
            values = parameter.detach().contiguous()
            mesh.world.broadcast(values, f"initial {name}")
            with torch.no_grad():
                parameter.copy_(values)


def broadcast_buffers(module: Module, comm: Comm, keep: bool) -> None:
    """Sends rank 0's buffers, those of one dtype in one message, to every rank; one that is to `keep` them does so."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in module.buffers():
        if not isinstance(buffer, DTensor):  # tensor-parallel modules keep those equal, or each its part
            by_dtype.setdefault(buffer.dtype, []).append(buffer.detach())
    for dtype, buffers in by_dtype.items():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        comm.broadcast(flat, f"buffers {dtype}")
        if keep and comm.rank:
            for buffer, values in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(values.view(buffer.shape))


def move_replicated(module: Module, device: torch.device) -> None:
    """Moves all that no group holds. Grouped parameters must not even be passed by: modules that look at their weights
    when they move (RNNs) would find nothing."""
    with no_interception():
        for inner in module.modules():
            moves_by_itself = type(inner)._apply is not Module._apply
            if moves_by_itself and not any(slot_of(parameter) for parameter in inner.parameters()):
                inner._apply(lambda tensor: tensor.to(device))
                continue
            for name, buffer in inner._buffers.items():
                inner._buffers[name] = None if buffer is None else buffer.to(device)
            for parameter in inner._parameters.values():
                if parameter is not None and slot_of(parameter) is None:
                    parameter.data = parameter.data.to(device)


def refuse_strangers(
    module: Module,
    trained: Container[int],  # ids of the parameters whose gradients are averaged
    known: Container[int],  # ids of those that were there at set-up
    foreign: Container[str],  # names of those that are tensors of their own kind
    steppers: Iterable[PieceStepper],
) -> None:
    """Raises RuntimeError for a parameter that trains since the middle of this step: nobody averages its gradient."""
    others = [parameter for parameter in module.parameters() if id(parameter) not in trained]
    strangers = {parameter for parameter in others if parameter.grad is not None}
    if not strangers:
        return
    stepped = {parameter for stepper in steppers for parameter in stepper.parameters}
    for name, parameter in module.named_parameters():
        if parameter not in strangers:
            continue
        if id(parameter) not in known:
            raise RuntimeError(
                f"Parameter {name!r} was made in the middle of a step, and has a gradient that is not averaged over "
                "ranks. Make modules between steps (in on_train_epoch_start or on_train_batch_start), or before fit."
            )
        if name in foreign:
            raise RuntimeError(
                f"Parameter {name!r} is a {type(parameter).__name__}, a tensor of its own kind, and trains since "
                "set-up: its gradient is not averaged over ranks. Keep it frozen."
            )
        if parameter in stepped:
            raise RuntimeError(
                f"Parameter {name!r} was thawed in the middle of a step, and its gradient is not averaged over ranks. "
                "Thaw it, and call add_param_group, between steps (in on_train_epoch_start or on_train_batch_start)."
            )
