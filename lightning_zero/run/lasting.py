"""`LastingLoans`: values that user code holds until the next boundary, and what it edits in them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from lightning_zero.run.cache import UnitCache
from lightning_zero.run.watch import Watch
from lightning_zero.shards.gradient import gradient_of
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.slot import Slot, no_interception
from lightning_zero.shards.unit import Unit
from lightning_zero.torch_private import edits_of
from lightning_zero.views.intercept import Lent


@dataclass
class _Copy:
    """Values of a group in the declared dtype that are lent, and their state then, by which edits can be told."""

    full: Tensor  # (N * S,)
    version: int = 0
    as_lent: Tensor | None = None  # the resting values of units then, (N * S,): of all ranks
    assigned: dict[Slot, Tensor] = field(default_factory=dict)  # by users to `p.data`: views of `full` keep the old
    kept: Tensor | None = None  # `full` with what was assigned when edits were last kept, (N * S,)

    @property
    def is_edited(self) -> bool:
        """Whether values have changed since, as versions tell, and bits of what is assigned: views of it raise none."""
        before = self.full if self.kept is None else self.kept
        pairs = ((slot.view(before), values) for slot, values in self.assigned.items())
        return edits_of(self.full) != self.version or any(not torch.equal(_bits(a), _bits(b)) for a, b in pairs)

    def current(self) -> Tensor:
        """Returns the values, and what is assigned by now: users may hold, and edit, views of it until the loan ends.
        It is not written into `full`, where users' views of old values are: `p.data` may be assigned these again."""
        if not self.assigned:
            return self.full
        current = self.full.clone()
        for slot, values in self.assigned.items():
            slot.view(current).copy_(values)
        return current


@final
class LastingLoans:
    """The loans of an engine that last to the next boundary: of copies in the declared dtype, of units, and of whole
    gradients. Nothing here waits for other ranks: `Loans` does, before it keeps edits."""

    def __init__(self, cache: UnitCache, watch: Watch) -> None:
        self._cache = cache
        self.watch = watch
        self._copies: dict[ShardGroup, _Copy] = {}
        self._in_blocks: dict[ShardGroup, Tensor] = {}  # those of them that recomputing blocks have read in this pass
        self._held: dict[Unit, None] = {}  # lent units, of whose values user code may hold views
        self._stepped: set[ShardGroup] = set()  # by the backward that runs: what is gathered of them may be older
        self._has_kept = False  # edits since the last boundary, which can be told from the loans no more
        self.gradients: dict[Slot, Tensor] = {}  # lent whole gradients, of which user code may hold views
        self._edits: dict[Slot, int] = {}  # of these, when they were lent

    # -- parameters

    def declared(self, group: ShardGroup, read: Callable[[ShardGroup], Tensor], *, in_block: bool) -> Tensor:
        """Lends the values of a group in the declared dtype, of which `read` returns a copy. Where backward gathers
        nothing, ranks do not meet in the middle of it. A block that recomputes there could not gather, so it finds what
        its forward has read `in_block`."""
        if group not in self._copies:
            again = self._in_blocks.get(group)
            self._copies[group] = _Copy(read(group) if again is None else again)
            self._note_lent(group, self._copies[group], self._copies[group].full)
        if in_block:
            self._in_blocks[group] = self._copies[group].full
        return self._copies[group].full

    def shown(self, slot: Slot) -> Tensor:
        """Returns what a two-byte parameter shows of the copy that is lent: its values there, or assigned ones."""
        copy = self._copies[slot.group]
        return copy.assigned.get(slot, slot.view(copy.full))

    def assign(self, slot: Slot, values: Tensor) -> None:
        """Shows other values of a two-byte parameter whose copy is lent; views of the old ones keep these."""
        self._copies[slot.group].assigned[slot] = values

    def _note_lent(self, group: ShardGroup, copy: _Copy, current: Tensor) -> None:
        """Notes the state of a copy, so that edits from here on can be told."""
        copy.version = edits_of(copy.full)
        if not group.stays_full:
            copy.as_lent = current.to(group.kind.resting)

    def end_call(self, group: ShardGroup, loan: Lent, result: Any) -> None:
        """Notes whether a call has edited lent values unseen, or has returned a view through which they may be."""
        is_arriving = loan.is_arriving_in(result)  # then a look at the values would be too early
        if loan.is_unversioned and (group.is_apart or (group.kind.upcasts and is_arriving)):
            self.watch.note_edit(group)
        elif loan.is_unwatched and loan.is_visible_in(result):
            if group.kind.upcasts:
                self.watch.note(group, self._copies[group].full)
            elif group.is_apart:
                self.watch.look(group)

    def hold(self, unit: Unit) -> None:
        """Keeps a unit gathered until the next boundary, as user code or a graph refers to its values."""
        if not unit.is_held:
            self._held[unit] = None
            self._cache.hold(unit)

    def note_views(self, groups: Iterable[ShardGroup]) -> None:
        """Notes that users can reach the values that are lent of groups, past what tells edits."""
        for group in groups:
            full = self._copies[group].full if group in self._copies else group.full_param
            if full is not None:
                self.watch.note(group, full)

    def keep_edit(self, unit: Unit, *, is_unversioned: bool, is_arriving: bool) -> None:
        """Keeps an edit that a call has just made in a unit. One that the end of its use will keep is only noted; one
        that is arriving is kept at the boundary, as users have waited for it by then."""
        self._has_kept = True
        if is_arriving:
            self.hold(unit)
            return
        if not (unit.is_held or is_unversioned):
            return
        with torch.no_grad(), no_interception():
            self._cache.part_from_old(unit)
        for group in unit.groups:
            if not group.kind.upcasts:
                with torch.no_grad(), no_interception():
                    group.edits.keep(is_edited=is_unversioned)
                    group.edits.note_versions()

    def show_edits(self, unit: Unit) -> None:
        """Shows the edits made so far in lent values of a unit, which is gathered, to what uses it on this rank from
        here on. They go into the shards at the next boundary, where all ranks are: until then, another rank that is
        still in a pass may gather the older values, and this one waits for nobody."""
        if self._copies:
            self.show_declared(unit.groups)
        if unit in self._held:
            with torch.no_grad(), no_interception():
                self._cache.part_from_old(unit)
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
        copy, unit = self._copies[group], self._cache.unit_of(group)
        if unit is not None and not unit.is_gathered:
            return  # all that this rank reads is the lent copy
        if unit is not None:
            unit.wait()  # a gather under way would overwrite the edit
            self.hold(unit)
        current = copy.current()
        if group.edits.show(current, copy.as_lent) and unit is not None:
            copy.as_lent = current.to(group.kind.resting)

    # -- gradients

    def take_gradient(
        self, slot: Slot, gradient: Tensor, *, is_edited: bool, is_visible: bool, is_arriving: bool
    ) -> None:
        """See `Loans`. One that is lent already is only read here, but for what the call has edited: edits through
        views of it are kept at the boundary, where all ranks are. So is what is arriving, for which users have waited
        by then."""
        is_lent = slot in self.gradients
        if is_arriving:
            self.gradients[slot], self._edits[slot] = gradient, edits_of(gradient)
        elif is_edited or not is_lent:
            self._keep_gradient(slot, gradient, is_edited=is_edited)
            if is_visible or is_lent:
                self.gradients[slot], self._edits[slot] = gradient, edits_of(gradient)

    def _keep_gradient(self, slot: Slot, gradient: Tensor, *, is_edited: bool) -> None:
        """Writes a gradient to its shard. What is only read is written, too, as not every edit can be told; but not
        what this rank alone has added to, which the next backward is to reduce."""
        own = gradient_of(slot)
        if is_edited or not own.beside.has(slot.index):
            own.beside.drop(slot.index)
            own.averaged.write(slot, gradient)

    @property
    def has_edited_gradients(self) -> bool:
        """Whether lent gradients were edited through views of them: the same on every rank that has edited them."""
        with no_interception():
            return any(self._is_gradient_edited(slot) for slot in self.gradients if slot.parameter.grad is not None)

    def _is_gradient_edited(self, slot: Slot) -> bool:
        return edits_of(self.gradients[slot]) != self._edits[slot]

    def take_back_gradients(self) -> None:
        """Ends all loans of gradients, and keeps edits made through views of them."""
        with torch.no_grad(), no_interception():
            for slot, gradient in self.gradients.items():
                if slot.parameter.grad is not None:
                    self._keep_gradient(slot, gradient, is_edited=self._is_gradient_edited(slot))
        self.gradients.clear()
        self._edits.clear()

    # -- edits, and the end of loans

    @property
    def are_edited(self) -> bool:
        """Whether there are edits since the last boundary: the same on every rank that has made them."""
        with no_interception():
            return self._has_kept or any(self._is_edited(group, full) for group, full in self._lent())

    def _lent(self) -> Iterator[tuple[ShardGroup, Tensor]]:
        """Yields the groups whose parameters are lent, with the full array that is."""
        yield from ((group, copy.full) for group, copy in self._copies.items())
        for group in (group for unit in self._held for group in unit.groups):
            if not group.kind.upcasts and group.full_param is not None:
                yield group, group.full_param

    def _is_edited(self, group: ShardGroup, full: Tensor) -> bool:
        if self._copies[group].is_edited if group.kind.upcasts else group.edits.are_made:
            return True
        return self.watch.tells_edit(group, full)

    def share_edits(self) -> None:
        """Keeps the edits made so far, as ranks do that go on from a boundary while this one waits. Its loans last, as
        user code may be in the middle of using them."""
        with torch.no_grad(), no_interception():
            for group, full in [*self._lent()]:
                if self._is_edited(group, full):
                    self._share(group, full)
        self._has_kept = False

    def _share(self, group: ShardGroup, full: Tensor) -> None:
        self._wait_for_gather(group)
        if group.kind.upcasts:
            copy = self._copies[group]
            current = copy.current()
            group.edits.keep_lent(current, copy.as_lent)
            copy.kept = current if copy.assigned else None
            self._note_lent(group, copy, current)
        else:
            group.edits.keep_shown()
            group.edits.note_versions()
        self.watch.note_kept(group, full)

    def end_all(self) -> None:
        """Ends all loans at a boundary, and keeps the edits that were made meanwhile."""
        self._has_kept = False
        self._stepped.clear()  # by a backward that has failed: users may have put all values right since
        with torch.no_grad(), no_interception():
            self.take_back_gradients()
            self.watch.keep_edits()
            for group in [*self._copies]:
                self._take_back_declared(group)
            self._in_blocks.clear()
            for unit in [*self._held]:
                self._take_back_unit(unit)
        self.watch.forget_all()

    def end(self, group: ShardGroup) -> None:
        """Ends the loans of a group, as `end_all` does, and releases its unit."""
        unit = self._cache.unit_of(group)
        with torch.no_grad(), no_interception():
            if group in self._copies:
                self._take_back_declared(group)
            self._in_blocks.pop(group, None)
            if unit in self._held:
                self._take_back_unit(unit)
            if unit is not None:
                self._cache.discard(self._cache.numbers[unit])

    def end_before_step(self, groups: Iterable[ShardGroup]) -> None:
        """Ends the loans of groups that are about to be stepped in the middle of a backward, and keeps edits: at the
        boundary the values of before the step would pass for edits. What recomputing blocks have read stays theirs."""
        with torch.no_grad(), no_interception():
            for group in groups:
                self.watch.keep_edits_of(group)
                if group in self._copies:
                    self._take_back_declared(group)
                unit = self._cache.unit_of(group)
                if unit in self._held:
                    self._take_back_unit(unit)
                self.watch.forget(group)
                self._stepped.add(group)

    def drop_after_step(self) -> None:
        """Drops what was lent of groups since a backward has stepped them: older values, which would pass for edits."""
        self.drop(self._stepped)
        self._stepped.clear()

    def drop(self, groups: Iterable[ShardGroup]) -> None:
        """Ends the loans of groups, and keeps no edits."""
        for group in groups:
            self._copies.pop(group, None)
            self.watch.forget(group)
            unit = self._cache.unit_of(group)
            if unit in self._held:
                del self._held[unit]
                self._cache.let_go(unit, keeps_edits=False)

    def _take_back_declared(self, group: ShardGroup) -> None:
        self._wait_for_gather(group)
        copy = self._copies.pop(group)
        group.edits.keep_lent(copy.current(), copy.as_lent)

    def _wait_for_gather(self, group: ShardGroup) -> None:
        """A gather under way would overwrite an edit."""
        unit = self._cache.unit_of(group)
        if unit is not None and unit.is_gathered:
            unit.wait()

    def _take_back_unit(self, unit: Unit) -> None:
        self._cache.part_from_old(unit)
        for group in unit.groups:
            if not group.kind.upcasts and group.full_param is not None and group not in self._stepped:
                group.edits.adopt_assigned()
                group.edits.keep_lent(group.full_param)
        del self._held[unit]
        self._cache.let_go(unit)


def _bits(values: Tensor) -> Tensor:
    return values.reshape(-1).view(torch.uint8)
