"""`Beside`: gradients that are this rank's own, beside averages that rest as shards.

Autograd adds each gradient to what is in `p.grad`. An average that rests as shards has no room for it there, so it is
kept here until the next reduction or step adds it to the average. Users find the sum of both in `p.grad`, as under DDP.
If they edit that (in a hook before it is collected, or after a backward that was not reduced), all of it is the rank's
own, and the mean of those of all ranks takes the average's place.
"""

from typing import final

from torch import Tensor

from lightning_zero.shards.averaged import Averaged, AveragedGradient
from lightning_zero.shards.slot import Slot
from lightning_zero.torch_private import edits_of


@final
class Beside:
    """What is beside the `averaged` gradients of a group on this rank, by the index of the parameter."""

    def __init__(self, averaged: Averaged) -> None:
        self._averaged = averaged
        self.fresh: dict[int, Tensor] = {}  # what this backward has added, until it is collected
        self.kept: dict[int, Tensor] = {}  # what earlier ones have added, which were not reduced; or an edited sum
        self._edited: set[int] = set()  # those in `kept` that are such a sum, with the average in it
        self.viewed: dict[int, tuple[Tensor, int]] = {}  # sums that users have views of, with their version then

    def has(self, index: int) -> bool:
        """Whether there is anything beside the average of a parameter."""
        return index in self.fresh or index in self.kept or index in self.viewed

    # -- what is added

    def add(self, slot: Slot, grad: Tensor) -> None:
        """Keeps what autograd adds to an average in backward, until it is collected."""
        index = slot.index
        self.end_views()
        self.fresh[index] = self.fresh[index] + grad if index in self.fresh else grad

    def keep(self, slot: Slot, grad: Tensor) -> None:
        """Keeps what a backward that is not reduced has added to an average. One rank adds it at once, as one device
        does: the sum of several would be rounded in another order."""
        if self._averaged.ranks > 1:
            self.kept[slot.index] = grad
        else:
            self._add_to_piece(slot, grad)

    def take(self, index: int) -> tuple[Tensor, bool]:
        """Returns, once, what was added to an average, in this backward and in earlier ones, and True; or the edited
        sum of all, and False: it takes the average's place."""
        self.end_views()
        if index not in self.kept:
            return self.fresh.pop(index), True
        kept, is_addition = self.take_kept(index)
        return kept + self.fresh.pop(index) if index in self.fresh else kept, is_addition

    def take_kept(self, index: int) -> tuple[Tensor, bool]:
        """Does what `take` does for what was there before this backward."""
        is_addition = index not in self._edited
        self._edited.discard(index)
        return self.kept.pop(index), is_addition

    def move_to_average(self, slot: Slot) -> None:
        """Moves what is kept into this rank's piece of the average, which is about to be stepped."""
        self.end_views()
        if slot.index not in self.kept:
            return
        kept, is_addition = self.take_kept(slot.index)
        if isinstance(slot.local.read_grad(), AveragedGradient):
            if is_addition:
                self._add_to_piece(slot, kept)
            else:
                self._averaged.write(slot, kept)

    def _add_to_piece(self, slot: Slot, grad: Tensor) -> None:
        with self._averaged.edit_piece(slot) as piece:
            own = grad.reshape(-1)[slot.piece.start : slot.piece.stop]
            piece.view(-1).add_(own.to(piece.device))

    # -- what users see

    def seen(self, index: int) -> Tensor | None:
        """Returns the sum that users have edited or have views of, unless autograd has added to it since."""
        if index in self.viewed:
            return self.viewed[index][0]
        return self.kept[index] if index in self._edited and index not in self.fresh else None

    def add_to(self, average: Tensor, index: int) -> Tensor:
        """Returns the sum of a whole average and all that was added, in its memory, which is nobody else's. An edited
        sum takes the average's place: that was gathered all the same, as other ranks may have edited nothing."""
        if index in self._edited:
            average.copy_(self.kept[index])
        elif index in self.kept:
            average.add_(self.kept[index])
        return average.add_(self.fresh[index]) if index in self.fresh else average

    def show(self, index: int, total: Tensor, *, is_edited: bool) -> None:
        """Notes a sum that users have edited, or of which they have views, through which they may edit it."""
        if is_edited:
            self.drop_all(index)
            self.kept[index] = total
            self._edited.add(index)
        elif self.seen(index) is None:
            self.viewed[index] = total, edits_of(total)

    def end_views(self) -> None:
        """Keeps what users have edited through views. Later edits through these are not seen."""
        while self.viewed:
            index, (total, before) = self.viewed.popitem()
            if edits_of(total) != before:
                self.show(index, total, is_edited=True)

    def drop(self, index: int) -> None:
        """Drops what is kept of one parameter, if anything is: another gradient has taken the average's place."""
        self.kept.pop(index, None)
        self.viewed.pop(index, None)
        self._edited.discard(index)

    def drop_all(self, index: int) -> None:
        """Drops what this backward has added, too: a hook has put another gradient into `p.grad`, or none."""
        self.drop(index)
        self.fresh.pop(index, None)

    def clear(self) -> None:
        for held in (self.fresh, self.kept, self.viewed, self._edited):
            held.clear()
