"""`Beside`: gradients that are to be added to averages, and are this rank's own until then.

Autograd adds each gradient to what is in `p.grad`. An average that rests as shards has no room for it there, so it is
kept here until the next reduction or step adds it to the average. A hook of the user's, which autograd calls before it
is collected, finds the sum of both in `p.grad`, as under DDP. If it edits that, all of it is this rank's own.
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
        self.fresh: dict[int, Tensor] = {}  # of this backward, until they are collected
        self._edited: set[int] = set()  # those in `fresh` that are no addition, but the edited sum with the average
        self.kept: dict[int, Tensor] = {}  # of earlier ones, which were not reduced

    def add(self, slot: Slot, grad: Tensor) -> None:
        """Keeps what autograd adds to an average in backward, until it is collected."""
        index = slot.index
        self.fresh[index] = self.fresh[index] + grad if index in self.fresh else grad

    def keep(self, slot: Slot, grad: Tensor) -> None:
        """Keeps what a backward that is not reduced has added to an average. One rank adds it at once, as one device
        does: the sum of several would be rounded in another order."""
        if self._averaged.ranks > 1:
            self.kept[slot.index] = grad
        else:
            self._add_to_piece(slot, grad)

    def take(self, index: int) -> tuple[Tensor, bool]:
        """Returns, once, what was added to an average in this backward and in earlier ones, and True; or, once a hook
        has edited the sum of all, that sum and False: it takes the average's place."""
        fresh = self.fresh.pop(index)
        if index in self._edited:
            self._edited.discard(index)
            return fresh, False
        return (self.kept.pop(index) + fresh if index in self.kept else fresh), True

    def add_to(self, average: Tensor, slot: Slot) -> Tensor:
        """Adds all that was added to a whole average, in place, and goes on keeping it: the average may be another
        rank's to read."""
        for added in (self.kept.get(slot.index), self.fresh.get(slot.index)):
            if added is not None:
                average.add_(added)
        return average

    def edited(self, slot: Slot) -> Tensor | None:
        """Returns the sum that a hook has edited in this backward, before it is collected."""
        return self.fresh[slot.index] if slot.index in self._edited else None

    def edit(self, slot: Slot, total: Tensor) -> None:
        """Keeps the sum that a hook has edited, or may edit through a view of it."""
        self.drop(slot.index)  # the sum has it
        self.fresh[slot.index] = total
        self._edited.add(slot.index)

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

    def drop_all(self, index: int) -> None:
        """Drops all that was added: a hook in this backward has put another gradient into `p.grad`, or none."""
        self.drop(index)
        self.fresh.pop(index, None)
        self._edited.discard(index)

    def clear(self) -> None:
        self.fresh.clear()
        self._edited.clear()
        self.kept.clear()
