"""`Engine`: trains one module with its optimizers at a stage of ZeRO. Knows nothing of Lightning."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import final

import torch
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zero.device import HOST, numbered
from lightning_zero.run.cache import UnitCache
from lightning_zero.run.facts import facts_of
from lightning_zero.run.given import adopt
from lightning_zero.run.gradients import Gradients
from lightning_zero.run.journal import Journal
from lightning_zero.run.lasting import LastingLoans
from lightning_zero.run.loans import Loans
from lightning_zero.run.module_hooks import ModuleHooks
from lightning_zero.run.notices import Notices
from lightning_zero.run.parameter import Interception, leave
from lightning_zero.run.phase import Phase
from lightning_zero.run.placing import make_program
from lightning_zero.run.program import Facts, Program
from lightning_zero.run.reductions import Reductions
from lightning_zero.run.regrouping import Regrouping
from lightning_zero.run.replicated import SharedBuffers, move_replicated
from lightning_zero.run.runner import Runner
from lightning_zero.run.saved import SavedParameters
from lightning_zero.run.setup import set_up
from lightning_zero.run.states import States
from lightning_zero.run.step_hooks import StepHooks
from lightning_zero.run.stepping import Stepping
from lightning_zero.run.watch import Watch
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.local import local_of
from lightning_zero.shards.options import Options
from lightning_zero.shards.slot import no_interception, slot_of
from lightning_zero.stage import Partition
from lightning_zero.tiers.ledger import Category, Ledger, Tier, category_in
from lightning_zero.wire.comm import Comm, RankTimeoutError
from lightning_zero.wire.mesh import Mesh

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
    3. `optimizer.step()` enters `Runner.step` and `Stepping.step` through hooks. First, all ranks agree on which
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
        self.groups = made.groups
        interception = Interception(lambda: self.loans)
        journal, notices = Journal(), Notices()
        watch = Watch(self.groups)
        cache = UnitCache(made.units, made.arena, 1 + self.options.prefetch, interception, watch)
        lasting = LastingLoans(cache, watch)
        stepping = Stepping(module, optimizers, self.parts, self.options, interception, journal, notices, lasting)
        overlap, in_backward = self.options.overlap, stepping.in_backward
        reductions = Reductions(made, comm, overlap, interception, in_backward, notices)
        self.runner = Runner(setting, self.groups, cache, reductions, stepping, lasting, interception, journal)
        saved = SavedParameters(cache, lasting, self.runner)
        self.loans = Loans(self.groups, cache, lasting, self.runner, saved)
        move_replicated(module, device)
        late = module if stepping.may_be_late else None
        self.module_hooks = ModuleHooks(made, self.loans, late=late)
        if self.parts.recompute is not None:
            self.parts.recompute.install()
        steppers, whole = stepping.steppers, self.parts.stepped.whole
        self.regrouping = Regrouping(
            module, steppers, whole, setting, self.options, self.module_hooks, reductions, self.loans
        )
        self.regrouping.deal()
        around = [self.runner.step, self._around_step, stepping.step]
        self._step_hooks = StepHooks(stepping, around, self.runner.change)
        self.gradients = Gradients(module, device, self.mesh, self.loans, reductions)
        self.states = States(module, steppers, self.mesh, self.loans)
        is_on = self.options.broadcast_buffers
        rendezvous, trains = self.runner.rendezvous, bool(self.optimizers)
        self._buffers = SharedBuffers(module, self.mesh.data, rendezvous, is_on=is_on, trains=trains)
        for group in self.groups:
            interception.begin(group)
        self.ledger.note_rest()

    @property
    def partition(self) -> Partition:
        """What rests as shards."""
        return self.parts.setting.partition

    @property
    def mesh(self) -> Mesh:
        return self.parts.setting.mesh

    @property
    def ledger(self) -> Ledger:
        return self.parts.setting.ledger

    # -- forward

    @contextmanager
    def forward(self, *, reduces: bool = True) -> Iterator[None]:
        """Around a forward. If its gradients will be reduced (`reduces`), the next forward broadcasts rank 0's buffers
        first, as DDP does."""
        self.runner.begin_forward()
        if torch.is_grad_enabled():
            self.regroup()
        if not torch.is_grad_enabled() or self.loans.loading:  # by user code that has loaded a checkpoint's entries
            self.catch_up()
            if (unread := self.loans.loading.take_error()) is not None:
                raise unread
        self.loans.end_all()
        self._buffers.broadcast_stale()
        with self.runner.phases.within(Phase.FORWARD), self.loans.saved.noting():
            yield
        self._buffers.note_forward(reduces=reduces)

    def regroup(self) -> None:
        """Takes in parameters that have begun to train since set-up, the same ones on every rank: they were thawed,
        given to an optimizer, or made. Those that were made take rank 0's values; all others keep every bit.

        Collective if there are any. `forward` calls it; call it also before the optimizers' states are loaded.
        """
        if newly := self.regrouping.newly_trainable():
            self.catch_up()
            self.runner.rendezvous.meet()  # settles the last backward, before there are more gradients to agree on
            self.loans.end_all(all_here=True)
            self.regrouping.take_in(newly)
        self.regrouping.deal()

    # -- backward

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward. A backward without it also works: a callback of autograd tells its end."""
        self.runner.recover()
        with self.runner.backward.bracket():
            self.runner.begin_backward()
            yield
            self.runner.end_backward()

    @contextmanager
    def backward_of_users(self) -> Iterator[None]:
        """Around code of the user's that runs backwards, and may read and edit the averages before it returns: autograd
        tells their ends. Where no hook has seen one (of a loss without a graph, say), one without gradients follows:
        other ranks may have some."""
        backward = self.runner.backward
        self.runner.recover()
        noticed = backward.noticed
        yield
        if backward.noticed == noticed:
            with self.backward():
                pass

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around backwards that only accumulate gradients on this rank; the first backward after it reduces them."""
        self.runner.reductions.refuse_stepped("accumulating gradients")
        before, self.runner.reductions.is_on = self.runner.reductions.is_on, False
        try:
            yield
        finally:
            self.runner.reductions.is_on = before

    def accumulating(self) -> AbstractContextManager[None]:
        """Around the backwards of all micro-batches but the last; each is reduced if gradients accumulate as shards."""
        self.runner.reductions.refuse_stepped("accumulating gradients")
        reduces = self.partition.gradient and self.options.accumulation == "sharded"
        return nullcontext() if reduces else self.no_sync()

    # -- step

    @contextmanager
    def calling_step(self) -> Iterator[None]:
        """Around a user's call of `optimizer.step`. Where it raises, parameters are whole again on the way out, and
        other ranks get what they wait for. A call without it also works: the next use of the engine ends it."""
        try:
            yield
        except RankTimeoutError:
            raise
        except Exception:
            if not self.closed:
                self.runner.stepping.recover()
            raise

    @contextmanager
    def _around_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Around `Stepping.step`, in which each parameter of `optimizer` is the piece that this rank owns."""
        self.regrouping.refuse_strangers(self.parts.foreign)
        self.regrouping.deal()
        adopt(self.runner.reductions, self.runner.stepping.steppers[optimizer].slots, steps=True)
        yield
        self.gradients.forget()
        self._buffers.forget_sent()
        self.ledger.note_rest()

    def catch_up(self) -> None:
        """Takes all postponed steps of offloaded parameters, which otherwise wait until the values are needed."""
        self.runner.catch_up()

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
        if not (uses := self.runner.journal.last_step(numbers)):
            raise RuntimeError("There is no program yet: a step is learnt while it is taken. Train one step first.")
        facts = self._facts_at_close if self.closed else self._facts()
        if facts is None:
            raise RuntimeError("There is no program any more: training ended with an error.")
        return make_program(facts, uses)

    def _facts(self) -> Facts:
        return facts_of(
            self.loans, self.runner.reductions, self.runner.stepping, self.options, self.partition, self.mesh
        )

    def bytes_by_category(self) -> dict[str, int]:
        """Returns the resident bytes of this rank by `Category`; after `close`, those before it. Activation checkpoints
        live from forward to backward, so for these it is the most bytes that there ever were."""
        if self.runner.phases.now is Phase.CLOSED:
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
        if not self.runner.journal.has_step:  # later, what autograd leaves in `p.grad` was there after the step before
            booked = self.ledger.live_in[Category.GRADIENT, Tier.DEVICE]
            grown[Category.GRADIENT] += self.bytes_by_category()[Category.GRADIENT] - booked
        return grown

    @property
    def optimizers(self) -> list[Optimizer]:
        return list(self.runner.stepping.steppers)

    # -- the end

    @property
    def closed(self) -> bool:
        return self.runner.phases.now is Phase.CLOSED

    def close(self, *, whole: bool = True) -> None:
        """Leaves the module and the optimizers.

        Args:
            whole: the parameters become whole again, in their declared dtypes. Collective. Pass False if a rank has
                failed and others may be gone: then only the hooks are removed, and sharded parameters raise when read.
        """
        disk = self.parts.setting.places.disk
        self.runner.reductions.notices.ends = True
        if not whole:
            self.mesh.abandon()  # first: until then, all that follows could wait behind a collective that never ends
            self.runner.stepping.abandon()
        if whole:
            self.runner.stepping.interrupt()
            self.runner.recover()
            self.runner.finish_steps()
        self._bytes_at_close = self.bytes_by_category()
        self._facts_at_close = None
        if whole and self.runner.journal.has_step:
            with suppress(RuntimeError):  # an optimizer's parameter is not the module's, which has ended the run
                self._facts_at_close = self._facts()
        self._step_hooks.remove()
        self.runner.stepping.leave()
        self.states.leave(whole=whole)
        if self.parts.recompute is not None:
            self.parts.recompute.remove()
        self.module_hooks.detach()
        self.runner.hooks.remove()
        self.runner.phases.close()
        if not whole:
            self.loans.lose()
            if disk is not None:
                disk.close(drains=False)
            return
        self.loans.end_all()
        self.runner.rendezvous.meet()  # after it no rank may ask for what is freed below
        self.runner.course.close()
        self.runner.reductions.free()  # first: whole parameters then take their memory, and not more
        self.parts.assembly.free()
        for group in self.groups:
            self._restore(group)
        if disk is not None:
            disk.close()
        self.parts.setting.ledger.pinned.give_back()
        self.runner.rendezvous.meet()
        self.runner.stepping.raise_late_error()

    def _restore(self, group: ShardGroup) -> None:
        """Makes the parameters of a group plain and whole again, in their declared dtypes, each with its own storage.

        Sharded parameters go to the host, as a whole model may not fit on the device, though one group at a time does.
        Those of tensor-parallel modules stay on the device, which their DTensors are bound to.
        """
        full = self.loans.latest.declared(group)
        device = self.device if group.stays_full or self.mesh.tensor.size > 1 else HOST
        with torch.no_grad(), no_interception():
            leave(group)
            for slot in group.slots:
                slot.local.set_grad(None)
                slot.local.values = slot.local.copied(slot.view(full), device)
        group.free()
