"""`UnitCache`: which units are gathered, and which of them must stay gathered."""

from collections.abc import Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from lightning_zero.run.parameter import Interception
from lightning_zero.run.plan import Residents
from lightning_zero.run.watch import Watch
from lightning_zero.shards.arena import Arena
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.slot import no_interception
from lightning_zero.shards.unit import Unit
from lightning_zero.torch_private import storage_key
from lightning_zero.wire.comm import Gather


@final
class UnitCache:
    """The units of an engine, by number. `room` of them are gathered in the arena at a time, beside those that contain
    other units (`apart`). A unit stays gathered until its room is needed."""

    def __init__(
        self, units: Sequence[Unit], arena: Arena, room: int, interception: Interception, watch: Watch
    ) -> None:
        self.units = units
        self.numbers = {unit: number for number, unit in enumerate(units)}
        self.apart = {number for number, unit in enumerate(units) if not unit.is_leaf}
        self.room = room
        self._arena = arena
        self._interception = interception
        self._watch = watch
        self._residents = Residents(room, self.apart)
        self._units = {group: unit for unit in units for group in unit.groups}
        self._in_buffers: dict[int, Unit] = {}  # storage of a buffer -> the unit in it

    def unit_of(self, group: ShardGroup) -> Unit | None:
        """Returns the unit that gathers a group; None if it stays full."""
        return self._units.get(group)

    def unit_around(self, tensor: Tensor) -> Unit | None:
        """Returns the unit in whose buffer a tensor is, if it is in any."""
        return self._in_buffers.get(storage_key(tensor.untyped_storage()))

    def touch(self, numbers: Sequence[int]) -> None:
        """Keeps units from being evicted next, as they are about to be used."""
        for number in numbers:
            self._residents.touch(number)

    def gather(self, number: int, diverges: bool | None = None) -> Gather:
        """Starts the all-gather of a unit, and evicts the least recently used one if there is no room. Collective."""
        unit = self.units[number]
        evicted = self._residents.admit(number)
        if evicted is not None and not self.units[evicted].must_stay:
            self._release(self.units[evicted])
        if unit.is_gathered:  # it was pinned when it was evicted
            return unit.pass_by(diverges)
        gather = unit.gather(self._arena, diverges)
        assert unit.buffer is not None
        self._in_buffers[unit.buffer.storage] = unit
        return gather

    def pin(self, unit: Unit) -> None:
        """Keeps a gathered unit gathered until `unpin`, and shows its values in its parameters."""
        unit.pins += 1
        if unit.pins == 1:
            self.show(unit)

    def unpin(self, unit: Unit) -> None:
        """Undoes one `pin`. The last one keeps in-place edits made meanwhile (`clamp_`, `max_norm`)."""
        unit.pins -= 1
        self._end_use(unit, keeps_edits=True)

    def hold(self, unit: Unit) -> None:
        """Keeps a gathered unit gathered until `let_go`. Calls that read its values are intercepted as before, so that
        edits are noticed where ranks that do not hold it notice them."""
        if not unit.pins:
            self.show(unit)
        unit.is_held = True

    def let_go(self, unit: Unit, *, keeps_edits: bool = True) -> None:
        """Undoes `hold`. If edits made meanwhile are not kept, the next use gathers the unit again."""
        unit.is_held = False
        self._end_use(unit, keeps_edits=keeps_edits)

    def _end_use(self, unit: Unit, *, keeps_edits: bool) -> None:
        if unit.pins:
            return
        for group in unit.groups:
            if group.kind.upcasts:
                continue
            if keeps_edits and not unit.is_held:
                with torch.no_grad(), no_interception():
                    self._watch.keep_used(group, partial(self.part_from_old, unit))
            self._interception.hide(group)
        if unit.is_held:
            return
        if not keeps_edits:
            self.discard(self.numbers[unit])
        elif self.numbers[unit] not in self._residents:
            self._release(unit)

    def part_from_old(self, unit: Unit) -> None:
        """Moves a gathered unit if users have assigned other tensors to `p.data` and hold views of old values, before
        these are overwritten: ``old = p.data; p.data = t`` leaves `old` as it is, for a later ``p.data = old``."""
        groups = (group for group in unit.groups if not group.kind.upcasts and group.full_param is not None)
        assigned = sum(len(group.edits.assigned) for group in groups)
        if assigned and unit.is_shared_beside(assigned):
            assert unit.buffer is not None
            del self._in_buffers[unit.buffer.storage]
            unit.move(self._arena)
            self._in_buffers[unit.buffer.storage] = unit

    def show(self, unit: Unit) -> None:
        """Shows a unit's values in its parameters until it is unpinned or released. Parameters that are read in another
        dtype than they rest in are not shown."""
        unit.wait()
        for group in unit.groups:
            if not group.kind.upcasts:
                self._interception.show(group)
                if not unit.is_held:  # edits made since are kept at the next boundary
                    group.edits.note_versions()

    def discard(self, number: int) -> None:
        """Releases a unit whose gathered values are not valid, unless it is pinned."""
        self._residents.remove(number)
        unit = self.units[number]
        if unit.is_gathered and not unit.must_stay:
            self._release(unit)

    def discard_all(self, but: int | None = None) -> None:
        """Releases all units that are not pinned, except the one of number `but`."""
        for number in self._residents:
            if number != but:
                self.discard(number)

    def _release(self, unit: Unit) -> None:
        for group in unit.groups:
            self._interception.hide(group)
        assert unit.buffer is not None
        del self._in_buffers[unit.buffer.storage]
        unit.release(self._arena)
