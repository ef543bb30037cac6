"""`Engine`: the stages for one module and its optimizers. Knows nothing of Lightning."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zero.run.averages import Averages
from lightning_zero.run.cache import UnitCache
from lightning_zero.run.calls import StepCalls
from lightning_zero.run.loans import Loans
from lightning_zero.run.modes import Modes
from lightning_zero.run.phase import Phase, Phases
from lightning_zero.run.reductions import Reductions, Stage
from lightning_zero.run.regrouping import Regrouping
from lightning_zero.run.rendezvous import Rendezvous
from lightning_zero.run.replicated import broadcast_buffers, move_replicated
from lightning_zero.run.schedule import Schedule
from lightning_zero.run.setup import set_up
from lightning_zero.run.states import States
from lightning_zero.shards.group import ShardGroup, publish
from lightning_zero.shards.local import local_of
from lightning_zero.shards.offload import why_serial
from lightning_zero.shards.optimizer import PieceStepper, groups_of
from lightning_zero.shards.options import Options
from lightning_zero.shards.slot import Slot, no_interception, slot_of
from lightning_zero.shards.units import modules_in_compiled_regions
from lightning_zero.stage import Partition
from lightning_zero.tiers.ledger import Category, Tier, return_freed_memory
from lightning_zero.views.parameter import Interception
from lightning_zero.views.saved import SavedParameters
from lightning_zero.views.state import RestingState
from lightning_zero.wire.comm import Comm

__all__ = ["Engine", "Options"]

HOST = torch.device("cpu")
MUCH = 64 * 2**20  # bytes of gradients, which a backward makes and frees


@final
class Engine:
    """Partitions `module` over the ranks of `comm` as `stage` says.

    A training step, from end to end; this loop is all of it:

        engine = Engine(module, [optimizer], stage=2, comm=comm)
        for batch in batches:
            with engine.forward():
                loss = module(batch)
            with engine.backward():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.close()

    1. `forward` takes over what users have edited since the last one, and rank 0's buffers. At stage 3 each unit is
       gathered before the first of its modules runs, with the next one behind it, into an arena; what was used last
       stays until its room is needed. What autograd saves of parameters is their place in a unit.
    2. `backward` gathers a unit again when autograd asks for what it saved of it. Each gradient is collected as it
       comes; when those of a group are complete, they are reduced bucket by bucket, in the same order on all ranks.
    3. `step` (a hook on every `optimizer.step`) first makes the ranks agree on which parameters have a gradient: the
       one message of a step beside its data. (At stages 0 to 2, where not all buckets can travel at once, there is one
       more before the first.) For the step itself, a parameter *is* the piece that this rank owns.
    4. After it the new values go where forward reads them: at stages 1 and 2 all ranks gather them at once.

    All ranks start from rank 0's parameters and buffers. Without optimizers only parameters are partitioned. On one
    rank nothing travels and nothing is swapped.

    Args:
        module: whose parameters; the Parameter objects stay the same from here to `close`.
        optimizers: over the module's parameters; stepped as ever.
        stage: 0, 1, 2 or 3.
        comm: all ranks.
        device: where the engine's tensors live; parameters move there group by group, so that a model larger than
            the device's memory can be set up at stage 3. Everything else of the module moves there at once.
        options: see `Options`.

    Raises:
        ValueError: for a `replicate_size` that does not divide the ranks, an optimizer over parameters that are not
            the module's, a parameter without a shape yet, a trainable one of a kind that cannot be sharded, or blocks
            to recompute that are not there.
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
    ) -> None:
        self.module = module
        self.device = device
        self.options = options or Options()
        parts = set_up(module, optimizers, stage, comm, device, self.options)
        setting, made = parts.setting, parts.assembly
        self.recompute = parts.recompute
        self.partition: Partition = setting.partition
        self.mesh = setting.mesh
        self.ledger = setting.ledger
        self.foreign_parameters = parts.foreign
        self.groups = made.groups
        self.resident_numel, self.uncast = made.resident, made.uncast
        self._arena = made.arena
        self._disk = setting.places.disk
        nbytes = sum(local_of(slot.parameter).nbytes for shard in made.shards for slot in shard.group.slots)
        self._leaves_much = device == HOST and self.partition.gradient and nbytes > MUCH
        self.loans = Loans(self.groups)
        self._interception = Interception(self.loans)
        saved = SavedParameters(lambda unit: self.schedule.bring(unit), self.loans.gather_old)
        self.cache = UnitCache(made.units, self._arena, 1 + self.options.prefetch, self._interception, saved)
        self.reductions = Reductions(made, comm, self.options.overlap, self.loans, self._interception)
        self.rendezvous = Rendezvous(self.mesh, self.cache, self.reductions)
        self.loans.join(self.cache, self.rendezvous, saved, self._interception)
        move_replicated(module, device)
        offloads = self.options.offload is not None
        self.serial_because = why_serial(module, made.shards) if offloads else None
        is_lazy = offloads and self.serial_because is None
        is_large = self.mesh.shard.size > 1 and nbytes >= self.options.late_publish_bytes
        self._publishes_late = is_large and not made.units and not modules_in_compiled_regions(module)
        late, ends = module if is_lazy or self._publishes_late else None, (self._begin_backward, self._end_backward)
        self.schedule = Schedule(made, self.reductions, self.loans, *ends, late=late)
        if self.recompute is not None:
            self.recompute.begin()
        self._steppers = {optimizer: PieceStepper(optimizer, setting, RestingState) for optimizer in optimizers}
        for stepper in self._steppers.values():
            stepper.is_lazy = is_lazy
        whole = parts.stepped.whole
        self.regrouping = Regrouping(
            module, self._steppers, whole, setting, self.options, self.schedule, self.reductions, self.loans
        )
        self.imbalance = self.regrouping.deal()
        self._stepped: dict[Slot, None] = {}  # in backward, since the last call of an optimizer's step
        if self.options.step_in_backward:
            self.reductions.step = self._step_in_backward
        self._calls = [
            StepCalls(optimizer, stepper, partial(self.step, optimizer), self._stepped.clear)
            for optimizer, stepper in self._steppers.items()
        ]
        self._modes = [
            Modes(optimizer, partial(self._change, optimizer), is_cut=any(slot.group.is_cut for slot in stepper.slots))
            for optimizer, stepper in self._steppers.items()
        ]
        self.averages = Averages(module, device, self.mesh, self.loans, self.reductions)
        self.states = States(module, self._steppers, self.mesh, self.loans)
        self._phases = Phases()
        self._buffers: int | None = None
        if self.options.broadcast_buffers and self.mesh.world.size > 1 and any(True for _ in module.buffers()):
            serve = partial(broadcast_buffers, module, self.mesh.world)
            self._buffers = self.rendezvous.enroll("the broadcast of rank 0's buffers", serve)
        self._buffers_are_stale = True
        for group in self.groups:
            if not group.is_plain:
                self._interception.hide(group)

    # -- forward

    @contextmanager
    def forward(self, *, reduces: bool = True) -> Iterator[None]:
        """Around a forward. If it `reduces` its gradients, the next one takes rank 0's buffers first, as under DDP."""
        self._recover()
        if torch.is_grad_enabled():
            self.regroup()
        else:
            self.catch_up()
        self.loans.settle()
        self.schedule.start_pass()
        if self._buffers is not None and self._buffers_are_stale:
            self.rendezvous.call(self._buffers)
        with self._phases.within(Phase.FORWARD), self.schedule.noting_saved():
            yield
        self._buffers_are_stale = reduces

    def regroup(self) -> None:
        """Takes in what trains only since set-up, the same on every rank: what was thawed, given to an optimizer, or
        made anew (of that all ranks take rank 0's values). What was there keeps every bit. A collective, if there is
        any; `forward` calls it, and so must whoever loads the optimizers' states.

        Raises:
            RuntimeError: with offloaded parameters.
        """
        if newly := self.regrouping.newly_trainable():
            self.catch_up()
            self.rendezvous.meet_all()  # a backward that has been reduced is shown, before there is more to agree on
            self.loans.settle()
            self.regrouping.take_in(newly)
        self.regrouping.deal()

    # -- backward

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward; without it the end of backward is found by a callback of autograd."""
        self._recover()
        with self.schedule.bracket():
            self._begin_backward()
            yield
        self._end_backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate, on this rank; the first one after reduces what they left."""
        self.averages.refuse_stepped("accumulating gradients")
        before, self.reductions.is_on = self.reductions.is_on, False
        try:
            yield
        finally:
            self.reductions.is_on = before

    def accumulating(self) -> AbstractContextManager[None]:
        """Around the backwards of all but the last micro-batch; communicates if gradients accumulate in shards."""
        self.averages.refuse_stepped("accumulating gradients")
        reduces = self.partition.gradient and self.options.accumulation == "sharded"
        return nullcontext() if reduces else self.no_sync()

    def _begin_backward(self) -> None:
        self._recover()
        self.catch_up()  # the gradients that are to come take the place of those that are to be stepped
        with no_interception(), torch.no_grad():
            self.loans.take_back_gradients()  # what is stored from here on is of this backward
        if self.reductions.stage is Stage.UNSETTLED or self.rendezvous.is_awaited:
            self.rendezvous.meet_all()
        self.schedule.start_pass()
        self.reductions.stage = Stage.COLLECTING
        self._phases.enter(Phase.BACKWARD)

    def _end_backward(self) -> None:
        self._phases.leave(Phase.BACKWARD)
        with no_interception(), torch.no_grad():
            if self.reductions.has_gradients:
                self.rendezvous.start_reductions(len(self.reductions.shards))
            self.reductions.end_backward()
            is_settled_now = not self.partition.optimizer or self.options.step_in_backward
            if is_settled_now and self.reductions.stage is Stage.UNSETTLED:
                self.rendezvous.meet()  # `p.grad` is what is reduced, and must not be added to meanwhile; or is stepped
            self._publish(groups_of(self._stepped))

    def _recover(self) -> None:
        """After a backward or a step that failed (on every rank alike): forgets what it left half done."""
        for calls in self._calls:
            calls.recover()
        if self._phases.now is Phase.BACKWARD and not self.schedule.backward_is_known:
            self._phases.leave(Phase.BACKWARD)
            with no_interception():
                self.reductions.forget()
            self._stepped.clear()

    # -- step

    @contextmanager
    def step(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, each parameter of `optimizer` is the piece this rank owns; hooks on `optimizer.step` enter it."""
        self._recover()
        self.catch_up()
        self.rendezvous.meet_all()  # first: a rank that goes another way may gather still, and is not to find edits
        self.loans.settle()
        self.regrouping.refuse_strangers(self.foreign_parameters)
        self.regrouping.deal()
        stepper = self._steppers[optimizer]
        slots = [slot for slot in stepper.slots if slot not in self._stepped]
        for slot in stepper.slots:
            if slot.local.grad is not None:
                self.averages.refuse_stepped(f"what you have put into {slot.name}.grad")
            self.reductions.adopt(slot)
        groups = groups_of(slots)
        with self._phases.within(Phase.STEP), stepper.step(slots):
            yield
        self._publish(groups)
        self.averages.forget()
        if self._leaves_much:
            return_freed_memory()

    def _publish(self, groups: Iterable[ShardGroup]) -> None:
        """What has been stepped is where forward reads it, or will be when it is wanted."""
        now = [group for group in groups if not group.is_behind]
        if self._publishes_late:
            with torch.no_grad():
                for group in now:
                    group.begin_publish()
            for group in (group for group in now if group.is_arriving):
                group.leave_behind()
        publish([group for group in groups if not group.is_behind])
        for group in groups:
            if group.is_behind and group.is_plain:
                self._interception.hide(group)
            elif group.is_plain:
                group.note_versions()

    def _step_in_backward(self, slots: Sequence[Slot]) -> None:
        (stepper,) = self._steppers.values()
        own = set(stepper.slots)
        mine = [slot for slot in slots if slot in own]
        again = next((slot for slot in mine if slot in self._stepped), None)
        if again is not None:
            self.averages.refuse_stepped(
                f"a second backward: {again.name} has been stepped, and optimizer.step() has not returned since"
            )
        stepper.step_now(mine)
        self._stepped.update(dict.fromkeys(mine))

    def catch_up(self) -> None:
        """Takes all steps that have been postponed: of what is offloaded, each is taken when the values are wanted."""
        self.loans.catch_up_all()
        for stepper in self._steppers.values():
            stepper.finish()

    def _change(self, optimizer: Optimizer, call: Callable[[], Any]) -> Any:
        """Has `call` change what `optimizer` steps, as pieces that this rank owns, between two steps. A collective."""
        self._recover()
        self.catch_up()
        self.loans.settle()
        self.rendezvous.meet_all()
        stepper = self._steppers[optimizer]
        groups = groups_of(stepper.slots)
        with self._phases.within(Phase.STEP):
            result = stepper.change(call)
        self._publish(groups)
        return result

    # -- whole values

    def full_parameters(self, module: Module | None = None, *, write: bool = False) -> AbstractContextManager[None]:
        """All parameters of `module` (default: the whole model) hold their values inside. Edits, the same on every
        rank, are kept if `write`. A collective."""
        wanted = {slot_of(parameter) for parameter in (module or self.module).parameters()} - {None}
        groups = [group for group in self.groups if not group.is_plain and not wanted.isdisjoint(group.slots)]
        return self.loans.all_of(groups, write=write)

    # -- reports

    def bytes_by_category(self) -> dict[str, int]:
        """Bytes that rest on this rank, by `Category`; after `close`, as they were before. Of activation checkpoints,
        which are there from forward to backward, the most there ever were."""
        if self._phases.now is Phase.CLOSED:
            return self._bytes_at_close
        live = {str(category): self.ledger.live_in[category, Tier.DEVICE] for category in Category}
        for (category, tier), nbytes in self.ledger.live_in.items():
            if tier is not Tier.DEVICE and nbytes:
                live[f"{category} ({tier})"] = nbytes
        for (category, tier), nbytes in self.ledger.peak_in.items():
            if category is Category.ACTIVATION_CHECKPOINT:
                live[str(category) if tier is Tier.DEVICE else f"{category} ({tier})"] = nbytes
        for parameter in self.module.parameters():
            slot = slot_of(parameter)
            if slot is None and parameter.layout == torch.strided:
                live[Category.PARAMETER] += parameter.nbytes
            with no_interception():
                is_own = slot is not None and slot.gradient is not None and not slot.gradient.travels
                live[Category.GRADIENT] += (
                    local_of(parameter.grad).nbytes if is_own and parameter.grad is not None else 0
                )
        return live

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those it was made with."""
        return list(self._steppers)

    # -- the end

    @property
    def closed(self) -> bool:
        return self._phases.now is Phase.CLOSED

    def close(self, *, whole: bool = True) -> None:
        """Leaves module and optimizers.

        Args:
            whole: the module gets its values back, in the declared dtypes (a collective). Without it (a rank failed,
                others may be gone) only the hooks go; parameters that rest as shards raise when they are read.
        """
        for calls in self._calls if whole else ():
            calls.interrupt()
        if whole:
            self.catch_up()
        self._bytes_at_close = self.bytes_by_category()
        for calls in self._calls:
            calls.remove()
        for modes in self._modes:
            modes.remove()
        self.reductions.step = None
        for stepper in self._steppers.values():
            stepper.leave()
        if self.recompute is not None:
            self.recompute.leave()
        self.schedule.detach()
        self._phases.close()
        if not whole:
            for group in self.groups:
                group.is_lost = not group.is_plain
            if self._disk is not None:
                self._disk.close(drains=False)
            return
        self.loans.settle()
        self.rendezvous.meet_all()  # nobody must ask for what is let go of below
        self.rendezvous.forget()
        self.reductions.free()  # first, so that whole parameters take their place and not more
        self._arena.close()
        for group in self.groups:
            self._restore(group)
        if self._disk is not None:
            self._disk.close()
        self.rendezvous.meet()

    def _restore(self, group: ShardGroup) -> None:
        """Leaves the parameters for good: plain again, whole, in their declared dtype, each in storage of its own. What
        rests as shards goes to the host: a whole model may not fit on the device, and one group at a time does. But for
        what tensor-parallel ranks share: its mesh is of the device."""
        full = self.loans.declared(group)
        device = self.device if group.stays_full or self.mesh.tensor.size > 1 else HOST
        with torch.no_grad(), no_interception():
            self._interception.show(group)
            for slot in group.slots:
                slot.local.grad = None
                slot.local.values = slot.whole(slot.view(full), device)
        group.free()
