"""`EditBarrier` and `GradientEdits`: where ranks wait for each other at edits of values of which each has a part."""

from collections.abc import Callable
from enum import IntEnum
from typing import final

import torch

from lightning_zero.device import HOST
from lightning_zero.run.lasting import LastingLoans
from lightning_zero.run.rendezvous import Rendezvous

_ALL = torch.iinfo(torch.int64).max  # edits


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


@final
class GradientEdits:
    """A rank that others do not hold up edits a gradient before they do. It waits for them where it reads one again:
    they would send it their parts as they were before the edit."""

    def __init__(self, rendezvous: Rendezvous, lasting: LastingLoans) -> None:
        self._comm = rendezvous.comm.host
        self._rendezvous = rendezvous
        self._lasting = lasting  # counts the edits of this rank
        self._made = 0  # of these, how many all ranks have edited, as far as this one knows
        self._number = rendezvous.serving.enroll("an edit of gradients", self._compare)

    def wait_for_all(self) -> None:
        """Waits until all ranks have made the edits that this one has made, and serves them meanwhile."""
        while self._made < self._lasting.edited_gradients:
            self._made = max(self._made, self._rendezvous.course.call(self._number))

    def _compare(self, _: bool) -> int:
        """Returns the least number of edits that a rank has made. One that has nothing more to do in this round has
        made its own. Collective."""
        own = self._lasting.edited_gradients
        told = torch.tensor([_ALL if self._rendezvous.serving.is_waiting else own], dtype=torch.int64, device=HOST)
        return min(own, int(self._comm.all_reduce(told, "edits of gradients", "min")))
