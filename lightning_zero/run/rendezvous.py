"""Gathers in company: ranks go the same way without a word, and may go apart at any time.

A gather needs every rank. A *round* is the time from one meeting of all ranks to the next: in training, a step. Ranks
that have gone the same way in an earlier round follow its plan in this one (`plan.Plan`), and send nothing but the
gathers. A rank that wants something else *diverges*: it marks a gather, and from where all have learnt of it to the end
of the round every rank says what it wants before it gathers; all serve all that is wanted, and a rank that has come to
the end serves the others until they have too.

    rank 0   block.0   block.1   head.a    done      done
    rank 1   block.0   block.1   head.b    head.c    done
    served   block.0   block.1   both      head.c    (nobody wants any: the round is over)

So a head that one rank does not use, uneven evaluation, `generate` of other lengths and a sample that only rank 0 draws
all come to their end; and whatever happens, all ranks issue the same collectives in the same order, the reductions of
gradients among them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import Tensor

from lightning_zero.run.cache import UnitCache
from lightning_zero.run.plan import Plan, Residents, Step, make_plan
from lightning_zero.run.reductions import Reductions, Stage
from lightning_zero.shards.slot import no_interception
from lightning_zero.shards.unit import Unit
from lightning_zero.wire.comm import Gather, RankTimeoutError
from lightning_zero.wire.mesh import Mesh

_LONGEST = 10_000  # uses; a longer round (an evaluation of many batches) is not planned as a whole
_MOST_PLANS = 16
_HASH = 2**61 - 1


class _Call(NamedTuple):
    """Something that can be wanted and is no unit: it is never done ahead."""

    label: str  # for messages
    serve: Callable[[bool], None]  # a collective; told whether this rank wants its result


class _Heard(NamedTuple):
    """What all ranks have said in one exchange."""

    wants: list[int]  # of any rank, in order; empty where all have come to the end
    agree: bool  # all want the same, and have used the same before
    early: bool  # a rank will come again before the step
    statement: Tensor  # see `Reductions`


@dataclass
class _Round:
    """What this rank knows of the time since ranks have met."""

    plan: Plan | None = None  # while it is followed
    start: int = 0  # which use is the plan's first
    uses: list[int] = field(default_factory=list)
    digest: int = 0  # of the uses
    begins: tuple[int, bool] | None = None  # what was used first, and whether gradients were on
    complete: dict[int, int] = field(default_factory=dict)  # use -> gradient groups that were complete on all ranks
    in_flight: dict[int, Gather] = field(default_factory=dict)  # unit -> its gather, until it tells who diverges
    reduces: bool = False  # all ranks are known to reduce the gradients of this round


@final
class Rendezvous:
    """Agrees on what is gathered next, among the ranks that share shards; what is wanted has a number: a unit its place
    in the cache, calls those after."""

    def __init__(self, mesh: Mesh, cache: UnitCache, reductions: Reductions) -> None:
        self._mesh = mesh
        self._comm = mesh.shard.host
        self._is_alone = mesh.shard.size == 1 and not cache.units
        self._cache = cache
        self._units = cache.units
        self._reductions = reductions  # started where all ranks are ready for them
        self._calls: list[_Call] = []
        self._round = _Round()
        self._plans_ahead = True
        self._plans: dict[int, Plan] = {}  # kind of a round (the digest of its uses) -> its plan
        self._next: dict[tuple[int, int], int] = {}  # what came before a round -> its kind, the last time
        self._beginnings: dict[tuple[int, bool], int] = {}  # how a round begins -> its kind
        self._was_early = False  # when it last met
        self._before = (0, 0)  # kind of the last round with uses in which all ranks went one way; empty ones since

    def enroll(self, label: str, serve: Callable[[bool], None]) -> int:
        """Returns the number under which `call` asks for it; enroll the same on every rank. See `_Call`."""
        self._calls.append(_Call(label, serve))
        return len(self._units) + len(self._calls) - 1

    def use(self, unit: Unit) -> None:
        """Returns when the unit is gathered, or on its way."""
        number = self._cache.numbers[unit]
        if self._round.uses and self._round.uses[-1] == number and unit.is_gathered:
            return
        self._arrive(number)

    def call(self, number: int) -> None:
        """Returns when the call has been served."""
        if self._is_alone:
            self._calls[number].serve(True)
        else:
            self._arrive(number)

    def _arrive(self, number: int) -> None:
        if not self._round.uses:
            self._round.begins = (number, torch.is_grad_enabled())
        if self._round.plan is None or not self._follow(self._round.plan, number):
            if number < len(self._units) and self._units[number].is_gathered:
                self._cache.touch([number])
            else:
                self._ask(number)
        self._round.uses.append(number)
        self._round.digest = (self._round.digest * 1_000_003 + number + 1) % _HASH

    @property
    def _to_reduce(self) -> int:
        """What a rank wants that is about to reduce."""
        return len(self._units) + len(self._calls)

    def _serve(self, wants: Iterable[int], own: int | None) -> None:
        """Does all that is wanted, and keeps what this rank wants."""
        for want in wants:
            if want == self._to_reduce:
                if own is None:  # this rank has no gradients, and contributes zeros
                    self._reductions.start_all()
            elif want >= len(self._units):
                self._calls[want - len(self._units)].serve(want == own)
            elif want == own:
                self._cache.gather(want)
            else:
                self._units[want].pass_by()

    # -- by plan

    def _follow(self, plan: Plan, number: int) -> bool:
        """Does what all ranks do at this use; False where ranks go, or this one wants to go, another way."""
        at = len(self._round.uses) - self._round.start
        step = plan[at] if at < len(plan) else None
        if step is None or step.use != number or self._reductions.count_complete() < step.due:
            self._diverge(plan, at)
            return False
        if not self._take(step, keep=True):
            return False
        if number < len(self._units) and not self._units[number].is_gathered:  # an edit has made it stale
            self._diverge(plan, at + 1)
            return False
        return True

    def _take(self, step: Step, *, keep: bool, marks: bool = False) -> bool:
        """What all ranks do at one use of the plan; False where a rank is learnt to have diverged before it."""
        if self._learn_of_divergence(number for number in step.learns if number not in step.gathers):
            return False
        self._reductions.start(step.starts)
        self._cache.touch(step.window)
        for number in step.gathers:
            if keep:
                self._round.in_flight[number] = self._cache.gather(number, diverges=False)
            else:
                self._round.in_flight[number] = self._units[number].pass_by(marks)
                marks = False
        if step.use >= len(self._units):
            self._calls[step.use - len(self._units)].serve(keep)
        return not self._learn_of_divergence(number for number in step.learns if number in step.gathers)

    def _diverge(self, plan: Plan, at: int) -> None:
        """Leaves the plan before its step `at`: takes part in it until the others have learnt of it."""
        marks = True
        for step in plan[at:]:
            if not self._take(step, keep=False, marks=marks):
                return
            marks = marks and not step.gathers
        self._stop()

    def _leave_plan(self) -> None:
        if (plan := self._round.plan) is not None:
            self._diverge(plan, len(self._round.uses) - self._round.start)  # at its end there is nothing to mark

    def _learn_of_divergence(self, numbers: Iterable[int]) -> bool:
        """Whether a rank has marked one of these gathers; then nobody follows the plan any longer."""
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
        """Leaves the plan, as all ranks do. What was gathered with a mark is void, unless marks travel beside."""
        self._round.plan = None
        for number, gather in self._round.in_flight.items():
            gather.wait()
            if gather.has_divergence() and not self._mesh.shard.learns_late:
                self._cache.discard(number)
        self._round.in_flight.clear()

    # -- by asking

    def _ask(self, number: int) -> None:
        heard = self._exchange(number)
        if heard.agree:
            self._round.complete[len(self._round.uses)] = self._reductions.count_complete_in(heard.statement)
        self._serve(heard.wants, number)
        if heard.agree and self._plans_ahead:
            self._look_for_plan(number)

    def _look_for_plan(self, number: int) -> None:
        """All ranks want the same, and have done the same: what followed the last time may follow now."""
        plan, uses = None, self._round.uses
        if not uses:
            plan = self._plans.get(self._beginnings.get((number, torch.is_grad_enabled()), 0))
        elif not torch.is_grad_enabled() and number in uses:  # one batch after the other
            plan = self._plan_of(uses[len(uses) - uses[::-1].index(number) - 1 :], {})
            self._cache.discard_all(but=number)  # as the plan expects it
        if plan is None:
            return
        self._round.plan, self._round.start = plan, len(uses)
        self._cache.touch(plan[0].window)
        for ahead in plan[0].gathers:
            if ahead != number:
                self._round.in_flight[ahead] = self._cache.gather(ahead, diverges=False)

    def _exchange(self, number: int | None, *, early: bool = False) -> _Heard:
        """Says what this rank wants (None: nothing more in this round), and hears what the others want."""
        known = self._to_reduce + 1
        wants = bytearray(known)
        if number is not None:
            wants[number] = 1
        want = known if number is None else number
        state = (want, len(self._round.uses), self._round.digest, torch.is_grad_enabled())
        same = b"".join(value.to_bytes(8, "little") for value in state)
        # Where ranks differ in a byte of `same`, the largest of it and of its complement do not add up to 255.
        mine = torch.frombuffer(wants + same + bytes(255 - byte for byte in same) + bytes([early]), dtype=torch.uint8)
        said = torch.cat([mine, self._reductions.statement()])
        try:
            heard = self._comm.all_reduce(said, "rendezvous", "max")
        except RankTimeoutError as error:
            units = [f"the all-gather of {unit.name or 'the model'}" for unit in self._units]
            wanted = "the agreement that ends a step or an evaluation"
            if number is not None:
                wanted = [*units, *(call.label for call in self._calls), "the reductions of a backward"][number]
            error.place = f"{wanted}, on rank {self._comm.rank}"
            raise
        wanted, one, other, anybody, statement = heard.split([known, len(same), len(same), 1, len(said) - len(mine)])
        if wanted.any():  # else all that are left start together, when they settle
            self._reductions.start(self._reductions.count_complete_in(statement))
        agree = bool((one.int() + other.int() == 255).all())
        return _Heard(wanted.nonzero().flatten().tolist(), agree, bool(anybody), statement)

    # -- meeting

    def meet(self, *, early: bool = False) -> bool:
        """Ends the round: serves the others until all have come here, and settles the gradients of a backward. A
        collective; any other collective of ours but those above comes after one. A rank that is `early` may want more
        before the step, and will meet once more; returns whether any rank is."""
        if self._is_alone:
            self._settle(self._reductions.statement())
            return False
        self._leave_plan()
        self._was_early = early
        while (heard := self._exchange(None, early=early)).wants:
            self._serve(heard.wants, None)
        self._learn(heard.agree)
        self._cache.discard_all()
        self._settle(heard.statement)
        return heard.early

    def meet_all(self) -> None:
        """`meet`, until no rank is early: it may have wanted something since it was asked for its gradients."""
        while self.meet() and self.may_be_wanted:
            pass

    def _settle(self, statement: Tensor) -> None:
        """What the ranks that share shards have said, all ranks hear."""
        for comm in (self._mesh.replicate, self._mesh.tensor):
            if comm.size > 1:
                statement = comm.host.all_reduce(statement, "settle", "max")
        self._reductions.settle(statement)

    def start_reductions(self, number: int) -> None:
        """Starts the first `number` reductions, unless gathers tell when all ranks do.

        A reduction may wait for another rank, which would not come if it wanted something alone, or had no gradients:
        so ranks serve each other until all are about to reduce, or have nothing more to do in this round.
        """
        if self._units or number <= self._reductions.started:
            return
        if self._reductions.may_wait and not self._round.reduces:
            self._round.reduces = True
            self._leave_plan()
            with no_interception(), torch.no_grad():
                while (wants := self._exchange(self._to_reduce).wants) != [self._to_reduce]:
                    self._serve(wants, self._to_reduce)
        self._reductions.start(number)

    def settle_gradients(self) -> None:
        """Makes ranks agree on which parameters have gradients, if they have not yet."""
        if self._reductions.stage is Stage.UNSETTLED:
            with no_interception(), torch.no_grad():
                self.meet(early=True)

    def meet_with_gradients(self) -> None:
        """The same, and `meet_before_collective`: a rank may have looked at gradients alone."""
        if self._reductions.stage is Stage.UNSETTLED or self.may_be_wanted:
            with no_interception(), torch.no_grad():
                self.meet_all()

    def expect_nothing(self) -> None:
        """All ranks are known to be here, and not to go on as they did the last time."""
        self._round.plan = None

    def meet_before_collective(self) -> None:
        """`meet`, where ranks may want anything that others must serve first."""
        if self.may_be_wanted:
            self.meet_all()

    @property
    def is_awaited(self) -> bool:
        """Whether others wait until this rank, which was early, meets them once more."""
        return self._was_early and self.may_be_wanted

    @property
    def may_be_wanted(self) -> bool:
        """Whether there is anything that one rank can want by itself."""
        return bool(self._units or self._calls)

    def _learn(self, agree: bool) -> None:
        """The round is over: what comes next is expected to be what came next the last time."""
        uses, kind, begins, (last, empty) = self._round.uses, self._round.digest, self._round.begins, self._before
        agree &= self._plans_ahead
        if agree:
            self._next[self._before] = kind
            self._before = (kind, 0) if uses else (last, min(empty + 1, _MOST_PLANS))
        if agree and uses and begins:
            self._beginnings[begins] = kind
            if kind not in self._plans and len(uses) <= _LONGEST:
                self._plans[kind] = self._plan_of(uses, self._round.complete)
                for old in list(self._plans)[:-_MOST_PLANS]:
                    del self._plans[old]
        self._round = _Round(plan=self._plans.get(self._next.get(self._before, 0)))

    def _plan_of(self, uses: list[int], complete: dict[int, int]) -> Plan:
        units, late = range(len(self._units)), self._mesh.shard.learns_late
        return make_plan(uses, units, Residents(self._cache.room, self._cache.apart), complete, late)

    def forget(self) -> None:
        """Expects nothing from here on: what was wanted in earlier rounds is about to be let go of."""
        self._plans.clear()
        self._round.plan = None
        self._plans_ahead = False
