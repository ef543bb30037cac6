"""Which units are gathered now, and which of their values are shown, lent and edited."""

from collections.abc import Sequence
from typing import final

import torch

from lightning_zero.run.plan import Residents
from lightning_zero.shards.arena import Arena
from lightning_zero.shards.slot import no_interception
from lightning_zero.shards.unit import Unit
from lightning_zero.views.parameter import Interception
from lightning_zero.views.saved import SavedParameters
from lightning_zero.wire.comm import Gather


@final
class UnitCache:
    """Units in the arena: there is room for `room` of them, those that lie around others not counted. What was used
    last stays until its room is needed."""

    def __init__(
        self, units: Sequence[Unit], arena: Arena, room: int, interception: Interception, saved: SavedParameters
    ) -> None:
        self.units = units
        self.numbers = {unit: number for number, unit in enumerate(units)}
        self.apart = {number for number, unit in enumerate(units) if not unit.is_leaf}
        self.room = room
        self._arena = arena
        self._interception = interception
        self._saved = saved
        self._residents = Residents(room, self.apart)

    def touch(self, numbers: Sequence[int]) -> None:
        """They are about to be used, and must not go."""
        for number in numbers:
            self._residents.touch(number)

    def gather(self, number: int, diverges: bool | None = None) -> Gather:
        """Starts to bring a unit; the least recently used goes if there is no room. A collective."""
        unit = self.units[number]
        goes = self._residents.admit(number)
        if goes is not None and not self.units[goes].pins:
            self._release(self.units[goes])
        if unit.is_gathered:  # somebody has held on to it
            return unit.pass_by(diverges)
        gather = unit.gather(self._arena, diverges)
        self._saved.note_gathered(unit)
        return gather

    def pin(self, unit: Unit) -> None:
        """Its values are here, which the caller has seen to, and stay until `unpin`; its parameters show them."""
        unit.pins += 1
        if unit.pins == 1:
            self.show(unit)

    def unpin(self, unit: Unit, *, keeps_edits: bool = True) -> None:
        """The reverse; takes over what has been done to the parameters since (`clamp_`, `max_norm`). Without
        `keeps_edits` the values are gathered anew when they are used next."""
        unit.pins -= 1
        if unit.pins:
            return
        for group in unit.groups:
            if group.upcasts:
                continue
            if keeps_edits:
                with torch.no_grad(), no_interception():
                    group.keep_edits()
            self._interception.hide(group)
        if not keeps_edits:
            self.discard(self.numbers[unit])
        elif self.numbers[unit] not in self._residents:
            self._release(unit)

    def show(self, unit: Unit) -> None:
        """Its parameters show their values until it is released, or unpinned; but for those of which readers see
        another dtype."""
        unit.wait()
        for group in unit.groups:
            if not group.upcasts:
                self._interception.show(group)
                group.note_versions()

    def discard(self, number: int) -> None:
        """What was gathered is not valid."""
        self._residents.remove(number)
        unit = self.units[number]
        if unit.is_gathered and not unit.pins:
            self._release(unit)

    def discard_all(self, but: int | None = None) -> None:
        """Nothing stays gathered past a boundary but what is pinned."""
        for number in self._residents:
            if number != but:
                self.discard(number)

    def _release(self, unit: Unit) -> None:
        for group in unit.groups:
            self._interception.hide(group)
        self._saved.note_released(unit)
        unit.release(self._arena)
