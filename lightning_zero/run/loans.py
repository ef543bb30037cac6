"""`Loans`: lends the values of parameters and gradients to user code, and takes over the edits that it makes in them.

A parameter or gradient that rests as a shard, in another dtype or in another tier lends its values to each call that
reads it. A loan ends with the call if the call leaves no view of the values, and otherwise at the next boundary: before
a forward or a step (`end_all`). Each rank takes over edits of what it owns, so all ranks must make the same edits.

A rank that comes to an edit before others waits for them (`edit_barriers`). Some keep at the boundary, for a loan that
lasts, what others keep at once: so a rank that has kept edits waits at the boundary, too. Until then a loan that lasts
is this rank's alone: what it runs or recomputes sees the edits (`show_edits`), what it sends to others does not. A rank
that waits elsewhere for those at the boundary, and serves them, keeps its edits when they go on: they run with these.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.run.cache import UnitCache
from lightning_zero.run.edit_barriers import EditBarrier, GradientEditBarrier, Position
from lightning_zero.run.lasting import LastingLoans
from lightning_zero.run.loading import Loading
from lightning_zero.run.parameter import AsDeclared, RestingParameter
from lightning_zero.run.runner import Runner
from lightning_zero.run.saved import SavedParameters
from lightning_zero.shards.gradient import averaged_of, gradient_of
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.slot import Slot, no_interception, slot_of
from lightning_zero.shards.unit import Unit
from lightning_zero.torch_private import backward_number, outside_transforms
from lightning_zero.views.intercept import Lent
from lightning_zero.views.lazy import Stored


@final
class Loans:
    """Lends the values of an engine to user code: for one call, or until the next boundary (`lasting`)."""

    def __init__(
        self, groups: list[ShardGroup], cache: UnitCache, lasting: LastingLoans, runner: Runner, saved: SavedParameters
    ) -> None:
        self.groups = groups
        self.cache = cache
        self.runner = runner
        self.saved = saved
        self.latest = runner.latest
        self.loading = Loading()
        self.lasting = lasting
        self._are_lost = False  # a rank failed: the values are spread over ranks that no longer answer
        is_cut = any(group.is_cut and not group.is_plain for group in groups)
        self._barrier = EditBarrier(runner.rendezvous, lasting.share_edits) if is_cut else None
        self._averages: dict[Slot, int] = {}  # by which `Course.call` gathers gradients
        self._enroll_gradients(groups)

    def _enroll_gradients(self, groups: Iterable[ShardGroup]) -> None:
        for slot in (slot for group in groups for slot in group.slots):
            if slot.gradient is not None and slot.gradient.averaged.is_spread:
                serve = partial(self._serve_gradient, slot)
                self._averages[slot] = self.runner.rendezvous.serving.enroll(f"the gradient of {slot.name}", serve)
        if self._averages and self.runner.gradient_edits is None:
            self.runner.gradient_edits = GradientEditBarrier(self.runner.rendezvous)

    def add(self, groups: Sequence[ShardGroup], trained: Sequence[ShardGroup]) -> None:
        """Adds new groups, whose parameters are shown plain, and the gradients of groups that have begun to train."""
        self.latest.add(groups, trained)
        self._enroll_gradients(trained)
        self.lasting.watch.add(groups)

    # -- parameters

    def lend(self, slot: Slot) -> Lent:
        """Lends a parameter's values, in the dtype that readers see, connected to autograd."""
        group = slot.group
        if self._are_lost and not group.is_plain:
            raise RuntimeError(
                f"Parameter {slot.name!r} cannot be read: training ended with an error, and its values are spread over "
                "the ranks. Load the latest checkpoint into a new model; to have one of the moment that a run fails, "
                "add Lightning's OnExceptionCheckpoint callback."
            )
        self.latest.catch_up(group)
        if group.kind.upcasts or group.stays_full:
            values = self._lend_declared(slot) if group.kind.upcasts else slot.parameter
            return Lent(slot.parameter, values, partial(self.lasting.end_call, group))
        unit = self.cache.unit_of(group)
        assert unit is not None
        with outside_transforms():
            if not unit.is_held:
                self.runner.course.use(unit)
            self.cache.pin(unit)
        # Activation checkpointing compares what autograd saves in forward and in recomputation. A recomputed layer may
        # come here where its first forward did not, so the checkpoint's hooks must see parameters themselves both
        # times. What the checkpoint keeps of them it drops in the same backward.
        notes = not self.saved.is_inside_checkpoint
        recomputes = not notes and backward_number() != -1
        if notes and not self.saved.push():
            self.lasting.hold(unit)
        return Lent(slot.parameter, slot.parameter, partial(self._end_call, unit, notes, recomputes))

    def lose(self) -> None:
        """Notes that values which are spread over ranks can be read no more."""
        self._are_lost = True

    def _lend_declared(self, slot: Slot) -> Tensor:
        with outside_transforms():  # else what is lent to a transform of torch.func would be a tensor of its own
            view = self.declared_of(slot)
        if not (slot.parameter.requires_grad and torch.is_grad_enabled()):
            return view
        with no_interception():
            return AsDeclared.apply(slot.parameter, view)

    def declared_of(self, slot: Slot) -> Tensor:
        """Returns the values of a two-byte weight in its declared dtype, lent until `end_all`, as a plain tensor."""
        self._declared(slot.group)
        return self.lasting.shown(slot)

    def assign(self, slot: Slot, values: Tensor) -> None:
        """Shows other values in a two-byte parameter, in its declared dtype; views of the old ones keep these."""
        self._declared(slot.group)
        self.lasting.assign(slot, values)

    def _declared(self, group: ShardGroup) -> Tensor:
        in_block = group.stays_full and torch.is_grad_enabled() and self.saved.is_inside_others
        return self.lasting.declared(group, self.latest.declared, in_block=in_block)

    def is_lent(self, values: Tensor) -> bool:
        """Whether a tensor is a parameter whose values are elsewhere, or in the memory of gathered values: at the next
        boundary those of other parameters may be there."""
        return isinstance(values, RestingParameter) or self.cache.unit_around(values) is not None

    def watch(self, group: ShardGroup) -> None:
        """Sees to it that edits from here on are noticed, also if they raise no version. The values are there."""
        self.lasting.watch.look(group)

    def _end_call(self, unit: Unit, notes: bool, recomputes: bool, loan: Lent, result: Any) -> None:
        """Ends the loan of a unit to one call, unless the values are still referred to."""
        if notes:
            self.saved.pop()
        is_arriving = loan.is_arriving_in(result)
        if unit.is_shared and not recomputes:
            self.lasting.hold(unit)
            if loan.is_unwatched and loan.is_visible_in(result) and not is_arriving:
                self.lasting.note_views(group for group in unit.groups if not group.kind.upcasts)
        if unit.pins == 1 and loan.is_edited:
            self._wait_for_all(Position.EDIT)
            self.lasting.keep_edit(unit, is_unversioned=loan.is_unversioned, is_arriving=is_arriving)
        self.cache.unpin(unit)

    @contextmanager
    def all_of(self, parameters: Iterable[Parameter], *, write: bool) -> Iterator[None]:
        """Lends the whole values of parameters; see `Engine.full_parameters`."""
        slots = {slot_of(parameter) for parameter in parameters}
        asked = [group for group in self.groups if not slots.isdisjoint(group.slots)]
        groups = [group for group in asked if not group.is_plain]
        self.end_all()
        for group in asked if write else ():
            if group.is_apart:
                self.latest.catch_up(group)
                self.watch(group)
        for group in groups:
            if group.kind.upcasts:
                self._declared(group)
            elif (unit := self.cache.unit_of(group)) is not None:
                self.runner.course.use(unit)
                self.lasting.hold(unit)
        if write:
            self.lasting.note_views(groups)
        try:
            yield
        finally:
            if not write:  # before `end_all`, which would keep their edits
                self.lasting.drop(groups)
            self.end_all()

    # -- loading

    def load(self, slot: Slot, source: Stored) -> None:
        """Has the parameter take values that are in a file."""
        group = slot.group
        if group not in self.loading:
            self.latest.catch_up(group)
            if group.is_plain:  # it was only shown as resting, as its last step was postponed
                slot.parameter.copy_(source.for_loading(slot.parameter))
                return
            self.lasting.end(group)  # what is lent now are older values, which would overwrite those that are read
            group.catch_up()  # a postponed step of a unit is this rank's own, and would overwrite them, too
        self.loading.note(slot, source)

    # -- gradients

    def settle_gradients(self) -> None:
        """Has ranks agree on which parameters have gradients, if they have not yet."""
        self.runner.rendezvous.settle_gradients()

    def lend_gradient(self, slot: Slot) -> Tensor:
        """Returns the whole averaged gradient of a parameter, in its shape. A collective."""
        beside = gradient_of(slot).beside
        if (lent := self._lent_gradient(slot)) is not None:
            return lent
        self.settle_gradients()  # reading `p.grad` has not done it if the parameter is shown plain
        # Until the step, one rank may read it alone.
        average: Tensor | None = self.runner.course.call(self._averages[slot])
        if average is None:
            raise RuntimeError(
                f"The averaged gradient of {slot.name!r} cannot be read any more: another rank has begun the next "
                "backward, which at stage 1 writes over it. Read gradients on every rank, or take stage=2, where a "
                "rank may read them alone."
            )
        with no_interception(), torch.no_grad():
            return beside.add_to(average, slot.index)

    def lend_zeros(self, slot: Slot) -> Tensor:
        """Returns zeros in place of a gradient that is about to become zeros: that needs no collective of its size."""
        if (lent := self._lent_gradient(slot)) is not None:
            return lent  # views of it are to become zeros, too
        self.settle_gradients()
        with torch.no_grad():
            return torch.zeros(slot.shape, dtype=averaged_of(slot).dtype, device=slot.group.places.gathered.device)

    def _lent_gradient(self, slot: Slot) -> Tensor | None:
        """Returns what users have views of already, or have edited on this rank alone."""
        beside = gradient_of(slot).beside
        if (seen := beside.seen(slot.index)) is not None:
            return seen
        return None if beside.has(slot.index) else self.lasting.gradients.get(slot)

    def _serve_gradient(self, slot: Slot, _: bool) -> Tensor | None:
        with no_interception(), torch.no_grad():
            return averaged_of(slot).full(slot, is_lost=gradient_of(slot).has_written_over(slot))

    def take_gradient(
        self, slot: Slot, gradient: Tensor, *, edited_by: int | None, is_visible: bool, is_arriving: bool
    ) -> None:
        """Takes back what a call has edited, as far as that can be told: then `edited_by` is its number, and all ranks
        must come here. If it `is_visible`, the call has returned a view of it, through which it may be edited later; if
        it `is_arriving`, a collective that still writes to it, on a stream of its own."""
        beside = gradient_of(slot).beside
        if beside.has(slot.index) or self.runner.reductions.are_accumulated:
            if edited_by is not None or is_visible:
                beside.show(slot.index, gradient, is_edited=edited_by is not None)
            return
        if edited_by is not None:
            self.runner.wait_to_edit_gradients(edited_by)
        is_edited = edited_by is not None and not is_arriving
        self.lasting.take_gradient(slot, gradient, is_edited=is_edited, is_visible=is_visible, is_arriving=is_arriving)

    # -- boundaries

    def end_all(self, *, all_here: bool = False) -> None:
        """Ends all loans, and keeps the edits that were made meanwhile. If there are any, all ranks must come here, or
        end their round; `all_here` says that they have just met."""
        self.runner.stepping.recover()  # in a step that an error has left, parameters are pieces
        if not all_here:
            if self.lasting.are_edited:
                self._wait_for_all(Position.BOUNDARY)
            if self.lasting.has_edited_gradients:
                self.runner.wait_to_edit_gradients()
        self.lasting.end_all()

    def _wait_for_all(self, position: Position) -> None:
        if self._barrier is not None:
            self._barrier.wait_for_all(position)
