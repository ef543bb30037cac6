"""Tensors that every rank holds whole: buffers, metrics, and parameters that are in no group."""

import itertools
from collections.abc import Container, Mapping
from functools import partial
from typing import final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_zero.device import HOST, point_at
from lightning_zero.run.rendezvous import Rendezvous
from lightning_zero.shards.early import early_of
from lightning_zero.shards.local import local_of
from lightning_zero.shards.slot import no_interception, slot_of
from lightning_zero.torch_private import buffers_in, moves_by_itself, parameters_in
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.mesh import Mesh


def broadcast_states(module: Module, foreign: Container[str], mesh: Mesh) -> None:
    """Gives every rank rank 0's parameters and buffers, as DDP does: otherwise ranks would hold shards of different
    models. Collective: call it on every rank.

    A DTensor is broadcast among the ranks that hold the same part of it. Parameters whose names are in `foreign`
    (quantised tensors and others of a kind of their own) stay as they are.
    """
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if early_of(tensor) is not None:  # ranks agree on the values of each of these as it is made
            continue
        if (isinstance(tensor, Parameter) and name not in foreign) or type(tensor) in (Tensor, DTensor):
            comms = (mesh.replicate, mesh.shard) if type(tensor) is DTensor else (mesh.world,)
            _broadcast(name, local_of(tensor).detach(), *comms)


def refuse_uneven_freezing(module: Module, comm: Comm) -> None:
    """Raises ValueError, on every rank, where ranks freeze different parameters: they would group them differently, and
    add gradients of one to those of another. Collective."""
    named = dict(module.named_parameters())
    trains = torch.tensor([parameter.requires_grad for parameter in named.values()], dtype=torch.uint8, device=HOST)
    found = comm.host.all_reduce(torch.stack([trains, 1 - trains]), "which parameters train", "max")
    uneven = [name for name, both in zip(named, found.all(0).tolist(), strict=True) if both]
    if uneven:
        raise ValueError(
            f"{', '.join(uneven[:3])}{' and others' * (len(uneven) > 3)} train on some ranks and are frozen on others. "
            "Freeze the same parameters on all ranks; one may still be without use, and without a gradient, on some."
        )


def broadcast_new(parameters: Mapping[str, Parameter], known: Container[int], mesh: Mesh) -> None:
    """Gives every rank rank 0's values of the parameters whose ids are not in `known`. Collective."""
    for name, parameter in parameters.items():
        if id(parameter) not in known and not isinstance(parameter, DTensor):
            _broadcast(name, parameter.detach(), mesh.world)


def _broadcast(name: str, tensor: Tensor, *comms: Comm) -> None:
    """Copies the values of the first rank of each of `comms`, one after the other, to the others."""
    if all(comm.size == 1 for comm in comms):
        return
    values = tensor.contiguous()
    for comm in comms:
        if comm.size > 1:
            comm.broadcast(values, f"initial {name}")
    with torch.no_grad():
        tensor.copy_(values)


@final
class SharedBuffers:
    """The buffers of a module, which all ranks take from rank 0 before a forward, as under DDP, if `is_on`."""

    def __init__(self, module: Module, comm: Comm, rendezvous: Rendezvous, *, is_on: bool) -> None:
        self._rendezvous = rendezvous
        self._number: int | None = None  # by which `Course.call` broadcasts them
        self._are_stale = True  # those of rank 0 may have other values
        if is_on and comm.size > 1 and any(True for _ in module.buffers()):
            serve = partial(broadcast_buffers, module, comm)
            self._number = rendezvous.serving.enroll("the broadcast of rank 0's buffers", serve)

    def broadcast_stale(self) -> None:
        """Takes rank 0's buffers, if they may have other values. Collective."""
        if self._number is not None and self._are_stale:
            self._rendezvous.course.call(self._number)

    def note_forward(self, *, reduces: bool) -> None:
        """Notes the end of a forward, whose gradients will be reduced or not. DDP broadcasts after the former."""
        self._are_stale = reduces


def broadcast_buffers(module: Module, comm: Comm, keep: bool) -> None:
    """Sends rank 0's buffers to every rank, in one message for each dtype. Collective; a rank takes them over if it is
    to `keep` them."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in module.buffers():
        if not isinstance(buffer, DTensor):  # tensor-parallel modules keep theirs equal, or divided
            by_dtype.setdefault(buffer.dtype, []).append(buffer.detach())
    for dtype, buffers in by_dtype.items():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        comm.broadcast(flat, f"buffers {dtype}")
        if keep and comm.rank:
            for buffer, values in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(values.view(buffer.shape))


def move_replicated(module: Module, device: torch.device) -> None:
    """Moves everything that is in no group to `device`.

    It does not call `to` on modules with grouped parameters: some (RNNs) look at their weights when they move, and
    would find no values.
    """
    with no_interception():
        for inner in module.modules():
            if moves_by_itself(inner) and not any(slot_of(parameter) for parameter in inner.parameters()):
                Module.to(inner, device)  # not `inner.to`, which some classes refuse
                continue
            buffers = buffers_in(inner)
            for name, buffer in buffers.items():
                buffers[name] = None if buffer is None else buffer.to(device)
            for parameter in parameters_in(inner).values():
                if parameter is not None and slot_of(parameter) is None:
                    point_at(parameter, parameter.data.to(device))
