"""`Beside`: gradients that are to be added to averages, and are this rank's own until then.

Autograd adds each gradient to what is in `p.grad`. An average that rests as shards has no room for it there, so it is
kept here until the next reduction or step adds it to the average.
"""

from typing import final

from torch import Tensor

from lightning_zero.shards.averaged import Averaged, AveragedGradient
from lightning_zero.shards.slot import Slot


@final
class Beside:
    """What autograd has added to `averaged` gradients of a group on this rank, by the index of the parameter."""

    def __init__(self, averaged: Averaged) -> None:
        self._averaged = averaged
        self._fresh: dict[int, Tensor] = {}  # of this backward, until they are collected
        self.kept: dict[int, Tensor] = {}  # of earlier ones, which were not reduced

    def add(self, slot: Slot, grad: Tensor) -> None:
        """Keeps what autograd adds to an average in backward, until it is collected."""
        index = slot.index
        self._fresh[index] = self._fresh[index] + grad if index in self._fresh else grad

    def keep(self, slot: Slot, grad: Tensor) -> None:
        """Keeps what a backward that is not reduced has added to an average. One rank adds it at once, as one device
        does: the sum of several would be rounded in another order."""
        if self._averaged.ranks > 1:
            self.kept[slot.index] = grad
        else:
            self._add_to_piece(slot, grad)

    def take(self, index: int) -> Tensor:
        """Returns, once, all that was added to an average: in this backward, and in earlier ones."""
        fresh = self._fresh.pop(index)
        return self.kept.pop(index) + fresh if index in self.kept else fresh

    def add_to(self, average: Tensor, slot: Slot) -> Tensor:
        """Adds what is kept to a whole average, in place, and goes on keeping it: the average may be another rank's to
        read."""
        kept = self.kept.get(slot.index)
        return average if kept is None else average.add_(kept)

    def settle(self, slot: Slot) -> None:
        """Adds what is kept to this rank's piece of the average, which is about to be stepped, and keeps it no
        longer."""
        kept = self.kept.pop(slot.index, None)
        if kept is not None and isinstance(slot.local.grad, AveragedGradient):
            self._add_to_piece(slot, kept)

    def _add_to_piece(self, slot: Slot, grad: Tensor) -> None:
        with self._averaged.edit_piece(slot) as piece:
            own = grad.reshape(-1)[slot.piece.start : slot.piece.stop]
            piece.view(-1).add_(own.to(piece.device))

    def drop(self, index: int) -> None:
        """Drops what is kept of one parameter, if anything is: another gradient has taken the average's place."""
        self.kept.pop(index, None)

    def clear(self) -> None:
        self._fresh.clear()
        self.kept.clear()
