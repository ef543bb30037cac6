"""`Notices`: events that one rank notices, and that all ranks must act upon together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto


class Notice(Enum):
    """An event or a condition that one rank tells the others."""

    STOP = auto()  # a signal has asked the run to stop
    REQUEUE = auto()  # that signal also asks SLURM to start the job again
    UNSAVED = auto()  # a save in the background has failed
    IN_BATCH = auto()  # this rank trains on a batch
    AT_EPOCH_END = auto()  # this rank has no more batches in this epoch


@dataclass
class Notices:
    """The notices of this rank, and of all ranks as of their last meeting (`Rendezvous.meet`). All ranks hear them at
    the same point: with the gradients of a backward, or at the latest after a batch, an evaluation or an epoch."""

    # Noticed on this rank. Changed only in place, by one call: a signal's handler may run in between, and add to it.
    here: set[Notice] = field(default_factory=set)
    anywhere: set[Notice] = field(default_factory=set)  # noticed on any rank, as of the last meeting
    are_current: bool = False  # ranks have met in the current batch
    place: str = ""  # where this rank is in its run, in words

    def flags(self) -> list[bool]:
        """Returns one flag for each `Notice`, whether this rank has noticed it."""
        return [notice in self.here for notice in Notice]

    def hear(self, flags: Sequence[int]) -> None:
        """Takes the flags of all ranks: each is set if any rank has set it."""
        self.are_current = True
        self.anywhere = {notice for notice, flag in zip(Notice, flags, strict=True) if flag}

    def move(self, notice: Notice, place: str) -> None:
        """Notes that this rank begins a batch, or has reached the end of its epoch."""
        self.note_outside_batches()
        self.here.add(notice)
        self.place = place

    def note_outside_batches(self) -> None:
        """Notes that this rank is between epochs, or in an evaluation."""
        self.here.difference_update({Notice.IN_BATCH, Notice.AT_EPOCH_END})

    @property
    def are_apart(self) -> bool:
        """Whether one rank had no more batches while another one trained."""
        return {Notice.IN_BATCH, Notice.AT_EPOCH_END} <= self.anywhere
