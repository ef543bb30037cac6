"""What one rank notices between two messages, and all must act upon together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto


class Notice(Enum):
    """What there is to notice."""

    STOP = auto()  # a signal
    REQUEUE = auto()  # the signal after which SLURM is to start the job again
    UNSAVED = auto()  # a save in the background has failed
    IN_BATCH = auto()  # this rank trains
    AT_EPOCH_END = auto()  # this rank has no more batches in this epoch


@dataclass
class Notices:
    """Ranks hear of each other's notices when they meet: in the message that ends a backward, at the latest after a
    batch, an evaluation or an epoch; and act upon them there.

    Attributes:
        here: noticed on this rank. Only ever changed in place, by one call: a signal's handler may come in between.
        anywhere: noticed on some rank, as of the latest time that ranks have met. The same on all ranks.
        are_current: whether that was in the batch under way.
        place: in words, where this rank is in its run.
    """

    here: set[Notice] = field(default_factory=set)
    anywhere: set[Notice] = field(default_factory=set)
    are_current: bool = False
    place: str = ""

    def flags(self) -> list[bool]:
        """One for each `Notice`, to be sent."""
        return [notice in self.here for notice in Notice]

    def hear(self, flags: Sequence[int]) -> None:
        """Takes what was noticed on any rank."""
        self.are_current = True
        self.anywhere = {notice for notice, flag in zip(Notice, flags, strict=True) if flag}

    def move(self, notice: Notice, place: str) -> None:
        """This rank is in a batch, or at the end of its epoch."""
        self.leave()
        self.here.add(notice)
        self.place = place

    def leave(self) -> None:
        """This rank is between epochs, or in an evaluation."""
        self.here.discard(Notice.IN_BATCH)
        self.here.discard(Notice.AT_EPOCH_END)

    @property
    def are_apart(self) -> bool:
        """Whether some rank had no more batches when another trained."""
        return {Notice.IN_BATCH, Notice.AT_EPOCH_END} <= self.anywhere
