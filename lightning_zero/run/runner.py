"""`Runner`: carries out a training step: what is due at each use of it, and in which order.

Hooks, reads and saves say which use they are (`program.Cause`) by calling a method here, or one of two parts: `course`
has units gathered and other ranks served, `latest` has groups catch up with postponed steps. `placing` says the same of
a step in integers; tests compare both.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.run.backward import Backward
from lightning_zero.run.cache import UnitCache
from lightning_zero.run.edit_barriers import GradientEditBarrier
from lightning_zero.run.gradient_hooks import GradientHooks
from lightning_zero.run.journal import Journal
from lightning_zero.run.lasting import LastingLoans
from lightning_zero.run.latest import Latest
from lightning_zero.run.parameter import Interception
from lightning_zero.run.phase import Phase, Phases
from lightning_zero.run.program import Cause
from lightning_zero.run.reductions import GradientState, Reductions
from lightning_zero.run.rendezvous import Rendezvous
from lightning_zero.run.stepping import Stepping
from lightning_zero.run.weight_views import WeightViews
from lightning_zero.shards.gradient import gradient_of
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.setting import Setting
from lightning_zero.shards.slot import Slot, no_interception


@final
class Runner:
    """Does what a step's uses need: has ranks agree, reduces, steps and publishes. `course` gathers."""

    def __init__(
        self,
        setting: Setting,
        groups: list[ShardGroup],
        cache: UnitCache,
        reductions: Reductions,
        stepping: Stepping,
        lasting: LastingLoans,
        interception: Interception,
        journal: Journal,
    ) -> None:
        self.journal = journal
        self.reductions = reductions
        self.stepping = stepping
        self.rendezvous = Rendezvous(setting.mesh, cache, reductions, journal)
        self.course = self.rendezvous.course
        self.latest = Latest(groups, cache, self.rendezvous, interception, journal)
        self.backward = Backward()
        self.hooks = GradientHooks(partial(self.gradient, weakref.ref(self)))
        self.hooks.add(reductions.gradients)
        self.views = WeightViews()  # in the pass under way
        self.phases = Phases()
        self._lasting = lasting
        self.gradient_edits: GradientEditBarrier | None = None  # where gradients rest as shards
        # Ranks agree on gradients at the end of a backward, and not as late as in the step: where `p.grad` is reduced
        # in place, and must not be added to before; and where gradients are stepped there.
        self._settles_at_end = not setting.partition.optimizer or not setting.keeps_gradients
        self._steps_next = False  # see `expect_step`

    # -- forward

    def begin_forward(self) -> None:
        """A forward begins."""
        self.recover()
        self._begin_pass()
        self.journal.is_on = torch.is_grad_enabled()
        self.journal.note(Cause.FORWARD)

    def _begin_pass(self) -> None:
        self._steps_next = False
        self.views.clear()
        self.hooks.begin_pass()

    def catch_up(self) -> None:
        """Takes all postponed steps of offloaded parameters, which otherwise wait until the values are needed. Raises
        the error of one that has failed."""
        self.finish_steps()
        self.stepping.raise_late_error()

    def finish_steps(self) -> None:
        """Takes all postponed steps, and waits until what is stepped is where it rests."""
        self.latest.catch_up_all()
        self.stepping.finish()

    # -- backward

    def notice_backward(self, slot: Slot | None = None) -> None:
        """A backward begins that nobody has announced. It has come to a unit, or to the gradient of `slot`."""
        with nullcontext() if slot is None else slot.gradient.kept_apart(slot):  # type: ignore[union-attr]
            self.begin_backward()
        self.backward.notice(self.end_backward)

    def begin_backward(self) -> None:
        """A backward begins."""
        self.recover()
        self._begin_pass()
        self.journal.note(Cause.BACKWARD)
        self.catch_up()  # new gradients take the place of those that postponed steps need
        self._take_back_gradients(all_here=False)  # edits of the old ones, before there are new ones
        if self.reductions.state is GradientState.UNSETTLED or self.rendezvous.is_awaited:
            self.rendezvous.settle_last_backward()
        self.reductions.begin_backward()
        self.phases.enter(Phase.BACKWARD)

    @staticmethod
    def gradient(runner: "weakref.ref[Runner]", of: weakref.ref[Slot], _: Tensor) -> None:
        """Autograd has accumulated a gradient into `p.grad`: takes it. The last one of a group has the group reduced,
        and what was complete here and waits for its turn."""
        self, slot = runner(), of()
        if self is None or slot is None:
            return
        with no_interception():
            if slot.parameter.grad is None:
                gradient_of(slot).note_taken(slot)
                return
        if not self.backward.is_known:
            self.notice_backward(slot)
        gradient = gradient_of(slot)
        if gradient.is_complete:
            self.reductions.refuse_second(slot)
        with no_interception():
            is_last = gradient.collect(slot, local=not self.reductions.is_on)
        if not is_last:
            return
        self.journal.note(Cause.GRADIENT, gradient.group)
        number = self.reductions.note_complete(gradient)
        if self.rendezvous.come_to_reduce(number):
            with no_interception(), torch.no_grad():
                for due in self.reductions.due(number):
                    due.begin_reduce()

    def end_backward(self) -> None:
        """A backward has ended: starts what is left to reduce, if its gradients are reduced."""
        self.phases.exit(Phase.BACKWARD)
        self.journal.note(Cause.END if self.reductions.is_on else Cause.KEPT)
        with no_interception(), torch.no_grad():
            number = len(self.reductions.gradients)
            if self.reductions.has_gradients and self.rendezvous.come_to_reduce(number):
                self.reductions.start(number)
            self.reductions.end_backward()
            self.rendezvous.end_backward()
            if self._settles_at_end and self.reductions.state is GradientState.UNSETTLED:
                self.rendezvous.meet()
            self.stepping.publish_stepped_in_backward(self.latest.groups)
            if self.stepping.has_failed_in_backward:  # no call of `step` follows here, in which others meet this rank
                self.stepping.forget_backward()
                self.rendezvous.meet()
                self.reductions.notices.begin_step()
                self.stepping.raise_late_error()

    def recover(self) -> None:
        """Forgets what a failed backward or step has left half done. It must have failed on every rank."""
        self.stepping.recover()
        # Asked of the reductions: the phase ends with the forward that it is in, as in manual optimization.
        if self.reductions.state is GradientState.COLLECTING and not self.backward.is_known:
            self.phases.exit(Phase.BACKWARD)
            self.rendezvous.forget_backward()
            with no_interception():
                self.reductions.forget()
            self.stepping.forget_backward()
            self.journal.forget()

    def meet_before_collective(self) -> None:
        """Forgets what has failed, and meets if a rank may want something alone. Collective."""
        self.recover()
        self.rendezvous.meet_before_collective()

    def meet(self) -> None:
        """Forgets what has failed, where user code has caught its error, and meets. Collective."""
        self.recover()
        self.rendezvous.meet()

    # -- averaged gradients, and steps

    def look(self, cause: Cause | None = None, *, meets: bool) -> None:
        """Averaged gradients are measured, changed or read. Collective after a backward; the caller passes `meets` if
        it issues another collective next."""
        self.recover()
        if cause is not None:
            self.journal.note(cause)
        self.latest.catch_up_all()
        self.rendezvous.settle_gradients(meets=meets)
        self._take_back_gradients(all_here=meets)

    def wait_to_edit_gradients(self, call: int | None = None) -> None:
        """Waits until all ranks have come to an edit of gradients; see `GradientEditBarrier`."""
        if self.gradient_edits is not None:
            self.gradient_edits.wait_for_all(call)

    def _take_back_gradients(self, *, all_here: bool) -> None:
        if not all_here and self._lasting.has_edited_gradients:
            self.wait_to_edit_gradients()
        self._lasting.take_back_gradients()

    def expect_step(self) -> None:
        """Notes that gradients have just been clipped, and that the step comes next, before any code of users, on every
        rank: ranks have met to clip, and need not meet again. Call it on every rank."""
        self._steps_next = True

    @contextmanager
    def step(self, optimizer: Optimizer, *, trains: bool = True) -> Iterator[None]:
        """Around `Stepping.step`: the user calls `optimizer.step`. Unless it `trains`, around `Stepping.change`. Ranks
        agree on which parameters have gradients, and edits are taken over. Collective."""
        self.recover()  # first, as the journal forgets what failed
        if trains:
            self.journal.note(Cause.STEP_AFTER_CLIP if self._steps_next else Cause.STEP, optimizer)
        with self.journal.dropping_what_fails():
            self.catch_up()
            if not self._steps_next and (self.rendezvous.serving.may_be_wanted or not self._settles_at_end):
                # Before edits are taken over: a rank that diverges may still gather the old values.
                self.rendezvous.meet()
            self._steps_next = False
            self.reductions.notices.begin_step()
            self._lasting.end_all()
            with self.phases.within(Phase.STEP):
                yield

    def change(self, optimizer: Optimizer, call: Callable[[], Any]) -> Any:
        """Returns `call()`, which changes parameters and state of `optimizer` between two steps. Collective."""
        with self.step(optimizer, trains=False):
            return self.stepping.change(optimizer, call)
