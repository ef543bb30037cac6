"""`ReductionOrder`: the order in which all ranks reduce the gradients of their groups, whichever became ready first.

It starts as the reverse of the model's. It is then learnt from rank 0's first backward, so that reductions also overlap
with the backward of a model whose modules do not run in the order in which they are defined.
"""

from collections.abc import Sequence
from typing import final

import torch

from lightning_zero.device import HOST
from lightning_zero.shards.gradient import GroupGradient
from lightning_zero.wire.comm import Comm


@final
class ReductionOrder:
    """Puts gradients in the order that ranks have agreed on, and counts how many of the first are complete here."""

    def __init__(self, gradients: Sequence[GroupGradient], comm: Comm) -> None:
        self.gradients = [*gradients]
        self._comm = comm
        self._complete = 0  # how many of them were complete when that was last counted in this backward
        self._ready: list[GroupGradient] = []  # in the order in which this backward has completed them
        self._is_learnt = False

    def add(self, gradients: Sequence[GroupGradient]) -> None:
        """Appends gradients that have begun to train. Call it between two backwards."""
        self.gradients = sorted([*self.gradients, *gradients], key=lambda gradient: gradient.group.kind.is_idle)

    def begin_backward(self) -> None:
        self._ready = []

    def note_complete(self, gradient: GroupGradient) -> None:
        self._ready.append(gradient)

    def count_complete(self) -> int:
        """Returns how many groups, from the first, have a gradient of every parameter on this rank."""
        while self._complete < len(self.gradients):
            gradient = self.gradients[self._complete]
            if not (gradient.is_complete or gradient.group.kind.is_idle):  # idle ones wait for ranks to agree
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
        numbers = {gradient: number for number, gradient in enumerate(self.gradients)}
        complete_first = dict.fromkeys([*self._ready, *self.gradients])
        agreed = torch.tensor([numbers[gradient] for gradient in complete_first], device=HOST)
        self._comm.broadcast(agreed, "reduction order")
        self.gradients = [self.gradients[at] for at in agreed.tolist()]
