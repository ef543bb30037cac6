"""`NativeComm`: torch's own collectives on single tensors: NCCL on CUDA devices, gloo's where tests run this code."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.wire.board import Board
from lightning_zero.wire.clock import Clock
from lightning_zero.wire.comm import Combine, Comm, Gather, Work
from lightning_zero.wire.gloo import GlooComm, once_per_world, own_group, own_subgroup
from lightning_zero.wire.links import Links
from lightning_zero.wire.local import LocalComm

# torch 2.13 renamed the two single-tensor collectives; torch 2.11 has only the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@final
class NativeComm(Comm):
    """Runs collectives on the stream of `group`, and sends small host messages through `control`, of the same ranks.

    Sums over more than two ranks are in the backend's order. Whether a rank diverges is one more byte per rank, in the
    same launch as the gather (NCCL), and is copied to the host without blocking it. `group` is used by nothing else.
    """

    learns_late = True
    keeps_order = True

    def __init__(self, group: dist.ProcessGroup, control: GlooComm) -> None:
        super().__init__(control.rank, control.size, sanitize=control.sanitize)
        self._group = group
        self._control = control
        self._on_device = dist.get_backend(group) == "nccl"
        self.bytes_sent, self.calls = control.bytes_sent, control.calls  # both count into the same
        self.clock = Clock(device) if self._on_device else control.clock

    @property
    def host(self) -> Comm:
        return self._control

    @property
    def board(self) -> Board:
        return self._control.board

    def report(self, told: str | None) -> None:
        self._control.report(told)

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        control = self._control.split(groups)
        return NativeComm(own_subgroup(dist.get_backend(self._group), self.rank, groups), control)

    def _all_gather(self, full: Tensor, shard: Tensor, key: str, diverges: bool | None) -> Gather:
        if diverges is None:
            work = _all_gather_single(full.view(-1), shard, group=self._group, async_op=True)
            return Gather(lambda: self._wait([work], key))
        mine = torch.full((1,), diverges, dtype=torch.uint8, device=full.device)
        flags = mine.new_empty(self.size)
        if self._on_device:
            with dist._coalescing_manager(self._group, async_ops=True) as launch:
                _all_gather_single(full.view(-1), shard, group=self._group)
                _all_gather_single(flags, mine, group=self._group)
            works = [launch]
        else:
            pairs = ((full.view(-1), shard), (flags, mine))
            works = [_all_gather_single(into, own, group=self._group, async_op=True) for into, own in pairs]
        arrived = torch.cuda.Event() if flags.is_cuda else None
        heard = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=flags.is_cuda)

        def finish() -> None:
            self._wait(works, key)
            heard.copy_(flags, non_blocking=True)
            if arrived is not None:
                arrived.record()

        def has_divergence() -> bool:
            if arrived is not None:
                arrived.synchronize()
            return bool(heard.any())

        return Gather(finish, has_divergence)

    def _reduce_scatter(self, shard: Tensor, full: Tensor, scratch: Tensor, key: str) -> Work:
        work = _reduce_scatter_single(shard, full.view(-1), group=self._group, async_op=True)
        return Work(lambda: self._wait([work], key))

    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], key: str) -> None:
        pairs = [(dist.irecv, received), (dist.isend, sent)]
        messages = [
            dist.P2POp(kind, tensor, group=self._group, group_peer=peer)
            for kind, tensors in pairs
            for peer, tensor in enumerate(tensors)
            if peer != self.rank and tensor.numel()
        ]
        self._wait(dist.batch_isend_irecv(messages) if messages else [], key)

    def _broadcast(self, tensor: Tensor, source: int, key: str) -> None:
        if tensor.is_cuda or not self._on_device:
            self._wait([dist.broadcast(tensor, group=self._group, group_src=source, async_op=True)], key)
        else:
            self._control._broadcast(tensor, source, key)

    def _all_reduce(self, value: Tensor, combine: Combine, key: str) -> Tensor:
        return self._control._all_reduce(value, combine, key)

    def _merge(self, mine: dict[int, Any], key: str) -> dict[int, Any]:
        return self._control._merge(mine, key)

    def _wait(self, works: Sequence[Any], key: str) -> None:
        for work in works:
            if self._on_device:
                work.wait()  # lets the current stream wait; with a time limit it would block this thread
            else:
                with self._control.explaining(key, None):
                    work.wait(self._control.wait_timeout)


def make_comm(
    device: torch.device, wait_timeout: timedelta, *, backend: str | None = None, sanitize: bool = False
) -> Comm:
    """Returns this process's communicator among all ranks, for tensors on `device`, on process groups of its own.

    Collective: call it on every rank, after `torch.distributed` is initialised; a world of one need not initialise it.
    `backend` is the default process group's: ``"nccl"`` gives NCCL, everything else gloo.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return LocalComm()
    group = own_group("gloo")
    links = once_per_world("links", lambda: Links(GlooComm(group, wait_timeout)))
    control = GlooComm(group, wait_timeout, links, sanitize=sanitize)
    if device.type == "cuda" and backend == "nccl":
        return NativeComm(own_group("nccl", device_id=device), control)
    return control
