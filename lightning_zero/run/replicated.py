"""Tensors that every rank holds whole: buffers, metrics, and parameters that are in no group."""

import itertools
from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_zero.device import HOST, on_host, point_at
from lightning_zero.run.course import Waits
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


class _Sent(NamedTuple):
    """Buffers of rank 0, which were sent before this rank had come to its forward."""

    values: dict[torch.dtype, Tensor]
    is_valid: Tensor  # whether rank 0 had come to its own


@final
class SharedBuffers:
    """The buffers of a module. All ranks in `comm` take them from its first before a forward, as under DDP, if `is_on`.

    Ranks that have gone different ways come to a forward one after another, and a forward may change buffers. So the
    first ones wait. A rank that leaves a plan, by which the others broadcast, keeps what it is sent until its forward.
    Where replicas go their own ways, no plan is of all of them, and they cannot serve each other: all meet first.
    """

    def __init__(self, module: Module, comm: Comm, rendezvous: Rendezvous, *, is_on: bool, trains: bool) -> None:
        self._module = module
        self._comm = comm
        self._rendezvous = rendezvous
        self._number: int | None = None  # by which `Course.call` broadcasts them
        # Those of rank 0 may have other values. At set-up they were broadcast; what code gives each rank after that (an
        # average of its own, say) DDP, too, replaces only where a model trains.
        self._are_stale = trains
        self._is_here = False  # this rank has come to a forward, and waits for them
        self._sent: list[_Sent] = []
        self._taken: list[Tensor] = []  # whether rank 0 had come to its own forward, for each that this rank has taken
        if is_on and comm.size > 1 and any(True for _ in module.buffers()):
            label = "the broadcast of rank 0's buffers"
            self._number = rendezvous.serving.enroll(label, self._serve, is_of_all=True)

    def broadcast_stale(self) -> None:
        """Takes rank 0's buffers, if they may have other values. Collective."""
        if self._number is None or not self._are_stale:
            return
        if self._rendezvous.comm.size < self._comm.size:
            self._rendezvous.meet_for(self._number)
            return
        self._is_here = not self._take_sent()
        while self._is_here:
            waits = self._rendezvous.course.call(self._number, self._has_come)
            if self._is_here and isinstance(waits, Waits):
                self._rendezvous.let_come(early=waits is Waits.EARLY)

    def _has_come(self) -> bool:
        return not self._is_here

    def note_forward(self, *, reduces: bool) -> None:
        """Notes the end of a forward, whose gradients will be reduced or not. DDP broadcasts after the former."""
        self._are_stale = reduces

    def forget_sent(self) -> None:
        """Forgets what was sent ahead, as all ranks have come to a step."""
        self._sent.clear()
        self._taken.clear()

    def _serve(self, keep: bool) -> None:
        """Sends rank 0's buffers to every rank, in one message for each dtype. Collective; a rank takes them over if it
        has come to a forward (`keep`, or it waits here)."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in _shared_buffers(self._module):
            by_dtype.setdefault(buffer.dtype, []).append(buffer.reshape(-1))
        values: dict[torch.dtype, Tensor] = {}
        for dtype, buffers in by_dtype.items():
            told = [] if values else [buffers[0].new_full((1,), keep or self._is_here)]
            values[dtype] = torch.cat([*told, *buffers])
            self._comm.broadcast(values[dtype], f"buffers {dtype}")
        if not values:
            self._is_here = False
            return
        first = next(iter(values))
        is_valid, values[first] = values[first][0], values[first][1:]
        if keep or self._is_here:
            self._is_here = False
            self._taken.append(is_valid.clone())  # a view would keep all buffers until the step
            self._take(values)
        elif not self._rendezvous.serving.is_waiting:
            self._sent.append(_Sent(values, is_valid))

    def _take_sent(self) -> bool:
        """Takes over what was sent for this forward, if anything was."""
        while self._sent:
            sent = self._sent.pop(0)
            if self._says(sent.is_valid) and not self._was_ahead():
                self._take(sent.values)
                return True
        return False

    def _was_ahead(self) -> bool:
        """Whether this rank has taken what rank 0 had before its own forward: it sends that of its forward later."""
        while self._taken:
            if not self._says(self._taken.pop(0)):
                return True
        return False

    def _says(self, flag: Tensor) -> bool:
        """Reads what rank 0 has sent: the host waits for the device, at most as long as for another rank."""
        return bool(on_host(flag, self._comm.limit))

    def _take(self, values: Mapping[torch.dtype, Tensor]) -> None:
        if self._comm.rank:
            start = dict.fromkeys(values, 0)
            for buffer in _shared_buffers(self._module):
                at = start[buffer.dtype]
                start[buffer.dtype] = stop = at + buffer.numel()
                buffer.copy_(values[buffer.dtype][at:stop].view(buffer.shape))


def _shared_buffers(module: Module) -> Iterator[Tensor]:
    """Yields the buffers, except those that tensor-parallel modules keep equal, or divided. Edits do not raise their
    versions, as under DDP: a backward may be of several forwards, between which they are broadcast."""
    return (buffer.data for buffer in module.buffers() if not isinstance(buffer, DTensor))


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
