"""What one rank notices between two messages, and all must act upon together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto


class Notice(Enum):
    """What there is to notice."""

    STOP = auto()  # a signal
    REQUEUE = auto()  # the signal after which SLURM is to start the job again
    UNSAVED = auto()  # a save in the background has failed


@dataclass
class Notices:
    """Ranks hear of each other's notices with the message that ends their next backward, and act after that batch.

    Attributes:
        here: noticed on this rank. Only ever changed in place, by one call: a signal's handler may come in between.
        anywhere: noticed on some rank, as of the latest backward that was reduced. The same on all ranks.
    """

    here: set[Notice] = field(default_factory=set)
    anywhere: set[Notice] = field(default_factory=set)

    def flags(self) -> list[bool]:
        """One for each `Notice`, to be sent."""
        return [notice in self.here for notice in Notice]

    def hear(self, flags: Sequence[int]) -> None:
        """Takes what was noticed on any rank."""
        self.anywhere = {notice for notice, flag in zip(Notice, flags, strict=True) if flag}
