"""Ranks as threads of one process: for large test matrices."""

import functools
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.wire.board import Board
from lightning_zero.wire.comm import Combine, Comm, Gather, RankTimeoutError, Work
from lightning_zero.wire.worlds import group_of
from ranks import PATIENCE

T = TypeVar("T")


@dataclass
class _Meeting:
    """One operation under way: what each rank has posted for it."""

    key: str
    payloads: dict[int, Any] = field(default_factory=dict)  # by rank
    is_over: threading.Event = field(default_factory=threading.Event)  # set when all have posted, or one has failed


@dataclass
class ThreadWorld:
    """A world of ranks that are threads of this process: `ThreadWorld(4).run(function)`."""

    size: int  # number of ranks
    wait_timeout: float = PATIENCE  # s, that a rank waits for the others
    learns_late: bool = False  # see `Comm`; True behaves as torch's own collectives
    keeps_order: bool = False
    sanitize: bool = False
    meetings: dict[str, _Meeting] = field(default_factory=dict)  # by operation
    lock: threading.Lock = field(default_factory=threading.Lock)  # of `meetings` and `errors`
    errors: list[BaseException] = field(default_factory=list)  # raised by ranks
    store: dist.Store = field(default_factory=dist.HashStore)

    def run(self, function: Callable[[Comm], T]) -> list[T]:
        """Calls `function(comm)` on every rank, and returns the results in rank order. Raises the first exception that
        a rank raised; the other ranks stop waiting."""
        world = replace(self, meetings={}, lock=threading.Lock(), errors=[], store=dist.HashStore())  # without remains
        results: list[Any] = [None] * self.size

        def rank_main(rank: int) -> None:
            try:
                results[rank] = function(ThreadComm(world, rank))
            except BaseException as error:  # raised below, in the caller's thread
                with world.lock:
                    world.errors.append(error)
                    for meeting in world.meetings.values():
                        meeting.is_over.set()

        threads = [threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}") for rank in range(self.size)]
        with _nothing_collected():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if world.errors:
            raise world.errors[0]
        return results


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Inside, no garbage is collected unless somebody asks for it. `torch.get_rng_state` holds a lock while it makes a
    tensor. A collection that begins there, and frees a parameter with hooks, lets another thread run; if that asks for
    the state, too, the process stands still, without a limit. Users' ranks are processes."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@final
class ThreadComm(Comm):
    """One rank of a `ThreadWorld`."""

    def __init__(self, world: ThreadWorld, rank: int, members: Sequence[int] | None = None) -> None:
        self._members = range(world.size) if members is None else members
        super().__init__(self._members.index(rank), len(self._members), sanitize=world.sanitize)
        self.learns_late, self.keeps_order = world.learns_late, world.keeps_order
        self._world = world
        self._prefix = "" if members is None else f"among {list(members)}: "

    @cached_property
    def board(self) -> Board:
        store = dist.PrefixStore(self._prefix, self._world.store)
        return Board(store, self.rank, self.size, timedelta(seconds=self._world.wait_timeout))

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        rank = self._members[self.rank]
        return ThreadComm(self._world, rank, group_of(rank, groups))

    def _post(self, key: str, payload: Any) -> _Meeting:
        """Posts what this rank contributes to an operation."""
        world, key = self._world, self._prefix + key
        with world.lock:
            meeting = world.meetings.setdefault(key, _Meeting(key))
            meeting.payloads[self.rank] = payload
            is_complete = len(meeting.payloads) == self.size
            if is_complete:
                del world.meetings[key]
            # Wakes waiting ranks once, when all have posted: otherwise each of N posts would wake N - 1 ranks.
            if is_complete or world.errors:
                meeting.is_over.set()
        return meeting

    def _collect(self, meeting: _Meeting) -> list[Any]:
        """Returns every rank's payload, in rank order, once all have posted."""
        wait_timeout, payloads = self._world.wait_timeout, meeting.payloads
        in_time = meeting.is_over.wait(wait_timeout)
        if len(payloads) < self.size:
            missing = [member for rank, member in enumerate(self._members) if rank not in payloads]
            why = "another rank failed" if in_time else f"wait_timeout={wait_timeout:g} s"
            raise RankTimeoutError(f"Ranks {missing} never came ({why})", meeting.key)
        return [payloads[rank] for rank in range(self.size)]

    def _swap(self, key: str, payload: Any) -> list[Any]:
        return self._collect(self._post(key, payload))

    def _all_gather(self, full: Tensor, shard: Tensor, key: str, diverges: bool | None) -> Gather:
        meeting = self._post(key, (shard.clone(), diverges))
        told: list[bool] = []

        def finish() -> None:
            rows = self._collect(meeting)
            told.append(any(theirs for _, theirs in rows))
            if self.learns_late or not told[0]:
                torch.stack([row for row, _ in rows], out=full)

        return Gather(finish, lambda: told[0])

    def _reduce_scatter(self, shard: Tensor, full: Tensor, scratch: Tensor, key: str, divisor: int) -> Work:
        meeting = self._post(key, full.clone())

        def finish() -> None:
            total = functools.reduce(torch.add, [theirs[self.rank] for theirs in self._collect(meeting)])
            shard.copy_(total / divisor if divisor != 1 else total)

        return Work(finish)

    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], key: str) -> None:
        for into, theirs in zip(received, self._swap(key, [tensor.clone() for tensor in sent]), strict=True):
            into.copy_(theirs[self.rank])

    def _broadcast(self, tensor: Tensor, source: int, key: str) -> None:
        tensor.copy_(self._swap(key, tensor.clone())[source])

    def _all_reduce(self, value: Tensor, combine: Combine, key: str) -> Tensor:
        return functools.reduce(combine, self._swap(key, value.clone()))

    def _merge(self, mine: dict[int, Any], key: str) -> dict[int, Any]:
        return {rank: value for theirs in self._swap(key, mine) for rank, value in theirs.items()}
