"""`Comm`: the collectives between ranks. Only this layer names a collective of torch.

Implementations: one rank (`local.LocalComm`), gloo message by message (`gloo.GlooComm`), torch's own collectives
(`native.NativeComm`: NCCL), a rank that only counts the bytes it would send (`local.CountingComm`), and for tests ranks
as threads of one process (`tests/thread_world.py`).

Shapes: N ranks; a *full* array is ``(N, columns)``, contiguous, with one row per rank; a *shard* is ``(columns,)``.
Every operation has a name, the same on all ranks. `GlooComm` puts it into the tags of messages: two ranks that issue
different operations then time out and say so, instead of silently swapping data.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor

from lightning_zero.device import HOST, Limit
from lightning_zero.wire.board import Board
from lightning_zero.wire.clock import Clock

T = TypeVar("T")
Reduction = Literal["sum", "max", "min"]

Combine = Callable[[Tensor, Tensor], Tensor]
COMBINE: dict[Reduction, Combine] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class RankTimeoutError(RuntimeError):
    """A rank waited longer than `wait_timeout` for another one, or lost it. Fatal: the operation's data is lost.

    Args:
        lost: which rank is lost, and why: "Rank 1 died (connection reset)".
        key: of the operation, from `Comm._issue`.
        details: sentences with what else is known, without their full stops.
    """

    def __init__(self, lost: str, key: str, *details: str) -> None:
        super().__init__(lost, key, *details)
        self.lost = lost
        self.place = place_of(key)  # where this rank was; a catcher that knows more replaces it
        self.moment = ""  # "step 12"; set by a catcher that counts steps
        self.details = [*details, f"Operation: {key!r}"]

    def __str__(self) -> str:
        moment = f" during {self.moment}" if self.moment else ""
        return f"{self.lost}{moment}, in {self.place}. {'. '.join(self.details)}."


# The purpose of an operation, by its kind and the beginning of its name. The first entry that fits counts.
_PLACES = {
    ("reduce_scatter", "reduce"): "the reduction of the gradients of {}",
    ("mark", "reduce"): "the reduction of the gradients of {}",
    ("mark", "replicas"): "the agreement of replicas on whether one has begun to reduce",
    ("mark", "settle"): "the agreement of replicas on which parameters have gradients",
    ("all_gather", "reduce"): "the reduction of the gradients of {}",
    ("all_gather", "gradient"): "the all-gather of the gradients of {}",
    ("all_gather", "read"): "the all-gather of the {}",
    ("all_gather", "gather master"): "the all-gather of the parameters of {}",
    ("all_gather", "gather average"): "the all-gather of the average of {}",
    ("all_gather", "gather"): "the all-gather of the parameters of {}",
    ("all_gather", "publish"): "the all-gather of the stepped parameters of {}",
    ("all_gather", "state"): "the all-gather of the optimizer state of {}",
    ("broadcast", "state"): "the broadcast of the optimizer state of {}",
    ("all_gather", "load"): "the reading of {} from a checkpoint",
    ("broadcast", "load"): "the reading of {} from a checkpoint",
    ("all_gather", "early parameter"): "the sharding of parameter {} of configure_model",
    ("all_to_all", "early parameter"): "the sharding of parameter {} of configure_model",
    ("broadcast", "early parameter"): "the sharding of parameter {} of configure_model",
    ("all_gather", "activation checkpoint"): "the all-gather of the activation checkpoint of {}",
    ("all_gather", "tensor-parallel parts"): "the all-gather of the parts that tensor-parallel ranks have",
    ("all_to_all", "whole tensors from"): "the exchange of the gradients of whole tensors from {}",
    ("broadcast", "initial"): "the broadcast of rank 0's {}",
    ("broadcast", "buffers"): "the broadcast of rank 0's buffers",
    ("broadcast", "reduction order"): "the broadcast of the order of rank 0's gradients",
    ("all_reduce", "norm"): "the sum of the gradient norm",
    ("all_reduce", "overflow"): "the agreement on whether gradients overflowed",
    ("all_reduce", "rendezvous"): "the agreement on what comes next",
    ("all_reduce", "which"): "the agreement on which parameters train",
    ("all_reduce", "settle"): "the agreement on which parameters have gradients",
    ("all_reduce", "edit"): "the agreement on an edit of weights",
    ("all_reduce", "edits of gradients"): "the agreement on an edit of gradients",
    ("all_reduce", "gradients at the end"): "the agreement on which gradients are left after fit",
    ("all_reduce", "fits in host memory"): "the agreement on whether the whole model fits into host memory",
    ("all_reduce", "before"): "a call of {}, by Lightning or by the user",
    ("all_gather", "calibration"): "the measurement of collectives",
    ("reduce_scatter", "calibration"): "the measurement of collectives",
}


_OF_MODEL = ", of model "  # before its number, in keys


def place_of(key: str) -> str:
    """Describes the operation `key` by the model's names: "the reduction of the gradients of x"."""
    kind, _, name = key.removeprefix("length of ").rpartition(" #")[0].partition(" ")
    name, of_model, model = name.partition(_OF_MODEL)
    if kind == "object":
        return f"the exchange about {name}"
    for (of_kind, purpose), place in _PLACES.items():
        if of_kind == kind and f"{name} ".startswith(f"{purpose} "):
            return place.format(name[len(purpose) + 1 :].partition("/")[0]) + of_model + model
    return f"the {kind.replace('_', '-')} of {name}{of_model}{model}"


class CollectiveMismatchError(RuntimeError):
    """Ranks issued different collectives at the same time (found by ``sanitize=True``)."""


@dataclass(eq=False)
class Work:
    """An operation under way. Its results may be read after `wait`, which finishes it."""

    _finish: Callable[[], None] | None = None
    clock: Clock | None = field(default=None, kw_only=True)  # measures the time spent in `wait`

    def wait(self) -> None:
        finish, self._finish = self._finish, None  # a second call does nothing
        if finish is not None:
            finish() if self.clock is None else self.clock.time(finish)


@dataclass(eq=False)
class Gather(Work):
    """An all-gather under way, in which any rank may have told all others that it diverges."""

    has_divergence: Callable[[], bool] = lambda: False  # after `wait`: whether any rank diverges; equal on all ranks


@dataclass(eq=False)
class Told(Work):
    """A number that each rank tells all others, under way."""

    rows: Tensor = field(kw_only=True)  # ``(N, 1)``

    @property
    def numbers(self) -> list[int]:
        """Those of all ranks, in rank order, after `wait`."""
        return self.rows.flatten().tolist()


class Comm(ABC):
    """Collectives among `size` ranks, and counts of the bytes that this rank sends.

    With `sanitize`, ranks compare name, shape and dtype of every collective before it starts.
    """

    scratch_rows = 0  # rows ``(columns,)`` of scratch that `reduce_scatter` needs
    # How `Gather.has_divergence` learns that a rank diverges. False: from the gathered rows, which are then void.
    # True: from a flag on the device; the rows are valid, but reading the flag at once would synchronise.
    learns_late = False
    # Whether a collective on arrays waits for those that this rank has issued before it.
    keeps_order = False
    is_asynchronous = False  # `Work.wait` lets the current stream of a device wait, and not the host

    def __init__(self, rank: int, size: int, *, sanitize: bool = False) -> None:
        self.rank = rank
        self.size = size
        self.sanitize = sanitize
        self.bytes_sent: Counter[str] = Counter()  # kind of operation -> bytes that left this rank
        self.calls: Counter[str] = Counter()  # kind of operation -> how many were issued
        self.clock = Clock()  # seconds that this rank has waited: communication that computation did not hide
        self._issued: Counter[str] = Counter()  # operation name -> how many were issued
        self._label = ""  # in the names of all operations

    @property
    def has_ended(self) -> bool:
        """Whether the world of these ranks has been destroyed."""
        return False

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns an uninitialised flat tensor ``(numel,)`` for full arrays of this rank. Where ranks share memory, it
        lies there: others then read what they are sent of it, in an all-gather its own row, without a copy more."""
        return torch.empty(numel, dtype=dtype, device=device)

    def all_gather(self, full: Tensor, shard: Tensor, name: str, *, diverges: bool | None = None) -> Gather:
        """Starts to fill row j of `full` ``(N, columns)`` with rank j's `shard` ``(columns,)``, which may be that row.

        `diverges` tells all ranks whether this one diverges, and needs a shard of at least 8 bytes; None, on all ranks,
        sends no such mark.
        """
        key = self._issue("all_gather", name, shard, (self.size - 1) * shard.nbytes)
        gather = self._all_gather(full, shard, key, diverges)
        gather.clock = self.clock
        return gather

    def tell(self, number: int, name: str) -> Told:
        """Starts to tell all ranks a number, such as a mark that this one diverges where no gather can tell it: 8 bytes
        to each."""
        rows = torch.full((self.size, 1), number, dtype=torch.int64, device=HOST)
        key = self._issue("mark", name, None, (self.size - 1) * rows[0].nbytes)
        work = self._all_gather(rows, rows[self.rank], key, None)
        return Told(work.wait, rows=rows, clock=self.clock)

    def reduce_scatter(self, shard: Tensor, full: Tensor, scratch: Tensor, name: str, divisor: int = 1) -> Work:
        """Starts to sum row j of all ranks' `full` ``(N, columns)`` into rank j's `shard` ``(columns,)``, and divides
        the sum by `divisor`. `full` must not change until `wait` returns, but for its row of this rank, which `shard`
        may be. `scratch` is ``(scratch_rows, columns)``."""
        key = self._issue("reduce_scatter", name, full, full.nbytes - full[0].nbytes)
        work = self._reduce_scatter(shard, full, scratch, key, divisor)
        work.clock = self.clock
        return work

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], name: str) -> None:
        """Fills `received[j]` with the tensor that rank j sends to this one, its `sent[this rank]`. Tensors are
        contiguous; sender and receiver know their size, which may be 0."""
        nbytes = sum(tensor.nbytes for peer, tensor in enumerate(sent) if peer != self.rank)
        key = self._issue("all_to_all", name, None, nbytes)
        received[self.rank].copy_(sent[self.rank])
        self.clock.time(partial(self._all_to_all, received, sent, key))

    def broadcast(self, tensor: Tensor, name: str, source: int = 0) -> None:
        """Copies rank `source`'s contiguous `tensor` to all ranks."""
        sent = (self.size - 1) * tensor.nbytes if self.rank == source else 0
        key = self._issue("broadcast", name, tensor, sent)
        if tensor.numel():
            self.clock.time(partial(self._broadcast, tensor, source, key))

    def all_reduce(self, tensor: Tensor, name: str, reduction: Reduction = "sum") -> Tensor:
        """Reduces a small tensor over ranks, to the same bits on every rank. On the host that takes O(log N) messages
        of each rank; on a device with collectives of its own the host does not wait."""
        value = tensor.detach().contiguous()
        key = self._issue("all_reduce", name, value, (self.size - 1).bit_length() * value.nbytes)
        if not value.numel():
            return value.clone()
        return self.clock.time(partial(self._all_reduce, value, COMBINE[reduction], key))

    def all_reduce_bytes(self, told: bytes, name: str) -> bytes:
        """Returns, byte by byte, the largest that any rank has told. All tell as many, at least one."""
        said = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        return bytes(self.all_reduce(said, name, "max").tolist())  # not `numpy`: torch.func's tensors have no memory

    def all_gather_object(self, value: T, name: str) -> list[T]:
        """Returns every rank's `value`, a small plain object, in rank order, for O(log N) messages of each rank."""
        key = self._issue("object", name, None, 0)
        merged = self.clock.time(partial(self._merge, {self.rank: value}, key))
        return [merged[rank] for rank in range(self.size)]

    @property
    def host(self) -> "Comm":
        """The communicator of the same ranks for tensors in host memory."""
        return self

    @property
    def limit(self) -> Limit | None:
        """The limit of waits of the host for a device that may be in a collective; None without such a device."""
        return None

    @property
    @abstractmethod
    def board(self) -> Board:
        """The board of these ranks, for agreements without collectives."""

    def report(self, told: str | None) -> None:  # noqa: B027
        """Tells ranks that wait for this one why it will not come; None takes that back. Does nothing where ranks are
        not processes: there they cannot wait for one that is lost."""

    def abandon(self) -> None:  # noqa: B027
        """Gives up what a device still waits for, after a rank was lost: nothing could be freed or read behind it."""

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]]) -> "Comm":
        """Returns the communicator of the group of ranks that holds this one. Collective: call it on every rank, with
        the same `groups`, each rank in exactly one."""

    def for_model(self, number: int) -> Self:
        """Returns the communicator of the same ranks for another model. Where ranks use several models in different
        orders, none takes a message about one for a message about another: it waits in vain, and says for what."""
        again = copy(self)
        again._label = f"{_OF_MODEL}{number}"
        return again

    def _issue(self, kind: str, name: str, tensor: Tensor | None, sent: int) -> str:
        """Counts an operation, and returns its key: kind, name, and how often the two have been issued."""
        self.bytes_sent[kind] += sent
        self.calls[kind] += 1
        name = f"{kind} {name}{self._label}"
        if self.sanitize:
            self._compare_signatures(name if tensor is None else f"{name} {tuple(tensor.shape)} {tensor.dtype}")
        self._issued[name] += 1
        return f"{name} #{self._issued[name]}"

    def _compare_signatures(self, signature: str) -> None:
        self._issued["sanitize"] += 1
        key = f"object sanitize #{self._issued['sanitize']}"
        found = self.clock.time(partial(self._merge, {self.rank: signature}, key))
        if len(set(found.values())) > 1:
            told = "\n".join(f"  rank {rank}: {theirs}" for rank, theirs in sorted(found.items()))
            raise CollectiveMismatchError(f"Ranks issue different collectives:\n{told}")

    @abstractmethod
    def _all_gather(self, full: Tensor, shard: Tensor, key: str, diverges: bool | None) -> Gather: ...

    @abstractmethod
    def _reduce_scatter(self, shard: Tensor, full: Tensor, scratch: Tensor, key: str, divisor: int) -> Work: ...

    @abstractmethod
    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], key: str) -> None: ...

    @abstractmethod
    def _broadcast(self, tensor: Tensor, source: int, key: str) -> None: ...

    @abstractmethod
    def _all_reduce(self, value: Tensor, combine: Combine, key: str) -> Tensor: ...

    @abstractmethod
    def _merge(self, mine: dict[int, Any], key: str) -> dict[int, Any]:
        """Returns the union of all ranks' dictionaries."""


def copy_unless_same(target: Tensor, source: Tensor) -> None:
    """Copies `source` into `target`, unless they are the same memory."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


@contextmanager
def failing_together(comm: Comm, doing: str) -> Iterator[None]:
    """Raises RuntimeError on every rank when one rank fails inside, where all are `doing` something. Nothing inside may
    wait for other ranks, since one that has failed does not come. Collective."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    for rank, reason in enumerate(comm.all_gather_object(None if failed is None else str(failed), doing)):
        if reason is not None:
            raise RuntimeError(f"rank {rank}, {doing}: {reason}") from failed


def in_tree(
    value: T, combine: Callable[[T, T], T], swap: Callable[[T | None, int, bool], Any], rank: int, size: int
) -> T:
    """Combines the ranks' values by recursive doubling: in round k, pairs at a distance of 2^k swap and combine, the
    lower rank's value first, so that all end with the same bits. Ranks beyond the largest power of two hand in their
    values before, and receive the result after.

        rank 0  1  2  3 | 4         4 -> 0
             0--1  2--3             distance 1
             0-----2, 1-----3       distance 2
             0                      0 -> 4

    `swap(value, peer, receives)` sends a value unless it is None, and returns the peer's if it `receives`.
    """
    core = 1 << (size.bit_length() - 1)
    if rank >= core:
        swap(value, rank - core, False)
        return swap(None, rank - core, True)
    outside = rank + core if rank + core < size else None
    if outside is not None:
        value = combine(value, swap(None, outside, True))
    for round_ in range(core.bit_length() - 1):
        peer = rank ^ (1 << round_)
        theirs = swap(value, peer, True)
        value = combine(value, theirs) if rank < peer else combine(theirs, value)
    if outside is not None:
        swap(value, outside, False)
    return value
