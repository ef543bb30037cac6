"""`Statement`: what a rank tells the others where they agree on the gradients of a backward."""

from typing import NamedTuple, Self

from lightning_zero.run.notices import Notice


class Statement(NamedTuple):
    """One byte for each flag. Ranks combine their statements by the maximum: a flag is set if any rank has set it."""

    has_gradients: bool  # there are some to reduce
    notices: bytes  # a flag for each `Notice`
    incomplete: bytes  # for each group, in the agreed order: a gradient of it is missing
    used: bytes  # for each parameter, group by group: it has a gradient

    def __bytes__(self) -> bytes:
        return bytes([self.has_gradients]) + self.notices + self.incomplete + self.used

    @classmethod
    def read(cls, said: bytes, groups: int) -> Self:
        """Returns the statement that `said` holds, of a model with so many groups that train."""
        of_groups = 1 + len(Notice)
        of_parameters = of_groups + groups
        return cls(bool(said[0]), said[1:of_groups], said[of_groups:of_parameters], said[of_parameters:])

    @property
    def complete(self) -> int:
        """How many groups, from the first, have all their gradients: on all ranks, in what they have combined."""
        first = self.incomplete.find(1)
        return len(self.incomplete) if first < 0 else first
