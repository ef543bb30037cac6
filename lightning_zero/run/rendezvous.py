"""`Rendezvous`: makes all ranks issue the same gathers and reductions in the same order, also where they diverge.

A gather needs every rank. A *round* is the time from one meeting of all ranks to the next; in training, it is a step.
Ranks that have used the same units in an earlier round follow its plan (`plan.Plan`), and send only the gathers. A rank
that needs something else *diverges*: it marks a gather. Once all ranks have learnt of the mark, each says what it wants
before it gathers, and all take part in everything that any rank wants. A rank that has come to the end of the round
serves the others until they have, too:

    rank 0   block.0   block.1   head.a    done      done
    rank 1   block.0   block.1   head.b    head.c    done
    served   block.0   block.1   both      head.c    (no rank wants anything: the round is over)

Micro-batches that are reduced make one round where ranks have gradients of the same parameters as in the last such
round. A rank that has others diverges at the end of a backward, so before the next one all have heard if any does.

So a head that only one rank uses, uneven evaluation, `generate` of different lengths, and a sample that only rank 0
draws all work.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from lightning_zero.device import HOST
from lightning_zero.run.cache import UnitCache
from lightning_zero.run.journal import Journal
from lightning_zero.run.plan import END, NEXT_BACKWARD, Plan, Residents, Step, ends_in_time, make_plan
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
    agree: bool  # all want the same, have used the same before, and know the same of it
    early: bool  # a rank will meet the others once more before the step
    alike: bool  # all have gradients of the same parameters
    ended: bool  # a rank has come to the end of the round
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
    patterns: dict[int, int] = field(default_factory=dict)  # step of the plan -> gradients that all have, see `Span`
    start: int = 0  # the use at which the plan begins
    uses: list[int] = field(default_factory=list)
    digest: int = 0  # of the uses
    begins: tuple[int, bool] | None = None  # the first use, and whether gradients were enabled then
    complete: dict[int, int] = field(default_factory=dict)  # use -> gradient groups that were complete on all ranks
    counts: int = 0  # a digest of them: a rank that leaves a plan early does not know what the others go by
    ended: dict[int, int] = field(default_factory=dict)  # end of a backward -> `Reductions.pattern` of this rank
    reduced: int = 0  # gradient groups of the micro-batches of this round that are over
    in_flight: dict[int, Gather] = field(default_factory=dict)  # unit -> its gather, until it tells who diverges
    reduces: bool = False  # all ranks are known to reduce the gradients of this backward
    all_reduce: bool = False  # ... and each of them has some of its own
    has_failed: bool = False  # a backward in it, on every rank
    replicas_reduce: bool | None = None  # whether any replica does; None until they have told each other


@dataclass
class _Span:
    """Rounds of one step, one after another. In each, all ranks have used the same, and after each but the last, they
    have met with gradients of the same parameters. Planned as one round, they need no such meetings."""

    before: _Before  # what came before the first one
    begins: tuple[int, bool] | None = None  # see `_Round`, of the first one with uses; also the others
    uses: list[int] = field(default_factory=list)
    complete: dict[int, int] = field(default_factory=dict)
    reduced: int = 0
    patterns: dict[int, int] = field(default_factory=dict)  # end of a backward -> `Reductions.pattern`, of all ranks

    def add(self, done: _Round) -> None:
        if not self.uses:
            self.begins = done.begins
        self.complete |= {len(self.uses) + at: self.reduced + count for at, count in done.complete.items()}
        for at, use in enumerate(done.uses):
            if use == NEXT_BACKWARD:  # by the plan
                end = _last_end(done.uses[:at])
                self.patterns[len(self.uses) + end] = done.ended[end]
        self.uses += done.uses
        self.reduced += done.reduced

    def continue_after(self, groups: int, pattern: int) -> None:
        """Notes that another micro-batch follows, after one with so many gradient groups."""
        self.patterns[_last_end(self.uses)] = pattern
        self.uses.append(NEXT_BACKWARD)
        self.reduced += groups


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
        # Kind of a round (the digest of its uses) -> its plan; None: see `ends_in_time`.
        self._plans: dict[int, Plan | None] = {}
        self._patterns: dict[int, dict[int, int]] = {}  # ... and which gradients it goes by
        self._order = reductions.shards  # in which plans count them
        self._next: dict[_Before, int] = {}  # what came before a round -> its kind, the last time
        self._beginnings: dict[tuple[int, bool], int] = {}  # `begins` of a round -> its kind, the last time
        self._before = _Before()
        self._span: _Span | None = _Span(self._before)  # None: ranks have used different things since the last step
        self._knew_all = False  # this rank has settled gradients alone: each parameter had one on it
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
        self._note(number)

    def _note(self, number: int) -> None:
        self._round.uses.append(number)
        self._round.digest = _kind_of([number], self._round.digest)

    @property
    def _to_reduce(self) -> int:
        """The number that a rank wants when it is about to reduce gradients."""
        return len(self._units) + len(self._calls)

    @property
    def _to_settle(self) -> int:
        """The number that a rank wants when it must know which parameters have gradients on the others."""
        return self._to_reduce + 1

    def _serve(self, wants: Sequence[int], own: int | None) -> None:
        """Takes part in everything that is wanted, and keeps the results of what this rank wants (`own`)."""
        for want in wants:
            if want == self._to_reduce:
                if own is None and len(wants) == 1:  # this rank has no gradients, and contributes zeros
                    self._reductions.forget_settled()
                    self._start(len(self._reductions.shards))
            elif want == self._to_settle:
                pass  # all have settled as they heard of it
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
        complete = self._round.reduced + self._reductions.count_complete()
        if step is None or step.use != number or complete < step.due:
            self._diverge(plan, at)
            return False
        if not self._take(step, keep=True):
            return False
        self._note_complete(len(self._round.uses), step.due)
        if 0 <= number < len(self._units) and not self._units[number].is_gathered:  # an edit has made it stale
            self._diverge(plan, at + 1)
            return False
        return True

    def _take(self, step: Step, *, keep: bool, marks: bool = False) -> bool:
        """Takes part in a step of the plan, and keeps the results if this rank follows it, or `marks` the first gather.
        Returns False if a rank turns out to have diverged before this step."""
        if self._learn_of_divergence(number for number in step.learns if number not in step.gathers):
            return False
        self._start(step.starts - self._round.reduced)
        self._cache.touch(step.window)
        for number in step.gathers:
            if keep:
                self._round.in_flight[number] = self._cache.gather(number, diverges=False)
            else:
                self._round.in_flight[number] = self._units[number].pass_by(marks)
                marks = False
        if step.use == NEXT_BACKWARD:
            self._reductions.settle_alike()
            self._round.reduced += len(self._reductions.shards)
        elif step.use >= len(self._units):
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
            self._count_complete(heard.statement)
        self._serve(heard.wants, number)
        if heard.agree and self._makes_plans:
            self._look_for_plan(number)

    def _count_complete(self, statement: Tensor) -> int:
        """Notes how many gradient groups are complete on all ranks, and returns it. After a backward that is so since
        its end."""
        uses, complete = self._round.uses, self._reductions.count_complete_in(statement)
        is_over = self._reductions.stage is Stage.UNSETTLED and END in uses
        self._note_complete(_last_end(uses) if is_over else len(uses), self._round.reduced + complete)
        return complete

    def _note_complete(self, at: int, count: int) -> None:
        self._round.complete[at] = count
        self._round.counts = _kind_of([at, count], self._round.counts)

    def _look_for_plan(self, number: int) -> None:
        """Follows a plan from here on, if there is one. All ranks want `number`, and have used the same before it, so
        they all come to the same plan: that of the last round that began so, or of the last batch of an evaluation."""
        plan, uses = None, self._round.uses
        if not uses:
            kind = self._beginnings.get((number, torch.is_grad_enabled()), 0)
            plan, self._round.patterns = self._plans.get(kind), self._patterns.get(kind, {})
        elif number in uses and not (torch.is_grad_enabled() or self._is_in_backward):  # one batch after another
            plan, self._round.patterns = self._plan_of(uses[len(uses) - uses[::-1].index(number) - 1 :], {}), {}
            self._cache.discard_all(but=number)  # as the plan expects
        if plan is None:
            return
        self._round.plan, self._round.start = plan, len(uses)
        self._cache.touch(plan[0].window)
        for ahead in plan[0].gathers:
            if ahead != number:
                self._round.in_flight[ahead] = self._cache.gather(ahead, diverges=False)

    @property
    def _is_in_backward(self) -> bool:
        """Whether a backward is under way. It may use a unit again, but is no batch after another."""
        return self._reductions.stage is Stage.COLLECTING

    @property
    def _began_on(self) -> bool:
        """Whether gradients were enabled when the round began. On a rank that evaluates first, they may not be."""
        return self._round.begins is not None and self._round.begins[1]

    def _exchange(self, number: int | None, *, early: bool = False, continues: bool = False) -> _Heard:
        """Says what this rank wants (None: nothing more in this round), and hears what the others want. Collective."""
        known = self._to_settle + 1
        wants = bytearray(known)
        if number is not None:
            wants[number] = 1
        want = known if number is None else number
        is_unsettled = self._reductions.stage is Stage.UNSETTLED
        modes = (torch.is_grad_enabled(), self._is_in_backward, is_unsettled, self._round.has_failed, self._began_on)
        flags = sum(mode << at for at, mode in enumerate(modes))
        state = (want + continues, len(self._round.uses), self._round.digest, self._round.counts, flags)
        same = b"".join(value.to_bytes(8, "little") for value in state)
        # Where ranks differ in a byte of `same`, its maximum and that of its complement do not add up to 255.
        pattern = self._reductions.pattern.to_bytes(8, "little")
        pairs = (part for value in (same, pattern) for part in (value, bytes(255 - byte for byte in value)))
        collects = self._round.all_reduce and not is_unsettled
        told = bytes([early, number is None, self._knew_all, collects])
        mine = torch.frombuffer(wants + b"".join(pairs) + told, dtype=torch.uint8)
        said = torch.cat([mine, self._reductions.statement()])
        try:
            heard = self._comm.all_reduce(said, "rendezvous", "max")
        except RankTimeoutError as error:
            labels = [f"the all-gather of {unit.name or 'the model'}" for unit in self._units]
            labels += [call.label for call in self._calls]
            labels += ["the reductions of a backward", "the agreement on the gradients of a backward"]
            labels += ["the agreement that ends a step or an evaluation"]
            error.place = f"{labels[want]}, on rank {self._comm.rank}"
            if self._round.reduces and number is not None and number < self._to_reduce:
                error.details.append(_IN_BACKWARD)
            raise
        sizes = [known, len(same), len(same), len(pattern), len(pattern), len(told), len(said) - len(mine)]
        wanted, one, other, first, second, anybody, statement = heard.split(sizes)
        if wanted.any() and self._units:  # else the rest starts together, when gradients are settled
            self._start(self._reductions.count_complete_in(statement))
        agree, alike = (bool((a.int() + b.int() == 255).all()) for a, b in ((one, other), (first, second)))
        is_early, has_ended, all_known, collects = (bool(flag) for flag in anybody)
        # A rank that reduces again, while this one has not settled the last backward, has settled it alone.
        settles = wanted[self._to_settle] or wanted[self._to_reduce]
        if settles and self._round.all_reduce and not collects:
            self._reductions.settle_alone(None if all_known else statement)
            self._round.reduces = self._round.all_reduce = False
        return _Heard(wanted.nonzero().flatten().tolist(), agree, is_early, alike, has_ended, statement)

    # -- meeting

    def end_backward(self) -> None:
        """Notes the end of a backward among the uses of units."""
        if not self._units:
            return
        plan, at, pattern = self._round.plan, len(self._round.uses) - self._round.start, self._reductions.pattern
        if plan is not None and self._round.patterns.get(at, pattern) != pattern:
            self._diverge(plan, at)
        elif plan is not None:
            self._follow(plan, END)
        self._round.ended[len(self._round.uses)] = pattern
        self._note(END)

    def settle_last_backward(self) -> None:
        """Settles the gradients of the backward before the one that begins: by what is known of the other ranks, and
        otherwise by meeting. Collective."""
        if self._round.all_reduce:
            self._settle_alone()
            return
        plan, at = self._round.plan, len(self._round.uses) - self._round.start
        if plan is not None and at < len(plan) and plan[at].use == NEXT_BACKWARD:
            with no_interception(), torch.no_grad():
                if self._follow(plan, NEXT_BACKWARD):
                    self._note(NEXT_BACKWARD)
                    return
        if not self._settles_by_leaving() and self.meet(continues=self.spans):
            self.meet_all()

    def _settles_by_leaving(self) -> bool:
        """Leaves the plan. Returns whether the last backward is settled then, as the others begin the next one before
        they learn that this rank has left: they meet no more for it."""
        with no_interception(), torch.no_grad():
            self._leave_plan()
        return self._reductions.stage is not Stage.UNSETTLED and not self.is_awaited

    def _settle_alone(self) -> None:
        """Settles gradients whose reductions all ranks start by themselves, as each has said that it has some. If every
        parameter has one here, nothing is to be learnt from the others. Otherwise this rank asks, and all settle that
        have not yet: the others come to an exchange before they reduce again."""
        if self._reductions.is_complete:
            self._reductions.settle_alone(None)
            self._round.reduces = self._round.all_reduce = False
            self._knew_all = True
            return
        with self._waiting(), no_interception(), torch.no_grad():
            while self._round.all_reduce:
                self._serve(self._exchange(self._to_settle).wants, self._to_settle)

    @property
    def spans(self) -> bool:
        """Whether a round may span micro-batches: only ranks that share shards know each other's plans."""
        return self._mesh.replicate.size == self._mesh.tensor.size == 1

    def meet(self, *, early: bool = False, continues: bool = False) -> bool:
        """Ends the round: serves the other ranks until all have come here, and settles the gradients of a backward.
        Collective; collectives of the engine that are not issued above must come after a meeting. A rank that is
        `early` may want something alone before the step, and meets once more. Returns whether any rank does.
        `continues`: another micro-batch of the same step follows."""
        if self._is_alone:
            self._settle(self._reductions.statement(), early=early)
            return False
        self._leave_plan()
        self.is_awaited = early and self.may_be_wanted
        with self._waiting():
            while (heard := self._exchange(None, early=early, continues=continues)).wants:
                self._serve(heard.wants, None)
        self._knew_all = False
        self._join_replicas(heard.statement)
        is_over = self._count_complete(heard.statement) == len(self._reductions.shards) and END in self._round.uses
        self._learn(heard.agree, continues=continues and is_over and heard.alike and not heard.early)
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
        if self._order != self._reductions.shards:
            self._reorder()
        return bool(said[-1])

    def _reorder(self) -> None:
        """Drops all plans, which count gradient groups in an order that ranks have just changed, or added to."""
        self._order = self._reductions.shards
        self._plans.clear()
        self._patterns.clear()
        self._round = _Round()
        if self._span is not None and self._span.uses:
            self._span = None

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
                while (heard := self._exchange(self._to_reduce)).wants != [self._to_reduce]:
                    self._serve(heard.wants, self._to_reduce)
            self._knew_all = False
            self._round.all_reduce = self._reductions.may_settle_alone and self.spans and not heard.ended
        self._start(number)

    def settle_gradients(self, *, meets: bool = False) -> None:
        """Makes ranks agree on which parameters have gradients, if they have not since the last backward. With `meets`,
        ranks also meet if one of them may have read gradients alone, so that another collective may follow."""
        is_unsettled = self._reductions.stage is Stage.UNSETTLED
        with no_interception(), torch.no_grad():
            if meets and (is_unsettled or self.may_be_wanted):
                self.meet_all()
            elif is_unsettled and self._round.all_reduce:
                self._settle_alone()
            elif is_unsettled and not self._settles_by_leaving():
                self.meet(early=True)

    def forget_backward(self) -> None:
        """Forgets what was known of a backward, which has failed on every rank. Its plan would start reductions in the
        next one, before that has gradients; and a plan of this round would count its gradients. Where ranks start
        reductions by themselves, others may wait in some that this rank has not come to, or for it to come to any."""
        with no_interception(), torch.no_grad():
            self._leave_plan()
        if self._reductions.reduces and self._reductions.step is None:
            self.start_reductions(len(self._reductions.shards))
        self._round.reduces = self._round.all_reduce = False
        self._round.has_failed = True

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

    def _learn(self, agree: bool, *, continues: bool) -> None:
        """Remembers the round that is over, and begins the next one with the plan of what came next the last time. It
        `continues` if that is of the same step, and all ranks had gradients of the same parameters."""
        agree &= self._makes_plans and not self._round.has_failed
        done, before = self._round, self._before
        if agree:
            self._remember(before, done.uses)
        is_micro = NEXT_BACKWARD not in done.uses  # of others, the span knows what is to be known
        if agree and done.begins and is_micro and self._make_plan(done.uses, done.complete):
            self._beginnings[done.begins] = done.digest
        self._learn_span(done, agree, continues)
        expected = self._next.get(self._before, self._next.get(self._before.in_short, 0))
        self._round = _Round(self._plans.get(expected), self._patterns.get(expected, {}))

    def _learn_span(self, done: _Round, agree: bool, continues: bool) -> None:
        """Adds a round that is over to the others of its step. If it was the last one, plans them as one."""
        span = self._span
        if span is not None and agree:
            span.add(done)
        else:
            span = None
        if span is not None and continues:
            span.continue_after(len(self._reductions.shards), self._reductions.pattern)
        elif span is not None and NEXT_BACKWARD in span.uses and self._make_plan(span.uses, span.complete):
            self._remember(span.before, span.uses)
            self._patterns[_kind_of(span.uses)] = span.patterns
            if span.begins:
                self._beginnings[span.begins] = _kind_of(span.uses)
        self._span = span if continues or not agree else _Span(self._before)

    def _remember(self, before: _Before, uses: list[int]) -> None:
        """Notes that a round with these uses has come after those `before`."""
        kind = _kind_of(uses)
        for each in (before, before.in_short):
            self._next.pop(each, None)  # so that it is the newest one
            self._next[each] = kind
        while len(self._next) > _MOST_NEXT:
            del self._next[next(iter(self._next))]
        self._before = before.then(kind if uses else None)

    def _make_plan(self, uses: list[int], complete: dict[int, int]) -> bool:
        """Makes the plan of a round, unless it was made before. Returns whether there is one."""
        kind = _kind_of(uses)
        if kind not in self._plans and len(uses) <= _LONGEST:
            plan = self._plan_of(uses, complete)
            is_in_time = ends_in_time(plan, END, NEXT_BACKWARD, len(self._reductions.shards))
            self._plans[kind] = plan if is_in_time else None
            for old in list(self._plans)[:-_MOST_PLANS]:
                del self._plans[old]
                self._patterns.pop(old, None)
        return self._plans.get(kind) is not None

    def _plan_of(self, uses: list[int], complete: dict[int, int]) -> Plan:
        units, late = range(len(self._units)), self._mesh.shard.learns_late
        return make_plan(uses, units, Residents(self._cache.room, self._cache.apart), complete, late)

    def forget(self) -> None:
        """Drops all plans, and makes no more, as the units in them are about to be freed."""
        self._plans.clear()
        self._round.plan = None
        self._makes_plans = False


def _kind_of(uses: Iterable[int], before: int = 0) -> int:
    """Returns a digest of uses that come after those with the digest `before`."""
    for use in uses:
        before = (before * 1_000_003 + use + 3) % _HASH
    return before


def _last_end(uses: list[int]) -> int:
    """Returns where the last backward has ended."""
    return len(uses) - 1 - uses[::-1].index(END)
