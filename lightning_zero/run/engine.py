"""`Engine`: trains one module with its optimizers at a stage of ZeRO. Knows nothing of Lightning."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, final

import torch
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zero.device import HOST, numbered
from lightning_zero.run.averages import Averages
from lightning_zero.run.cache import UnitCache
from lightning_zero.run.facts import facts_of
from lightning_zero.run.loans import Loans
from lightning_zero.run.parameter import Interception
from lightning_zero.run.phase import Phase, Phases
from lightning_zero.run.placing import make_program
from lightning_zero.run.program import Cause, Facts, Program
from lightning_zero.run.reductions import Reductions, Stage
from lightning_zero.run.regrouping import Regrouping
from lightning_zero.run.rendezvous import Rendezvous
from lightning_zero.run.replicated import SharedBuffers, move_replicated
from lightning_zero.run.saved import SavedParameters
from lightning_zero.run.schedule import Schedule
from lightning_zero.run.setup import set_up
from lightning_zero.run.states import States
from lightning_zero.run.stepping import Stepping
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.local import local_of
from lightning_zero.shards.options import Options
from lightning_zero.shards.slot import no_interception, slot_of
from lightning_zero.tiers.ledger import Category, Ledger, Tier, category_in
from lightning_zero.wire.comm import Comm

__all__ = ["Engine", "Options"]


@final
class Engine:
    """Trains `module` on the ranks of `comm`, with optimizer state, gradients and parameters sharded as `stage` says.

    This is a whole training loop:

        engine = Engine(module, [optimizer], stage=2, comm=comm)
        for batch in batches:
            with engine.forward():
                loss = module(batch)
            with engine.backward():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.close()

    A training step, from end to end (`ARCHITECTURE.md` explains unit, group, bucket and piece):

    1. `forward` takes over in-place edits that user code has made to parameters, and broadcasts rank 0's buffers. At
       stage 3, each unit is all-gathered into a buffer of the arena before the first of its modules runs, together with
       the unit after it. It stays gathered until another unit needs the buffer. In place of a parameter's values,
       autograd saves which part of which unit they are.
    2. `backward`, at stage 3, gathers a unit again when autograd asks for values that it has saved of it. A hook
       collects each gradient as soon as autograd has written it. When all gradients of a group are complete, they are
       reduce-scattered, bucket by bucket, while backward goes on. All ranks reduce the groups in the same order.
    3. `optimizer.step()` enters `around_step` and `Stepping.step` through a hook. First, all ranks agree on which
       parameters have a gradient (at stage 0, they do so at the end of backward). This is the only message of a step
       that ranks wait for beside its data, also where each of several micro-batches is reduced. (At stages 0 to 2, if
       all buckets can travel at once, there is one more between two micro-batches that are reduced. If they cannot, a
       mark travels beside the first reduction of each backward; over NCCL, ranks agree before it.) During the call, the
       values and the gradient of each parameter are the piece that this rank owns, so the optimizer makes state for
       this piece only.
    4. After the call, at stages 1 and 2, the new values are all-gathered. At stage 3, the next forward gathers them.

    All ranks start from rank 0's parameters and buffers. Without optimizers, only parameters are sharded. On one rank
    there is no communication, and without offload optimizers step the parameters themselves.

    Args:
        module: the model. Its Parameter objects stay the same ones, also after `close`.
        optimizers: over parameters of the module. Call their `step` as usual.
        stage: 0, 1, 2 or 3.
        comm: the communicator of all ranks.
        device: where the module computes. Parameters move there group by group, so a model larger than the device's
            memory can be set up at stage 3. Everything else of the module moves there at once.
        options: see `Options`.
        ledger: books the bytes of this engine; None for one of its own.

    Raises:
        ValueError: if `replicate_size` does not divide the ranks, an optimizer has parameters that are not the
            module's, a parameter has no shape yet, a trainable parameter is of a kind that cannot be sharded, or the
            module has no blocks of the kind that is to recompute.
    """

    def __init__(
        self,
        module: Module,
        optimizers: Sequence[Optimizer],
        *,
        stage: int,
        comm: Comm,
        device: torch.device = HOST,
        options: Options | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.module = module
        self.device = device = numbered(device)
        self.options = options or Options()
        self.parts = set_up(module, optimizers, stage, comm, device, self.options, ledger or Ledger())
        setting, made = self.parts.setting, self.parts.assembly
        self.partition = setting.partition
        self.mesh = setting.mesh
        self.ledger = setting.ledger
        self.groups = made.groups
        self._interception = Interception()
        saved = SavedParameters()
        self.cache = UnitCache(made.units, made.arena, 1 + self.options.prefetch, self._interception, saved)
        self.reductions = Reductions(made, comm, self.options.overlap, self._interception)
        self.rendezvous = Rendezvous(self.mesh, self.cache, self.reductions)
        self.journal = self.rendezvous.journal
        self.loans = Loans(self.groups, self.cache, self.rendezvous, saved, self._interception)
        move_replicated(module, device)
        self.stepping = Stepping(
            module, optimizers, self.parts, self.options, self.reductions, self._interception, self.journal
        )
        late = module if self.stepping.may_be_late else None
        around_backward = self._begin_backward, self._end_backward, self._recover
        self.schedule = Schedule(made, self.reductions, self.loans, *around_backward, late=late)
        if self.parts.recompute is not None:
            self.parts.recompute.begin()
        steppers, whole = self.stepping.steppers, self.parts.stepped.whole
        self.regrouping = Regrouping(
            module, steppers, whole, setting, self.options, self.schedule, self.reductions, self.loans
        )
        self.regrouping.deal()
        self.stepping.begin(self.around_step, self._change)
        self.averages = Averages(module, device, self.mesh, self.loans, self.reductions)
        self.states = States(module, steppers, self.mesh, self.loans)
        self._phases = Phases()
        self._steps_next = False  # see `expect_step`
        is_on = self.options.broadcast_buffers
        self._buffers = SharedBuffers(module, self.mesh.world, self.rendezvous, is_on=is_on)
        for group in self.groups:
            if not group.is_plain:
                self._interception.hide(group)
        self.ledger.note_rest()

    # -- forward

    @contextmanager
    def forward(self, *, reduces: bool = True) -> Iterator[None]:
        """Around a forward. If its gradients will be reduced (`reduces`), the next forward broadcasts rank 0's buffers
        first, as DDP does."""
        self._recover()
        self._steps_next = False
        self.journal.is_on = torch.is_grad_enabled()
        self.journal.note(Cause.FORWARD)
        if torch.is_grad_enabled():
            self.regroup()
        if not torch.is_grad_enabled() or self.loans.loading:  # by user code that has loaded a checkpoint's entries
            self.catch_up()
            if (unread := self.loans.loading.take_error()) is not None:
                raise unread
        self.loans.settle()
        self.schedule.start_pass()
        self._buffers.bring()
        with self._phases.within(Phase.FORWARD), self.schedule.noting_saved():
            yield
        self._buffers.note_forward(reduces=reduces)

    def regroup(self) -> None:
        """Takes in parameters that have begun to train since set-up, the same ones on every rank: they were thawed,
        given to an optimizer, or made. Those that were made take rank 0's values; all others keep every bit.

        Collective if there are any. `forward` calls it; call it also before the optimizers' states are loaded.

        Raises:
            RuntimeError: if there are any, and parameters are offloaded.
        """
        if newly := self.regrouping.newly_trainable():
            self.catch_up()
            self.rendezvous.meet_all()  # settles the last backward, before there are more gradients to agree on
            self.loans.settle(all_here=True)
            self.regrouping.take_in(newly)
        self.regrouping.deal()

    # -- backward

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward. A backward without it also works: a callback of autograd tells its end."""
        self._recover()
        with self.schedule.bracket():
            self._begin_backward()
            yield
        self._end_backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around backwards that only accumulate gradients on this rank; the first backward after it reduces them."""
        self.reductions.refuse_stepped("accumulating gradients")
        before, self.reductions.is_on = self.reductions.is_on, False
        try:
            yield
        finally:
            self.reductions.is_on = before

    def accumulating(self) -> AbstractContextManager[None]:
        """Around the backwards of all micro-batches but the last; each is reduced if gradients accumulate as shards."""
        self.reductions.refuse_stepped("accumulating gradients")
        reduces = self.partition.gradient and self.options.accumulation == "sharded"
        return nullcontext() if reduces else self.no_sync()

    def _begin_backward(self) -> None:
        self._recover()
        self._steps_next = False
        self.journal.note(Cause.BACKWARD)
        self.catch_up()  # new gradients take the place of those that postponed steps need
        with no_interception(), torch.no_grad():
            self.loans.take_back_gradients()  # keeps edits of the old gradients, before this backward stores new ones
        if self.reductions.stage is Stage.UNSETTLED or self.rendezvous.is_awaited:
            self.rendezvous.settle_last_backward()
        self.schedule.start_pass()
        self.reductions.begin_backward()
        self._phases.enter(Phase.BACKWARD)

    def _end_backward(self) -> None:
        self._phases.leave(Phase.BACKWARD)
        self.journal.note(Cause.END if self.reductions.is_on else Cause.KEPT)
        with no_interception(), torch.no_grad():
            if self.reductions.has_gradients:
                self.rendezvous.start_reductions(len(self.reductions.shards))
            self.reductions.end_backward()
            self.rendezvous.end_backward()
            if self._settles_at_end and self.reductions.stage is Stage.UNSETTLED:
                self.rendezvous.meet()  # `p.grad` is reduced in place, and must not be added to before; or is stepped
            self.stepping.publish_stepped_in_backward()

    @property
    def _settles_at_end(self) -> bool:
        """Whether ranks agree on gradients at the end of a backward, and not as late as in the step."""
        return not self.partition.optimizer or self.options.step_in_backward

    def _recover(self) -> None:
        """Forgets what a failed backward or step has left half done. It must have failed on every rank."""
        self.stepping.recover()
        if self._phases.now is Phase.BACKWARD and not self.schedule.backward_is_known:
            self._phases.leave(Phase.BACKWARD)
            self.rendezvous.forget_backward()
            with no_interception():
                self.reductions.forget()
            self.stepping.forget_backward()
            self.journal.forget()

    # -- step

    @contextmanager
    def around_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Around `Stepping.step`, in which each parameter of `optimizer` is the piece that this rank owns. `StepCalls`
        enters both by hooks."""
        self.journal.note(Cause.STEP_AFTER_CLIP if self._steps_next else Cause.STEP, optimizer)
        self._prepare_step()
        self.regrouping.refuse_strangers(self.parts.foreign)
        self.regrouping.deal()
        with self._phases.within(Phase.STEP):
            yield
        self.averages.forget()
        self.ledger.note_rest()

    def expect_step(self) -> None:
        """Notes that gradients have just been clipped, and that the step comes next, before any code of users, on every
        rank: ranks have met to clip, and need not meet again. Call it on every rank."""
        self._steps_next = True

    def _change(self, optimizer: Optimizer, call: Callable[[], Any]) -> Any:
        """Returns `call()`, which changes parameters and state of `optimizer` between two steps. Collective."""
        self._prepare_step()
        with self._phases.within(Phase.STEP):
            return self.stepping.change(optimizer, call)

    def _prepare_step(self) -> None:
        """Makes ranks agree on which parameters have gradients, and takes over edits."""
        self._recover()
        self.catch_up()
        if not self._steps_next and (self.rendezvous.serving.may_be_wanted or not self._settles_at_end):
            # Before edits are taken over: a rank that diverges may still gather the old values.
            self.rendezvous.meet_all()
        self._steps_next = False
        self.loans.settle(all_here=True)

    def catch_up(self) -> None:
        """Takes all postponed steps of offloaded parameters, which otherwise wait until the values are needed."""
        self.loans.latest.catch_up_all()
        self.stepping.finish()

    # -- whole values

    def full_parameters(self, module: Module | None = None, *, write: bool = False) -> AbstractContextManager[None]:
        """Inside, all parameters of `module` (default: the whole model) have their whole values. Edits, the same on
        every rank, are kept if `write`. Collective."""
        return self.loans.all_of((module or self.module).parameters(), write=write)

    # -- reports

    def program(self) -> Program:
        """Returns the last training step as data: what user code did, and what the engine does at each such use when
        another step like it comes. After `close`, the last one before.

        Raises:
            RuntimeError: before a step has ended, and after a rank has failed.
        """
        numbers = {one: number for ones in (self.groups, self.optimizers) for number, one in enumerate(ones)}
        if not (uses := self.journal.last_step(numbers)):
            raise RuntimeError("There is no program yet: a step is learnt while it is taken. Train one step first.")
        facts = self._facts_at_close if self.closed else self._facts()
        if facts is None:
            raise RuntimeError("There is no program any more: training ended with an error.")
        return make_program(facts, uses)

    def _facts(self) -> Facts:
        return facts_of(self.loans, self.reductions, self.stepping, self.options, self.partition, self.mesh)

    def bytes_by_category(self) -> dict[str, int]:
        """Returns the resident bytes of this rank by `Category`; after `close`, those before it. Activation checkpoints
        live from forward to backward, so for these it is the most bytes that there ever were."""
        if self._phases.now is Phase.CLOSED:
            return self._bytes_at_close
        live = {str(category): self.ledger.live_in[category, Tier.DEVICE] for category in Category}
        elsewhere = {where: n for where, n in self.ledger.live_in.items() if where[1] is not Tier.DEVICE and n}
        most = {where: n for where, n in self.ledger.peak_in.items() if where[0] is Category.ACTIVATION_CHECKPOINT}
        for (category, tier), nbytes in (elsewhere | most).items():
            live[category_in(category, tier)] = nbytes
        for parameter in self.module.parameters():
            slot = slot_of(parameter)
            if slot is None:
                live[Category.PARAMETER] += parameter.nbytes if parameter.layout == torch.strided else 0
            elif slot.gradient is not None and not slot.gradient.travels:
                with no_interception():
                    live[Category.GRADIENT] += 0 if parameter.grad is None else local_of(parameter.grad).nbytes
        return live

    def bytes_grown(self) -> Counter[str]:
        """Returns by how many bytes each category in memory has grown since it rested after the last step, or since
        set-up. Allocates nothing."""
        grown: Counter[str] = Counter()
        for (category, tier), nbytes in self.ledger.live_in.items():
            if tier is not Tier.DISK:
                grown[category_in(category, tier)] = nbytes - self.ledger.rested.get((category, tier), 0)
        if not self.journal.has_step:  # later, what autograd has left in `p.grad` has been there after the step before
            booked = self.ledger.live_in[Category.GRADIENT, Tier.DEVICE]
            grown[Category.GRADIENT] += self.bytes_by_category()[Category.GRADIENT] - booked
        return grown

    @property
    def optimizers(self) -> list[Optimizer]:
        return list(self.stepping.steppers)

    # -- the end

    @property
    def closed(self) -> bool:
        return self._phases.now is Phase.CLOSED

    def close(self, *, whole: bool = True) -> None:
        """Leaves the module and the optimizers.

        Args:
            whole: the parameters become whole again, in their declared dtypes. Collective. Pass False if a rank has
                failed and others may be gone: then only the hooks are removed, and sharded parameters raise when read.
        """
        disk = self.parts.setting.places.disk
        if not whole:
            self.mesh.abandon()  # first: until then, all that follows could wait behind a collective that never ends
        if whole:
            self.stepping.interrupt()
            self._recover()
            self.catch_up()
        self._bytes_at_close = self.bytes_by_category()
        self._facts_at_close = None
        if whole and self.journal.has_step:
            with suppress(RuntimeError):  # an optimizer's parameter is not the module's, which has ended the run
                self._facts_at_close = self._facts()
        self.stepping.leave()
        self.states.leave()
        if self.parts.recompute is not None:
            self.parts.recompute.leave()
        self.schedule.detach()
        self._phases.close()
        if not whole:
            for group in self.groups:
                group.is_lost = not group.is_plain
            if disk is not None:
                disk.close(drains=False)
            return
        self.loans.settle()
        self.rendezvous.meet_all()  # after it no rank may ask for what is freed below
        self.rendezvous.forget()
        self.reductions.free()  # first: whole parameters then take their memory, and not more
        self.parts.assembly.free()
        for group in self.groups:
            self._restore(group)
        if disk is not None:
            disk.close()
        self.parts.setting.ledger.pinned.give_back()
        self.rendezvous.meet()

    def _restore(self, group: ShardGroup) -> None:
        """Makes the parameters of a group plain and whole again, in their declared dtypes, each with its own storage.

        Sharded parameters go to the host, as a whole model may not fit on the device, though one group at a time does.
        Those of tensor-parallel modules stay on the device, which their DTensors are bound to.
        """
        full = self.loans.latest.declared(group)
        device = self.device if group.stays_full or self.mesh.tensor.size > 1 else HOST
        with torch.no_grad(), no_interception():
            self._interception.leave(group)
            for slot in group.slots:
                slot.local.grad = None
                slot.local.values = slot.local.copied(slot.view(full), device)
        group.free()
