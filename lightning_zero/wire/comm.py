"""The protocol of all communication between ranks. Only this room names a collective of torch.

Implementations: one rank (`local.LocalComm`), gloo message by message (`gloo.GlooComm`), torch's own collectives
(`native.NativeComm`: NCCL), ranks as threads of one process (`threads.ThreadComm`), and a count of what would be sent
(`local.CountingComm`).

Shapes: N ranks; a *full* array is ``(N, columns)``, contiguous, with one row per rank; a *shard* is ``(columns,)``.
Every operation has a name, the same on all ranks; where messages are ours it goes into their tags, so that two ranks
that issue different operations wait for each other and say so, instead of silently swapping data.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from lightning_zero.wire.board import Board
from lightning_zero.wire.clock import Clock

T = TypeVar("T")
Reduction = Literal["sum", "max", "min"]

Combine = Callable[[Tensor, Tensor], Tensor]
COMBINE: dict[Reduction, Combine] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class RankTimeoutError(RuntimeError):
    """A rank waited longer than `wait_timeout` for another one, or has lost it. Fatal: data of that operation is lost.

    Args:
        lost: who, and why: "Rank 1 died (connection reset)".
        key: of the operation.
        details: what is known besides.
    """

    def __init__(self, lost: str, key: str, *details: str) -> None:
        super().__init__(lost, key, *details)
        self.lost = lost
        self.place = place_of(key)  # what this rank was in; who knows more says it
        self.moment = ""  # "step 12", from whoever counts
        self.details = [*details, f"Operation: {key!r}"]

    def __str__(self) -> str:
        moment = f" during {self.moment}" if self.moment else ""
        return f"{self.lost}{moment}, in {self.place}. {'. '.join(self.details)}."


# What an operation is for, by its kind and what its name begins with; the first that fits.
_PLACES = {
    ("reduce_scatter", "reduce"): "the reduction of the gradients of {}",
    ("all_gather", "reduce"): "the reduction of the gradients of {}",
    ("all_gather", "gradient"): "the all-gather of the gradients of {}",
    ("all_gather", "read"): "the all-gather of the {}",
    ("all_gather", "gather master"): "the all-gather of the parameters of {}",
    ("all_gather", "gather average"): "the all-gather of the average of {}",
    ("all_gather", "gather for backward"): "the all-gather, for backward, of what a forward saw of {}",
    ("all_gather", "gather"): "the all-gather of the parameters of {}",
    ("all_gather", "publish"): "the all-gather of the stepped parameters of {}",
    ("all_gather", "state"): "the all-gather of the optimizer state of {}",
    ("broadcast", "initial"): "the broadcast of rank 0's {}",
    ("broadcast", "buffers"): "the broadcast of rank 0's buffers",
    ("all_reduce", "norm"): "the sum of the gradient norm",
    ("all_reduce", "overflow"): "the agreement on whether gradients overflowed",
    ("all_reduce", "rendezvous"): "the agreement on what comes next",
    ("all_reduce", "settle"): "the agreement on which parameters have gradients",
    ("all_reduce", "gradients at the end"): "the agreement on which gradients are left after fit",
    ("all_reduce", "fits in host memory"): "the agreement on whether the whole model fits into host memory",
    ("all_reduce", "before"): "a call of {}, by Lightning or by the user",
}


def place_of(key: str) -> str:
    """Where a rank is that issues the operation `key`, by the model's names: "the reduction of the gradients of x"."""
    kind, _, name = key.rpartition(" #")[0].partition(" ")
    for (of_kind, purpose), place in _PLACES.items():
        if of_kind == kind and f"{name} ".startswith(f"{purpose} "):
            return place.format(name[len(purpose) + 1 :].partition("/")[0])
    return f"the {kind.replace('_', '-')} of {name}"


class CollectiveMismatchError(RuntimeError):
    """Ranks issued different collectives at the same point (found by ``sanitize=True``)."""


@dataclass(eq=False)
class Work:
    """An operation under way, and what is left to do with its results, which may be read only after `wait`."""

    _finish: Callable[[], None] | None = None
    clock: Clock | None = field(default=None, kw_only=True)  # of whoever issued it: counts what is waited here

    def wait(self) -> None:
        finish, self._finish = self._finish, None  # it finishes once
        if finish is not None:
            finish() if self.clock is None else self.clock.time(finish)


@dataclass(eq=False)
class Gather(Work):
    """An all-gather under way, with which any rank may have told all others that it diverges."""

    has_divergence: Callable[[], bool] = lambda: False  # after `wait`: whether a rank said so; the same on every rank


class Comm(ABC):
    """Collectives among `size` ranks, counted in bytes sent by this one.

    With `sanitize`, name, shape and dtype of every collective are compared across ranks before it starts.
    """

    scratch_rows = 0  # rows ``(columns,)`` of scratch that `reduce_scatter` needs
    # How `all_gather` tells that a rank diverges. False: once the gather is complete, and its rows are then void.
    # True: on the device, so reading it at once would synchronise with it; the rows are valid.
    learns_late = False
    # Whether an operation on arrays waits for those that this rank has issued before it.
    keeps_order = False

    def __init__(self, rank: int, size: int, *, sanitize: bool = False) -> None:
        self.rank = rank
        self.size = size
        self.sanitize = sanitize
        self.bytes_sent: Counter[str] = Counter()  # kind of operation -> bytes that left this rank
        self.calls: Counter[str] = Counter()  # kind of operation -> how many were issued
        self.clock = Clock()  # what this rank has waited for collectives: communication that no work has hidden
        self._issued: Counter[str] = Counter()  # operation name -> how many were issued

    def all_gather(self, full: Tensor, shard: Tensor, name: str, *, diverges: bool | None = None) -> Gather:
        """Fills row j of `full` ``(N, columns)`` with rank j's `shard` ``(columns,)``, which may be its own row.

        `diverges` tells all ranks whether this one diverges, and needs a shard of at least 8 bytes; None, on every
        rank, sends nothing of the kind.
        """
        key = self._begin("all_gather", name, shard, (self.size - 1) * shard.nbytes)
        gather = self._all_gather(full, shard, key, diverges)
        gather.clock = self.clock
        return gather

    def reduce_scatter(self, shard: Tensor, full: Tensor, scratch: Tensor, name: str) -> Work:
        """Sums over ranks row j of their `full` ``(N, columns)``, which must stay untouched until done, into rank j's
        `shard` ``(columns,)``. `scratch` is ``(scratch_rows, columns)``."""
        key = self._begin("reduce_scatter", name, full, full.nbytes - full[0].nbytes)
        work = self._reduce_scatter(shard, full, scratch, key)
        work.clock = self.clock
        return work

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], name: str) -> None:
        """Fills `received[j]` with what rank j has sent to this one, `sent[this rank]` there: contiguous tensors of any
        size, also none, which both ends know."""
        nbytes = sum(tensor.nbytes for peer, tensor in enumerate(sent) if peer != self.rank)
        key = self._begin("all_to_all", name, None, nbytes)
        received[self.rank].copy_(sent[self.rank])
        self.clock.time(partial(self._all_to_all, received, sent, key))

    def broadcast(self, tensor: Tensor, name: str, source: int = 0) -> None:
        """Copies rank `source`'s contiguous `tensor` to all ranks."""
        sent = (self.size - 1) * tensor.nbytes if self.rank == source else 0
        key = self._begin("broadcast", name, tensor, sent)
        if tensor.numel():
            self.clock.time(partial(self._broadcast, tensor, source, key))

    def all_reduce(self, tensor: Tensor, name: str, reduction: Reduction = "sum") -> Tensor:
        """Returns the reduction of a small host tensor over ranks, with the same bits on every rank, for O(log N)
        messages of each."""
        value = tensor.detach().contiguous()
        key = self._begin("all_reduce", name, value, (self.size - 1).bit_length() * value.nbytes)
        if not value.numel():
            return value.clone()
        return self.clock.time(partial(self._all_reduce, value, COMBINE[reduction], key))

    def all_gather_object(self, value: T, name: str) -> list[T]:
        """Returns every rank's `value`, in rank order; for small plain objects. Costs this rank O(log N) messages."""
        key = self._begin("object", name, None, 0)
        merged = self.clock.time(partial(self._merge, {self.rank: value}, key))
        return [merged[rank] for rank in range(self.size)]

    @property
    def host(self) -> "Comm":
        """These ranks' communicator for tensors in host memory."""
        return self

    @property
    @abstractmethod
    def board(self) -> Board:
        """For agreements among these ranks that are no collectives."""

    def report(self, told: str | None) -> None:  # noqa: B027
        """Leaves word of why this rank will not come any more, for ranks that wait for it; None takes it back. Nobody
        waits where there is nothing to be done."""

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]]) -> "Comm":
        """The communicator of the one among `groups` (of ranks) that holds this rank. Call it on every rank, with the
        same groups; each rank is in exactly one."""

    def _begin(self, kind: str, name: str, tensor: Tensor | None, sent: int) -> str:
        self.bytes_sent[kind] += sent
        self.calls[kind] += 1
        name = f"{kind} {name}"
        if self.sanitize:
            self._compare(name if tensor is None else f"{name} {tuple(tensor.shape)} {tensor.dtype}")
        self._issued[name] += 1
        return f"{name} #{self._issued[name]}"

    def _compare(self, signature: str) -> None:
        self._issued["sanitize"] += 1
        key = f"object sanitize #{self._issued['sanitize']}"
        found = self.clock.time(partial(self._merge, {self.rank: signature}, key))
        if len(set(found.values())) > 1:
            told = "\n".join(f"  rank {rank}: {theirs}" for rank, theirs in sorted(found.items()))
            raise CollectiveMismatchError(f"Ranks issue different collectives:\n{told}")

    @abstractmethod
    def _all_gather(self, full: Tensor, shard: Tensor, key: str, diverges: bool | None) -> Gather: ...

    @abstractmethod
    def _reduce_scatter(self, shard: Tensor, full: Tensor, scratch: Tensor, key: str) -> Work: ...

    @abstractmethod
    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], key: str) -> None: ...

    @abstractmethod
    def _broadcast(self, tensor: Tensor, source: int, key: str) -> None: ...

    @abstractmethod
    def _all_reduce(self, value: Tensor, combine: Combine, key: str) -> Tensor: ...

    @abstractmethod
    def _merge(self, mine: dict[int, Any], key: str) -> dict[int, Any]:
        """The union of all ranks' dictionaries."""


def group_of(rank: int, groups: Sequence[Sequence[int]]) -> Sequence[int]:
    """The one of `groups` that `rank` is in."""
    return next(ranks for ranks in groups if rank in ranks)
