"""`rounds_of`: where in a step ranks meet, and what they do between two meetings. Integers only; see `rendezvous`."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_zero.run.plan import END, NEXT_BACKWARD, Residents, Step, ends_in_time, make_plan
from lightning_zero.run.program import Cause, Facts, Use


@dataclass(frozen=True)
class Round:
    """The uses from `start` on, up to the one at which ranks meet next, or the end of the step."""

    start: int
    stop: int
    steps: dict[int, Step]  # of its plan, by use


def rounds_of(facts: Facts, uses: Sequence[Use]) -> list[Round]:
    """Returns the rounds of a step that is like the one before it."""
    found, start = [], 0
    met = _meetings(facts, uses)
    between = [at for at, settles in met.items() if settles and uses[at].cause is Cause.BACKWARD and facts.spans]
    for stop in [at for at in [*met, len(uses)] if at not in between]:
        inside = [at for at in between if start <= at < stop]
        span = _round(facts, uses, start, stop, inside)
        if inside and ends_in_time(tuple(span.steps.values()), END, NEXT_BACKWARD, len(facts.order)):
            found.append(span)
        else:
            bounds = [start, *inside, stop]
            found += [_round(facts, uses, *both, ()) for both in pairwise(bounds)]
        start = stop
    return found


def _meetings(facts: Facts, uses: Sequence[Use]) -> dict[int, bool]:
    """Returns the uses at which ranks meet, if no round spans micro-batches, and whether they settle a backward there.
    Ranks that have read gradients meet once more before anything else that all do: one may have been alone."""
    found, is_unsettled, is_awaited = dict[int, bool](), False, False
    may_be_wanted, settles_at_end = bool(facts.units or facts.calls), facts.gathers_gradients or facts.steps_in_backward
    alone = settled_alone(facts, uses)
    for at, use in enumerate(uses):
        cause = use.cause
        is_unsettled &= at not in alone
        meets = {
            Cause.CALL: facts.meets_for(use),
            Cause.BACKWARD: is_unsettled or is_awaited,
            Cause.END: settles_at_end,
            Cause.UNSCALE: is_unsettled or may_be_wanted,
            Cause.CLIP: is_unsettled or may_be_wanted,
            Cause.LOOK: is_unsettled or may_be_wanted,
            Cause.MEASURE: is_unsettled or may_be_wanted,
            Cause.READ_GRADIENT: is_unsettled,
            Cause.STEP: may_be_wanted or not settles_at_end,
        }.get(cause, False)
        if meets:
            found[at] = is_unsettled or cause is Cause.END
            is_awaited = may_be_wanted and cause is Cause.READ_GRADIENT
        is_unsettled = (is_unsettled or cause is Cause.END) and not meets
    return found


def tells_ready(facts: Facts, uses: Sequence[Use]) -> bool:
    """Returns whether ranks tell each other in a backward that they reduce: where a reduction may wait for another
    rank, or where a step has several such backwards, of which each is settled by that, and not by a meeting."""
    repeats = [use.cause for use in uses].count(Cause.END) > 1
    return facts.may_wait or (repeats and facts.marks_reductions and facts.settles_alone)


def settled_alone(facts: Facts, uses: Sequence[Use]) -> set[int]:
    """Returns the beginnings of backwards, and reads of gradients, at which each rank settles the last one without the
    others: it has heard, in that one, that they reduce, and has all gradients."""
    found, there, is_over = set[int](), set[int](), False
    hears = facts.settles_alone and tells_ready(facts, uses)
    for at, (cause, number) in enumerate(uses):
        if cause is Cause.GRADIENT:
            there.add(number)
        elif cause is Cause.END:
            is_over = True
        elif cause in (Cause.BACKWARD, Cause.READ_GRADIENT) and is_over:
            if hears and there.issuperset(facts.order):
                found.add(at)
            there.clear()
            is_over = False
    return found


def _round(facts: Facts, uses: Sequence[Use], start: int, stop: int, inside: Collection[int]) -> Round:
    """Plans a round. `inside` it backwards begin after others whose gradients are reduced."""
    numbers: dict[int, int] = {}
    for at in range(start, stop):
        cause, number = uses[at]
        if cause is Cause.UNIT:
            numbers[at] = number
        elif cause is Cause.CALL and not facts.meets_for(uses[at]):
            numbers[at] = len(facts.units) + number
        elif cause in (Cause.END, Cause.KEPT) and facts.units:
            numbers[at] = END
        elif at in inside:
            numbers[at] = NEXT_BACKWARD
    complete = _complete_at(facts, uses, start, numbers)
    units = range(len(facts.units))
    plan = make_plan([*numbers.values()], units, residents(facts), complete, facts.learns_late)
    return Round(start, stop, dict(zip(numbers, plan, strict=True)))


def residents(facts: Facts) -> Residents:
    """Returns room for units, of which none is gathered."""
    return Residents(1 + facts.prefetch, {at for at, unit in enumerate(facts.units) if not unit.is_leaf})


def _complete_at(facts: Facts, uses: Sequence[Use], start: int, numbers: dict[int, int]) -> dict[int, int]:
    """Returns how many groups, of those that are reduced first, have all their gradients at uses of a round, by their
    place in it. Ranks know it from the step that they learnt from: from each use at which one of them asked for a unit,
    and from the end of each backward, after which they met."""
    here, found, complete, reduced = residents(facts), dict[int, int](), Complete(facts, uses), 0
    complete.settle(start)
    for place, (at, number) in enumerate(numbers.items()):
        complete.come_to(at)
        if number == NEXT_BACKWARD:
            here, reduced = residents(facts), reduced + len(facts.order)
        elif number == END:
            if uses[at].cause is Cause.END:
                found[place] = reduced + len(facts.order)
        elif number in here:
            here.touch(number)
        else:
            if number < len(facts.units):
                here.admit(number)
            found[place] = reduced + complete.count
    return found


class Complete:
    """Counts the groups that have all their gradients, from the first of those that are reduced."""

    def __init__(self, facts: Facts, uses: Sequence[Use]) -> None:
        self._facts, self._uses = facts, uses
        self._seen = 0  # uses
        self._there: set[int] = set()
        self._reduced, began = set[int](), 0  # beginnings of backwards whose gradients are reduced
        for at, (cause, _) in enumerate(uses):
            began = at if cause is Cause.BACKWARD else began
            if cause is Cause.END:
                self._reduced.add(began)
        self._is_reduced = False  # the last of these backwards
        self.count = 0

    def come_to(self, at: int) -> None:
        """Takes in the uses before one."""
        for seen in range(self._seen, at):
            use = self._uses[seen]
            if use.cause is Cause.BACKWARD:
                self._there.clear()
                self.count, self._is_reduced = 0, seen in self._reduced
            elif use.cause is Cause.GRADIENT and self._facts.overlaps and self._is_reduced:
                self._there.add(use.number)
                order = self._facts.order
                while self.count < len(order) and order[self.count] in self._there:
                    self.count += 1
        self._seen = max(self._seen, at)

    def settle(self, at: int) -> None:
        """Takes in the uses before one at which ranks meet, and have reduced what is complete."""
        self.come_to(at)
        self._there.clear()
        self.count = 0
