"""`make_program`: places what the engine does at the uses of a step. Integers only."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import final

from lightning_zero.run.placed import Placed, PlacedReductions
from lightning_zero.run.placed_steps import PlacedSteps
from lightning_zero.run.plan import Step
from lightning_zero.run.program import Among, Cause, Facts, Kind, Program, Use
from lightning_zero.run.rounds import Complete, residents, rounds_of, settled_alone, tells_ready


def make_program(facts: Facts, uses: Sequence[Use]) -> Program:
    """Returns the program of a step with these uses, from its first forward to the return of `optimizer.step`. The step
    before it had the same ones."""
    placing = _Placing(facts, uses)
    for at, use in enumerate(uses):
        placing.place(at, use)
    return Program(facts, tuple(uses), tuple(placing.placed.ops))


@final
class _Placing:
    """Follows a step, use by use, and notes what the engine does. `place` it in order; then see `placed`."""

    def __init__(self, facts: Facts, uses: Sequence[Use]) -> None:
        self._facts = facts
        self.placed = Placed(facts, uses)
        self._reductions = PlacedReductions(self.placed)
        self._steps = PlacedSteps(self.placed, self._reductions)
        rounds = rounds_of(facts, uses)
        self._met = {at for at in range(len(uses)) if any(at == one.stop for one in rounds)}
        self._plan = {at: step for one in rounds for at, step in one.steps.items()}
        self._alone = settled_alone(facts, uses)
        self._here = residents(facts)
        self._complete = Complete(facts, uses)
        self._reduced = 0  # groups of the micro-batches of this round that are over
        self._started = 0  # reductions of this backward
        self._is_ready = False  # all ranks are known to reduce in this round
        self._starts_early: bool | None = None  # replicas start to reduce before they meet; None: they have not told
        self._is_unsettled = False
        self._unstepped: list[int] = []  # reduced, and to be stepped in backward

    @property
    def _at(self) -> int:
        return self.placed.at

    def place(self, at: int, use: Use) -> None:
        self.placed.at = at
        self._complete.come_to(at + 1)
        causes: dict[Cause, Callable[[int], None]] = {
            Cause.UNIT: self._use,
            Cause.CALL: self._call,
            Cause.READ: self._steps.catch_up,
            Cause.BACKWARD: self._begin_backward,
            Cause.GRADIENT: self._start_complete,
            Cause.END: self._end_backward,
            Cause.KEPT: self._note_end,
            Cause.UNSCALE: self._unscale,
            Cause.CLIP: self._clip,
            Cause.LOOK: lambda _: self._meet(),
            Cause.MEASURE: self._clip,
            Cause.READ_GRADIENT: self._read_gradient,
            Cause.STEP: self._step,
            Cause.STEP_AFTER_CLIP: self._step,
            Cause.STEPPED: self._steps.end_call,
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
                self.placed.add(Kind.RESHARD, evicted)
            groups = self._facts.units[number].groups
            for group in groups:
                self._steps.catch_up(group)
            facts = [self._facts.groups[group] for group in groups]
            sent = sum(self.placed.sent(one.shard, one.itemsize) for one in facts)
            self.placed.add(Kind.UNSHARD, number, by=self._next_use(number), nbytes=sent)

    def _next_use(self, unit: int) -> int:
        return self.placed.uses.index(Use(Cause.UNIT, unit), self._at)

    def _call(self, number: int) -> None:
        if self._facts.meets_for(Use(Cause.CALL, number)):
            self._meet()
        elif self._at in self._plan:
            self._follow(self._plan[self._at])
        else:
            self.placed.add(Kind.AGREE, among=self._facts.agree_among)
        if number in self._facts.publishes:
            self._steps.catch_up(self._facts.publishes[number])
        else:
            among = self._facts.among_all if number in self._facts.of_all else Among.SHARD
            self.placed.add(Kind.CALL, number, among=among)

    # -- agreement

    def _meet(self) -> None:
        """Has ranks agree, if they meet here, and reduces what is left."""
        if self._at not in self._met:
            return
        if self._facts.agree > 1 or self._facts.units:
            if not self._is_unsettled:
                self._tell_replicas(starts=False)
            if self._facts.spans:
                self._tell_end()
            self.placed.add(Kind.AGREE, among=self._facts.agree_among)
            self._join_replicas()
        self._is_ready, self._reduced = False, 0
        for number in self._here:
            self._here.remove(number)
            self.placed.add(Kind.RESHARD, number)
        if self._facts.parts:
            self.placed.add(Kind.AGREE, among=Among.REPLICAS)
        if self._facts.tensor_ranks > 1 and self.placed.uses[self._at].cause is not Cause.BACKWARD:
            self.placed.add(Kind.AGREE, among=Among.TENSOR)
        if self._is_unsettled:
            self._is_unsettled = False
            self._settle()

    def _tell_replicas(self, *, starts: bool) -> None:
        """Has replicas tell each other, once for each backward, whether they start reductions before they meet."""
        if self._facts.parts and self._starts_early is None:
            self._starts_early = starts
            self.placed.add(Kind.MARK, among=Among.REPLICAS)

    def _tell_end(self) -> None:
        """Has replicas tell each other which parameters have gradients, or that they meet."""
        if self._facts.parts:
            self.placed.add(Kind.MARK, among=Among.REPLICAS)

    def _join_replicas(self) -> None:
        """Reduces what another replica may wait in, before anything else waits for it."""
        self._tell_replicas(starts=False)
        if self._starts_early:
            self._start(len(self._facts.order))
            self._reductions.drain()
        self._starts_early = None

    # -- backward

    def _begin_backward(self, _: int) -> None:
        self._steps.catch_up_all()
        if self._at in self._plan:  # of a round that goes on
            self._follow(self._plan[self._at])
            self._tell_end()
            self._is_unsettled = False
            self._settle()
            self._starts_early = None
            self._reduced += len(self._facts.order)
        else:
            self._settle_alone()
        self._meet()
        self._started = 0

    def _settle_alone(self) -> None:
        """Settles the last backward, where this rank needs no other for it."""
        if self._at in self._alone:
            self._is_ready = self._is_unsettled = False
            self._settle()

    def _start_complete(self, _: int) -> None:
        """Starts the reductions of complete groups. Where units are gathered, a plan says when."""
        if not self._facts.units:
            self._start_now(self._complete.count)

    @cached_property
    def _tells_ready(self) -> bool:
        return self._facts.agree > 1 and tells_ready(self._facts, self.placed.uses)

    def _start_now(self, count: int) -> None:
        if count > self._started and self._tells_ready and not self._is_ready:
            self._is_ready = True
            kind = Kind.MARK if self._facts.marks_reductions else Kind.AGREE
            self.placed.add(kind, among=self._facts.agree_among)
            if kind is Kind.AGREE:
                self._leave_plan()
        self._start(count)

    def _leave_plan(self) -> None:
        """Drops the rest of the plan of this round: it ends where ranks ask each other."""
        stop = min((at for at in self._met if at > self._at), default=len(self.placed.uses))
        for at in range(self._at, stop):
            self._plan.pop(at, None)

    def _start(self, count: int) -> None:
        if count > self._started:
            self._tell_replicas(starts=True)
        self._reduce(count)

    def _reduce(self, count: int) -> None:
        for group in self._facts.order[self._started : count]:
            self._reductions.reduce(group)
            if self._facts.steps_in_backward:
                self._step_reduced()
                self._unstepped.append(group)
        self._started = max(self._started, count)

    def _settle(self) -> None:
        if self._facts.steps_in_backward:
            self._settle_in_steps()
        else:
            self._reduce(len(self._facts.order))
            self._reductions.drain()

    def _settle_in_steps(self) -> None:
        for number, group in enumerate(self._facts.order):
            self._start(number + 1)
            if group in self._unstepped:
                self._step_reduced()

    def _step_reduced(self) -> None:
        for group in self._unstepped:
            self._reductions.drain_until(group)
            self._steps.step_now(group)
        self._unstepped.clear()

    def _end_backward(self, _: int) -> None:
        if not self._facts.units:
            self._start_now(len(self._facts.order))
            if self._is_ready and self._facts.replicas > 1:
                self._reductions.drain()
        self._is_unsettled = True
        self._note_end(0)
        self._meet()
        if self._facts.steps_in_backward:
            self._steps.publish_stepped()

    def _note_end(self, _: int) -> None:
        if self._at in self._plan:
            self._follow(self._plan[self._at])

    # -- gradients that are averaged

    def _read_gradient(self, _: int) -> None:
        self._settle_alone()
        self._meet()

    def _unscale(self, _: int) -> None:
        self._meet()
        self._steps.look_for_overflow()

    def _clip(self, _: int) -> None:
        self._meet()
        self._steps.measure()

    # -- steps

    def _step(self, optimizer: int) -> None:
        self._steps.catch_up_all()
        self._meet()
        self._steps.begin_call(optimizer)
