"""`Plan`: which units are gathered at which use, and from where reductions may run; integers only.

Ranks mostly use the same units in the same order, step after step. A plan is made from that order: it says at which use
each unit is gathered, some uses ahead, and from which use on each reduction may run. Ranks that follow it send no other
messages. There is room for `room` units at a time, and the least recently used one is evicted first:

    room for 2, one ahead     use  0   1   2   2'  1'  0'          ' = in backward
                           gather 0,1  2           0'              units 1 and 2 are still gathered when backward begins

A rank that wants something else *diverges*: it marks the next gather of the plan, and takes part in the plan until all
ranks have learnt of the mark (at the use of the gathered unit, or one use later). A reduction that all ranks were ready
for at use k therefore starts where a rank that was not ready would have been heard of, and not earlier. If a step has
several micro-batches that are reduced, a plan may span them, and counts their gradient groups one after another.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final


@final
class Residents:
    """The numbers of the units that are gathered, least recently used first: at most `room` of them, beside those in
    `apart`, which have buffers of their own and are never evicted."""

    def __init__(self, room: int, apart: Collection[int] = ()) -> None:
        self.room = room
        self._apart = apart
        self._here: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, number: int) -> bool:
        return number in self._here

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._here))

    def touch(self, number: int) -> None:
        """Makes a unit the most recently used one, if it is gathered."""
        if number in self._here:
            self._here.move_to_end(number)

    def admit(self, number: int) -> int | None:
        """Adds a unit. Returns the one that is evicted for it, if any."""
        counted = [here for here in self._here if here not in self._apart]
        evicted = counted[0] if number not in self._apart and len(counted) >= self.room else None
        if evicted is not None:
            del self._here[evicted]
        self._here[number] = None
        return evicted

    def remove(self, number: int) -> None:
        self._here.pop(number, None)


@dataclass(frozen=True)
class Step:
    """One use of a plan, and what every rank does at it."""

    use: int  # the unit or call that is used
    due: int  # a rank diverges unless so many gradient groups of the round, in their order, are complete on it
    window: tuple[int, ...]  # units that must not be evicted
    gathers: tuple[int, ...]  # units to gather, in order
    # Units whose gathers tell here whether a rank has diverged: before anything else, or last if they begin here.
    learns: tuple[int, ...]
    starts: int  # reductions of so many of these groups are started


Plan = tuple[Step, ...]  # of one round, in order

# Uses that are no unit and no call: a backward begins, and ranks have not met since the one before it; a backward ends.
NEXT_BACKWARD, END = -1, -2
# Where there are no units: the first reduction of a backward, with a mark beside it; ranks ask each other which
# parameters have gradients.
REDUCE, ASK = -3, -4


def make_plan(
    uses: Sequence[int], units: Collection[int], here: Residents, complete: Mapping[int, int], late: bool
) -> Plan:
    """Plans a round that uses `uses` in order.

    Args:
        uses: units and calls. A number that is not in `units` is a call, which is never done ahead.
        units: numbers of the units.
        here: empty, as no unit is gathered when the plan begins.
        complete: use -> how many gradient groups were complete there on all ranks; counts never fall.
        late: ranks learn of a mark one use after that of the marked gather.
    """
    steps = []
    learns: list[list[int]] = [[] for _ in uses]
    learnt_at: dict[int, int] = {}  # use -> where ranks learn of a mark in the first gather that is issued at it
    due = 0
    for at in range(len(uses)):
        window = [number for number in uses[at : at + here.room] if number in units]
        for number in window:
            here.touch(number)
        gathers = []
        for place, number in enumerate(uses[at : at + here.room], at + late):
            if number in units and number not in here:
                here.admit(number)
                gathers.append(number)
                learnt_at.setdefault(at, place)
                if place < len(uses):
                    learns[place].append(number)
        due = max(due, complete.get(at, 0))
        steps.append((uses[at], due, tuple(dict.fromkeys(window)), tuple(gathers)))
    starts = _starts(len(uses), complete, learnt_at)
    return tuple(Step(*step, tuple(learnt), start) for step, learnt, start in zip(steps, learns, starts, strict=True))


def _starts(length: int, complete: Mapping[int, int], learnt_at: Mapping[int, int]) -> list[int]:
    """Returns, for each use, how many groups may be reducing: those of which every rank would have learnt by then if a
    rank had not been ready. Such a rank marks the first gather that it begins."""
    first = [0] * (length + 1)  # how many groups start there at the earliest
    gathers = sorted(learnt_at)
    for use, count in complete.items():
        place = bisect_left(gathers, use)
        marked = gathers[place] if place < len(gathers) else length
        at = min(length, max(learnt_at.get(marked, 0), marked + 1))
        first[at] = max(first[at], count)
    return list(accumulate(first[:length], max))


def ends_in_time(plan: Plan, end: int, following: int, groups: int) -> bool:
    """Whether all `groups` of each micro-batch but the last are being reduced when its `following` backward begins, and
    a rank that diverges from the `end` of the micro-batch on would have been heard of by then."""
    ended = begun = 0
    for at, step in enumerate(plan):
        if step.use == end:
            ended = at
        elif step.use == following:
            begun += groups
            marks = next((place for place in range(ended + 1, at) if plan[place].gathers), at)
            if step.starts < begun or marks == at:
                return False
            if not any(plan[marks].gathers[0] in later.learns for later in plan[marks : at + 1]):
                return False
    return True
