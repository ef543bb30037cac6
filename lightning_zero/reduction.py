"""Which gradients travel when: every rank sends those of its groups in one agreed order, whatever became ready first.

The order starts as the reverse of the model's and is then learnt from rank 0's first backward, so that overlap
survives models whose backward runs in another order than their modules stand in.
"""

from typing import final

import torch

from lightning_zero.comm import Comm
from lightning_zero.gradient import BucketPool, GradientShard
from lightning_zero.notices import Notice, Notices


@final
class Reductions:
    """The reductions of one backward after the other.

    Args:
        shards: the gradients of all trainable groups, in the order in which backward should reach them.
        pools: the buckets they travel in.
        comm: all ranks, for the small messages at the end of backward.
        overlap: let reductions run while backward goes on.

    Attributes:
        is_on: whether the next end of backward reduces; otherwise gradients only accumulate, on this rank.
        notices: what ranks tell each other with these messages.
    """

    def __init__(self, shards: list[GradientShard], pools: list[BucketPool], comm: Comm, *, overlap: bool) -> None:
        self._order = shards
        self._pools = pools
        self._comm = comm
        self._overlap = overlap
        self._started = 0  # how many of self._order
        self._ready_order: list[GradientShard] = []
        self._order_learnt = False
        self.is_on = True
        self.notices = Notices()

    @property
    def shards(self) -> list[GradientShard]:
        return self._order

    def has_started(self, shard: GradientShard) -> bool:
        return self._order.index(shard) < self._started

    def note_complete(self, shard: GradientShard) -> None:
        """All gradients of `shard` have come."""
        self._ready_order.append(shard)

    def count_complete(self) -> int:
        """How many groups, from the first of the agreed order, have all their gradients."""
        if not (self.is_on and self._overlap):
            return 0
        return next((at for at, shard in enumerate(self._order) if not shard.is_complete), len(self._order))

    def start(self, number: int) -> None:
        """Sends the first `number` groups of the agreed order, but for those that have been sent."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for shard in self._order[self._started : number]:
                shard.begin_reduce()
        self._started = max(self._started, number)

    def start_all(self) -> None:
        self.start(len(self._order))

    def finish(self) -> None:
        """Reduces what is left, and waits for all of it. A collective."""
        # All starts before the first wait: another rank may be out of buckets, waiting for one of ours.
        self.start_all()
        used = self._agree_on_used()
        for pool in self._pools:
            pool.drain()
        for shard in self._order:
            shard.finish_reduce(used[shard])
        self._learn_order()

    def end_unreduced(self) -> None:
        """The end of a backward that only accumulates."""
        for shard in self._order:
            shard.end_backward_unreduced()

    def forget(self) -> None:
        """Drops what a backward that failed (on every rank alike) left half done."""
        for pool in self._pools:
            pool.drain()
        for shard in self._order:
            shard.forget()

    def clear(self) -> None:
        """Ready for the next backward."""
        self._started = 0
        self._ready_order = []

    def let_go(self) -> None:
        """Of the buckets, for good."""
        self._pools = []

    def _agree_on_used(self) -> dict[GradientShard, set[int]]:
        """Which parameters had a gradient on any rank, and what was noticed there; one small message."""
        counts = [len(shard.group.parameters) for shard in self._order]
        mine = torch.zeros(sum(counts) + len(Notice), dtype=torch.uint8)
        mine[: len(Notice)] = torch.tensor(self.notices.flags())
        start = len(Notice)
        for shard, count in zip(self._order, counts, strict=True):
            mine[[start + index for index in shard.used]] = 1
            start += count
        anywhere = self._comm.all_reduce(mine, "used parameters", "max") if self._comm.size > 1 else mine
        self.notices.hear(anywhere[: len(Notice)].tolist())
        return {
            shard: set(flags.nonzero().flatten().tolist())
            for shard, flags in zip(self._order, anywhere[len(Notice) :].split(counts), strict=True)
        }

    def _learn_order(self) -> None:
        if self._order_learnt:  # nothing that differs between ranks may decide whether a message is sent
            return
        self._order_learnt = True
        ready = [self._order.index(shard) for shard in self._ready_order]
        rest = [at for at in range(len(self._order)) if at not in set(ready)]
        agreed = torch.tensor(ready + rest)
        self._comm.broadcast(agreed, "reduction order")
        self._order = [self._order[at] for at in agreed.tolist()]
