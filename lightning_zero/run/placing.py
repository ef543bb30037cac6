"""`make_program`: places what the engine does at the uses of a step. Integers only."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from lightning_zero.run.plan import Step
from lightning_zero.run.program import Cause, Facts, Kind, Op, OptimizerFacts, Program, Use, WindowFacts
from lightning_zero.run.rounds import Complete, residents, rounds_of, settled_alone


def make_program(facts: Facts, uses: Sequence[Use]) -> Program:
    """Returns the program of a step with these uses, from its first forward to the return of `optimizer.step`. The step
    before it had the same ones."""
    placing = _Placing(facts, uses)
    for at, use in enumerate(uses):
        placing.place(at, use)
    return Program(facts, tuple(uses), tuple(placing.ops))


class _Flight(NamedTuple):
    """A reduction under way."""

    group: int
    part: int
    reduce: int  # number of its op


class _Window(NamedTuple):
    """A window that is stepped apart from the user's call, and the part of each of its groups that it is."""

    facts: WindowFacts
    parts: tuple[tuple[int, int], ...]  # group, and how many windows of it come before


def _windows_of(optimizer: OptimizerFacts) -> list[_Window]:
    seen: dict[int, int] = {}
    found = []
    for facts in optimizer.windows:
        found.append(_Window(facts, tuple((group, seen.get(group, 0)) for group in facts.groups)))
        seen.update({group: part + 1 for group, part in found[-1].parts})
    return found


class _Placing:
    """Follows a step, use by use, and notes what the engine does. `place` it in order; then see `ops`."""

    def __init__(self, facts: Facts, uses: Sequence[Use]) -> None:
        self._facts, self._uses = facts, uses
        self.ops: list[Op] = []
        self._at = 0
        rounds = rounds_of(facts, uses)
        self._met = {at for at in range(len(uses)) if any(at == one.stop for one in rounds)}
        self._plan = {at: step for one in rounds for at, step in one.steps.items()}
        self._alone = settled_alone(facts, uses)
        self._here = residents(facts)
        self._complete = Complete(facts, uses)
        self._reduced = 0  # groups of the micro-batches of this round that are over
        self._started = 0  # reductions of this backward
        self._pools = [deque[_Flight | None]([None] * count) for count in facts.buckets]
        self._stores: dict[int, list[int]] = {}  # group -> the ops that have stored its gradient
        self._is_ready = False  # all ranks are known to reduce in this round
        self._is_unsettled = False
        self._unstepped: list[int] = []  # reduced, and to be stepped in backward
        self._stepped: dict[int, list[int]] = {}  # group -> the ops that have stepped it
        self._scale: tuple[int, ...] = ()  # the op by which gradients are scaled
        self._ahead = [  # as the step before has left them
            window
            for use in uses
            if use.cause is Cause.STEPPED and not facts.steps_in_backward
            for window in _windows_of(facts.optimizers[use.number])
            if window.facts.is_postponed
        ]
        self._fetched: dict[_Window, list[int]] = {}  # windows that are being read -> the ops, those of this step
        if self._ahead and self._ahead[0].facts.is_staged:
            self._fetched[self._ahead[0]] = []

    def _add(
        self,
        kind: Kind,
        target: int = -1,
        part: int = 0,
        *,
        by: int | None = None,
        after: Iterable[int] = (),
        lag: int = 0,
        nbytes: int = 0,
    ) -> int:
        op = Op(kind, target, self._at, part, by, tuple(sorted(after)), lag, nbytes)
        self.ops.append(op)
        return len(self.ops) - 1

    def _sent(self, elements: int, itemsize: int) -> int:
        """Bytes that this rank sends in a collective in which each rank has so many elements."""
        return (self._facts.ranks - 1) * elements * itemsize

    def place(self, at: int, use: Use) -> None:
        self._at = at
        self._complete.come_to(at + 1)
        causes: dict[Cause, Callable[[int], None]] = {
            Cause.UNIT: self._use,
            Cause.CALL: self._call,
            Cause.READ: self._catch_up,
            Cause.BACKWARD: self._begin_backward,
            Cause.GRADIENT: self._start_complete,
            Cause.END: self._end_backward,
            Cause.KEPT: self._note_end,
            Cause.UNSCALE: self._unscale,
            Cause.CLIP: self._clip,
            Cause.LOOK: lambda _: self._meet(),
            Cause.STEP: self._step,
            Cause.STEP_AFTER_CLIP: self._step,
            Cause.STEPPED: self._end_step,
        }
        if use.cause in causes:
            causes[use.cause](use.number)

    # -- units

    def _use(self, number: int) -> None:
        self._follow(self._plan[self._at])

    def _follow(self, step: Step) -> None:
        self._start(step.starts - self._reduced)
        for number in step.window:
            self._here.touch(number)
        for number in step.gathers:
            evicted = self._here.admit(number)
            if evicted is not None:
                self._add(Kind.RESHARD, evicted)
            groups = self._facts.units[number].groups
            for group in groups:
                self._catch_up(group)
            sent = sum(self._sent(self._facts.groups[one].shard, self._facts.groups[one].itemsize) for one in groups)
            self._add(Kind.UNSHARD, number, by=self._next_use(number), nbytes=sent)

    def _next_use(self, unit: int) -> int:
        return next(at for at in range(self._at, len(self._uses)) if self._uses[at] == Use(Cause.UNIT, unit))

    def _call(self, number: int) -> None:
        self._follow(self._plan[self._at])
        if number in self._facts.publishes:
            self._catch_up(self._facts.publishes[number])
        else:
            self._add(Kind.CALL, number)

    # -- agreement

    def _meet(self) -> None:
        """Has ranks agree, if they meet here, and reduces what is left."""
        if self._at not in self._met:
            return
        if self._facts.ranks > 1 or self._facts.units:
            self._add(Kind.AGREE)
        self._is_ready, self._reduced = False, 0
        for number in self._here:
            self._here.remove(number)
            self._add(Kind.RESHARD, number)
        if self._is_unsettled:
            self._is_unsettled = False
            self._settle()

    # -- backward

    def _begin_backward(self, _: int) -> None:
        self._catch_up_all()
        if self._at in self._plan:  # of a round that goes on
            self._follow(self._plan[self._at])
            self._settle()
            self._reduced += len(self._facts.order)
        elif self._at in self._alone:
            self._is_ready = self._is_unsettled = False
            self._settle()
        self._meet()
        self._started = 0

    def _start_complete(self, _: int) -> None:
        """Starts the reductions of complete groups. Where units are gathered, a plan says when."""
        if not self._facts.units:
            self._start_now(self._complete.count)

    def _start_now(self, count: int) -> None:
        if count > self._started and self._facts.may_wait and not self._is_ready and self._facts.ranks > 1:
            self._is_ready = True
            self._add(Kind.MARK if self._facts.marks_reductions else Kind.AGREE)
        self._start(count)

    def _start(self, count: int) -> None:
        for group in self._facts.order[self._started : count]:
            self._reduce(group)
            if self._facts.steps_in_backward:
                self._step_reduced()
                self._unstepped.append(group)
        self._started = max(self._started, count)

    def _reduce(self, group: int) -> None:
        facts = self._facts.groups[group]
        for part, width in enumerate(facts.chunks):
            pool = self._pools[facts.pool]
            self._take(pool)
            sent = self._sent(width, facts.reduced_itemsize)
            pool[-1] = _Flight(group, part, self._add(Kind.REDUCE, group, part, nbytes=sent))

    def _take(self, pool: deque[_Flight | None]) -> None:
        """Empties the bucket that was taken longest ago. It is the last one then."""
        pool.rotate(-1)
        self._store(pool, len(pool) - 1)

    def _store(self, pool: deque[_Flight | None], bucket: int) -> None:
        flight, pool[bucket] = pool[bucket], None
        if flight is None:
            return
        facts = self._facts.groups[flight.group]
        stored = self._add(Kind.STORE, flight.group, flight.part, after=[flight.reduce])
        if self._facts.gathers_gradients and flight.part == len(facts.chunks) - 1:
            sent = self._sent(facts.shard, facts.reduced_itemsize)
            stored = self._add(Kind.GATHER, flight.group, after=[stored], nbytes=sent)
        self._stores.setdefault(flight.group, []).append(stored)

    def _settle(self) -> None:
        if self._facts.steps_in_backward:
            self._settle_in_steps()
        else:
            self._start(len(self._facts.order))
            for pool in self._pools:
                for _ in range(len(pool)):
                    self._take(pool)

    def _settle_in_steps(self) -> None:
        for number, group in enumerate(self._facts.order):
            self._start(number + 1)
            if group in self._unstepped:
                self._step_reduced()

    def _step_reduced(self) -> None:
        for group in self._unstepped:
            pool = self._pools[self._facts.groups[group].pool] if self._facts.groups[group].chunks else deque()
            own = [bucket for bucket, flight in enumerate(pool) if flight is not None and flight.group == group]
            for bucket in range(own[-1] + 1 if own else 0):
                self._store(pool, bucket)
            self._step_now(group)
        self._unstepped.clear()

    def _step_now(self, group: int) -> None:
        """Steps a group in backward, all of it before anything else is done."""
        windows = [window for one in self._facts.optimizers for window in _windows_of(one)]
        apart = [window for window in windows if group in window.facts.groups]
        for window in apart:
            self._step_window(window, lag=0)
        if not apart:
            self._step_group(group)

    def _end_backward(self, _: int) -> None:
        if not self._facts.units:
            self._start_now(len(self._facts.order))
        self._is_unsettled = True
        self._note_end(0)
        self._meet()
        if self._facts.steps_in_backward:
            self._publish(self._facts.order)

    def _note_end(self, _: int) -> None:
        if self._at in self._plan:
            self._follow(self._plan[self._at])

    # -- gradients that are averaged

    def _all_stored(self) -> list[int]:
        return [op for stores in self._stores.values() for op in stores]

    def _unscale(self, _: int) -> None:
        self._meet()
        self._sum(Kind.VERDICT)

    def _clip(self, _: int) -> None:
        self._meet()
        self._sum(Kind.NORM)

    def _sum(self, kind: Kind) -> None:
        """Sums a number over ranks, unless each has all gradients."""
        if self._facts.ranks > 1 and not self._facts.gathers_gradients:
            self._scale = (self._add(kind, by=self._at, after=[*self._all_stored(), *self._scale]),)

    # -- steps

    def _step(self, optimizer: int) -> None:
        self._catch_up_all()
        self._meet()
        stepped = self._facts.optimizers[optimizer]
        apart = {group for window in stepped.windows for group in window.groups}
        for group in stepped.groups:
            if not (group in apart or self._facts.steps_in_backward):
                self._step_group(group)

    def _step_group(self, group: int, part: int = 0, after: Iterable[int] = (), lag: int = 0) -> int:
        causes = [*after] if lag else [*self._stores.get(group, ()), *self._scale, *after]
        op = self._add(Kind.STEP, group, part, after=causes, lag=lag)
        self._stepped.setdefault(group, []).append(op)
        return op

    def _end_step(self, optimizer: int) -> None:
        facts = self._facts
        if facts.steps_in_backward:
            return
        stepped = facts.optimizers[optimizer]
        self._ahead = _windows_of(stepped)
        self._fetch_next()
        late = set[int]()
        for window in self._ahead.copy():
            if not window.facts.is_postponed:
                self._step_window(window, lag=0)
                continue
            late.update(window.facts.groups)
            if window.facts.is_whole:
                self._collect(window, lag=0)
        self._publish([group for group in stepped.groups if group not in late])

    def _catch_up_all(self) -> None:
        """Takes all postponed steps, but those of groups that are still read as such."""
        later = set(self._uses[self._at + 1 :])
        calls = {group: call for call, group in self._facts.publishes.items()}
        for group in range(len(self._facts.groups)):
            reads = {Use(Cause.READ, group), Use(Cause.CALL, calls.get(group, -1))}
            if later.isdisjoint(reads):
                self._catch_up(group)

    def _catch_up(self, group: int) -> None:
        """Takes the postponed steps of a group, and publishes what they have made."""
        due = [window for window in self._ahead if group in window.facts.groups]
        for window in due:
            self._step_window(window, lag=1)
        if due and self._facts.groups[group].is_full:
            self._publish([group], lag=1)

    def _step_window(self, window: "_Window", *, lag: int) -> None:
        is_staged, is_whole = window.facts.is_staged, window.facts.is_whole
        if window in self._ahead:
            self._ahead.remove(window)
        if is_staged and window not in self._fetched:
            self._fetch(window, lag)
        causes = self._fetched.pop(window, [])
        self._fetch_next(lag)
        if is_whole and not window.facts.is_postponed:
            causes = [self._collect(window, lag, causes)]
        stepped = [self._step_group(group, part, causes, lag) for group, part in window.parts]
        if is_whole:
            stepped = [self._add(Kind.RETURN, window.facts.groups[0], window.parts[0][1], after=stepped, lag=lag)]
        for group, part in window.parts if is_staged else ():
            self._add(Kind.PUT, group, part, by=self._ends_put(), after=stepped, lag=lag)

    def _collect(self, window: "_Window", lag: int, after: Iterable[int] = ()) -> int:
        causes = [op for group in window.facts.groups for op in (*self._stores.get(group, ()), *self._scale)]
        return self._add(Kind.COLLECT, window.facts.groups[0], window.parts[0][1], after={*causes, *after}, lag=lag)

    def _fetch_next(self, lag: int = 0) -> None:
        """Begins to read one window ahead."""
        if self._ahead and not self._fetched and self._ahead[0].facts.is_staged:
            self._fetch(self._ahead[0], lag)

    def _fetch(self, window: "_Window", lag: int) -> None:
        self._fetched[window] = [self._add(Kind.FETCH, group, part, lag=lag) for group, part in window.parts]

    def _ends_put(self) -> int | None:
        """Returns the use that waits until all that was stepped is written."""
        return next((at for at in range(self._at, len(self._uses)) if self._uses[at].cause is Cause.BACKWARD), None)

    def _publish(self, groups: Iterable[int], *, lag: int = 0) -> None:
        for group in groups:
            facts = self._facts.groups[group]
            if facts.is_full and facts.is_published:
                by = self._first_read(group) if self._facts.publishes_late and not lag else self._at
                after, sent = self._stepped.get(group, ()), self._sent(facts.shard, facts.itemsize)
                self._add(Kind.PUBLISH, group, by=by, after=after, lag=lag, nbytes=sent)

    def _first_read(self, group: int) -> int | None:
        """Returns the use, of the next step, that waits for values that may arrive late."""
        reads = (Use(Cause.READ, group), Use(Cause.BACKWARD))
        return next((at for at, use in enumerate(self._uses) if use in reads), None)
