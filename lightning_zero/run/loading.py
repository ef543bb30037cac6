"""`Loading`: parameters that take their values from files, each rank its part, when the values are wanted."""

from functools import partial
from typing import final

import torch

from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.slot import Slot, no_interception
from lightning_zero.views.lazy import Stored


@final
class Loading:
    """What is noted is read at the end of `States.loading`, or when the values of a group are wanted before: to its
    group it is a postponed step."""

    def __init__(self) -> None:
        self._noted: dict[ShardGroup, dict[Slot, Stored]] = {}
        self._error: Exception | None = None  # why one could not be read

    def __bool__(self) -> bool:
        """Whether parameters are still to be read from files."""
        return bool(self._noted)

    def __contains__(self, group: ShardGroup) -> bool:
        return group in self._noted

    def note(self, slot: Slot, source: Stored) -> None:
        """Notes the file that the values of a parameter are in. Its group must have caught up when the first is."""
        if slot.group not in self._noted:
            self._noted[slot.group] = {}
            slot.group.postpone(partial(self._read, slot.group))
        self._noted[slot.group][slot] = source

    def read_all(self) -> None:
        """Reads this rank's pieces of all that is noted."""
        for group in [*self._noted]:
            self._read(group)

    def _read(self, group: ShardGroup) -> None:
        """Reads this rank's pieces of what is noted for a group. Where it cannot, it notes why: other ranks may wait
        for this one, and hear of it by `take_error`."""
        if group not in self._noted:
            return  # a postponed step that `read_all` has taken
        noted, master = self._noted.pop(group), group.master
        with torch.no_grad(), no_interception():
            for slot, source in noted.items():
                extent = slot.local.box.extent(source.name, slot.piece.start, slot.piece.stop)
                try:
                    with master.edit(slot.piece.in_shard) as piece:
                        source.read(extent, piece)
                except Exception as error:
                    self._error = error
            group.take_masters(noted)

    def take_error(self) -> Exception | None:
        """Returns why a parameter could not be read since the last call; None if all could."""
        error, self._error = self._error, None
        return error
