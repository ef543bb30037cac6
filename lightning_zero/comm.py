"""Every collective of the package: the only file that names one.

`Comm` is the protocol; its implementations are a world of one, gloo, NCCL, ranks as threads of one process (`threads`),
and a rehearsal that only counts. Operations carry a name. It goes into the tag of every message, so that two ranks that
issue different operations wait for each other, and say so, instead of silently swapping data.

Shapes: N ranks; a *full* array is ``(N, columns)`` with one row per rank, a *shard* is ``(columns,)``.
"""

import itertools
import pickle
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.board import Board

T = TypeVar("T")
Reduction = Literal["sum", "max", "min"]

_REDUCE: dict[Reduction, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(0, dtype=rows.dtype),
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
}

# torch 2.13 renamed the two single-tensor collectives; both names are tried, 2.11 has only the older.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_MADE = itertools.count()  # communicators of this process; all ranks make the same ones, in the same order

_GRACE = timedelta(seconds=3)  # after a timed-out wait: how long to listen for what the other ranks report


class RankTimeoutError(RuntimeError):
    """A rank waited longer than `wait_timeout` for another one. Fatal: data of that operation is lost."""


class CollectiveMismatchError(RuntimeError):
    """Ranks issued different collectives at the same point (found by ``sanitize=True``)."""


@dataclass
class Work:
    """An operation under way. `wait` finishes it, once; its results may be read only after."""

    finish: Callable[[], None] | None = None

    def wait(self) -> None:
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()


class Comm(ABC):
    """Collectives among `size` ranks, counted in bytes sent by this one.

    Args:
        rank: of this process, in ``range(size)``.
        size: number of ranks.
        sanitize: compare the name, shape and dtype of every collective across ranks before it starts.
    """

    def __init__(self, rank: int, size: int, *, sanitize: bool = False) -> None:
        self.rank = rank
        self.size = size
        self.sanitize = sanitize
        self.bytes_sent: Counter[str] = Counter()  # kind of operation -> bytes that left this rank
        self.calls: Counter[str] = Counter()  # kind of operation -> how many were issued
        self._issued: Counter[str] = Counter()  # operation name -> how many were issued
        self.before_next: Callable[[], None] | None = None  # what must end before any collective but a reduce_scatter

    def all_gather(self, full: Tensor, shard: Tensor, name: str) -> Work:
        """Fills row j of `full` ``(N, columns)`` with rank j's `shard` ``(columns,)``, which may be its own row."""
        key = self._begin("all_gather", name, shard, (self.size - 1) * shard.nbytes)
        return self._all_gather(full, shard, key)

    def reduce_scatter(self, shard: Tensor, full: Tensor, incoming: Tensor, name: str) -> Work:
        """Sums over ranks, in rank order, their row for this rank into `shard` ``(columns,)``.

        Args:
            shard: receives the sum, in its own dtype.
            full: ``(N, columns)``, row j is this rank's contribution to rank j; must stay untouched until done.
            incoming: scratch ``(N - 1, columns)`` of the dtype of `full`.
            name: the operation, the same on every rank.
        """
        key = self._begin("reduce_scatter", name, full, full.nbytes - full[0].nbytes)
        return self._reduce_scatter(shard, full, incoming, key)

    def broadcast(self, tensor: Tensor, name: str, source: int = 0) -> None:
        """Copies rank `source`'s contiguous `tensor` to all ranks."""
        sent = (self.size - 1) * tensor.nbytes if self.rank == source else 0
        self._broadcast(tensor, source, self._begin("broadcast", name, tensor, sent))

    def all_reduce(self, tensor: Tensor, name: str, reduction: Reduction = "sum") -> Tensor:
        """Returns the reduction of a small host tensor over ranks, in rank order. Same bits on every rank."""
        flat = tensor.detach().reshape(-1).contiguous()
        rows = flat.new_empty((self.size, flat.numel()))
        key = self._begin("all_reduce", name, flat, (self.size - 1) * flat.nbytes)
        self._all_gather_host(rows, flat, key).wait()
        return _REDUCE[reduction](rows).reshape(tensor.shape) if flat.numel() else tensor.clone()

    def all_gather_object(self, value: T, name: str) -> list[T]:
        """Returns every rank's `value`, in rank order; for small plain objects."""
        message = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        longest = int(self.all_reduce(torch.tensor(message.numel()), f"{name}/length", "max"))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: message.numel()] = message
        rows = padded.new_empty((self.size, longest))
        key = self._begin("object", name, padded, (self.size - 1) * longest, compare=False)
        self._all_gather_host(rows, padded, key).wait()
        return [pickle.loads(row.numpy().tobytes()) for row in rows]

    def all_gather_host(self, full: Tensor, shard: Tensor, name: str) -> Work:
        """`all_gather` of small host tensors, whatever device the other collectives run on."""
        return self._all_gather_host(full, shard, self._begin("host", name, shard, (self.size - 1) * shard.nbytes))

    @property
    @abstractmethod
    def board(self) -> Board:
        """For agreements among these ranks that are no collectives."""

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]]) -> "Comm":
        """The communicator of the one among `groups` (of ranks) that holds this rank. Call it on every rank, with the
        same groups; each rank is in exactly one."""

    def _begin(self, kind: str, name: str, tensor: Tensor, sent: int, compare: bool = True) -> str:
        if self.before_next is not None and kind != "reduce_scatter":
            self.before_next()
        self.bytes_sent[kind] += sent
        self.calls[kind] += 1
        name = f"{kind} {name}"
        if self.sanitize and compare and not name.startswith("all_reduce sanitize"):
            self._compare(f"{name} {tuple(tensor.shape)} {tensor.dtype}")
        self._issued[name] += 1
        return f"{name} #{self._issued[name]}"

    def _compare(self, signature: str) -> None:
        found = self.all_gather_object(signature, "sanitize")
        if len(set(found)) > 1:
            told = "\n".join(f"  rank {rank}: {theirs}" for rank, theirs in enumerate(found))
            raise CollectiveMismatchError(f"Ranks issue different collectives:\n{told}")

    @abstractmethod
    def _all_gather(self, full: Tensor, shard: Tensor, key: str) -> Work: ...

    @abstractmethod
    def _reduce_scatter(self, shard: Tensor, full: Tensor, incoming: Tensor, key: str) -> Work: ...

    @abstractmethod
    def _broadcast(self, tensor: Tensor, source: int, key: str) -> None: ...

    @abstractmethod
    def _all_gather_host(self, full: Tensor, shard: Tensor, key: str) -> Work: ...


@final
class LocalComm(Comm):
    """A world of one: the shard is the full array, and nothing travels."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)
        self._board = Board(dist.HashStore(), 0, 1, timedelta.max)

    @property
    def board(self) -> Board:
        return self._board

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        return self

    def _all_gather(self, full: Tensor, shard: Tensor, key: str) -> Work:
        if full.data_ptr() != shard.data_ptr():
            full[0].copy_(shard)
        return Work()

    def _reduce_scatter(self, shard: Tensor, full: Tensor, incoming: Tensor, key: str) -> Work:
        shard.copy_(full[0])
        return Work()

    def _broadcast(self, tensor: Tensor, source: int, key: str) -> None:
        pass

    def _all_gather_host(self, full: Tensor, shard: Tensor, key: str) -> Work:
        return self._all_gather(full, shard, key)


@final
class CountingComm(Comm):
    """Rank `rank` of an imagined world: counts what would be sent, moves nothing. For rehearsals."""

    @property
    def board(self) -> Board:
        raise NotImplementedError("A rehearsal saves nothing.")

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        mine = group_of(self.rank, groups)
        return CountingComm(mine.index(self.rank), len(mine))

    def _all_gather(self, full: Tensor, shard: Tensor, key: str) -> Work:
        return Work()

    def _reduce_scatter(self, shard: Tensor, full: Tensor, incoming: Tensor, key: str) -> Work:
        return Work()

    def _broadcast(self, tensor: Tensor, source: int, key: str) -> None:
        pass

    def _all_gather_host(self, full: Tensor, shard: Tensor, key: str) -> Work:
        full.copy_(shard.expand_as(full))  # every imagined rank agrees with this one
        return Work()


@final
class GlooComm(Comm):
    """Host memory, point to point, straight into place.

    gloo's own reduce-scatter is an all-reduce inside (twice the bytes), and its all-gather is slower than sending
    to each peer. Tensors of another device are staged through host memory, because gloo sends only that.

    Args:
        group: a process group of its own, so that tags cannot meet anybody else's.
        wait_timeout: how long to wait for a peer before saying who is missing.
        sanitize: see `Comm`.
    """

    def __init__(self, group: dist.ProcessGroup, wait_timeout: timedelta, *, sanitize: bool = False) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), sanitize=sanitize)
        self._group = group
        self._wait_timeout = wait_timeout
        self._number = next(_MADE)
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]

    @cached_property
    def board(self) -> Board:
        return Board(self._store(), self.rank, self.size, self._wait_timeout)

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        return GlooComm(_own_subgroup("gloo", self.rank, groups), self._wait_timeout, sanitize=self.sanitize)

    def _all_gather(self, full: Tensor, shard: Tensor, key: str) -> Work:
        if full.device.type != "cpu":
            return self._staged_all_gather(full, shard, key)
        if full[self.rank].data_ptr() != shard.data_ptr():
            full[self.rank].copy_(shard)
        pending = [(peer, self._receive(full[peer], peer, key)) for peer in self._peers]
        pending += [(peer, self._send(shard, peer, key)) for peer in self._peers]
        return Work(lambda: self._wait(pending, key))

    def _reduce_scatter(self, shard: Tensor, full: Tensor, incoming: Tensor, key: str) -> Work:
        rows = full if full.device.type == "cpu" else full.cpu()
        landing = incoming if full.device.type == "cpu" else torch.empty_like(rows[1:])
        slots = dict(zip(self._peers, landing, strict=True)) | {self.rank: rows[self.rank]}
        pending = [(peer, self._receive(slots[peer], peer, key)) for peer in self._peers]
        pending += [(peer, self._send(rows[peer], peer, key)) for peer in self._peers]

        def finish() -> None:
            self._wait(pending, key)
            shard.copy_(slots[0])
            for rank in range(1, self.size):  # in rank order: the sum does not depend on who came first
                shard.add_(slots[rank].to(shard.device))

        return Work(finish)

    def _staged_all_gather(self, full: Tensor, shard: Tensor, key: str) -> Work:
        host = torch.empty(full.shape, dtype=full.dtype, pin_memory=full.is_cuda)
        work = self._all_gather(host, shard.cpu(), key)

        def finish() -> None:
            work.wait()
            full.copy_(host)

        return Work(finish)

    def _broadcast(self, tensor: Tensor, source: int, key: str) -> None:
        host = tensor.cpu()  # the tensor itself when it is on the host
        if self.rank == source:
            pending = [(peer, self._send(host, peer, key)) for peer in self._peers]
        else:
            pending = [(source, self._receive(host, source, key))]
        self._wait(pending, key)
        if host is not tensor and self.rank != source:
            tensor.copy_(host)

    def _all_gather_host(self, full: Tensor, shard: Tensor, key: str) -> Work:
        return self._all_gather(full, shard, key) if full.numel() else Work()

    def _send(self, tensor: Tensor, peer: int, key: str) -> dist.Work:
        return self._begin_with(peer, key, self._group.send, tensor)

    def _receive(self, tensor: Tensor, peer: int, key: str) -> dist.Work:
        return self._begin_with(peer, key, self._group.recv, tensor)

    def _begin_with(self, peer: int, key: str, begin: Callable[..., dist.Work], tensor: Tensor) -> dist.Work:
        try:
            return begin([tensor], peer, _tag(key))
        except RuntimeError as error:  # the connection is closed, since an earlier wait timed out
            raise self._lost(peer, key, error) from error

    def _wait(self, pending: list[tuple[int, dist.Work]], key: str) -> None:
        for peer, work in pending:
            try:
                work.wait(self._wait_timeout)
            except RuntimeError as error:
                raise self._lost(peer, key, error) from error

    def _store(self) -> dist.Store:
        # By number: what an earlier one left there (the verdict on its first save) must not be taken for this one's.
        prefix = f"lightning_zero/{self._group.group_name}/{self._number}"
        return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())

    def _lost(self, peer: int, key: str, error: RuntimeError) -> RankTimeoutError:
        """Tells the others, through the store, where this rank waits, and listens for where they do."""
        told = [f"rank {self.rank} was in {key!r}, waiting for rank {peer}"]
        try:
            store = self._store()
            store.set(f"lost/{self.rank}", told[0])
            for rank in self._peers:
                told.append(_hear(store, rank))
        except Exception as unreachable:  # rank 0, which holds the store, may be the one that died
            told.append(f"the store on rank 0 does not answer ({type(unreachable).__name__})")
        waited = self._wait_timeout.total_seconds()
        return RankTimeoutError(
            f"Lost a rank (wait_timeout={waited:g} s): " + "; ".join(told) + f". Cause: {str(error).splitlines()[0]}"
        )


def _hear(store: Any, rank: int) -> str:
    try:
        store.wait([f"lost/{rank}"], _GRACE)
    except RuntimeError:
        return f"rank {rank} reported nothing: it has died, or is busy outside any collective"
    return store.get(f"lost/{rank}").decode()


def _tag(key: str) -> int:
    return zlib.crc32(key.encode()) & 0x7FFFFFFF


@final
class NcclComm(Comm):
    """Device memory, NCCL's own collectives on their own stream; small host messages go over `control`."""

    def __init__(self, group: dist.ProcessGroup, control: Comm) -> None:
        super().__init__(control.rank, control.size, sanitize=control.sanitize)
        self._group = group
        self._control = control

    @property
    def board(self) -> Board:
        return self._control.board

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        return NcclComm(_own_subgroup("nccl", self.rank, groups), self._control.split(groups))

    def _all_gather(self, full: Tensor, shard: Tensor, key: str) -> Work:
        if full.is_contiguous():
            return Work(_all_gather_single(full.view(-1), shard, group=self._group, async_op=True).wait)
        return Work(dist.all_gather(list(full.unbind(0)), shard, group=self._group, async_op=True).wait)

    def _reduce_scatter(self, shard: Tensor, full: Tensor, incoming: Tensor, key: str) -> Work:
        total = shard if shard.dtype == full.dtype else torch.empty_like(full[0])
        work = _reduce_scatter_single(total, full.view(-1), group=self._group, async_op=True)

        def finish() -> None:
            work.wait()
            if total is not shard:
                shard.copy_(total)

        return Work(finish)

    def _broadcast(self, tensor: Tensor, source: int, key: str) -> None:
        if tensor.is_cuda:
            dist.broadcast(tensor, group=self._group, group_src=source)
        else:
            self._control._broadcast(tensor, source, key)

    def _all_gather_host(self, full: Tensor, shard: Tensor, key: str) -> Work:
        if full.device.type == "cpu":
            return self._control._all_gather_host(full, shard, key)
        host = full.cpu()
        work = self._control._all_gather_host(host, shard.cpu(), key)

        def finish() -> None:
            work.wait()
            full.copy_(host)

        return Work(finish)


def make_comm(
    device: torch.device, wait_timeout: timedelta, *, backend: str | None = None, sanitize: bool = False
) -> Comm:
    """The communicator of this process among all ranks, on process groups of its own.

    Call it on every rank, after `torch.distributed` is initialised (or not at all, for a world of one).

    Args:
        device: where the tensors live.
        wait_timeout: how long any rank waits for another before it says who is missing.
        backend: of the default process group; ``"nccl"`` gives NCCL, everything else gloo.
        sanitize: compare every collective's signature across ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return LocalComm()
    control = GlooComm(_own_group("gloo"), wait_timeout, sanitize=sanitize)
    if device.type == "cuda" and backend == "nccl":
        return NcclComm(_own_group("nccl", device_id=device), control)
    return control


_OWN_GROUPS: dict[Any, tuple[Any, dist.ProcessGroup]] = {}  # backend and ranks -> the world it was made in, the group


def _own_group(backend: str, ranks: Sequence[int] | None = None, **kwargs: Any) -> dist.ProcessGroup:
    """A process group of our own, made once per process and world: each holds sockets and threads while it lives."""
    key = (backend, None if ranks is None else tuple(ranks))
    world, group = _OWN_GROUPS.get(key, (None, None))
    if group is None or world is not dist.group.WORLD:
        group = dist.new_group(ranks, backend=backend, **kwargs)
        _OWN_GROUPS[key] = (dist.group.WORLD, group)
    return group


def _own_subgroup(backend: str, rank: int, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Torch wants every rank to make every group, also those that it is not in."""
    made = [(ranks, _own_group(backend, ranks)) for ranks in groups]
    return next(group for ranks, group in made if rank in ranks)


def group_of(rank: int, groups: Sequence[Sequence[int]]) -> Sequence[int]:
    """The one of `groups` that `rank` is in."""
    return next(ranks for ranks in groups if rank in ranks)
