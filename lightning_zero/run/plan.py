"""`Plan`: what is gathered when, as all ranks have agreed; integers only.

Ranks mostly use the same units in the same order, step after step. A plan is made of that order. It says at which use
which units are gathered ahead, and from which use on which reductions may run; ranks that follow it need to tell each
other nothing. Room is for `room` units at a time, the least recently used goes first:

    room for 2, one ahead     use  0   1   2   2'  1'  0'          ' = in backward
                           gather 0,1  2           0'              unit 1 and 2 are still here when backward begins

A rank that wants something else *diverges*: it marks the next gather of the plan, and takes part in the rest of it
until all ranks have learnt of the mark (at the use of that gather, or one later). So a reduction that all ranks were
ready for at use k may start as soon as a rank that was not would have been heard, and no sooner.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final


@final
class Residents:
    """Which units are here: at most `room`, and those `apart`, which have room of their own and stay."""

    def __init__(self, room: int, apart: Collection[int] = ()) -> None:
        self.room = room
        self._apart = apart
        self._here: OrderedDict[int, None] = OrderedDict()  # the last used comes last

    def __contains__(self, number: int) -> bool:
        return number in self._here

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._here))

    def touch(self, number: int) -> None:
        """It is in use."""
        if number in self._here:
            self._here.move_to_end(number)

    def admit(self, number: int) -> int | None:
        """It comes. Returns the one that must go."""
        counted = [here for here in self._here if here not in self._apart]
        goes = counted[0] if number not in self._apart and len(counted) >= self.room else None
        if goes is not None:
            del self._here[goes]
        self._here[number] = None
        return goes

    def remove(self, number: int) -> None:
        self._here.pop(number, None)


@dataclass(frozen=True)
class Step:
    """One use, and what all ranks do when they come to it.

    Args:
        use: the unit, or the call, that is used.
        due: how many gradient groups, from the first of the agreed order, must be complete here; otherwise diverge.
        window: units that must not go yet.
        gathers: units to gather, in order.
        learns: the gathers of these units tell now whether a rank has diverged: before anything else, or if they begin
            at this use, after that.
        starts: reduce so many groups of the agreed order.
    """

    use: int
    due: int
    window: tuple[int, ...]
    gathers: tuple[int, ...]
    learns: tuple[int, ...]
    starts: int


Plan = tuple[Step, ...]  # of a round, in order; see the module's docstring


def make_plan(
    uses: Sequence[int], units: Collection[int], here: Residents, complete: Mapping[int, int], late: bool
) -> Plan:
    """Plans for an order of uses.

    Args:
        uses: what is used, one after the other. What is not among `units` is a call: nothing is gathered ahead.
        units: numbers of those that can be gathered ahead.
        here: as empty as the units are when the plan begins.
        complete: use -> how many gradient groups all ranks have had complete there; counts never fall.
        late: ranks learn of a mark one use after that of the gather.
    """
    reach = max(here.room, 1)
    steps = []
    learns: list[list[int]] = [[] for _ in uses]
    learnt_at: dict[int, list[int]] = {}  # use -> where the gathers issued there are learnt of
    for at in range(len(uses)):
        window = [number for number in uses[at : at + reach] if number in units]
        for number in window:
            here.touch(number)
        gathers = []
        for place, number in enumerate(uses[at : at + reach], at + late):
            if number in units and number not in here:
                here.admit(number)
                gathers.append(number)
                learnt_at.setdefault(at, []).append(place)
                if place < len(uses):
                    learns[place].append(number)
        due = max((count for use, count in complete.items() if use <= at), default=0)
        steps.append((uses[at], due, tuple(dict.fromkeys(window)), tuple(gathers)))
    starts = _starts(len(uses), complete, learnt_at)
    return tuple(Step(*step, tuple(learnt), start) for step, learnt, start in zip(steps, learns, starts, strict=True))


def _starts(length: int, complete: Mapping[int, int], learnt_at: Mapping[int, Sequence[int]]) -> list[int]:
    """At each use, how many groups may be reducing: those of which all ranks would have heard if one were not ready,
    by the mark in the first gather that such a rank begins."""
    starts = [0] * length
    for use, count in complete.items():
        marked = min((at for at in learnt_at if at >= use), default=None)
        first = length if marked is None else max(learnt_at[marked][0], marked + 1)
        for at in range(first, length):
            starts[at] = max(starts[at], count)
    return starts
