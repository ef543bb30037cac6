"""Communicators that send nothing: `LocalComm` for a world of one rank, `CountingComm` for an imagined world."""

from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from lightning_zero.wire.board import Board
from lightning_zero.wire.comm import Combine, Comm, Gather, Work, copy_unless_same, group_of


class _Silent(Comm):
    """Sends nothing, and assumes that all ranks do what this one does."""

    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], key: str) -> None:
        pass

    def _broadcast(self, tensor: Tensor, source: int, key: str) -> None:
        pass

    def _all_reduce(self, value: Tensor, combine: Combine, key: str) -> Tensor:
        return value.clone()

    def _merge(self, mine: dict[int, Any], key: str) -> dict[int, Any]:
        return dict.fromkeys(range(self.size), mine[self.rank])


@final
class LocalComm(_Silent):
    """A world of one rank: the shard is the full array."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    @cached_property
    def board(self) -> Board:
        return Board(dist.HashStore(), 0, 1, timedelta.max)

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        return self

    def _all_gather(self, full: Tensor, shard: Tensor, key: str, diverges: bool | None) -> Gather:
        copy_unless_same(full[0], shard)
        return Gather(has_divergence=lambda: bool(diverges))  # from its plan: it would else go by it to its end

    def _reduce_scatter(self, shard: Tensor, full: Tensor, scratch: Tensor, key: str, divisor: int) -> Work:
        copy_unless_same(shard, full[0])
        if divisor != 1:
            shard.div_(divisor)
        return Work()


@final
class CountingComm(_Silent):
    """One rank of an imagined world, in which all ranks do the same. Counts bytes and calls, and copies nothing."""

    @property
    def board(self) -> Board:
        raise NotImplementedError("A rehearsal saves nothing.")

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        mine = group_of(self.rank, groups)
        return CountingComm(mine.index(self.rank), len(mine))

    def _all_gather(self, full: Tensor, shard: Tensor, key: str, diverges: bool | None) -> Gather:
        return Gather(has_divergence=lambda: bool(diverges))

    def _reduce_scatter(self, shard: Tensor, full: Tensor, scratch: Tensor, key: str, divisor: int) -> Work:
        return Work()
