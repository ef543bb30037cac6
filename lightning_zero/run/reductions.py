"""`Reductions`: sends the gradients of all groups, and tells the other ranks which parameters have some."""

import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import final

import torch

from lightning_zero.run.in_backward import StepsInBackward, nothing_left_for
from lightning_zero.run.notices import Notices
from lightning_zero.run.parameter import Interception
from lightning_zero.run.reduction_order import ReductionOrder
from lightning_zero.run.sharded_gradient import ShardedGradient
from lightning_zero.run.statement import Statement
from lightning_zero.shards.assembly import Assembly
from lightning_zero.shards.bucket import BucketPool
from lightning_zero.shards.gradient import GroupGradient, averaged_of, gradient_of
from lightning_zero.shards.slot import Slot, no_interception
from lightning_zero.wire.comm import Comm


class GradientState(Enum):
    """Where gradients are between autograd and the optimizer."""

    CLEAR = auto()  # no backward has ended since ranks last agreed
    COLLECTING = auto()  # a backward is under way
    UNSETTLED = auto()  # backward has ended, and ranks have not agreed yet on which parameters have gradients


@final
class Reductions:
    """Collects and reduces the gradients of each backward; with `overlap`, reductions run while backward goes on.

    From the end of backward until ranks have agreed, `interception` makes parameters ask for their gradients. After
    that, `p.grad` borrows averaged gradients from its lender.
    """

    def __init__(
        self,
        assembly: Assembly,
        comm: Comm,
        overlap: bool,
        interception: Interception,
        steps: StepsInBackward | None,
        notices: Notices,
    ) -> None:
        self._order = ReductionOrder(assembly.gradients, comm)
        self.pools = assembly.pools
        self._comm = comm
        self._overlap = overlap
        self._interception = interception
        self.started = 0  # how many of `gradients` are being reduced, or have been
        self._may_wait: bool | None = None  # see `may_wait`; None until it is asked
        self.state = GradientState.CLEAR
        self._alone: bytes | None = None  # flags of parameters with gradients, if this rank has settled them alone
        self.is_on = True  # False: backwards only accumulate gradients, on this rank
        self.reduces = True  # the latest backward was begun while `is_on`
        self.notices = notices  # told to the other ranks with each statement
        self.steps = steps  # takes averaged gradients in backward, if there is one

    @property
    def gradients(self) -> list[GroupGradient]:
        """All gradients, in the agreed order."""
        return self._order.gradients

    def add(self, gradients: Sequence[GroupGradient], pools: Sequence[BucketPool]) -> None:
        """Appends gradients that have begun to train to the agreed order. Call it between two backwards."""
        self._order.add(gradients)
        self.pools = [*self.pools, *pools]
        self._may_wait = None

    @property
    def may_wait(self) -> bool:
        """Whether a reduction may wait for another one, and so for another rank, before backward has ended; or is
        compared with what another rank issues (`sanitize`). It is asked at every gradient."""
        if self._may_wait is None:
            chunks = Counter({pool: -pool.size for pool in self.pools})
            for gradient in self.gradients:
                if gradient.travels and not gradient.group.kind.is_idle:
                    chunks[gradient.pool] += len(gradient.group.layout.chunks)
            comms = {gradient.group.comm for gradient in self.gradients}
            in_order = any(comm.keeps_order or comm.sanitize for comm in comms)
            self._may_wait = in_order or any(more > 0 for more in chunks.values())
        return self._may_wait or self.steps is not None

    def refuse_stepped(self, doing: str) -> None:
        """Raises RuntimeError for an action that needs gradients after backward, if backward steps them."""
        if self.steps is not None:
            raise nothing_left_for(doing)

    # -- in backward

    def begin_backward(self) -> None:
        """Notes that a backward begins, and that the last one is settled."""
        self.state = GradientState.COLLECTING
        self.reduces = self.is_on
        self._order.begin_backward()
        self.forget_settled()
        with no_interception():
            # All are read before any is written: after `p.grad, q.grad = q.grad, p.grad`, one is where another goes.
            given = [gradient.begin_backward() for gradient in self.gradients]
            for gradient, grads in zip(self.gradients, given, strict=True):
                if grads:
                    gradient.replace_accumulated(grads)

    def forget_settled(self) -> None:
        """Notes that other ranks have begun another backward than the one that this rank has settled alone."""
        self._alone = None

    def refuse_second(self, slot: Slot) -> None:
        """Raises RuntimeError for another gradient of a parameter, if its group has been sent in this backward."""
        if gradient_of(slot) in self.gradients[: self.started]:
            raise RuntimeError(
                f"Parameter {slot.name!r} received a second gradient in one backward, after its first was sent to the "
                "other ranks: it is used in several reentrant activation checkpoints. Write "
                "checkpoint(..., use_reentrant=False), or ZeroStrategy(overlap=False)."
            )

    def note_complete(self, gradient: GroupGradient) -> int:
        """Notes that a group has all its gradients on this rank. Returns `count_complete`."""
        self._order.note_complete(gradient)
        return self.count_complete()

    def count_complete(self) -> int:
        """Returns how many groups, from the first of the agreed order, have all the gradients on this rank that they
        will have: once backward has ended, those are all groups."""
        if self.state is GradientState.UNSETTLED and self.has_gradients:
            return len(self.gradients)
        return self._order.count_complete() if self.is_on and self._overlap else 0

    def due(self, number: int) -> Iterator[GroupGradient]:
        """Yields those of the first `number` gradients of the agreed order that are not being reduced yet. The caller
        begins to reduce each before it goes on."""
        for gradient in self.gradients[self.started : number]:
            if not gradient.group.kind.is_idle:  # of an idle one other ranks may have no gradient: see `_awake`
                yield gradient
                if self.steps is not None:
                    self.steps.follow(gradient)
            self.started += 1

    def start(self, number: int) -> None:
        """Starts the first `number` reductions of the agreed order, except those that have started."""
        with no_interception(), torch.no_grad():
            for gradient in self.due(number):
                gradient.begin_reduce()

    def wait_after(self, hear: Callable[[], None] | None) -> None:
        """Has `hear` called before any reduction is waited for; None ends that."""
        for pool in self.pools:
            pool.wait_after(hear)

    def start_all(self, having: Sequence[Sequence[Slot]] = ()) -> None:
        """Starts all reductions, before any is waited for: another rank may be out of buckets. `having` are the
        parameters with a gradient on any rank, by group, where ranks have agreed on them."""
        self.start(len(self.gradients))
        with no_interception(), torch.no_grad():
            for gradient, _ in self._awake(having):
                gradient.begin_reduce()

    def _awake(self, having: Sequence[Sequence[Slot]]) -> list[tuple[GroupGradient, Sequence[Slot]]]:
        """Returns the idle groups of which any rank has gradients, and those parameters. They are idle no longer. All
        ranks come to the same ones, and reduce them after all others."""
        found = [(gradient, slots) for gradient, slots in zip(self.gradients, having, strict=False) if slots]
        found = [(gradient, slots) for gradient, slots in found if gradient.group.kind.is_idle]
        for gradient, _ in found:
            gradient.begin_having_gradients()
            self._may_wait = None
        return found

    @property
    def has_gradients(self) -> bool:
        """Whether this rank has gradients to reduce."""
        return self.is_on and any(gradient.used for gradient in self.gradients)

    @property
    def are_accumulated(self) -> bool:
        """Whether the gradients of the latest backward are still those of each rank, and no average of them."""
        return not self.reduces and any(gradient.travels for gradient in self.gradients)

    def end_backward(self) -> None:
        """Ends a backward: its gradients only accumulate, or are reduced when ranks agree (`settle`)."""
        if not self.is_on:
            self.state = GradientState.CLEAR
            for gradient in self.gradients:
                gradient.end_backward_unreduced()
            self._clear()
            return
        self.state = GradientState.UNSETTLED
        self.notices.are_current = False  # one rank may read these gradients alone: the others do not go on without it
        for gradient in self.gradients:  # what a next backward adds to `p.grad` before ranks agree is kept apart
            if gradient.averaged.is_spread and self.steps is None:
                for index in gradient.used:
                    self.show(gradient.group.slots[index])
        for gradient in self._plain:
            self._interception.hide(gradient.group)

    # -- what ranks agree on

    def statement(self) -> Statement:
        """Returns what this rank knows of the backward."""
        has_gradients = self.state is GradientState.UNSETTLED and any(gradient.used for gradient in self.gradients)
        has_gradients |= self._alone is not None
        complete = self.count_complete()
        incomplete = bytes(at >= complete for at in range(len(self.gradients)))
        return Statement(has_gradients, bytes(self.notices.flags()), incomplete, self._alone or self._flags)

    def read(self, said: bytes) -> Statement:
        """Returns the statement that `said` holds, of this rank or of several."""
        return Statement.read(said, len(self.gradients))

    @property
    def _flags(self) -> bytes:
        return b"".join(bytes(map(one.used.__contains__, range(len(one.group.slots)))) for one in self.gradients)

    def hear(self, said: Statement, *, of_all: bool = True) -> bytes | None:
        """Takes the combined statements of all ranks. Returns the flags of parameters with a gradient on any rank, for
        `settle`; None if no rank has gradients to reduce. May raise RuntimeError on every rank. If they are not
        `of_all` ranks, but of some with all batches, notices are left for later: all hear them at the same point."""
        if of_all:
            self.notices.hear(said.notices)
            if self.notices.are_apart:
                self._refuse_uneven_batches()
            if self.notices.is_torn:
                self.notices.refuse_torn_step(self._comm.all_gather_object(self.notices.left, "steps that were left"))
        if said.has_gradients:
            return said.used
        self._end_unsettled()
        self.started = 0  # a replica may have reduced with this one what both have dropped since, as a backward failed
        return None

    def settle(self, flags: bytes) -> None:
        """Reduces the remaining gradients of the parameters with a flag, and shows the averaged ones in `p.grad` (or
        steps them). Collective."""
        self._end_unsettled()
        if self._alone is None:
            with no_interception(), torch.no_grad():
                having = self._slots_in(flags)
                if self.steps is None:
                    self.start_all(having)
                    for pool in self.pools:  # not by `drain`: so each gradient walks through fewer calls
                        with pool.draining() as finishes:
                            for finish in finishes:
                                finish()
                    self._show_averages(having)
                else:
                    self._step_averages(self.steps, having)
        self._alone = None
        self._clear()

    def learn_order(self) -> None:
        """Takes over the order of rank 0's first backward. Collective, once."""
        self._order.learn()

    def _slots_in(self, flags: bytes) -> list[list[Slot]]:
        """Returns the parameters with a flag, by group."""
        found, rest = [], flags
        for slots in (gradient.group.slots for gradient in self.gradients):
            own, rest = rest[: len(slots)], rest[len(slots) :]
            found.append([*itertools.compress(slots, own)])
        return found

    @property
    def pattern(self) -> int:
        """A digest of which parameters have gradients on this rank."""
        return zlib.crc32(self._flags)

    def settle_alike(self) -> None:
        """Does what `settle` does, where all ranks are known to have gradients of the same parameters. Collective."""
        self.settle(self._flags)

    @property
    def may_settle_alone(self) -> bool:
        """Whether averages are stored without further collectives, and stay as they are until the next ones are."""
        return self.steps is None and all(s.travels and s.group.setting.partition.gradient for s in self.gradients)

    @property
    def is_complete(self) -> bool:
        """Whether all parameters have gradients on this rank, and ranks need not agree on which have."""
        return all(self._flags) and not self.has_idle

    @property
    def has_idle(self) -> bool:
        """Whether there are groups of which no rank has had a gradient so far."""
        return any(gradient.group.kind.is_idle for gradient in self.gradients)

    def settle_alone(self, said: Statement | None) -> None:
        """Does what `settle` does, where all reductions are under way on all ranks. Other ranks may settle later. Of
        `said`, the combined statements, it takes which parameters have gradients; without it, all have."""
        flags = bytes([1] * len(self._flags)) if said is None else said.used
        self.settle(flags)
        self._alone = flags

    def _end_unsettled(self) -> None:
        """Has parameters ask for their gradients no longer: ranks agree on them here."""
        if self.state is GradientState.UNSETTLED:
            for gradient in self._plain:
                self._interception.show(gradient.group)
        self.state = GradientState.CLEAR

    def _refuse_uneven_batches(self) -> None:
        """Raises RuntimeError on every rank. Collective."""
        places = self._comm.all_gather_object(self.notices.place, "places")
        told = "; ".join(f"rank {rank} is {place}" for rank, place in enumerate(places))
        raise RuntimeError(
            f"Ranks have not equally many training batches: {told}. Give each as many: with a DistributedSampler "
            "(Lightning adds one to datasets that have a length), drop_last=True, or Trainer(limit_train_batches=...)."
        )

    def _show_averages(self, having: Sequence[Sequence[Slot]]) -> None:
        """Shows averaged gradients in parameters that had one on any rank (`having`); other `p.grad` stay as is."""
        for gradient, slots in zip(self.gradients, having, strict=True):
            gradient.end_reduce()
            for slot in slots if gradient.travels else ():
                self.show(slot)

    def _step_averages(self, steps: StepsInBackward, having: Sequence[Sequence[Slot]]) -> None:
        """Steps the remaining gradients group by group; each reduction starts when it is the group's turn."""
        for number, (gradient, slots) in enumerate(zip(self.gradients, having, strict=True)):
            self.start(number + 1)
            steps.step_rest(gradient, slots)
        for gradient, slots in self._awake(having):
            gradient.begin_reduce()
            steps.step(gradient, slots)
        for gradient in self.gradients:
            gradient.end_reduce()

    @property
    def _plain(self) -> list[GroupGradient]:
        """Gradients of parameters that are not intercepted for any other reason."""
        return [gradient for gradient in self.gradients if gradient.travels and gradient.group.is_plain]

    def show(self, slot: Slot) -> None:
        """Makes `p.grad` the averaged gradient."""
        averaged = averaged_of(slot)
        if averaged.is_spread:
            shown = slot.local.read_grad()
            if not (isinstance(shown, ShardedGradient) and shown.is_of(slot)):
                slot.local.set_grad(ShardedGradient(slot, self._interception.lender))
        else:
            assert averaged.full_grad is not None
            slot.local.set_grad(slot.view(averaged.full_grad))

    def forget(self) -> None:
        """Drops the gradients of a backward that has failed, on every rank."""
        for pool in self.pools:
            pool.drain()
        for gradient in self.gradients:
            gradient.forget()
        self.state = GradientState.CLEAR
        self._alone = None
        self._clear()

    def _clear(self) -> None:
        self.started = 0
        self._order.end_backward()
        if self.steps is not None:
            self.steps.clear()

    def free(self) -> None:
        """Releases gradients and buckets permanently."""
        for gradient in self.gradients:
            gradient.free()
        self._clear()
        # Nothing is due any more, even if an error has ended a backward in the middle.
        self._order.gradients, self.pools = [], []
