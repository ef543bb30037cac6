"""`Loans`: lends the values of parameters and gradients to user code, and takes over the edits that it makes in them.

A parameter or gradient that rests as a shard, in another dtype or in another tier lends its values to each call that
reads it. A loan ends with the call if the call leaves no view of the values, and otherwise at the next boundary: before
a forward or a step (`settle`). Each rank takes over edits of what it owns, so all ranks must make the same edits.

A rank may read or use what others do not, and so come to an edit before them. It waits there until all ranks have come
to it, as they would be served the edited values of this rank beside the older ones of the others. Some keep at the
boundary, for a loan that lasts, what others keep at once: so a rank that has kept edits waits at the boundary, too.
Until then a loan that lasts is this rank's alone: what it runs or recomputes sees the edits (`show_edits`), what it
sends to other ranks does not. A rank that waits elsewhere for those at the boundary, and serves them, keeps its edits
when they go on: they run with these.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.device import HOST
from lightning_zero.run.cache import UnitCache
from lightning_zero.run.program import Cause
from lightning_zero.run.rendezvous import Rendezvous
from lightning_zero.shards.group import ShardGroup, publish
from lightning_zero.shards.norm import gradient_of
from lightning_zero.shards.slot import Slot, no_interception, slot_of
from lightning_zero.shards.unit import Unit
from lightning_zero.tiers.array import Array
from lightning_zero.tiers.ledger import Category
from lightning_zero.torch_private import backward_number, edits_of
from lightning_zero.views.gradient import GradientLender
from lightning_zero.views.intercept import Lent
from lightning_zero.views.lazy import Stored
from lightning_zero.views.parameter import AsDeclared, Interception, Lender
from lightning_zero.views.saved import SavedParameters

Fingerprint = tuple[int, int]


class _Place(IntEnum):
    """Where a rank is, for those that wait at an edit."""

    ELSEWHERE = 0
    EDIT = 1  # a call has edited values, which are kept at its end
    BOUNDARY = 2  # keeps what has been edited since the last one


@final
class Loans(Lender, GradientLender):
    """The values of an engine that are lent to user code. After construction, `join` says where they come from."""

    def __init__(self, groups: list[ShardGroup]) -> None:
        self.groups = groups
        self._declared: dict[ShardGroup, Tensor] = {}  # lent copies in the declared dtype, (N * S,)
        self._as_lent: dict[ShardGroup, Tensor] = {}  # the resting values of units then, (N * S,): of all ranks
        self._versions: dict[ShardGroup, int] = {}  # of these copies when they were lent
        self._fingerprints: dict[ShardGroup, Fingerprint] = {}  # of what users hold views of, at the first view
        self._has_kept = False  # edits since the last boundary, which can be told from the loans no more
        self._place = _Place.ELSEWHERE
        self._in_blocks: dict[ShardGroup, Tensor] = {}  # those of them that recomputing blocks have read in this pass
        self._held: dict[Unit, None] = {}  # lent units, of whose values user code may hold views
        self._gradients: dict[Slot, Tensor] = {}  # lent whole gradients, of which user code may hold views
        self._noted: dict[ShardGroup, dict[Slot, Stored]] = {}  # the files that parameters are to be read from
        self._unread: Exception | None = None  # why one could not be read
        for group in groups:
            if group.is_plain:
                group.note_versions()

    def join(
        self, cache: UnitCache, rendezvous: Rendezvous, saved: SavedParameters, interception: Interception
    ) -> None:
        self._interception = interception
        self.cache = cache
        self.rendezvous = rendezvous
        self.saved = saved
        self._units = {group: unit for unit in cache.units for group in unit.groups}
        self._numbers = {
            group: rendezvous.serving.enroll(f"the all-gather of {names_of(group)}", partial(self._serve, group))
            for group in self.groups
            if group.is_cut and not group.is_plain
        }
        self._edit = rendezvous.serving.enroll("an edit of weights", self._compare_places) if self._numbers else None
        self._averages: dict[Slot, int] = {}
        self._enroll_gradients(self.groups)
        self._publishing: dict[ShardGroup, int] = {}
        self._enroll_publishing(self.groups)

    def unit_of(self, group: ShardGroup) -> Unit | None:
        """Returns the unit that gathers a group; None if it stays full."""
        return self._units.get(group)

    def _enroll_gradients(self, groups: Iterable[ShardGroup]) -> None:
        for slot in (slot for group in groups for slot in group.slots):
            if slot.gradient is not None and slot.gradient.is_spread:
                serve = partial(self._serve_gradient, slot)
                self._averages[slot] = self.rendezvous.serving.enroll(f"the gradient of {slot.name}", serve)

    def _enroll_publishing(self, groups: Iterable[ShardGroup]) -> None:
        for group in groups:
            if group.is_cut and (group.places.optimizer != group.places.gathered or not group.is_plain):
                serve = partial(self._serve_publishing, group)
                self._publishing[group] = self.rendezvous.serving.enroll(f"publish {group.name}", serve)

    @property
    def published(self) -> dict[int, ShardGroup]:
        """The groups that ranks catch up with together, by the number of the call."""
        return {number: group for group, number in self._publishing.items()}

    def add(self, groups: Sequence[ShardGroup], trained: Iterable[ShardGroup]) -> None:
        """Adds new groups, whose parameters are shown plain, and the gradients of groups that have begun to train."""
        self.groups.extend(groups)
        for group in groups:
            group.note_versions()
        self._enroll_publishing(groups)
        self._enroll_gradients(trained)

    # -- postponed steps

    def catch_up(self, group: ShardGroup) -> None:
        """Takes the postponed steps of a group, and publishes their values. Collective where ranks own parts of it."""
        if not (group.is_behind or group.needs_all):
            return
        if group in self._publishing and not group.is_arriving:
            self.rendezvous.call(self._publishing[group])
        else:
            self.rendezvous.journal.note(Cause.READ, group)
            self._publish(group)

    def catch_up_all(self) -> None:
        """Takes all postponed steps of all groups, in the order in which forward needs them."""
        # Groups of a model without units are made in the order of backward.
        for group in self.groups if self.cache.units else reversed(self.groups):
            self.catch_up(group)
            group.catch_up()

    def _serve_publishing(self, group: ShardGroup, _: bool) -> None:
        """Publishes a group together with all ranks. A plan may have that done where nothing has been stepped since;
        then each rank has the values, unless they are on their way yet, and its user code may have edited them."""
        if group.is_arriving:
            self._publish(group)
        if group.is_behind or group.needs_all or not group.stays_full:
            self._publish(group)
        else:
            with torch.no_grad(), no_interception():
                group.pass_by(group.owned_param, "publish")

    def _publish(self, group: ShardGroup) -> None:
        with no_interception():
            group.catch_up()
            publish([group])
            if group.is_plain:
                self._interception.show(group)
                group.note_versions()

    # -- whole values

    def _serve(self, group: ShardGroup, keep: bool) -> Tensor | None:
        group.catch_up()
        if keep:
            return self.gather(group, group.master)
        group.pass_by(group.master, "gather master")
        return None

    @staticmethod
    def gather(group: ShardGroup, shard: Array, purpose: str = "gather master") -> Tensor:
        """Returns the full array ``(N * S,)`` of which each rank has a `shard`. Collective."""
        setting = group.setting
        full = setting.ledger.allocate(Category.GATHERED, group.layout.numel, shard.dtype, group.places.gathered)
        for gather in group.all_gather(full, shard, purpose):
            gather.wait()
        return full

    def declared(self, group: ShardGroup) -> Tensor:
        """Returns all values of a group in the declared dtype, ``(N * S,)``, not to be written to. Collective, unless
        they rest in full on this rank."""
        self.catch_up(group)
        group.catch_up()  # also where nothing is published after it
        if not group.is_cut:
            return group.master.read().to(group.places.gathered.device)
        if group.full_param is not None and group.stays_full and not group.kind.is_cast:
            return group.full_param
        if group not in self._numbers:  # only all ranks together read them
            return self.gather(group, group.master)
        full: Tensor = self.rendezvous.call(self._numbers[group])
        return full

    # -- parameters

    def lend(self, slot: Slot) -> Lent:
        group = slot.group
        if group.is_lost:
            raise RuntimeError(
                f"Parameter {slot.name!r} cannot be read: training ended with an error, and its values are spread over "
                "the ranks. Load the latest checkpoint into a new model; to have one of the moment that a run fails, "
                "add Lightning's OnExceptionCheckpoint callback."
            )
        self.catch_up(group)
        if group.upcasts or group.stays_full:
            values = self._lend_declared(slot) if group.upcasts else slot.parameter
            return Lent(slot.parameter, values, partial(self._end_lasting, group))  # until `settle`
        unit = self._units[group]
        if not unit.is_held:
            self.rendezvous.use(unit)
        self.cache.pin(unit)
        # Activation checkpointing compares what autograd saves in forward and in recomputation. A recomputed layer may
        # come here where its first forward did not, so the checkpoint's hooks must see parameters themselves both
        # times. What the checkpoint keeps of them it drops in the same backward.
        notes = not self.saved.is_inside_others
        recomputes = not notes and backward_number() != -1
        if notes and not self.saved.push():
            self.hold(unit)
        return Lent(slot.parameter, slot.parameter, partial(self._end_call, unit, notes, recomputes))

    def _lend_declared(self, slot: Slot) -> Tensor:
        view = self.declared_of(slot)
        if not (slot.parameter.requires_grad and torch.is_grad_enabled()):
            return view
        with no_interception():
            return AsDeclared.apply(slot.parameter, view)

    def declared_of(self, slot: Slot) -> Tensor:
        """Returns the values of a two-byte weight in its declared dtype, lent until `settle`, as a plain tensor."""
        return slot.view(self._borrow_declared(slot.group))

    def _borrow_declared(self, group: ShardGroup) -> Tensor:
        if group not in self._declared:
            again = self._in_blocks.get(group)
            full = self._declared[group] = self.declared(group) if again is None else again
            self._note_lent(group, full)
        # Where backward gathers nothing, ranks do not meet in the middle of it. A block that recomputes there could not
        # gather, so it finds here what its forward has read.
        if group.stays_full and torch.is_grad_enabled() and self.saved.is_inside_others:
            self._in_blocks[group] = self._declared[group]
        return self._declared[group]

    def _note_lent(self, group: ShardGroup, full: Tensor) -> None:
        """Notes the state of a copy in the declared dtype, so that edits from here on can be told."""
        self._versions[group] = edits_of(full)
        if not group.stays_full:
            self._as_lent[group] = full.to(group.kind.resting)

    def _end_lasting(self, group: ShardGroup, loan: Lent, result: Any) -> None:
        """Notes whether a call has returned a view of lent values, through which they may be edited unseen."""
        if group.upcasts and loan.is_unwatched and loan.is_visible_in(result):
            self._note_fingerprint(group, self._declared[group])

    def _end_call(self, unit: Unit, notes: bool, recomputes: bool, loan: Lent, result: Any) -> None:
        """Ends the loan of a unit to one call, unless the values are still referred to."""
        if notes:
            self.saved.pop()
        if unit.is_shared and not recomputes:
            self.hold(unit)
            if loan.is_unwatched and loan.is_visible_in(result):
                self._note_fingerprints(unit)
        if unit.pins == 1 and loan.is_edited:  # the edit is kept now
            self._wait_for_all(_Place.EDIT)
            self._has_kept = True
            if unit.is_held:
                self._keep_edits(unit)
        self.cache.unpin(unit)

    def hold(self, unit: Unit) -> None:
        """Keeps a unit gathered until the next boundary, as user code or a graph refers to its values."""
        if not unit.is_held:
            self._held[unit] = None
            self.cache.hold(unit)

    def _keep_edits(self, unit: Unit) -> None:
        for group in unit.groups:
            if not group.upcasts:
                with torch.no_grad(), no_interception():
                    group.keep_edits()
                    group.note_versions()

    def _note_fingerprints(self, unit: Unit) -> None:
        for group in unit.groups:
            if not group.upcasts and group.full_param is not None:
                self._note_fingerprint(group, group.full_param)

    def _note_fingerprint(self, group: ShardGroup, full: Tensor) -> None:
        if group not in self._fingerprints:
            self._fingerprints[group] = fingerprint_of(full)

    def show_edits(self, unit: Unit) -> None:
        """Shows the edits made so far in lent values of a unit, which is gathered, to what uses it on this rank from
        here on. They go into the shards at the next boundary, where all ranks are: until then, another rank that is
        still in a pass may gather the older values, and this one waits for nobody."""
        if self._declared:
            self.show_declared(unit.groups)
        if unit in self._held:
            with torch.no_grad(), no_interception():
                for group in unit.groups:
                    if not group.upcasts and group.full_param is not None and group.adopt_assigned():
                        self._has_kept = True

    def show_declared(self, groups: Iterable[ShardGroup]) -> None:
        """Does `show_edits` for copies in the declared dtype, and ends the loans of those that were not edited."""
        for group in groups:
            if group in self._declared:
                with torch.no_grad(), no_interception():
                    if self._is_edited(group, self._declared[group]):
                        self._show_edited(group)
                    else:
                        self._take_back_declared(group)

    def _show_edited(self, group: ShardGroup) -> None:
        full, unit = self._declared[group], self._units.get(group)
        if unit is not None and not unit.is_gathered:
            return  # all that this rank reads is the lent copy
        if unit is not None:
            unit.wait()  # a gather under way would overwrite the edit
            self.hold(unit)
        if group.show_edits(full, self._as_lent.get(group)) and unit is not None:
            self._as_lent[group] = full.to(group.kind.resting)

    @contextmanager
    def all_of(self, parameters: Iterable[Parameter], *, write: bool) -> Iterator[None]:
        """Lends the whole values of parameters; see `Engine.full_parameters`."""
        slots = {slot_of(parameter) for parameter in parameters}
        groups = [group for group in self.groups if not group.is_plain and not slots.isdisjoint(group.slots)]
        self.settle()
        for group in groups:
            if group.upcasts:
                self._borrow_declared(group)
            elif not group.stays_full:
                self.rendezvous.use(self._units[group])
                self.hold(self._units[group])
        if write:
            for group in groups:
                full = self._declared.get(group, group.full_param)
                if full is not None:
                    self._note_fingerprint(group, full)
        try:
            yield
        finally:
            for group in () if write else groups:  # before `settle`, which would keep their edits
                self._declared.pop(group, None)
                self._as_lent.pop(group, None)
                self._fingerprints.pop(group, None)
                unit = self._units.get(group)
                if unit in self._held:
                    del self._held[unit]
                    self.cache.let_go(unit, keeps_edits=False)
            self.settle()

    # -- loading

    def load(self, slot: Slot, source: Stored) -> None:
        """Notes the file that the values of a parameter are in. Reading it is a postponed step of the group: it is done
        when its values are wanted, or at the end of `States.loading`."""
        group = slot.group
        if group not in self._noted:
            self.catch_up(group)
            if group.is_plain:  # it was only shown as resting, as its last step was postponed
                slot.parameter.copy_(source.for_loading(slot.parameter))
                return
            self._end_loans_of(group)  # what is lent now are older values, which would overwrite those that are read
            self._noted[group] = {}
            group.postpone(partial(self._read, group))
        self._noted[group][slot] = source

    @property
    def has_noted(self) -> bool:
        """Whether parameters are still to be read from files."""
        return bool(self._noted)

    def _read(self, group: ShardGroup) -> None:
        """Reads this rank's pieces of what is noted for a group. Where it cannot, it notes why: other ranks may wait
        for this one, and hear of it by `take_unread`."""
        noted, master = self._noted.pop(group), group.master
        with torch.no_grad(), no_interception():
            for slot, source in noted.items():
                extent = slot.local.box.extent(source.name, slot.piece.start, slot.piece.stop)
                try:
                    with master.edit(slot.piece.in_shard) as piece:
                        source.read(extent, piece)
                except Exception as error:
                    self._unread = error
            group.take_masters(noted)

    def take_unread(self) -> Exception | None:
        """Returns why a parameter could not be read since the last call; None if all could."""
        unread, self._unread = self._unread, None
        return unread

    # -- gradients

    def settle_gradients(self) -> None:
        self.rendezvous.settle_gradients()

    def lend_gradient(self, slot: Slot) -> Tensor:
        if slot in self._gradients:
            return self._gradients[slot]
        self.settle_gradients()  # reading `p.grad` has not done it if the parameter is shown plain
        gradient: Tensor = self.rendezvous.call(self._averages[slot])  # until the step, one rank may read it alone
        return gradient

    def _serve_gradient(self, slot: Slot, _: bool) -> Tensor:
        with no_interception(), torch.no_grad():
            return gradient_of(slot).gather(slot)

    def take_gradient(self, slot: Slot, gradient: Tensor, *, is_visible: bool) -> None:
        gradient_of(slot).write(slot, gradient)
        if is_visible:
            self._gradients[slot] = gradient

    def take_back_gradients(self) -> None:
        """Ends all loans of gradients, and keeps edits made through views of them."""
        for slot, gradient in self._gradients.items():
            if slot.parameter.grad is not None:
                self.take_gradient(slot, gradient, is_visible=False)
        self._gradients.clear()

    # -- boundaries

    def settle(self, *, all_here: bool = False) -> None:
        """Ends all loans, and keeps the edits that were made meanwhile. If there are any, all ranks must come here, or
        end their round; `all_here` says that they have just met."""
        with no_interception():
            is_edited = any(self._is_edited(group, full) for group, full in self._lasting())
        if (is_edited or self._has_kept) and not all_here:
            self._wait_for_all(_Place.BOUNDARY)
        self._has_kept = False
        with torch.no_grad(), no_interception():
            self.take_back_gradients()
            for group in self.groups:
                if group.is_behind:
                    continue
                if group.is_plain and group.master is not group.owned_param:
                    group.keep_edits()
                    group.note_versions()
                elif group.is_plain:
                    group.adopt_assigned()
            for group in [*self._declared]:
                self._take_back_declared(group)
            self._in_blocks.clear()
            for unit in [*self._held]:
                self._take_back_unit(unit)
        self._fingerprints.clear()

    def _lasting(self) -> Iterator[tuple[ShardGroup, Tensor]]:
        """Yields the groups of which loans last to the next boundary, with the full array that is lent."""
        yield from self._declared.items()
        for group in (group for unit in self._held for group in unit.groups):
            if not group.upcasts and group.full_param is not None:
                yield group, group.full_param

    def _is_edited(self, group: ShardGroup, full: Tensor) -> bool:
        """Whether lent values have been edited: the same on every rank that has made the edits."""
        if edits_of(full) != self._versions[group] if group.upcasts else group.is_edited:
            return True
        return group in self._fingerprints and self._fingerprints[group] != fingerprint_of(full)

    def _wait_for_all(self, place: _Place) -> None:
        """Waits until all ranks have come to the edit that this one is about to keep, and serves them meanwhile."""
        self._place = place
        while self._edit is not None and self.rendezvous.call(self._edit) < place:
            pass
        self._place = _Place.ELSEWHERE

    def _compare_places(self, _: bool) -> int:
        """Returns the place of the rank that is farthest from a boundary. One that has nothing more to do in this round
        makes no edit before one. If all are there, those that only wait share their edits with those that go on.
        Collective."""
        place = _Place.BOUNDARY if self.rendezvous.serving.is_waiting else self._place
        told = torch.tensor([place], dtype=torch.uint8, device=HOST)
        nearest = int(self.groups[0].comm.host.all_reduce(told, "edit", "min"))
        if nearest == _Place.BOUNDARY and self._place is not _Place.BOUNDARY:
            self._share_edits()
        return nearest

    def _share_edits(self) -> None:
        """Keeps the edits made so far, as ranks do that go on from a boundary while this one waits. Its loans last, as
        user code may be in the middle of using them."""
        with torch.no_grad(), no_interception():
            for group, full in [*self._lasting()]:
                if self._is_edited(group, full):
                    self._share(group, full)
        self._has_kept = False

    def _share(self, group: ShardGroup, full: Tensor) -> None:
        if group in self._units and self._units[group].is_gathered:
            self._units[group].wait()  # a gather under way would overwrite the edit
        if group.upcasts:
            group.take_edits(full, self._as_lent.get(group))
            self._note_lent(group, full)
        else:
            group.take_shown()
            group.note_versions()
        if group in self._fingerprints:
            self._fingerprints[group] = fingerprint_of(full)

    def _end_loans_of(self, group: ShardGroup) -> None:
        """Ends the loans of a group, as `settle` does, and releases its unit."""
        unit = self._units.get(group)
        with torch.no_grad(), no_interception():
            if group in self._declared:
                self._take_back_declared(group)
            self._in_blocks.pop(group, None)
            if unit in self._held:
                self._take_back_unit(unit)
            if unit is not None:
                self.cache.discard(self.cache.numbers[unit])

    def _take_back_declared(self, group: ShardGroup) -> None:
        if group in self._units and self._units[group].is_gathered:
            self._units[group].wait()  # a gather under way would overwrite the edit
        self._versions.pop(group)
        group.take_edits(self._declared.pop(group), self._as_lent.pop(group, None))

    def _take_back_unit(self, unit: Unit) -> None:
        for group in unit.groups:
            if not group.upcasts and group.full_param is not None:
                group.adopt_assigned()
                group.take_edits(group.full_param)
        del self._held[unit]
        self.cache.let_go(unit)


def fingerprint_of(values: Tensor) -> Fingerprint:
    """Returns two numbers that tell whether values have been edited in any way, also past torch: sums of their bits."""
    bits = values.view(torch.int64)
    matrix = bits.view(-1, math.gcd(bits.numel(), 4096))
    first, second = (
        int((sums * torch.arange(1, sums.numel() + 1, device=sums.device)).sum())
        for sums in (matrix.sum(0), matrix.sum(1))
    )
    return first, second


def names_of(group: ShardGroup) -> str:
    """Names the parameters of a group, for messages."""
    first, *others = (slot.name for slot in group.slots)
    return f"{first} and {len(others)} more parameters" if others else first
