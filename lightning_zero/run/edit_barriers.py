"""Where ranks wait for each other at edits of values of which each has a part: of weights, and of gradients."""

from collections.abc import Callable
from enum import IntEnum
from typing import final

import torch

from lightning_zero.device import HOST
from lightning_zero.run.rendezvous import Rendezvous

_ALL = torch.iinfo(torch.int64).max  # edits


class Position(IntEnum):
    """Where a rank is, for those that wait at an edit."""

    ELSEWHERE = 0
    EDIT = 1  # a call has edited values, which are kept at its end
    BOUNDARY = 2  # keeps what has been edited since the last one


@final
class EditBarrier:
    """A rank may read or use what others do not, and so come to an edit before them. It waits here until all ranks have
    come to it, as they would be served the edited values of this rank beside the older ones of the others.

    `share` keeps the edits made so far on a rank that goes on waiting, while those at the boundary go on.
    """

    def __init__(self, rendezvous: Rendezvous, share: Callable[[], None]) -> None:
        self._comm = rendezvous.comm.host
        self._rendezvous = rendezvous
        self._share = share
        self._position = Position.ELSEWHERE
        self._number = rendezvous.serving.enroll("an edit of weights", self._compare)

    def wait_for_all(self, position: Position) -> None:
        """Waits until all ranks have come to the edit that this one is about to keep, and serves them meanwhile."""
        self._position = position
        while self._rendezvous.course.call(self._number) < position:
            pass
        self._position = Position.ELSEWHERE

    def _compare(self, _: bool) -> int:
        """Returns the position of the rank that is farthest from a boundary. One that has nothing more to do in this
        round makes no edit before one. If all are there, those that only wait share their edits with those that go on.
        Collective."""
        position = Position.BOUNDARY if self._rendezvous.serving.is_waiting else self._position
        told = torch.tensor([position], dtype=torch.uint8, device=HOST)
        nearest = int(self._comm.all_reduce(told, "edit", "min"))
        if nearest == Position.BOUNDARY and self._position is not Position.BOUNDARY:
            self._share()
        return nearest


@final
class GradientEditBarrier:
    """A rank that others do not hold up comes to an edit of a gradient before they do. It waits until all have come to
    it: those that still read the gradient would be sent its part as it is after the edit, and it would be sent theirs
    of before when it reads the gradient again."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._comm = rendezvous.comm.host
        self._rendezvous = rendezvous
        self._come = 0  # number of edits that this rank has come to; those of one call of users' are one
        self._all = 0  # ... that all ranks have come to, as far as this one knows
        self._call = -1  # the latest call of users' that has edited gradients
        self._number = rendezvous.serving.enroll("an edit of gradients", self._compare)

    def wait_for_all(self, call: int | None = None) -> None:
        """Waits until all ranks have come to the edit that this one is about to keep, which was made by `call` if that
        is known, and serves them meanwhile."""
        if call is not None and call == self._call:
            return
        self._call = self._call if call is None else call
        self._come += 1
        while self._all < self._come:
            self._all = max(self._all, self._rendezvous.course.call(self._number))

    def _compare(self, _: bool) -> int:
        """Returns the least number of edits that a rank has come to. One that has nothing more to do in this round has
        come to all of its own. Collective."""
        told = torch.tensor(
            [_ALL if self._rendezvous.serving.is_waiting else self._come], dtype=torch.int64, device=HOST
        )
        return int(self._comm.all_reduce(told, "edits of gradients", "min"))
