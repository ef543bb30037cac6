"""`PlanCache`: the plans of rounds that came before, and which one comes next; see `rendezvous`. Integers only."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final

from lightning_zero.run.plan import ASK, END, NEXT_BACKWARD, Plan, ends_in_time

_LONGEST = 10_000  # uses; a longer round (an evaluation of many batches) is not planned as a whole
_MOST_PLANS = 16
_MOST_TIMES = 256  # that a kind of round is counted one after another
_MOST_NEXT = 1024  # rounds of which it is known what came next
_HASH = 2**61 - 1


@dataclass
class Past:
    """What this rank has done in the current round."""

    uses: list[int] = field(default_factory=list)
    digest: int = 0  # of the uses
    begins: tuple[int, bool] | None = None  # the first use, and whether gradients were enabled then
    complete: dict[int, int] = field(default_factory=dict)  # use -> gradient groups that were complete on all ranks
    counts: int = 0  # a digest of them: a rank that leaves a plan early does not know what the others go by
    ended: dict[int, int] = field(default_factory=dict)  # end of a backward -> `Reductions.pattern` of this rank
    reduced: int = 0  # gradient groups of the micro-batches of this round that are over
    asked: int | None = None  # use before which ranks first asked each other whether all reduce: a plan ends there
    has_failed: bool = False  # a backward in it, on every rank

    def note(self, use: int) -> None:
        self.uses.append(use)
        self.digest = kind_of([use], self.digest)

    def note_complete(self, at: int, count: int) -> None:
        self.complete[at] = count
        self.counts = kind_of([at, count], self.counts)

    def note_asked(self) -> None:
        if self.asked is None:
            self.asked = len(self.uses)
            self.counts = kind_of([self.asked, ASK], self.counts)

    @property
    def last_end(self) -> int:
        """Where the last backward has ended."""
        return last_end(self.uses)


class Expected(NamedTuple):
    """A plan, and which gradients it goes by: end of a backward -> `Reductions.pattern` of all ranks."""

    plan: Plan | None = None
    patterns: Mapping[int, int] = {}


NOTHING = Expected()


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
class _Span:
    """Rounds of one step, one after another. In each, all ranks have used the same, and after each but the last, they
    have met with gradients of the same parameters. Planned as one round, they need no such meetings."""

    before: _Before  # what came before the first one
    begins: tuple[int, bool] | None = None  # see `Past`, of the first one with uses; also the others
    uses: list[int] = field(default_factory=list)
    complete: dict[int, int] = field(default_factory=dict)
    reduced: int = 0
    patterns: dict[int, int] = field(default_factory=dict)  # see `Expected`

    def add(self, done: Past) -> None:
        if not self.uses:
            self.begins = done.begins
        self.complete |= {len(self.uses) + at: self.reduced + count for at, count in done.complete.items()}
        for at, use in enumerate(done.uses):
            if use == NEXT_BACKWARD:  # by the plan
                end = last_end(done.uses[:at])
                self.patterns[len(self.uses) + end] = done.ended[end]
        self.uses += done.uses
        self.reduced += done.reduced

    def continue_after(self, groups: int, pattern: int) -> None:
        """Notes that another micro-batch follows, after one with so many gradient groups."""
        self.patterns[last_end(self.uses)] = pattern
        self.uses.append(NEXT_BACKWARD)
        self.reduced += groups


@final
class PlanCache:
    """Plans by the *kind* of a round, the digest of its uses. Ranks that have agreed in the same rounds have the same
    ones, and expect the same next round.

    `plan_of` makes the plan of uses, given how many gradient groups are complete at them.
    """

    def __init__(self, plan_of: Callable[[list[int], Mapping[int, int]], Plan]) -> None:
        self._plan_of = plan_of
        self.is_on = True
        self._plans: dict[int, Plan | None] = {}  # None: see `ends_in_time`
        self._patterns: dict[int, dict[int, int]] = {}  # by kind, see `Expected`
        self._next: dict[_Before, int] = {}  # what came before a round -> its kind, the last time
        self._beginnings: dict[tuple[int, bool], int] = {}  # `Past.begins` -> kind of that round, the last time
        self._before = _Before()
        self._span: _Span | None = _Span(self._before)  # None: ranks have used different things since the last step

    @property
    def expected(self) -> Expected:
        """What came next, the last time that the same came before."""
        return self._known(self._next.get(self._before, self._next.get(self._before.in_short, 0)))

    def beginning(self, number: int, *, enabled: bool) -> Expected:
        """The last round whose first use was `number`, with gradients `enabled` or not."""
        return self._known(self._beginnings.get((number, enabled), 0))

    def _known(self, kind: int) -> Expected:
        return Expected(self._plans.get(kind), self._patterns.get(kind, {}))

    def learn(self, done: Past, groups: int, pattern: int, *, agree: bool, continues: bool) -> None:
        """Remembers a round that is over.

        Args:
            done: what this rank has done in it.
            groups: gradient groups of a backward.
            pattern: which parameters had gradients on this rank.
            agree: all ranks have used the same in it, and know the same of it.
            continues: the next round is of the same step, and all ranks had gradients of the same parameters.
        """
        agree &= self.is_on and not done.has_failed
        before = self._before
        if agree:
            self._remember(before, done.uses)
        is_micro = NEXT_BACKWARD not in done.uses  # of others, the span knows what is to be known
        has_any = bool(done.uses[: done.asked])
        if agree and has_any and done.begins and is_micro and self._make(done.uses, done.complete, groups, done.asked):
            self._beginnings[done.begins] = done.digest
        span = self._span
        if span is not None and agree:
            span.add(done)
        else:
            span = None
        if span is not None and continues:
            span.continue_after(groups, pattern)
        elif span is not None and NEXT_BACKWARD in span.uses and self._make(span.uses, span.complete, groups):
            self._remember_span(span)
        self._span = span if continues or not agree else _Span(self._before)

    def _remember_span(self, span: _Span) -> None:
        """Notes that its rounds come as one."""
        self._remember(span.before, span.uses)
        kind = kind_of(span.uses)
        self._patterns[kind] = span.patterns
        if span.begins:
            self._beginnings[span.begins] = kind

    def _remember(self, before: _Before, uses: list[int]) -> None:
        """Notes that a round with these uses has come after those `before`."""
        kind = kind_of(uses)
        for each in (before, before.in_short):
            self._next.pop(each, None)  # so that it is the newest one
            self._next[each] = kind
        while len(self._next) > _MOST_NEXT:
            del self._next[next(iter(self._next))]
        self._before = before.then(kind if uses else None)

    def _make(self, uses: list[int], complete: Mapping[int, int], groups: int, stop: int | None = None) -> bool:
        """Makes the plan of a round, or of its uses before `stop`, unless it was made before. Returns whether there is
        one."""
        kind = kind_of(uses)
        if kind not in self._plans and len(uses) <= _LONGEST:
            plan = self._plan_of(uses[:stop], complete)
            self._plans[kind] = plan if ends_in_time(plan, END, NEXT_BACKWARD, groups) else None
            for old in list(self._plans)[:-_MOST_PLANS]:
                del self._plans[old]
                self._patterns.pop(old, None)
        return self._plans.get(kind) is not None

    def clear(self) -> None:
        """Drops all plans, as gradient groups are counted in another order, or there are more of them."""
        self._plans.clear()
        self._patterns.clear()
        if self._span is not None and self._span.uses:
            self._span = None

    def close(self) -> None:
        """Drops all plans, and makes no more."""
        self._plans.clear()
        self.is_on = False


def kind_of(uses: Iterable[int], before: int = 0) -> int:
    """Returns a digest of uses that come after those with the digest `before`."""
    for use in uses:
        before = (before * 1_000_003 + use + 1 - ASK) % _HASH  # no use counts as nothing
    return before


def last_end(uses: list[int]) -> int:
    """Returns where the last backward has ended."""
    return len(uses) - 1 - uses[::-1].index(END)
