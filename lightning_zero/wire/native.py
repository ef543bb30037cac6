"""`NativeComm`: torch's own collectives on single tensors: NCCL on GPUs, gloo's where tests run this code."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.device import HOST, Late, Limit, has_streams, is_host, on_host
from lightning_zero.distributed_private import in_one_launch
from lightning_zero.torch_private import find
from lightning_zero.wire.board import Board
from lightning_zero.wire.clock import Clock
from lightning_zero.wire.comm import Combine, Comm, Gather, RankTimeoutError, Work
from lightning_zero.wire.gloo import GlooComm
from lightning_zero.wire.links import Links
from lightning_zero.wire.local import LocalComm
from lightning_zero.wire.worlds import Held, forget, group_of, once_per_world, own_group

# torch 2.13 renamed the two single-tensor collectives; torch 2.11 has only the old names.
_all_gather_single = find(dist, "all_gather_single", "all_gather_into_tensor")  # the latter is there before torch 2.13
_reduce_scatter_single = find(dist, "reduce_scatter_single", "reduce_scatter_tensor")

_OPERATIONS = {torch.add: dist.ReduceOp.SUM, torch.maximum: dist.ReduceOp.MAX, torch.minimum: dist.ReduceOp.MIN}
SMALL = 2**16  # bytes, up to which host tensors are not worth the way by the device


# Dtypes that NCCL has, and gloo. Others are never summed: buffers, frozen tables, quantised values.
_KNOWN = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}


def real(tensor: Tensor) -> Tensor:
    """Returns a tensor as NCCL sums it, which has no complex numbers: as pairs of real ones, in the same memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def sendable(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor as NCCL sends it, in the same memory: see `real`; of a dtype that it has not, as
    bytes."""
    plain = real(tensor)
    return plain if plain.dtype in _KNOWN else plain.view(-1).view(torch.uint8)


@dataclass
class _Latest:
    """The collective that a rank has given its device last, in any communicator: one that hangs holds up the others."""

    key: str = ""


@final
class NativeComm(Comm):
    """Runs collectives on the stream of `group`, and sends small host messages through `control`, of the same ranks.

    Sums over more than two ranks are in the backend's order. Whether a rank diverges is one more byte per rank, in the
    same launch as the gather, and is copied to the host without blocking it. `group` is used by nothing else.

    Args:
        group: of a backend for tensors on `device`.
        control: for host tensors and for small messages.
        device: that this rank computes on.
    """

    learns_late = True
    keeps_order = True

    def __init__(self, group: dist.ProcessGroup, control: GlooComm, device: torch.device = HOST) -> None:
        super().__init__(control.rank, control.size, sanitize=control.sanitize)
        self._held = Held(group)
        self._control = control
        self._device = device
        self.is_asynchronous = not is_host(device)
        self.bytes_sent, self.calls = control.bytes_sent, control.calls  # both count into the same
        self.clock = Clock(device) if self.is_asynchronous else control.clock
        self._latest = _Latest()  # shared with communicators that are made of this one

    @property
    def has_ended(self) -> bool:
        return self._held.has_ended

    @property
    def host(self) -> Comm:
        return self._control

    def for_model(self, number: int) -> Self:
        again = super().for_model(number)
        again._control = self._control.for_model(number)
        return again

    @property
    def board(self) -> Board:
        return self._control.board

    def report(self, told: str | None) -> None:
        self._control.report(told)

    @property
    def limit(self) -> Limit | None:
        return Limit(self._control.wait_timeout.total_seconds(), self._explain) if self.is_asynchronous else None

    def _explain(self) -> RankTimeoutError:
        return self._control.explain(self._latest.key, None, "the device did not get there")

    def abandon(self) -> None:
        """Has the device give up the collectives that it still waits in. The group is spoilt: the next one is new."""
        if self.is_asynchronous:
            self._held.thing.abort()
            forget(self._held.thing)

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        control = self._control.split(groups)
        device = self._device if self.is_asynchronous else None
        backend, ranks = dist.get_backend(self._held.thing), group_of(self.rank, groups)
        group = own_group(backend, ranks, timeout=control.timeout, device=device)
        part = NativeComm(group, control, self._device)
        part._latest = self._latest
        return part

    def _all_gather(self, full: Tensor, shard: Tensor, key: str, diverges: bool | None) -> Gather:
        full, shard = sendable(full), sendable(shard)
        if diverges is None:
            with self._starting(key):
                work = _all_gather_single(full.view(-1), shard.view(-1), group=self._held.thing, async_op=True)
            return Gather(lambda: self._wait([work], key))
        mine = torch.full((1,), diverges, dtype=torch.uint8, device=full.device)
        flags = mine.new_empty(self.size)
        works = self._all_gather_both(full, shard, flags, mine, key)
        heard: list[Late] = []

        def finish() -> None:
            self._wait(works, key)
            heard.append(Late(flags))

        def has_divergence() -> bool:
            return bool(heard[0].read(self.limit).any())

        return Gather(finish, has_divergence)

    def _all_gather_both(self, full: Tensor, shard: Tensor, flags: Tensor, mine: Tensor, key: str) -> list[Any]:
        """Starts two all-gathers, on a device in one launch."""
        pairs = ((full.view(-1), shard.view(-1)), (flags, mine))
        with self._starting(key):
            if not self.is_asynchronous:
                return [_all_gather_single(into, own, group=self._held.thing, async_op=True) for into, own in pairs]
            with in_one_launch(self._held.thing) as launch:
                for into, own in pairs:
                    _all_gather_single(into, own, group=self._held.thing)
        return [launch]

    def _reduce_scatter(self, shard: Tensor, full: Tensor, scratch: Tensor, key: str, divisor: int) -> Work:
        into, sent = real(shard).view(-1), real(full).view(-1)
        with self._starting(key):
            work = _reduce_scatter_single(into, sent, group=self._held.thing, async_op=True)

        def finish() -> None:
            self._wait([work], key)
            if divisor != 1:
                into.div_(divisor)

        return Work(finish)

    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], key: str) -> None:
        pairs = [(dist.irecv, received), (dist.isend, sent)]
        messages = [
            dist.P2POp(kind, sendable(tensor), group=self._held.thing, group_peer=peer)
            for kind, tensors in pairs
            for peer, tensor in enumerate(tensors)
            if peer != self.rank and tensor.numel()
        ]
        with self._starting(key):
            works = dist.batch_isend_irecv(messages) if messages else []
        self._wait(works, key)

    def _broadcast(self, tensor: Tensor, source: int, key: str) -> None:
        if is_host(tensor.device) and self.is_asynchronous:
            self._broadcast_by_device(tensor, source, key)
            return
        with self._starting(key):
            work = dist.broadcast(sendable(tensor), group=self._held.thing, group_src=source, async_op=True)
        self._wait([work], key)

    def _broadcast_by_device(self, tensor: Tensor, source: int, key: str) -> None:
        """Copies a host tensor by way of the device, whose links are faster: a model that was built on the host would
        otherwise travel from rank 0 to each rank, one after another."""
        if tensor.nbytes <= SMALL:
            self._control._broadcast(tensor, source, key)
            return
        staged = tensor.to(self._device) if self.rank == source else torch.empty_like(tensor, device=self._device)
        self._broadcast(staged, source, key)
        if self.rank != source:
            tensor.copy_(on_host(staged, self.limit))

    def _all_reduce(self, value: Tensor, combine: Combine, key: str) -> Tensor:
        if is_host(value.device):
            return self._control._all_reduce(value, combine, key)
        total = value.clone()
        with self._starting(key):
            work = dist.all_reduce(real(total), _OPERATIONS[combine], group=self._held.thing, async_op=True)
        self._wait([work], key)
        return total

    def _merge(self, mine: dict[int, Any], key: str) -> dict[int, Any]:
        return self._control._merge(mine, key)

    @contextmanager
    def _starting(self, key: str) -> Iterator[None]:
        """Around the start of a collective, where NCCL tells that an earlier one has failed, as a peer is gone."""
        self._latest.key = key
        try:
            yield
        except dist.DistBackendError as error:
            raise self._control.explain(key, None, str(error).splitlines()[0]) from None

    def _wait(self, works: Sequence[Any], key: str) -> None:
        for work in works:
            if self.is_asynchronous:
                work.wait()  # lets the current stream wait; with a time limit it would block this thread
            else:
                with self._control.explaining(key, None):
                    work.wait(self._control.wait_timeout)


def make_comm(
    device: torch.device,
    wait_timeout: timedelta,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    sanitize: bool = False,
) -> Comm:
    """Returns this process's communicator among all ranks, for tensors on `device`, on process groups of its own.

    Collective: call it on every rank, after `torch.distributed` is initialised; a world of one need not initialise it.

    Args:
        device: that this rank computes on.
        wait_timeout: how long the host waits for another rank.
        backend: of the default process group. Unless it is ``"gloo"``, tensors on a device travel by it.
        timeout: after which a backend itself gives up; None is torch's own.
        sanitize: see `Comm`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return LocalComm(on_device=has_streams(device.type))
    group = own_group("gloo", timeout=timeout)
    links = once_per_world("links", lambda: Links(GlooComm(group, wait_timeout)))
    control = GlooComm(group, wait_timeout, links, timeout=timeout, sanitize=sanitize)
    if is_host(device) or backend in (None, "gloo"):
        return control
    return NativeComm(own_group(backend, timeout=timeout, device=device), control, device)
