"""`EditBarrier`: where ranks wait for each other before they keep edits of values that all of them use."""

from collections.abc import Callable
from enum import IntEnum
from typing import final

import torch

from lightning_zero.device import HOST
from lightning_zero.run.rendezvous import Rendezvous


class Place(IntEnum):
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
        self._place = Place.ELSEWHERE
        self._number = rendezvous.serving.enroll("an edit of weights", self._compare)

    def wait_for_all(self, place: Place) -> None:
        """Waits until all ranks have come to the edit that this one is about to keep, and serves them meanwhile."""
        self._place = place
        while self._rendezvous.course.call(self._number) < place:
            pass
        self._place = Place.ELSEWHERE

    def _compare(self, _: bool) -> int:
        """Returns the place of the rank that is farthest from a boundary. One that has nothing more to do in this round
        makes no edit before one. If all are there, those that only wait share their edits with those that go on.
        Collective."""
        place = Place.BOUNDARY if self._rendezvous.serving.is_waiting else self._place
        told = torch.tensor([place], dtype=torch.uint8, device=HOST)
        nearest = int(self._comm.all_reduce(told, "edit", "min"))
        if nearest == Place.BOUNDARY and self._place is not Place.BOUNDARY:
            self._share()
        return nearest
