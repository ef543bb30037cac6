"""Ranks as threads of one process: for large test matrices, and to try things out where there is one machine."""

import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.wire.board import Board
from lightning_zero.wire.comm import Comm, Gather, RankTimeoutError, Work, group_of

T = TypeVar("T")


@dataclass
class ThreadWorld:
    """Ranks as threads of one process, for large test matrices: `ThreadWorld(4).run(function)`.

    Args:
        size: number of ranks.
        wait_timeout: seconds a rank waits for the others.
        learns_late: see `Comm`; True does as torch's own collectives do.
    """

    size: int
    wait_timeout: float = 60.0
    learns_late: bool = False
    _posted: dict[str, dict[int, Any]] = field(default_factory=dict)
    _read: Counter[str] = field(default_factory=Counter)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _failed: bool = False
    store: dist.Store = field(default_factory=dist.HashStore)

    def run(self, function: Callable[[Comm], T]) -> list[T]:
        """Calls `function(comm)` on every rank and returns the results in rank order.

        Raises:
            Exception: the first one that a rank raised; the other ranks stop waiting.
        """
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []
        self.store = dist.HashStore()
        self._posted.clear()
        self._read.clear()
        self._failed = False

        def rank_main(rank: int) -> None:
            try:
                results[rank] = function(ThreadComm(self, rank))
            except BaseException as error:  # handed to the caller below
                errors.append(error)
                with self._changed:
                    self._failed = True
                    self._changed.notify_all()

        threads = [threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}") for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def post(self, key: str, rank: int, payload: Any) -> None:
        with self._changed:
            self._posted.setdefault(key, {})[rank] = payload
            self._changed.notify_all()

    def collect(self, key: str, members: Sequence[int]) -> list[Any]:
        """Every member's payload, in rank order, once all have posted it; the last reader clears it away."""
        with self._changed:
            complete = self._changed.wait_for(
                lambda: self._failed or len(self._posted.get(key, {})) == len(members), self.wait_timeout
            )
            here = self._posted.get(key, {})
            if len(here) < len(members):
                missing = [rank for rank in members if rank not in here]
                why = "another rank failed" if complete else f"wait_timeout={self.wait_timeout:g} s"
                raise RankTimeoutError(f"{key!r}: ranks {missing} never came ({why}).")
            payloads = [here[rank] for rank in members]
            self._read[key] += 1
            if self._read[key] == len(members):
                del self._posted[key], self._read[key]
            return payloads


@final
class ThreadComm(Comm):
    """One rank of a `ThreadWorld`."""

    def __init__(self, world: ThreadWorld, rank: int, members: Sequence[int] | None = None) -> None:
        self._members = list(range(world.size)) if members is None else list(members)
        super().__init__(self._members.index(rank), len(self._members))
        self.learns_late = world.learns_late
        self._world = world
        self._prefix = "" if members is None else f"among {self._members}: "

    @cached_property
    def board(self) -> Board:
        store = dist.PrefixStore(self._prefix, self._world.store)
        return Board(store, self.rank, self.size, timedelta(seconds=self._world.wait_timeout))

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        rank = self._members[self.rank]
        return ThreadComm(self._world, rank, group_of(rank, groups))

    def _post(self, key: str, payload: Any) -> None:
        self._world.post(self._prefix + key, self._members[self.rank], payload)

    def _collect(self, key: str) -> list[Any]:
        return self._world.collect(self._prefix + key, self._members)

    def _all_gather(self, full: Tensor, shard: Tensor, key: str, diverges: bool | None) -> Gather:
        self._post(key, (shard.clone(), diverges))
        told: list[bool] = []

        def finish() -> None:
            rows = self._collect(key)
            told.append(any(theirs for _, theirs in rows))
            if self.learns_late or not told[0]:
                torch.stack([row for row, _ in rows], out=full)

        return Gather(finish, lambda: told[0])

    def _reduce_scatter(self, shard: Tensor, full: Tensor, scratch: Tensor, key: str) -> Work:
        self._post(key, full.clone())

        def finish() -> None:
            first, *others = (theirs[self.rank] for theirs in self._collect(key))
            shard.copy_(first)
            for contribution in others:
                shard.add_(contribution)

        return Work(finish)

    def _broadcast(self, tensor: Tensor, source: int, key: str) -> None:
        self._post(key, tensor.clone())
        tensor.copy_(self._collect(key)[source])

    def _all_reduce(self, value: Tensor, combine: Callable[[Tensor, Tensor], Tensor], key: str) -> Tensor:
        self._post(key, value.clone())
        return functools.reduce(combine, self._collect(key))

    def _merge(self, mine: dict[int, Any], key: str) -> dict[int, Any]:
        self._post(key, mine)
        return {rank: value for theirs in self._collect(key) for rank, value in theirs.items()}
