"""Communicators that send nothing: `LocalComm` for a world of one rank, `CountingComm` for an imagined world."""

from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from lightning_zero.wire.board import Board
from lightning_zero.wire.comm import Combine, Comm, Gather, Work, copy_unless_same, in_tree
from lightning_zero.wire.worlds import group_of


class _Silent(Comm):
    """Sends nothing, and assumes that all ranks do what this one does."""

    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], key: str) -> None:
        pass

    def _broadcast(self, tensor: Tensor, source: int, key: str) -> None:
        pass

    def _merge(self, mine: dict[int, Any], key: str) -> dict[int, Any]:
        return dict.fromkeys(range(self.size), mine[self.rank])


@final
class LocalComm(_Silent):
    """A world of one rank: the shard is the full array. `on_device` says that it is in memory of a device with streams:
    what is offloaded is then copied beside compute."""

    def __init__(self, *, on_device: bool = False) -> None:
        super().__init__(rank=0, size=1)
        self.is_asynchronous = on_device

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

    def _all_reduce(self, value: Tensor, combine: Combine, key: str) -> Tensor:
        return value.clone()


@final
class CountingComm(_Silent):
    """One rank of an imagined world, in which all ranks do the same. Counts bytes and calls, and copies no array.

    Args:
        rank: which of them.
        size: how many there are.
        on_device: whether they have collectives of a device, beside its compute (`native.NativeComm`).
    """

    def __init__(self, rank: int, size: int, *, on_device: bool = False) -> None:
        super().__init__(rank, size)
        self.learns_late = self.keeps_order = self.is_asynchronous = on_device

    @property
    def board(self) -> Board:
        raise NotImplementedError("A rehearsal saves nothing.")

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        mine = group_of(self.rank, groups)
        return CountingComm(mine.index(self.rank), len(mine), on_device=self.is_asynchronous)

    def _all_gather(self, full: Tensor, shard: Tensor, key: str, diverges: bool | None) -> Gather:
        return Gather(has_divergence=lambda: bool(diverges))

    def _reduce_scatter(self, shard: Tensor, full: Tensor, scratch: Tensor, key: str, divisor: int) -> Work:
        return Work()

    def _all_reduce(self, value: Tensor, combine: Combine, key: str) -> Tensor:
        """Returns this rank's own value, and takes the memory that messages between ranks take. In more than two rounds
        there is not more of it at a time."""
        if self.is_asynchronous:
            return value.clone()

        def swap(mine: Tensor | None, peer: int, receives: bool) -> Tensor | None:
            return value.clone() if receives else None

        size = min(self.size, 4)
        return in_tree(value, lambda one, other: one.clone(), swap, self.rank % size, size)
