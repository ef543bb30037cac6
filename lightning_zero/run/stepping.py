"""`Stepping`: the user's optimizers, which step what this rank owns, and the publishing of what they have stepped."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zero.run.calls import StepCalls
from lightning_zero.run.in_backward import StepsInBackward, nothing_left_for
from lightning_zero.run.journal import Journal
from lightning_zero.run.lasting import LastingLoans
from lightning_zero.run.notices import Notices
from lightning_zero.run.parameter import Interception
from lightning_zero.run.setup import EngineParts
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.local import local_of
from lightning_zero.shards.offload import why_serial
from lightning_zero.shards.optimizer import PieceStepper, groups_of
from lightning_zero.shards.options import Options
from lightning_zero.shards.slot import Slot
from lightning_zero.shards.units import modules_in_compiled_regions
from lightning_zero.shards.window import Changes
from lightning_zero.tiers.ledger import return_freed_memory
from lightning_zero.views.state import RestingState

MUCH = 64 * 2**20  # bytes of gradients, which a backward makes and frees
# Steps after which what they have freed returns to the system. The next step takes as much again, so that nobody else
# has use of it in between, and to fault it in takes 4 percent of a step; peaks are the same. The first step frees what
# only the start of a training needs.
KEPT_STEPS = 8


@final
class Stepping:
    """Has optimizers step pieces, in the user's calls of `step` and in backward, and publishes the new values."""

    def __init__(
        self,
        module: Module,
        optimizers: Sequence[Optimizer],
        parts: EngineParts,
        options: Options,
        interception: Interception,
        journal: Journal,
        notices: Notices,
        lasting: LastingLoans,
    ) -> None:
        setting, made = parts.setting, parts.assembly
        self._lasting = lasting
        self._interception = interception
        self._journal = journal
        offloads = options.offload is not None
        # Why an offloaded step is taken in the call of `step`; None: it waits until its values are needed.
        self.serial_because = why_serial(module, made.gradients) if offloads else None
        is_lazy = offloads and self.serial_because is None
        nbytes = sum(local_of(slot.parameter).nbytes for gradient in made.gradients for slot in gradient.group.slots)
        on_host = setting.places.gathered.device.type == "cpu"
        self._leaves_much = on_host and setting.partition.gradient and nbytes > MUCH
        self._steps = 0  # that may have left much
        is_large = setting.mesh.shard.size > 1 and nbytes >= options.late_publish_bytes
        self.publishes_late = is_large and not made.units and not modules_in_compiled_regions(module)
        self.may_be_late = is_lazy or self.publishes_late  # forward may begin before all new values are there
        self._notices = notices  # which tell other ranks of steps that have failed
        self._errors = notices.late_errors
        self._changes: list[tuple[str, Changes]] = []  # of steps, with the optimizer's name, that nobody was told yet
        self.steppers = {
            each: PieceStepper(each, setting, RestingState, partial(self._note_step, each), is_lazy=is_lazy)
            for each in optimizers
        }
        self._in_backward: dict[Slot, None] = {}  # stepped by backward, since the last call of the optimizer's `step`
        self.in_backward = StepsInBackward(self._step_in_backward) if options.step_in_backward else None
        self.calls = {each: StepCalls(stepper, self._in_backward.clear) for each, stepper in self.steppers.items()}

    @contextmanager
    def step(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, each parameter of `optimizer` is the piece that this rank owns. Collective."""
        stepper = self.steppers[optimizer]
        slots = [slot for slot in stepper.slots if slot not in self._in_backward]
        groups, slots = groups_of(slots), stepper.without_idle(slots)
        with stepper.step(slots, self._errors):
            yield
            self._journal.end_step(optimizer)
        self.publish(groups, groups_of(slots))
        self._tell()
        self.raise_late_error()
        if self._leaves_much:
            if self._steps % KEPT_STEPS == 0:
                return_freed_memory()
            self._steps += 1

    def _note_step(self, optimizer: Optimizer, changes: Changes) -> None:
        self._changes.append((type(optimizer).__name__, changes))
        if self.in_backward is None:
            self._tell()

    def _tell(self) -> None:
        """Has other ranks hear what has been stepped. Of a step in backward they hear after its end: they meet there
        before all of it is stepped."""
        for name, changes in self._changes:
            self._notices.note_step(name, changes)
        self._changes.clear()

    def raise_late_error(self) -> None:
        """Raises what an optimizer has raised in a step that was taken late, once this rank has sent what it owes."""
        if self._errors:
            error = self._errors[0]
            self._errors.clear()
            raise error

    def change(self, optimizer: Optimizer, call: Callable[[], Any]) -> Any:
        """Returns `call()`, which changes parameters and state of `optimizer` between two steps. As in `step`, each
        parameter is the piece that this rank owns. Collective."""
        stepper = self.steppers[optimizer]
        groups = groups_of(stepper.slots)
        result = stepper.change(call)
        self.publish(groups, groups)
        return result

    def _step_in_backward(self, slots: Sequence[Slot]) -> None:
        """Steps parameters whose averaged gradients are complete, in the middle of backward."""
        (stepper,) = self.steppers.values()
        own = set(stepper.slots)
        mine = [slot for slot in slots if slot in own]
        again = next((slot for slot in mine if slot in self._in_backward), None)
        if again is not None:
            raise nothing_left_for(
                f"a second backward: {again.name} has been stepped, and optimizer.step() has not returned since"
            )
        self._lasting.end_before_step(groups_of(mine))
        stepper.step_now(mine, self._errors)
        self._in_backward.update(dict.fromkeys(mine))

    def publish_stepped_in_backward(self, there: Iterable[ShardGroup]) -> None:
        """Publishes which of the groups that are `there` this backward has stepped, at its end. Collective."""
        # In one order: where ranks use different modules, each has stepped groups as they became complete there.
        stepped = groups_of(self._in_backward)
        groups = [group for group in there if group in stepped]
        self._lasting.drop_after_step()
        self.publish(groups, groups)
        self._tell()

    @property
    def has_failed_in_backward(self) -> bool:
        """Whether a step in the backward that ends has raised on this rank."""
        return self.in_backward is not None and bool(self._errors)

    def publish(self, groups: Sequence[ShardGroup], stepped: Sequence[ShardGroup]) -> None:
        """Sends the values of those of `groups` that were `stepped` to where forward reads them, unless units gather
        them there. Leaves to `Latest.catch_up` what may arrive late. Collective."""
        with torch.no_grad():
            for group in stepped:
                if group.stays_full and not group.publish.is_due:
                    group.publish.begin()
                    if self.publishes_late and group.publish.is_arriving:
                        group.publish.put_off()
            for group in groups:
                if group.stays_full and not group.publish.is_due:
                    group.publish.end()
        for group in groups:
            if group.publish.is_due and group.is_plain:
                self._interception.hide(group)
            elif group.is_plain:
                group.edits.note_versions()

    def finish(self) -> None:
        """Waits until all that has been stepped is where it rests."""
        for stepper in self.steppers.values():
            stepper.finish()

    # -- after a failure, and at the end

    def recover(self) -> None:
        """Forgets a call of `step` that has failed."""
        for calls in self.calls.values():
            calls.recover()

    def forget_backward(self) -> None:
        """Forgets what a failed backward has stepped."""
        self._in_backward.clear()

    def interrupt(self) -> None:
        """Ends calls of `step` that an error has left, with what they have stepped so far."""
        for calls in self.calls.values():
            calls.interrupt()

    def abandon(self) -> None:
        """Ends calls of `step` that an error has left, on this rank alone: parameters are no pieces any more."""
        for calls in self.calls.values():
            calls.abandon()

    def leave(self) -> None:
        """Leaves the optimizers to the user."""
        for stepper in self.steppers.values():
            stepper.leave()
