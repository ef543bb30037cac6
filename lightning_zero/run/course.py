"""`Course`: what a rank uses, one thing after another: by a plan, until any rank leaves it, or by asking the others.
See `rendezvous`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, final

import torch

from lightning_zero.run.cache import UnitCache
from lightning_zero.run.journal import Journal
from lightning_zero.run.plan import ASK, END, NEXT_BACKWARD, REDUCE, Plan, Residents, Step, make_plan
from lightning_zero.run.plan_cache import NOTHING, Expected, Past, PlanCache
from lightning_zero.run.program import Cause
from lightning_zero.run.readiness import Readiness
from lightning_zero.run.reductions import GradientState, Reductions
from lightning_zero.run.replicas import Replicas
from lightning_zero.run.serving import Serving
from lightning_zero.run.statement import Statement
from lightning_zero.shards.unit import Unit
from lightning_zero.wire.comm import Comm, Gather


class Waits(Enum):
    """Why a call of all ranks is not done yet."""

    BUSY = auto()  # another rank wants something else first
    EARLY = auto()  # another rank looks at gradients first, and waits for this one to meet it


@dataclass
class _Round:
    """The current round of this rank: the plan that it follows, and what it has done."""

    expected: Expected = NOTHING  # its plan is None once it is not followed any longer
    start: int = 0  # the use at which the plan begins
    past: Past = field(default_factory=Past)
    in_flight: dict[int, Gather] = field(default_factory=dict)  # unit -> its gather, until it tells who diverges


@final
class Course:
    """The uses of this rank in the current round, the plan that it follows in it, if any, and those of earlier rounds.
    Numbers are those of `Serving`."""

    def __init__(
        self,
        comm: Comm,
        cache: UnitCache,
        reductions: Reductions,
        replicas: Replicas,
        serving: Serving,
        readiness: Readiness,
        journal: Journal,
    ) -> None:
        self.is_alone = comm.size == 1 and not cache.units  # there is nobody to agree with
        self._learns_late = comm.learns_late
        self._cache = cache
        self._units = cache.units
        self._reductions = reductions
        self._replicas = replicas
        self._serving = serving
        self._readiness = readiness
        self._journal = journal
        self._round = _Round()
        self._plans = PlanCache(self._plan_of)
        self._order = reductions.gradients  # in which plans count them

    @property
    def past(self) -> Past:
        """What this rank has done in the current round."""
        return self._round.past

    def use(self, unit: Unit) -> None:
        """Has a unit gathered, or at least its gather under way."""
        number = self._cache.numbers[unit]
        uses = self.past.uses
        if uses and uses[-1] == number and unit.is_gathered:
            return
        self.call(number)

    def call(self, number: int, is_done: Callable[[], bool] | None = None) -> Any:
        """Has all ranks gather a unit, or serve a call. Returns the result of the call; `Waits` if it is of all ranks,
        and others want something else before. `is_done` tells whether it has been, as this rank has left the plan."""
        self.hear_marks()
        is_unit = self.note(number)
        if self.is_alone:
            self._serving.serve([number], number)
            return self._serving.take_result()
        past = self.past
        if not past.uses:
            past.begins = (number, torch.is_grad_enabled())
        if self.follow(number) or (is_done is not None and is_done()):
            pass  # the plan has had it done, or others have
        elif is_unit and self._units[number].is_gathered:
            self._cache.touch([number])
        else:
            heard = self._serving.exchange(number, past)
            if heard.agree:
                self.count_complete(heard.statement)
            self._serving.serve(heard.wants, number, early=heard.early)
            if heard.agree:
                self._look_for_plan(number)
            if not self._serving.is_due(number, heard.wants, early=heard.early):
                return Waits.EARLY if heard.early else Waits.BUSY
        past.note(number)
        return self._serving.take_result()

    def note(self, number: int) -> bool:
        """Notes a use in the journal. Returns whether it is one of a unit."""
        is_unit = number < len(self._units)
        self._journal.note(Cause.UNIT if is_unit else Cause.CALL, number if is_unit else number - len(self._units))
        return is_unit

    # -- which plan

    def _look_for_plan(self, number: int) -> None:
        """Follows a plan from here on, if there is one. All ranks want `number`, and have used the same before it, so
        they all come to the same plan: that of the last round that began so, or of the last batch of an evaluation."""
        if not self._plans.is_on:
            return
        uses, expected = self.past.uses, NOTHING
        if not uses:
            expected = self._plans.beginning(number, enabled=torch.is_grad_enabled())
        elif number in uses and not (torch.is_grad_enabled() or self._reductions.state is GradientState.COLLECTING):
            # One batch after another. A backward may use a unit again, too, but is none.
            expected = Expected(self._plan_of(uses[len(uses) - uses[::-1].index(number) - 1 :], {}))
            self._cache.discard_all(but=number)  # as the plan expects
        self._round.expected = expected
        if expected.plan is None:
            return
        self._round.start = len(uses)
        first = expected.plan[0]
        self._cache.touch(first.window)
        for ahead in first.gathers:
            if ahead != number:
                self._round.in_flight[ahead] = self._cache.gather(ahead, diverges=False)

    def _plan_of(self, uses: list[int], complete: Mapping[int, int]) -> Plan:
        residents = Residents(self._cache.room, self._cache.apart)
        return make_plan(uses, range(len(self._units)), residents, complete, self._learns_late)

    def end_round(self, *, agree: bool, continues: bool) -> None:
        """Learns the plan of the round that is over, and begins the next one; see `PlanCache.learn`."""
        groups, pattern = len(self._reductions.gradients), self._reductions.pattern
        self._plans.learn(self.past, groups, pattern, agree=agree, continues=continues)
        self._round = _Round(self._plans.expected)

    def forget_old_order(self) -> bool:
        """Drops all plans if ranks have just changed the order of gradient groups, or added to it, and begins the round
        anew. Returns whether they have."""
        if self._order == self._reductions.gradients:
            return False
        self._order = self._reductions.gradients
        self._plans.clear()
        self._round = _Round()
        return True

    def close(self) -> None:
        """Drops all plans, and makes no more, as the units in them are about to be freed."""
        self._plans.close()
        self.drop()

    # -- as the plan says

    @property
    def _at(self) -> int:
        """The next step of the plan."""
        return len(self._round.past.uses) - self._round.start

    def expects(self, number: int) -> bool:
        """Whether a plan is followed, and this is its next use."""
        plan, at = self._round.expected.plan, self._at
        return plan is not None and at < len(plan) and plan[at].use == number

    def follow(self, number: int) -> bool:
        """Does what the plan says for this use. Returns False if there is none, or if any rank diverges, this one
        included."""
        plan, past = self._round.expected.plan, self._round.past
        if plan is None:
            return False
        at = self._at
        step = plan[at] if at < len(plan) else None
        complete = past.reduced + self._reductions.count_complete()
        if step is None or step.use != number or complete < step.due:
            self._diverge(plan, at)
            return False
        if not self._take(step, keep=True):
            return False
        past.note_complete(len(past.uses), step.due)
        if 0 <= number < len(self._units) and not self._units[number].is_gathered:  # an edit has made it stale
            self._diverge(plan, at + 1)
            return False
        return True

    def _take(self, step: Step, *, keep: bool, marks: bool = False) -> bool:
        """Takes part in a step of the plan, and keeps the results if this rank follows it, or `marks` the first gather.
        Returns False if a rank turns out to have diverged before this step."""
        if self._learn_of_divergence(number for number in step.learns if number not in step.gathers):
            return False
        self._replicas.start(step.starts - self._round.past.reduced)
        self._cache.touch(step.window)
        for number in step.gathers:
            if keep:
                self._round.in_flight[number] = self._cache.gather(number, diverges=False)
            else:
                self._round.in_flight[number] = self._units[number].pass_by(marks)
                marks = False
        if step.use == NEXT_BACKWARD:
            if not self._replicas.settle_alike():
                self._stop()
                return False
            self._round.past.reduced += len(self._reductions.gradients)
        elif step.use == REDUCE:
            self._readiness.send_mark(diverges=not keep)
            return keep
        elif step.use == ASK and not keep:
            return False  # the others ask there: an exchange, in which they hear of it
        elif step.use >= len(self._units):
            self._serving.serve([step.use], step.use if keep else None)
        return not self._learn_of_divergence(number for number in step.learns if number in step.gathers)

    def end_backward(self) -> None:
        """Notes the end of a backward. A rank diverges there whose gradients are not those that its plan goes by."""
        expected, past, pattern = self._round.expected, self._round.past, self._reductions.pattern
        if expected.patterns.get(self._at, pattern) != pattern:
            self.diverge()
        else:
            self.follow(END)
        past.ended[len(past.uses)] = pattern
        past.note(END)

    def count_complete(self, statement: Statement) -> int:
        """Notes how many gradient groups are complete on all ranks, and returns it. After a backward that is so since
        its end."""
        past, complete = self._round.past, statement.complete
        is_over = self._reductions.state is GradientState.UNSETTLED and END in past.uses
        if self._units:  # elsewhere no plan starts reductions
            past.note_complete(past.last_end if is_over else len(past.uses), past.reduced + complete)
        return complete

    # -- reductions that all ranks begin

    def hear_marks(self) -> None:
        """Learns whether all ranks are about to reduce, before this one waits for them or does anything else with them.
        Where one has diverged, all serve it until they are."""
        if self._readiness.marks is None:
            return
        self._reductions.wait_after(None)
        if self._readiness.hear_marks():
            self._stop()
            self.wait_until_all_reduce()

    def wait_until_all_reduce(self) -> None:
        """Serves the others until all ranks are about to reduce, or have come to the end of the round."""
        self._readiness.all_reduce = True
        heard = self._serving.until_all_reduce(self.past)
        self._readiness.note_that_all_reduce(each=not heard.ended)

    # -- no longer

    def diverge(self) -> None:
        """Diverges from the plan, if there is one; at its end there is nothing to mark."""
        self.hear_marks()
        if (plan := self._round.expected.plan) is not None:
            self._diverge(plan, self._at)

    def _diverge(self, plan: Plan, at: int) -> None:
        """Leaves the plan before its step `at`, but takes part in it until the others have learnt of that."""
        marks = True
        for step in plan[at:]:
            if not self._take(step, keep=False, marks=marks):
                break
            marks = marks and not step.gathers
        self._stop()

    def _learn_of_divergence(self, numbers: Iterable[int]) -> bool:
        """Whether a rank has marked one of these gathers. Then no rank follows the plan any longer."""
        for number in numbers:
            gather = self._round.in_flight.get(number)
            if gather is not None:
                gather.wait()
                if gather.has_divergence():
                    self._stop()
                    return True
                del self._round.in_flight[number]
        return False

    def _stop(self) -> None:
        """Ends the plan, as all ranks do here. Units gathered with a mark are void, unless marks travel beside them."""
        self.drop()
        for number, gather in self._round.in_flight.items():
            gather.wait()
            if gather.has_divergence() and not self._learns_late:
                self._cache.discard(number)
        self._round.in_flight.clear()

    def drop(self) -> None:
        """Drops the plan of this round: all ranks are known to be here, and not to follow it."""
        self._round.expected = NOTHING
