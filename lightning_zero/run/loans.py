"""`Loans`: lends the values of parameters and gradients to user code, and takes over the edits that it makes in them.

A parameter or gradient that rests as a shard, in another dtype or in another tier lends its values to each call that
reads it. A loan ends with the call if the call leaves no view of the values, and otherwise at the next boundary: before
a forward or a step (`settle`). Each rank takes over edits of what it owns, so all ranks must make the same edits.

A rank that comes to an edit before others waits for them (`edits`). Some keep at the boundary, for a loan that lasts,
what others keep at once: so a rank that has kept edits waits at the boundary, too. Until then a loan that lasts is this
rank's alone: what it runs or recomputes sees the edits (`show_edits`), what it sends to other ranks does not. A rank
that waits elsewhere for those at the boundary, and serves them, keeps its edits when they go on: they run with these.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.run.cache import UnitCache
from lightning_zero.run.edits import EditBarrier, Place
from lightning_zero.run.loading import Loading
from lightning_zero.run.parameter import AsDeclared, Interception, Lender, RestingParameter
from lightning_zero.run.runner import Runner
from lightning_zero.run.saved import SavedParameters
from lightning_zero.run.watch import Watch
from lightning_zero.shards.gradient import averaged_of
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.slot import Slot, no_interception, slot_of
from lightning_zero.shards.unit import Unit
from lightning_zero.torch_private import backward_number, edits_of, outside_transforms
from lightning_zero.views.intercept import Lent
from lightning_zero.views.lazy import Stored


@dataclass
class _Copy:
    """Values of a group in the declared dtype that are lent, and their state then, by which edits can be told."""

    full: Tensor  # (N * S,)
    version: int = 0
    as_lent: Tensor | None = None  # the resting values of units then, (N * S,): of all ranks


@final
class Loans(Lender):
    """The values of an engine that are lent to user code."""

    def __init__(
        self,
        groups: list[ShardGroup],
        cache: UnitCache,
        runner: Runner,
        saved: SavedParameters,
        interception: Interception,
    ) -> None:
        self.groups = groups
        self.cache = cache
        self.runner = runner
        self.saved = saved
        self.latest = runner.latest
        self.loading = Loading()
        self._copies: dict[ShardGroup, _Copy] = {}
        self._in_blocks: dict[ShardGroup, Tensor] = {}  # those of them that recomputing blocks have read in this pass
        self._held: dict[Unit, None] = {}  # lent units, of whose values user code may hold views
        self._has_kept = False  # edits since the last boundary, which can be told from the loans no more
        self._are_lost = False  # a rank failed: the values are spread over ranks that no longer answer
        is_cut = any(group.is_cut and not group.is_plain for group in groups)
        self._barrier = EditBarrier(runner.rendezvous, self._share_edits) if is_cut else None
        self._averages: dict[Slot, int] = {}  # by which `Course.call` gathers gradients
        self._gradients: dict[Slot, Tensor] = {}  # lent whole gradients, of which user code may hold views
        self._enroll_gradients(groups)
        interception.lender = self
        self._watch = Watch(groups, interception)

    def _enroll_gradients(self, groups: Iterable[ShardGroup]) -> None:
        for slot in (slot for group in groups for slot in group.slots):
            if slot.gradient is not None and slot.gradient.averaged.is_spread:
                serve = partial(self._serve_gradient, slot)
                self._averages[slot] = self.runner.rendezvous.serving.enroll(f"the gradient of {slot.name}", serve)

    def add(self, groups: Sequence[ShardGroup], trained: Iterable[ShardGroup]) -> None:
        """Adds new groups, whose parameters are shown plain, and the gradients of groups that have begun to train."""
        self.latest.add(groups)
        self._enroll_gradients(trained)
        self._watch.add(groups)

    # -- parameters

    def lend(self, slot: Slot) -> Lent:
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
            return Lent(slot.parameter, values, partial(self._end_lasting, group))  # until `settle`
        unit = self._unit_of(group)
        with outside_transforms():
            if not unit.is_held:
                self.runner.course.use(unit)
            self.cache.pin(unit)
        # Activation checkpointing compares what autograd saves in forward and in recomputation. A recomputed layer may
        # come here where its first forward did not, so the checkpoint's hooks must see parameters themselves both
        # times. What the checkpoint keeps of them it drops in the same backward.
        notes = not self.saved.is_inside_others
        recomputes = not notes and backward_number() != -1
        if notes and not self.saved.push():
            self.hold(unit)
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
        """Returns the values of a two-byte weight in its declared dtype, lent until `settle`, as a plain tensor."""
        return slot.view(self._borrow_declared(slot.group))

    def _borrow_declared(self, group: ShardGroup) -> Tensor:
        if group not in self._copies:
            again = self._in_blocks.get(group)
            self._copies[group] = _Copy(self.latest.declared(group) if again is None else again)
            self._note_lent(group, self._copies[group])
        # Where backward gathers nothing, ranks do not meet in the middle of it. A block that recomputes there could not
        # gather, so it finds here what its forward has read.
        if group.stays_full and torch.is_grad_enabled() and self.saved.is_inside_others:
            self._in_blocks[group] = self._copies[group].full
        return self._copies[group].full

    def _note_lent(self, group: ShardGroup, copy: _Copy) -> None:
        """Notes the state of a copy, so that edits from here on can be told."""
        copy.version = edits_of(copy.full)
        if not group.stays_full:
            copy.as_lent = copy.full.to(group.kind.resting)

    def _end_lasting(self, group: ShardGroup, loan: Lent, result: Any) -> None:
        """Notes whether a call has edited lent values unseen, or has returned a view through which they may be."""
        if group.is_apart and loan.is_unversioned:
            self._watch.note_edit(group)
        elif loan.is_unwatched and loan.is_visible_in(result):
            if group.kind.upcasts:
                self._watch.note(group, self._copies[group].full)
            elif group.is_apart:
                self.watch(group)

    def is_lent(self, values: Tensor) -> bool:
        return isinstance(values, RestingParameter) or self.cache.unit_around(values) is not None

    def watch(self, group: ShardGroup) -> None:
        self._watch.look(group)

    def _end_call(self, unit: Unit, notes: bool, recomputes: bool, loan: Lent, result: Any) -> None:
        """Ends the loan of a unit to one call, unless the values are still referred to."""
        if notes:
            self.saved.pop()
        if unit.is_shared and not recomputes:
            self.hold(unit)
            if loan.is_unwatched and loan.is_visible_in(result):
                self._note_fingerprints(unit)
        if unit.pins == 1 and loan.is_edited:  # the edit is kept now
            self._wait_for_all(Place.EDIT)
            self._has_kept = True
            if unit.is_held or loan.is_unversioned:
                self._keep_edits(unit, is_edited=loan.is_unversioned)
        self.cache.unpin(unit)

    def hold(self, unit: Unit) -> None:
        """Keeps a unit gathered until the next boundary, as user code or a graph refers to its values."""
        if not unit.is_held:
            self._held[unit] = None
            self.cache.hold(unit)

    def _keep_edits(self, unit: Unit, *, is_edited: bool) -> None:
        for group in unit.groups:
            if not group.kind.upcasts:
                with torch.no_grad(), no_interception():
                    group.edits.keep(is_edited=is_edited)
                    group.edits.note_versions()

    def _note_fingerprints(self, unit: Unit) -> None:
        for group in unit.groups:
            if not group.kind.upcasts and group.full_param is not None:
                self._watch.note(group, group.full_param)

    def show_edits(self, unit: Unit) -> None:
        """Shows the edits made so far in lent values of a unit, which is gathered, to what uses it on this rank from
        here on. They go into the shards at the next boundary, where all ranks are: until then, another rank that is
        still in a pass may gather the older values, and this one waits for nobody."""
        if self._copies:
            self.show_declared(unit.groups)
        if unit in self._held:
            with torch.no_grad(), no_interception():
                for group in unit.groups:
                    if not group.kind.upcasts and group.full_param is not None and group.edits.adopt_assigned():
                        self._has_kept = True

    def show_declared(self, groups: Iterable[ShardGroup]) -> None:
        """Does `show_edits` for copies in the declared dtype, and ends the loans of those that were not edited."""
        for group in groups:
            if group in self._copies:
                with torch.no_grad(), no_interception():
                    if self._is_edited(group, self._copies[group].full):
                        self._show_edited(group)
                    else:
                        self._take_back_declared(group)

    def _show_edited(self, group: ShardGroup) -> None:
        copy, unit = self._copies[group], self.cache.unit_of(group)
        if unit is not None and not unit.is_gathered:
            return  # all that this rank reads is the lent copy
        if unit is not None:
            unit.wait()  # a gather under way would overwrite the edit
            self.hold(unit)
        if group.edits.show(copy.full, copy.as_lent) and unit is not None:
            copy.as_lent = copy.full.to(group.kind.resting)

    @contextmanager
    def all_of(self, parameters: Iterable[Parameter], *, write: bool) -> Iterator[None]:
        """Lends the whole values of parameters; see `Engine.full_parameters`."""
        slots = {slot_of(parameter) for parameter in parameters}
        asked = [group for group in self.groups if not slots.isdisjoint(group.slots)]
        groups = [group for group in asked if not group.is_plain]
        self.settle()
        for group in asked if write else ():
            if group.is_apart:
                self.latest.catch_up(group)
                self.watch(group)
        for group in groups:
            if group.kind.upcasts:
                self._borrow_declared(group)
            elif not group.stays_full:
                needed = self._unit_of(group)
                self.runner.course.use(needed)
                self.hold(needed)
        if write:
            for group in groups:
                full = self._copies[group].full if group in self._copies else group.full_param
                if full is not None:
                    self._watch.note(group, full)
        try:
            yield
        finally:
            for group in () if write else groups:  # before `settle`, which would keep their edits
                self._copies.pop(group, None)
                self._watch.forget(group)
                unit = self.cache.unit_of(group)
                if unit in self._held:
                    del self._held[unit]
                    self.cache.let_go(unit, keeps_edits=False)
            self.settle()

    # -- loading

    def load(self, slot: Slot, source: Stored) -> None:
        group = slot.group
        if group not in self.loading:
            self.latest.catch_up(group)
            if group.is_plain:  # it was only shown as resting, as its last step was postponed
                slot.parameter.copy_(source.for_loading(slot.parameter))
                return
            self._end_loans_of(group)  # what is lent now are older values, which would overwrite those that are read
        self.loading.note(slot, source)

    # -- gradients

    def settle_gradients(self) -> None:
        self.runner.rendezvous.settle_gradients()

    def lend_gradient(self, slot: Slot) -> Tensor:
        if slot in self._gradients:
            return self._gradients[slot]
        self.settle_gradients()  # reading `p.grad` has not done it if the parameter is shown plain
        # Until the step, one rank may read it alone.
        gradient: Tensor = self.runner.course.call(self._averages[slot])
        return gradient

    def _serve_gradient(self, slot: Slot, _: bool) -> Tensor:
        with no_interception(), torch.no_grad():
            return averaged_of(slot).full(slot)

    def take_gradient(self, slot: Slot, gradient: Tensor, *, is_visible: bool) -> None:
        averaged_of(slot).write(slot, gradient)
        if is_visible:
            self._gradients[slot] = gradient

    def take_back_gradients(self) -> None:
        for slot, gradient in self._gradients.items():
            if slot.parameter.grad is not None:
                self.take_gradient(slot, gradient, is_visible=False)
        self._gradients.clear()

    # -- boundaries

    def settle(self, *, all_here: bool = False) -> None:
        self.runner.stepping.recover()  # in a step that an error has left, parameters are pieces
        with no_interception():
            is_edited = any(self._is_edited(group, full) for group, full in self._lasting())
        if (is_edited or self._has_kept) and not all_here:
            self._wait_for_all(Place.BOUNDARY)
        self._has_kept = False
        with torch.no_grad(), no_interception():
            self.take_back_gradients()
            self._watch.keep_edits()
            for group in [*self._copies]:
                self._take_back_declared(group)
            self._in_blocks.clear()
            for unit in [*self._held]:
                self._take_back_unit(unit)
        self._watch.forget_all()

    def _lasting(self) -> Iterator[tuple[ShardGroup, Tensor]]:
        """Yields the groups of which loans last to the next boundary, with the full array that is lent."""
        yield from ((group, copy.full) for group, copy in self._copies.items())
        for group in (group for unit in self._held for group in unit.groups):
            if not group.kind.upcasts and group.full_param is not None:
                yield group, group.full_param

    def _is_edited(self, group: ShardGroup, full: Tensor) -> bool:
        """Whether lent values have been edited: the same on every rank that has made the edits."""
        if edits_of(full) != self._copies[group].version if group.kind.upcasts else group.edits.are_made:
            return True
        return self._watch.tells_edit(group, full)

    def _wait_for_all(self, place: Place) -> None:
        if self._barrier is not None:
            self._barrier.wait_for_all(place)

    def _share_edits(self) -> None:
        """Keeps the edits made so far, as ranks do that go on from a boundary while this one waits. Its loans last, as
        user code may be in the middle of using them."""
        with torch.no_grad(), no_interception():
            for group, full in [*self._lasting()]:
                if self._is_edited(group, full):
                    self._share(group, full)
        self._has_kept = False

    def _share(self, group: ShardGroup, full: Tensor) -> None:
        self._wait_for_gather(group)
        if group.kind.upcasts:
            copy = self._copies[group]
            group.edits.keep_lent(copy.full, copy.as_lent)
            self._note_lent(group, copy)
        else:
            group.edits.keep_shown()
            group.edits.note_versions()
        self._watch.note_kept(group, full)

    def _end_loans_of(self, group: ShardGroup) -> None:
        """Ends the loans of a group, as `settle` does, and releases its unit."""
        unit = self.cache.unit_of(group)
        with torch.no_grad(), no_interception():
            if group in self._copies:
                self._take_back_declared(group)
            self._in_blocks.pop(group, None)
            if unit in self._held:
                self._take_back_unit(unit)
            if unit is not None:
                self.cache.discard(self.cache.numbers[unit])

    def _take_back_declared(self, group: ShardGroup) -> None:
        self._wait_for_gather(group)
        copy = self._copies.pop(group)
        group.edits.keep_lent(copy.full, copy.as_lent)

    def _unit_of(self, group: ShardGroup) -> Unit:
        unit = self.cache.unit_of(group)
        assert unit is not None
        return unit

    def _wait_for_gather(self, group: ShardGroup) -> None:
        """A gather under way would overwrite an edit."""
        unit = self.cache.unit_of(group)
        if unit is not None and unit.is_gathered:
            unit.wait()

    def _take_back_unit(self, unit: Unit) -> None:
        for group in unit.groups:
            if not group.kind.upcasts and group.full_param is not None:
                group.edits.adopt_assigned()
                group.edits.keep_lent(group.full_param)
        del self._held[unit]
        self.cache.let_go(unit)
