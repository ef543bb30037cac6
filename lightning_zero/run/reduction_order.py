"""`ReductionOrder`: the order in which all ranks reduce the gradients of their groups, whichever became ready first.

It starts as the reverse of the model's. It is then learnt from rank 0's first backward, so that reductions also overlap
with the backward of a model whose modules do not run in the order in which they are defined.
"""

from collections.abc import Sequence
from typing import final

import torch

from lightning_zero.device import HOST
from lightning_zero.shards.gradient import GradientShard
from lightning_zero.wire.comm import Comm


@final
class ReductionOrder:
    """Puts gradients in the order that ranks have agreed on, and counts how many of the first are complete here."""

    def __init__(self, shards: Sequence[GradientShard], comm: Comm) -> None:
        self.shards = [*shards]
        self._comm = comm
        self._complete = 0  # how many of them were complete when that was last counted in this backward
        self._ready: list[GradientShard] = []  # in the order in which this backward has completed them
        self._is_learnt = False

    def add(self, shards: Sequence[GradientShard]) -> None:
        """Appends gradients that have begun to train. Call it between two backwards."""
        self.shards = sorted([*self.shards, *shards], key=lambda shard: shard.group.kind.is_idle)

    def begin_backward(self) -> None:
        self._ready = []

    def note_complete(self, shard: GradientShard) -> None:
        self._ready.append(shard)

    def count_complete(self) -> int:
        """Returns how many groups, from the first, have a gradient of every parameter on this rank."""
        while self._complete < len(self.shards):
            shard = self.shards[self._complete]
            if not (shard.is_complete or shard.group.kind.is_idle):  # idle ones wait for ranks to agree
                break
            self._complete += 1
        return self._complete

    def end_backward(self) -> None:
        """Forgets what was counted, as the gradients have been reduced, or only accumulate."""
        self._complete = 0

    def learn(self) -> None:
        """Takes over the order in which rank 0's first backward has completed groups. Collective, once."""
        if self._is_learnt:  # not a check that may differ between ranks: it decides whether a message is sent
            return
        self._is_learnt = True
        numbers = {shard: number for number, shard in enumerate(self.shards)}
        agreed = torch.tensor([numbers[shard] for shard in {**dict.fromkeys(self._ready), **numbers}], device=HOST)
        self._comm.broadcast(agreed, "reduction order")
        self.shards = [self.shards[at] for at in agreed.tolist()]
