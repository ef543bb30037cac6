"""Ranks as threads of one process: for large test matrices, and to try things out where there is one machine."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar, final

import torch.distributed as dist
from torch import Tensor

from lightning_zero.board import Board
from lightning_zero.comm import Comm, RankTimeoutError, Work, group_of

T = TypeVar("T")


@dataclass
class ThreadWorld:
    """Ranks as threads of one process, for large test matrices: `ThreadWorld(4).run(function)`.

    Args:
        size: number of ranks.
        wait_timeout: seconds a rank waits for the others.
    """

    size: int
    wait_timeout: float = 60.0
    _posted: dict[str, dict[int, Tensor]] = field(default_factory=dict)
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

    def post(self, key: str, rank: int, payload: Tensor) -> None:
        with self._changed:
            self._posted.setdefault(key, {})[rank] = payload
            self._changed.notify_all()

    def collect(self, key: str, members: Sequence[int]) -> list[Tensor]:
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
        self._world = world
        self._prefix = "" if members is None else f"among {self._members}: "

    @cached_property
    def board(self) -> Board:
        store = dist.PrefixStore(self._prefix, self._world.store)
        return Board(store, self.rank, self.size, timedelta(seconds=self._world.wait_timeout))

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        rank = self._members[self.rank]
        return ThreadComm(self._world, rank, group_of(rank, groups))

    def _post(self, key: str, payload: Tensor) -> None:
        self._world.post(self._prefix + key, self._members[self.rank], payload)

    def _collect(self, key: str) -> list[Tensor]:
        return self._world.collect(self._prefix + key, self._members)

    def _all_gather(self, full: Tensor, shard: Tensor, key: str) -> Work:
        self._post(key, shard.clone())
        return Work(lambda: self._copy_rows(full, self._collect(key)))

    def _reduce_scatter(self, shard: Tensor, full: Tensor, incoming: Tensor, key: str) -> Work:
        self._post(key, full.clone())

        def finish() -> None:
            contributions = [theirs[self.rank] for theirs in self._collect(key)]
            shard.copy_(contributions[0])
            for contribution in contributions[1:]:
                shard.add_(contribution)

        return Work(finish)

    def _broadcast(self, tensor: Tensor, source: int, key: str) -> None:
        self._post(key, tensor.clone())
        tensor.copy_(self._collect(key)[source])

    def _all_gather_host(self, full: Tensor, shard: Tensor, key: str) -> Work:
        return self._all_gather(full, shard, key)

    @staticmethod
    def _copy_rows(full: Tensor, rows: Sequence[Tensor]) -> None:
        for row, theirs in zip(full, rows, strict=True):
            row.copy_(theirs)
