"""`Rendezvous`: makes all ranks issue the same gathers and reductions in the same order, also where they diverge.

A gather needs every rank. A *round* is the time from one meeting of all ranks to the next; in training, it is a step.
Ranks that have used the same units in an earlier round follow its plan (`plan.Plan`), and send only the gathers. A rank
that needs something else *diverges*: it marks a gather. Once all ranks have learnt of the mark, each says what it wants
before it gathers, and all take part in everything that any rank wants. A rank that has come to the end of the round
serves the others until they have, too:

    rank 0   block.0   block.1   head.a    done      done
    rank 1   block.0   block.1   head.b    head.c    done
    served   block.0   block.1   both      head.c    (no rank wants anything: the round is over)

So a head that only one rank uses, uneven evaluation, `generate` of different lengths, and a sample that only rank 0
draws all work.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from lightning_zero.device import HOST
from lightning_zero.run.cache import UnitCache
from lightning_zero.run.journal import Journal
from lightning_zero.run.plan import Plan, Residents, Step, make_plan
from lightning_zero.run.program import Cause
from lightning_zero.run.reductions import Reductions, Stage
from lightning_zero.shards.slot import no_interception
from lightning_zero.shards.unit import Unit
from lightning_zero.wire.comm import Gather, RankTimeoutError
from lightning_zero.wire.mesh import Mesh

_LONGEST = 10_000  # uses; a longer round (an evaluation of many batches) is not planned as a whole
_MOST_PLANS = 16
_MOST_TIMES = 256  # that a kind of round is counted one after another
_MOST_NEXT = 1024  # rounds of which it is known what came next
_HASH = 2**61 - 1
# The others may wait in a reduction for gradients that this rank has not got yet, and cannot serve it.
_IN_BACKWARD = (
    "A hook in backward cannot read this on one rank alone once gradients are being reduced: read it there on every "
    "rank, or on one rank before or after backward, or give ZeroStrategy(overlap=False)"
)


class _Call(NamedTuple):
    """A collective that a rank may want alone, beside the gathers of units. It is never done ahead."""

    label: str  # for messages
    serve: Callable[[bool], Any]  # issues it, and returns its result; told whether this rank wants that


class _Heard(NamedTuple):
    """What all ranks have said in one exchange; the same on all of them."""

    wants: list[int]  # numbers that any rank wants, in order; empty if all have come to the end of the round
    agree: bool  # all want the same, and have used the same before
    early: bool  # a rank will meet the others once more before the step
    statement: Tensor  # see `Reductions.statement`


class _Before(NamedTuple):
    """What comes before a round: the last ones with uses in which ranks agreed. Micro-batches are such rounds, one like
    the other, so it is their number that tells when another one comes."""

    kind: int = 0  # of the last one
    times: int = 0  # that it has come one after another
    other: int = 0  # the kind before those
    empty: int = 0  # rounds without uses since

    def then(self, kind: int | None) -> "_Before":
        """Returns what comes before the next round, given the kind of this one; None if it has no uses."""
        if kind is None:
            return self._replace(empty=min(self.empty + 1, _MOST_PLANS))
        if kind == self.kind and not self.empty:
            return self._replace(times=min(self.times + 1, _MOST_TIMES))
        return _Before(kind, 1, self.kind)

    @property
    def in_short(self) -> "_Before":
        """The same, however often the last round has come, and after whatever."""
        return self._replace(times=0, other=0)


@dataclass
class _Round:
    """The current round of this rank."""

    plan: Plan | None = None  # while it is followed
    start: int = 0  # the use at which the plan begins
    uses: list[int] = field(default_factory=list)
    digest: int = 0  # of the uses
    begins: tuple[int, bool] | None = None  # the first use, and whether gradients were enabled then
    complete: dict[int, int] = field(default_factory=dict)  # use -> gradient groups that were complete on all ranks
    in_flight: dict[int, Gather] = field(default_factory=dict)  # unit -> its gather, until it tells who diverges
    reduces: bool = False  # all ranks are known to reduce gradients in this round
    replicas_reduce: bool | None = None  # whether any replica does; None until they have told each other


@final
class Rendezvous:
    """Agrees on the next collectives among the ranks that share shards. Each unit has its number in the cache; calls,
    and last the reductions of a backward, have the numbers after those."""

    def __init__(self, mesh: Mesh, cache: UnitCache, reductions: Reductions) -> None:
        self._mesh = mesh
        self._comm = mesh.shard.host
        self._is_alone = mesh.shard.size == 1 and not cache.units
        self._cache = cache
        self._units = cache.units
        self._reductions = reductions  # started where all ranks are ready for them
        self.journal = Journal()
        self._calls: list[_Call] = []
        self._result: Any = None  # of the latest call that this rank has wanted
        self._round = _Round()
        self._makes_plans = True
        self._plans: dict[int, Plan] = {}  # kind of a round (the digest of its uses) -> its plan
        self._next: dict[_Before, int] = {}  # what came before a round -> its kind, the last time
        self._beginnings: dict[tuple[int, bool], int] = {}  # `begins` of a round -> its kind, the last time
        self._before = _Before()
        self.is_awaited = False  # the others wait for this rank to meet them once more, as it was early
        self.is_waiting = False  # this rank wants nothing but that the others come to where it is

    def enroll(self, label: str, serve: Callable[[bool], Any]) -> int:
        """Returns the number by which `call` asks for `serve`; see `_Call`. Enroll the same calls on every rank."""
        self._calls.append(_Call(label, serve))
        return len(self._units) + len(self._calls) - 1

    @property
    def labels(self) -> tuple[str, ...]:
        """What ranks may do together beside the units, by number."""
        return tuple(call.label for call in self._calls)

    def use(self, unit: Unit) -> None:
        """Has a unit gathered, or at least its gather under way."""
        number = self._cache.numbers[unit]
        if self._round.uses and self._round.uses[-1] == number and unit.is_gathered:
            return
        self._arrive(number)

    def call(self, number: int) -> Any:
        """Has all ranks serve a call. Returns its result."""
        if self._is_alone:
            self.journal.note(Cause.CALL, number - len(self._units))
            self._serve_call(number, True)
        else:
            self._arrive(number)
        result, self._result = self._result, None
        return result

    def _arrive(self, number: int) -> None:
        is_unit = number < len(self._units)
        self.journal.note(Cause.UNIT if is_unit else Cause.CALL, number if is_unit else number - len(self._units))
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
        """The number that a rank wants when it is about to reduce gradients."""
        return len(self._units) + len(self._calls)

    def _serve(self, wants: Iterable[int], own: int | None) -> None:
        """Takes part in everything that is wanted, and keeps the results of what this rank wants (`own`)."""
        for want in wants:
            if want == self._to_reduce:
                if own is None:  # this rank has no gradients, and contributes zeros
                    self._start(len(self._reductions.shards))
            elif want >= len(self._units):
                self._serve_call(want, want == own)
            elif want == own:
                self._cache.gather(want)
            else:
                self._units[want].pass_by()

    def _serve_call(self, number: int, keep: bool) -> None:
        result = self._calls[number - len(self._units)].serve(keep)
        if keep:
            self._result = result

    # -- by plan

    def _follow(self, plan: Plan, number: int) -> bool:
        """Does what the plan says for this use. Returns False if any rank diverges, this one included."""
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
        """Takes part in a step of the plan, and keeps the results if this rank follows it, or `marks` the first gather.
        Returns False if a rank turns out to have diverged before this step."""
        if self._learn_of_divergence(number for number in step.learns if number not in step.gathers):
            return False
        self._start(step.starts)
        self._cache.touch(step.window)
        for number in step.gathers:
            if keep:
                self._round.in_flight[number] = self._cache.gather(number, diverges=False)
            else:
                self._round.in_flight[number] = self._units[number].pass_by(marks)
                marks = False
        if step.use >= len(self._units):
            self._serve_call(step.use, keep)
        return not self._learn_of_divergence(number for number in step.learns if number in step.gathers)

    def _diverge(self, plan: Plan, at: int) -> None:
        """Leaves the plan before its step `at`, but takes part in it until the others have learnt of that."""
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
        if heard.agree and self._makes_plans:
            self._look_for_plan(number)

    def _look_for_plan(self, number: int) -> None:
        """Follows a plan from here on, if there is one. All ranks want `number`, and have used the same before it, so
        they all come to the same plan: that of the last round that began so, or of the last batch of an evaluation."""
        plan, uses = None, self._round.uses
        if not uses:
            plan = self._plans.get(self._beginnings.get((number, torch.is_grad_enabled()), 0))
        elif number in uses and not (torch.is_grad_enabled() or self._trains):  # one batch after another
            plan = self._plan_of(uses[len(uses) - uses[::-1].index(number) - 1 :], {})
            self._cache.discard_all(but=number)  # as the plan expects
        if plan is None:
            return
        self._round.plan, self._round.start = plan, len(uses)
        self._cache.touch(plan[0].window)
        for ahead in plan[0].gathers:
            if ahead != number:
                self._round.in_flight[ahead] = self._cache.gather(ahead, diverges=False)

    @property
    def _trains(self) -> bool:
        """Whether the round began with gradients enabled. What it uses again without them, it uses in backward."""
        return self._round.begins is not None and self._round.begins[1]

    def _exchange(self, number: int | None, *, early: bool = False) -> _Heard:
        """Says what this rank wants (None: nothing more in this round), and hears what the others want. Collective."""
        known = self._to_reduce + 1
        wants = bytearray(known)
        if number is not None:
            wants[number] = 1
        want = known if number is None else number
        modes = torch.is_grad_enabled() + 2 * self._trains
        state = (want, len(self._round.uses), self._round.digest, modes)
        same = b"".join(value.to_bytes(8, "little") for value in state)
        # Where ranks differ in a byte of `same`, its maximum and that of its complement do not add up to 255.
        mine = torch.frombuffer(wants + same + bytes(255 - byte for byte in same) + bytes([early]), dtype=torch.uint8)
        said = torch.cat([mine, self._reductions.statement()])
        try:
            heard = self._comm.all_reduce(said, "rendezvous", "max")
        except RankTimeoutError as error:
            labels = [f"the all-gather of {unit.name or 'the model'}" for unit in self._units]
            labels += [call.label for call in self._calls]
            labels += ["the reductions of a backward", "the agreement that ends a step or an evaluation"]
            error.place = f"{labels[want]}, on rank {self._comm.rank}"
            if self._round.reduces and number is not None and number < self._to_reduce:
                error.details.append(_IN_BACKWARD)
            raise
        wanted, one, other, anybody, statement = heard.split([known, len(same), len(same), 1, len(said) - len(mine)])
        if wanted.any():  # else the remaining reductions start together, when gradients are settled
            self._start(self._reductions.count_complete_in(statement))
        agree = bool((one.int() + other.int() == 255).all())
        return _Heard(wanted.nonzero().flatten().tolist(), agree, bool(anybody), statement)

    # -- meeting

    def meet(self, *, early: bool = False) -> bool:
        """Ends the round: serves the other ranks until all have come here, and settles the gradients of a backward.
        Collective; collectives of the engine that are not issued above must come after a meeting. A rank that is
        `early` may want something alone before the step, and meets once more. Returns whether any rank does."""
        if self._is_alone:
            self._settle(self._reductions.statement(), early=early)
            return False
        self._leave_plan()
        self.is_awaited = early and self.may_be_wanted
        with self._waiting():
            while (heard := self._exchange(None, early=early)).wants:
                self._serve(heard.wants, None)
        self._join_replicas(heard.statement)
        self._learn(heard.agree)
        self._cache.discard_all()
        return self._settle(heard.statement, early=heard.early) and self.may_be_wanted

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.is_waiting = True
        try:
            yield
        finally:
            self.is_waiting = False

    def meet_all(self) -> None:
        """Meets until no rank is early: such a rank may have wanted something since it met. Collective."""
        while self.meet():
            pass

    def _settle(self, statement: Tensor, *, early: bool) -> bool:
        """Settles gradients by the statements of all ranks: `statement`, and whether any is `early`, is of those that
        share shards. Returns whether any rank is early."""
        said = torch.cat([statement, torch.tensor([early], dtype=torch.uint8, device=HOST)])
        for comm in (self._mesh.replicate, self._mesh.tensor):
            if comm.size > 1:
                said = comm.host.all_reduce(said, "settle", "max")
        self._reductions.settle(said[:-1])
        return bool(said[-1])

    # -- reductions

    def _start(self, number: int) -> None:
        """Starts the first `number` reductions. Collective among the ranks that share shards."""
        if number > self._reductions.started and self._waits_for_replicas:
            self._tell_replicas(reduces=True)
        self._reductions.start(number)

    @property
    def _waits_for_replicas(self) -> bool:
        """Whether a reduction may wait, before the end of backward, for the ranks that hold the same shard."""
        return self._mesh.replicate.size > 1 and self._reductions.may_wait

    def _tell_replicas(self, *, reduces: bool) -> bool:
        """Returns whether any replica reduces gradients in this round. Collective.

        Replicas gather on their own, and one whose ranks have no gradients would not come to a reduction that another
        one waits in. So they tell each other, once in each round: before the first reduction, or at the end.
        """
        if self._round.replicas_reduce is None:
            told = torch.tensor([reduces], dtype=torch.uint8, device=HOST)
            self._round.replicas_reduce = bool(self._mesh.replicate.host.all_reduce(told, "replicas", "max"))
        return self._round.replicas_reduce

    def _join_replicas(self, statement: Tensor) -> None:
        """Does the reductions of this round that another replica may wait in, before anything else waits for it."""
        if self._waits_for_replicas and self._tell_replicas(reduces=self._reductions.has_gradients_in(statement)):
            self._reductions.reduce_all()

    def start_reductions(self, number: int) -> None:
        """Starts the first `number` reductions; not at stage 3, where gathers tell when all ranks are ready.

        A reduction may wait for another rank, which never comes if it wants something alone, or has no gradients. So
        ranks serve each other until all are about to reduce, or have come to the end of the round.
        """
        if self._units or number <= self._reductions.started:
            return
        if self._reductions.may_wait and not self._round.reduces:
            self._round.reduces = True
            self._leave_plan()
            with self._waiting(), no_interception(), torch.no_grad():
                while (wants := self._exchange(self._to_reduce).wants) != [self._to_reduce]:
                    self._serve(wants, self._to_reduce)
        self._start(number)

    def settle_gradients(self, *, meets: bool = False) -> None:
        """Makes ranks agree on which parameters have gradients, if they have not since the last backward. With `meets`,
        ranks also meet if one of them may have read gradients alone, so that another collective may follow."""
        is_unsettled = self._reductions.stage is Stage.UNSETTLED
        with no_interception(), torch.no_grad():
            if meets and (is_unsettled or self.may_be_wanted):
                self.meet_all()
            elif is_unsettled:
                self.meet(early=True)

    def expect_nothing(self) -> None:
        """Drops the plan of this round: all ranks are known to be here, and not to follow it."""
        self._round.plan = None

    def meet_before_collective(self) -> None:
        """Meets, if a rank may want something alone that the others must serve first."""
        if self.may_be_wanted:
            self.meet_all()

    @property
    def may_be_wanted(self) -> bool:
        """Whether there is anything that one rank can want alone."""
        return bool(self._units or self._calls)

    def _learn(self, agree: bool) -> None:
        """Remembers the round that is over, and begins the next one with the plan of what came next the last time."""
        uses, kind, begins = self._round.uses, self._round.digest, self._round.begins
        agree &= self._makes_plans
        if agree:
            for before in (self._before, self._before.in_short):
                self._next.pop(before, None)  # so that it is the newest one
                self._next[before] = kind
            while len(self._next) > _MOST_NEXT:
                del self._next[next(iter(self._next))]
            self._before = self._before.then(kind if uses else None)
        if agree and uses and begins:
            self._beginnings[begins] = kind
            if kind not in self._plans and len(uses) <= _LONGEST:
                self._plans[kind] = self._plan_of(uses, self._round.complete)
                for old in list(self._plans)[:-_MOST_PLANS]:
                    del self._plans[old]
        expected = self._next.get(self._before, self._next.get(self._before.in_short, 0))
        self._round = _Round(plan=self._plans.get(expected))

    def _plan_of(self, uses: list[int], complete: dict[int, int]) -> Plan:
        units, late = range(len(self._units)), self._mesh.shard.learns_late
        return make_plan(uses, units, Residents(self._cache.room, self._cache.apart), complete, late)

    def forget(self) -> None:
        """Drops all plans, and makes no more, as the units in them are about to be freed."""
        self._plans.clear()
        self._round.plan = None
        self._makes_plans = False
