"""`Rendezvous`: makes all ranks issue the same gathers and reductions in the same order, also where they diverge.

It has two modes: ranks follow a plan (here), or ask each other (`serving`).

A gather needs every rank. A *round* is the time from one meeting of all ranks to the next; in training, it is a step.
Ranks that have used the same units in an earlier round follow its plan (`plan.Plan`), and send only the gathers. A rank
that needs something else *diverges*: it marks a gather. Once all ranks have learnt of the mark, each says what it wants
before it gathers, and all take part in everything that any rank wants. A rank that has come to the end of the round
serves the others until they have, too:

    rank 0   block.0   block.1   head.a    done      done
    rank 1   block.0   block.1   head.b    head.c    done
    served   block.0   block.1   both      head.c    (no rank wants anything: the round is over)

Where there are no units, a plan is of calls and of the first reduction of each backward. Beside it travels a mark,
which ranks read where they first wait for a reduction. If a rank has diverged, the others serve it there. Their
reductions under way wait for those that it begins when it comes to them.

Micro-batches that are reduced make one round where ranks have gradients of the same parameters as in the last such
round. A rank that has others diverges at the end of a backward, so before the next one all have heard if any does.

So a head that only one rank uses, uneven evaluation, `generate` of different lengths, and a sample that only rank 0
draws all work.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from lightning_zero.device import HOST
from lightning_zero.run.cache import UnitCache
from lightning_zero.run.journal import Journal
from lightning_zero.run.plan import ASK, END, NEXT_BACKWARD, REDUCE, Plan, Residents, Step, make_plan
from lightning_zero.run.plan_cache import NOTHING, Expected, Past, PlanCache
from lightning_zero.run.program import Cause
from lightning_zero.run.reductions import Reductions, Stage
from lightning_zero.run.replicas import Replicas
from lightning_zero.run.serving import Serving
from lightning_zero.shards.slot import no_interception
from lightning_zero.shards.unit import Unit
from lightning_zero.wire.comm import Gather
from lightning_zero.wire.mesh import Mesh


@dataclass
class _Round:
    """The current round of this rank: the plan that it follows, and what it has done."""

    expected: Expected = NOTHING  # its plan is None once it is not followed any longer
    start: int = 0  # the use at which the plan begins
    past: Past = field(default_factory=Past)
    in_flight: dict[int, Gather] = field(default_factory=dict)  # unit -> its gather, until it tells who diverges
    marks: Gather | None = None  # beside the first reduction of this backward, until they tell who diverges

    @property
    def plan(self) -> Plan | None:
        return self.expected.plan

    @property
    def at(self) -> int:
        """The next step of the plan."""
        return len(self.past.uses) - self.start

    def leave_plan(self) -> None:
        self.expected = NOTHING


@final
class Rendezvous:
    """Agrees on the next collectives among the ranks that share shards: by a plan, and where they part ways, by asking
    (`serving`). Numbers are those of `Serving`."""

    def __init__(self, mesh: Mesh, cache: UnitCache, reductions: Reductions) -> None:
        self._mesh = mesh
        self._is_alone = mesh.shard.size == 1 and not cache.units
        self._cache = cache
        self._units = cache.units
        self._reductions = reductions
        self._replicas = Replicas(mesh.replicate, reductions)
        self.serving = Serving(mesh.shard, cache, reductions, self._replicas)
        self.journal = Journal()
        self._plans = PlanCache(self._plan_of)
        self._order = reductions.shards  # in which plans count them
        self._round = _Round()
        self.is_awaited = False  # the others wait for this rank to meet them once more, as it was early

    def use(self, unit: Unit) -> None:
        """Has a unit gathered, or at least its gather under way."""
        number = self._cache.numbers[unit]
        uses = self._round.past.uses
        if uses and uses[-1] == number and unit.is_gathered:
            return
        self._arrive(number)

    def call(self, number: int) -> Any:
        """Has all ranks serve a call. Returns its result."""
        if self._is_alone:
            self.journal.note(Cause.CALL, number - len(self._units))
            self.serving.serve_call(number, True)
        else:
            self._arrive(number)
        return self.serving.take_result()

    def _arrive(self, number: int) -> None:
        self._hear_marks()
        is_unit = number < len(self._units)
        self.journal.note(Cause.UNIT if is_unit else Cause.CALL, number if is_unit else number - len(self._units))
        past = self._round.past
        if not past.uses:
            past.begins = (number, torch.is_grad_enabled())
        if self._round.plan is None or not self._follow(self._round.plan, number):
            if is_unit and self._units[number].is_gathered:
                self._cache.touch([number])
            else:
                self._ask(number)
        past.note(number)

    def _ask(self, number: int) -> None:
        heard = self.serving.exchange(number, self._round.past)
        if heard.agree:
            self._count_complete(heard.statement)
        self.serving.serve(heard.wants, number)
        if heard.agree and self._plans.is_on:
            self._look_for_plan(number)

    # -- by plan

    def _follow(self, plan: Plan, number: int) -> bool:
        """Does what the plan says for this use. Returns False if any rank diverges, this one included."""
        at, past = self._round.at, self._round.past
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
            self._reductions.settle_alike()
            self._round.past.reduced += len(self._reductions.shards)
        elif step.use == REDUCE:
            self._send_marks(diverges=not keep)
            return keep
        elif step.use == ASK and not keep:
            return False  # the others ask there: an exchange, in which they hear of it
        elif step.use >= len(self._units):
            self.serving.serve_call(step.use, keep)
        return not self._learn_of_divergence(number for number in step.learns if number in step.gathers)

    def _diverge(self, plan: Plan, at: int) -> None:
        """Leaves the plan before its step `at`, but takes part in it until the others have learnt of that."""
        marks = True
        for step in plan[at:]:
            if not self._take(step, keep=False, marks=marks):
                break
            marks = marks and not step.gathers
        self._stop()

    def _leave_plan(self) -> None:
        self._hear_marks()
        if (plan := self._round.plan) is not None:
            self._diverge(plan, self._round.at)  # at its end there is nothing to mark

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
        self._round.leave_plan()
        for number, gather in self._round.in_flight.items():
            gather.wait()
            if gather.has_divergence() and not self._mesh.shard.learns_late:
                self._cache.discard(number)
        self._round.in_flight.clear()

    @property
    def marks_reductions(self) -> bool:
        """Whether ranks that expect to reduce start without asking, and a mark travels beside the first reduction of
        each backward. Not where a collective waits for those before it, or is compared with what other ranks issue:
        what a rank that diverges wants could not pass the reductions that wait for it. Nor where backward steps, as the
        values that it wants would change."""
        comm, steps = self._mesh.shard, self._reductions.step is not None
        in_order = comm.keeps_order or comm.sanitize
        return self.spans and comm.size > 1 and not (self._units or in_order or steps)

    def _send_marks(self, *, diverges: bool) -> None:
        """Tells all ranks whether this one diverges before the first reduction of a backward. Those that do not begin
        to reduce, and hear of one that does before they wait. It joins their reductions when they have served it."""
        name = f"reduce {self._reductions.shards[0].group.name}"
        gather = self._mesh.shard.host.mark(name, diverges=diverges)
        if diverges:
            self.serving.marked = gather
        else:
            self._round.marks = gather
            self._reductions.wait_after(self._hear_marks)

    def _hear_marks(self) -> None:
        """Learns whether all ranks are about to reduce, before this one waits for them or does anything else with them.
        Where one has diverged, all serve it until they are."""
        marks, self._round.marks = self._round.marks, None
        if marks is None:
            return
        self._reductions.wait_after(None)
        marks.wait()
        if marks.has_divergence():
            self._stop()
            self._wait_until_all_reduce()
        else:
            self._note_that_all_reduce(each=True)

    # -- which plan

    def _look_for_plan(self, number: int) -> None:
        """Follows a plan from here on, if there is one. All ranks want `number`, and have used the same before it, so
        they all come to the same plan: that of the last round that began so, or of the last batch of an evaluation."""
        uses, expected = self._round.past.uses, NOTHING
        if not uses:
            expected = self._plans.beginning(number, enabled=torch.is_grad_enabled())
        elif number in uses and not (torch.is_grad_enabled() or self._reductions.stage is Stage.COLLECTING):
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
        units, late = range(len(self._units)), self._mesh.shard.learns_late
        return make_plan(uses, units, Residents(self._cache.room, self._cache.apart), complete, late)

    def _count_complete(self, statement: Tensor) -> int:
        """Notes how many gradient groups are complete on all ranks, and returns it. After a backward that is so since
        its end."""
        past, complete = self._round.past, self._reductions.count_complete_in(statement)
        is_over = self._reductions.stage is Stage.UNSETTLED and END in past.uses
        if self._units:  # elsewhere no plan starts reductions
            past.note_complete(past.last_end if is_over else len(past.uses), past.reduced + complete)
        return complete

    @property
    def spans(self) -> bool:
        """Whether a round may span micro-batches: only ranks that share shards know each other's plans."""
        return self._mesh.replicate.size == self._mesh.tensor.size == 1

    def expect_nothing(self) -> None:
        """Drops the plan of this round: all ranks are known to be here, and not to follow it."""
        self._round.leave_plan()

    def forget(self) -> None:
        """Drops all plans, and makes no more, as the units in them are about to be freed."""
        self._plans.close()
        self._round.leave_plan()

    # -- meeting

    def meet(self, *, early: bool = False, continues: bool = False) -> bool:
        """Ends the round: serves the other ranks until all have come here, and settles the gradients of a backward.
        Collective; collectives of the engine that are not issued above must come after a meeting. A rank that is
        `early` may want something alone before the step, and meets once more. Returns whether any rank does.
        `continues`: another micro-batch of the same step follows."""
        if self._is_alone:
            self._settle(self._reductions.statement(), early=early)
            return False
        self._leave_plan()
        past, groups = self._round.past, len(self._reductions.shards)
        self.is_awaited = early and self.serving.may_be_wanted
        heard = self.serving.until_end(past, early=early, continues=continues)
        self.serving.knew_all = False
        self._replicas.join(heard.statement)
        is_over = self._count_complete(heard.statement) == groups and END in past.uses
        continues &= is_over and heard.alike and not heard.early
        self._plans.learn(past, groups, self._reductions.pattern, agree=heard.agree, continues=continues)
        self._begin_round(self._plans.expected)
        self._cache.discard_all()
        return self._settle(heard.statement, early=heard.early) and self.serving.may_be_wanted

    def meet_all(self) -> None:
        """Meets until no rank is early: such a rank may have wanted something since it met. Collective."""
        while self.meet():
            pass

    def meet_before_collective(self) -> None:
        """Meets, if a rank may want something alone that the others must serve first."""
        if self.serving.may_be_wanted:
            self.meet_all()

    def _begin_round(self, expected: Expected = NOTHING) -> None:
        self._round = _Round(expected)
        self.serving.begin_round()
        self._replicas.begin_round()

    def _settle(self, statement: Tensor, *, early: bool) -> bool:
        """Settles gradients by the statements of all ranks: `statement`, and whether any is `early`, is of those that
        share shards. Returns whether any rank is early."""
        said = torch.cat([statement, torch.tensor([early], dtype=torch.uint8, device=HOST)])
        for comm in (self._mesh.replicate, self._mesh.tensor):
            if comm.size > 1:
                said = comm.host.all_reduce(said, "settle", "max")
        self._reductions.settle(said[:-1])
        if self._order != self._reductions.shards:  # ranks have just changed it, or added to it
            self._order = self._reductions.shards
            self._plans.clear()
            self._begin_round()
        return bool(said[-1])

    # -- backward

    def start_reductions(self, number: int) -> None:
        """Starts the first `number` reductions; not at stage 3, where gathers tell when all ranks are ready.

        A reduction may wait for another rank, which never comes if it wants something alone, or has no gradients. So
        ranks serve each other until all are about to reduce, or have come to the end of the round.
        """
        if self._units or number <= self._reductions.started:
            return
        if self._reductions.may_wait and not self.serving.reduces and self._round.marks is None:
            plan, past = self._round.plan, self._round.past
            if plan is None or not self._follow(plan, REDUCE):
                self._wait_until_all_reduce()
            if self.marks_reductions:
                past.begins = past.begins or (REDUCE, False)
                past.note(REDUCE)
        self._replicas.start(number)

    def _wait_until_all_reduce(self) -> None:
        self.serving.reduces = True
        heard = self.serving.until_all_reduce(self._round.past)
        self._note_that_all_reduce(each=not heard.ended)

    def _note_that_all_reduce(self, *, each: bool) -> None:
        """Notes that no rank wants anything before it reduces. `each` has gradients of its own."""
        self.serving.reduces, self.serving.knew_all = True, False
        self.serving.all_reduce = self._reductions.may_settle_alone and self.spans and each

    def end_backward(self) -> None:
        """Notes the end of a backward among the uses of units."""
        if not self._units:
            return
        plan, at, pattern = self._round.plan, self._round.at, self._reductions.pattern
        if plan is not None and self._round.expected.patterns.get(at, pattern) != pattern:
            self._diverge(plan, at)
        elif plan is not None:
            self._follow(plan, END)
        past = self._round.past
        past.ended[len(past.uses)] = pattern
        past.note(END)

    def settle_last_backward(self) -> None:
        """Settles the gradients of the backward before the one that begins: by what is known of the other ranks, and
        otherwise by meeting. Collective."""
        self._hear_marks()
        if self.serving.all_reduce:
            self._settle_alone()
            return
        plan, at = self._round.plan, self._round.at
        if plan is not None and at < len(plan) and plan[at].use == NEXT_BACKWARD:
            with no_interception(), torch.no_grad():
                if self._follow(plan, NEXT_BACKWARD):
                    self._round.past.note(NEXT_BACKWARD)
                    return
        if not self._settles_by_leaving() and self.meet(continues=self.spans):
            self.meet_all()

    def settle_gradients(self, *, meets: bool = False) -> None:
        """Makes ranks agree on which parameters have gradients, if they have not since the last backward. With `meets`,
        ranks also meet if one of them may have read gradients alone, so that another collective may follow."""
        self._hear_marks()
        is_unsettled = self._reductions.stage is Stage.UNSETTLED
        with no_interception(), torch.no_grad():
            if meets and (is_unsettled or self.serving.may_be_wanted):
                self.meet_all()
            elif is_unsettled and self.serving.all_reduce:
                self._settle_alone()
            elif is_unsettled and not self._settles_by_leaving():
                self.meet(early=True)

    def _settles_by_leaving(self) -> bool:
        """Leaves the plan. Returns whether the last backward is settled then, as the others begin the next one before
        they learn that this rank has left: they meet no more for it."""
        with no_interception(), torch.no_grad():
            self._leave_plan()
        return self._reductions.stage is not Stage.UNSETTLED and not self.is_awaited

    def _settle_alone(self) -> None:
        """Settles gradients whose reductions all ranks start by themselves, as each has said that it has some. If every
        parameter has one here, nothing is to be learnt from the others. Otherwise this rank asks, and all settle that
        have not yet."""
        if self._reductions.is_complete:
            self.serving.settle_alone(None)
            self.serving.knew_all = True
            return
        plan, past = self._round.plan, self._round.past
        follows = plan is not None and self._follow(plan, ASK)
        if not self.serving.until_settled(past, follows=follows):
            self._round.leave_plan()
        if self.marks_reductions:
            past.note(ASK)

    def forget_backward(self) -> None:
        """Forgets what was known of a backward, which has failed on every rank. Its plan would start reductions in the
        next one, before that has gradients; and a plan of this round would count its gradients. Where ranks start
        reductions by themselves, others may wait in some that this rank has not come to, or for it to come to any."""
        with no_interception(), torch.no_grad():
            self._leave_plan()
        if self._reductions.reduces and self._reductions.step is None:
            self.start_reductions(len(self._reductions.shards))
        self.serving.reduces = self.serving.all_reduce = False
        self._round.past.has_failed = True
