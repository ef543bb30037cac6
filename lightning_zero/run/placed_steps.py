"""`PlacedSteps`: steps of optimizers, the windows that are stepped apart, and what is published. Integers only; see
`placing`."""

from collections.abc import Iterable
from typing import NamedTuple, final

from lightning_zero.run.placed import Placed, PlacedReductions
from lightning_zero.run.program import Among, Cause, Kind, OptimizerFacts, Use, WindowFacts


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


@final
class PlacedSteps:
    """What is done with averaged gradients. What is postponed in a step is done in the next one, with a lag."""

    def __init__(self, placed: Placed, reductions: PlacedReductions) -> None:
        self._placed = placed
        self._facts = placed.facts
        self._reductions = reductions
        self._stepped: dict[int, list[int]] = {}  # group -> the ops that have stepped it
        self._scale: tuple[int, ...] = ()  # the op by which gradients are scaled
        self._ahead = [  # as the step before has left them
            window
            for use in placed.uses
            if use.cause is Cause.STEPPED and not placed.facts.steps_in_backward
            for window in _windows_of(placed.facts.optimizers[use.number])
            if window.facts.is_postponed
        ]
        self._fetched: dict[_Window, list[int]] = {}  # windows that are being read -> the ops, those of this step
        if self._ahead and self._ahead[0].facts.is_staged:
            self._fetched[self._ahead[0]] = []

    def measure(self) -> None:
        """Sums squares over ranks, unless each has all gradients."""
        among = [Among.SHARD] * (self._facts.ranks > 1 and not self._facts.gathers_gradients)
        among += [Among.TENSOR] * (self._facts.tensor_ranks > 1)
        if len(among) > 1 and self._facts.replicas == 1:
            among = [Among.WORLD]
        for each in among:
            self._scale_by(Kind.NORM, each)

    def look_for_overflow(self) -> None:
        """Has all ranks tell each other what has overflowed."""
        if self._facts.world > 1:
            self._scale_by(Kind.VERDICT, Among.SHARD if self._facts.world == self._facts.ranks else Among.WORLD)

    def _scale_by(self, kind: Kind, among: Among) -> None:
        after = [*self._reductions.stores, *self._scale]
        self._scale = (self._placed.add(kind, by=self._placed.at, after=after, among=among),)

    def step_now(self, group: int) -> None:
        """Steps a group in backward, all of it before anything else is done, if an optimizer has it."""
        if not any(group in one.groups for one in self._facts.optimizers):
            return
        windows = [window for one in self._facts.optimizers for window in _windows_of(one)]
        apart = [window for window in windows if group in window.facts.groups]
        for window in apart:
            self._step_window(window, lag=0)
        if not apart:
            self._step(group)

    def _step(self, group: int, part: int = 0, after: Iterable[int] = (), lag: int = 0) -> int:
        causes = [*after] if lag else [*self._reductions.stores_of(group), *self._scale, *after]
        op = self._placed.add(Kind.STEP, group, part, after=causes, lag=lag)
        self._stepped.setdefault(group, []).append(op)
        return op

    def begin_call(self, optimizer: int) -> None:
        """Steps what is stepped in the user's call of an optimizer."""
        stepped = self._facts.optimizers[optimizer]
        apart = {group for window in stepped.windows for group in window.groups}
        for group in stepped.groups:
            if not (group in apart or self._facts.steps_in_backward):
                self._step(group)

    def end_call(self, optimizer: int) -> None:
        """Steps, or postpones, what is stepped apart from the user's call, and publishes."""
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
        self.publish([group for group in stepped.groups if group not in late])

    def catch_up_all(self) -> None:
        """Takes all postponed steps, but those of groups that are still read as such."""
        later = set(self._placed.uses[self._placed.at + 1 :])
        calls = {group: call for call, group in self._facts.publishes.items()}
        for group in range(len(self._facts.groups)):
            reads = {Use(Cause.READ, group), Use(Cause.CALL, calls.get(group, -1))}
            if later.isdisjoint(reads):
                self.catch_up(group)

    def catch_up(self, group: int) -> None:
        """Takes the postponed steps of a group, and publishes what they have made."""
        due = [window for window in self._ahead if group in window.facts.groups]
        for window in due:
            self._step_window(window, lag=1)
        if due and self._facts.groups[group].is_full:
            self.publish([group], lag=1)

    def _step_window(self, window: _Window, *, lag: int) -> None:
        is_staged, is_whole = window.facts.is_staged, window.facts.is_whole
        if window in self._ahead:
            self._ahead.remove(window)
        if is_staged and window not in self._fetched:
            self._fetch(window, lag)
        causes = self._fetched.pop(window, [])
        self._fetch_next(lag)
        if is_whole and not window.facts.is_postponed:
            causes = [self._collect(window, lag, causes)]
        stepped = [self._step(group, part, causes, lag) for group, part in window.parts]
        if is_whole:
            stepped = [self._placed.add(Kind.RETURN, *window.parts[0], after=stepped, lag=lag)]
        for group, part in window.parts if is_staged else ():
            self._placed.add(Kind.PUT, group, part, by=self._ends_put(), after=stepped, lag=lag)

    def _collect(self, window: _Window, lag: int, after: Iterable[int] = ()) -> int:
        causes = [op for group in window.facts.groups for op in (*self._reductions.stores_of(group), *self._scale)]
        return self._placed.add(Kind.COLLECT, *window.parts[0], after={*causes, *after}, lag=lag)

    def _fetch_next(self, lag: int = 0) -> None:
        """Begins to read one window ahead."""
        if self._ahead and not self._fetched and self._ahead[0].facts.is_staged:
            self._fetch(self._ahead[0], lag)

    def _fetch(self, window: _Window, lag: int) -> None:
        self._fetched[window] = [self._placed.add(Kind.FETCH, group, part, lag=lag) for group, part in window.parts]

    def _ends_put(self) -> int | None:
        """Returns the use that waits until all that was stepped is written."""
        here, uses = self._placed.at, self._placed.uses
        return next((at for at in range(here, len(uses)) if uses[at].cause is Cause.BACKWARD), None)

    def publish(self, groups: Iterable[int], *, lag: int = 0) -> None:
        """Publishes those of `groups` that every rank has whole."""
        for group in groups:
            facts = self._facts.groups[group]
            if facts.is_full and facts.is_published:
                by = self._first_read(group) if self._facts.publishes_late and not lag else self._placed.at
                after, sent = self._stepped.get(group, ()), self._placed.sent(facts.shard, facts.itemsize)
                self._placed.add(Kind.PUBLISH, group, by=by, after=after, lag=lag, nbytes=sent)

    def publish_stepped(self) -> None:
        """Publishes what this backward has stepped."""
        self.publish(sorted(self._stepped))

    def _first_read(self, group: int) -> int | None:
        """Returns the use, of the next step, that waits for values that may arrive late."""
        reads = (Use(Cause.READ, group), Use(Cause.BACKWARD))
        return next((at for at, use in enumerate(self._placed.uses) if use in reads), None)
