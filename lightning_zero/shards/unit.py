"""`Unit`: modules whose parameters are gathered together, into one buffer of the arena."""

import bisect
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import final

import torch
from torch import Tensor
from torch.nn import Module

from lightning_zero.device import Event, wait_for
from lightning_zero.shards.arena import Arena, Buffer
from lightning_zero.shards.group import ShardGroup
from lightning_zero.tiers.alignment import ALIGNMENT_BYTES, round_up
from lightning_zero.wire.comm import Gather


@final
class Unit:
    """Modules, and the groups (of all kinds) of the parameters that they use. All groups are gathered, or none is."""

    def __init__(
        self,
        name: str,
        modules: Sequence[Module],
        groups: list[ShardGroup],
        *,
        traced: Collection[Module],
        is_leaf: bool,
    ) -> None:
        self.name = name
        self.modules = modules
        self.groups = groups
        self.traced = traced  # the modules whose calls lie inside a compiled region
        self.is_leaf = is_leaf  # no other unit's modules run while its own do
        self.pins = 0  # forwards and calls that need the values to stay
        self.is_held = False  # until the next boundary, as user code or a graph refers to the values
        self._offsets = []  # of each group in a buffer, in bytes
        self.nbytes = 0
        for group in groups:
            self._offsets.append(self.nbytes)
            self.nbytes += round_up(group.layout.numel * group.kind.resting.itemsize, ALIGNMENT_BYTES)
        self.buffer: Buffer | None = None
        self._under_way: list[Gather] = []
        self._copied: Event | None = None  # on the stream that gathers beside the device's work

    @property
    def must_stay(self) -> bool:
        """Whether the values may not be released now."""
        return self.pins > 0 or self.is_held

    @property
    def is_gathered(self) -> bool:
        """Whether the values are in a buffer, or on their way there."""
        return self.buffer is not None

    def gather(self, arena: Arena, diverges: bool | None = None) -> Gather:
        """Starts the all-gathers of the unit, into a buffer. Returns the one that tells whether a rank diverges."""
        assert self.buffer is None, self.name
        self.buffer = arena.take(apart=None if self.is_leaf else self.nbytes)
        places, aside = self.groups[0].setting.places, self.groups[0].setting.aside
        if places.parameter == places.optimizer == places.gathered:
            aside = None
        # Values that come from another tier are copied beside the device's work. That stream first waits for the work
        # that has used the buffer before.
        with nullcontext() if aside is None else aside.after_current():
            for offset, group in zip(self._offsets, self.groups, strict=True):
                full = _full_at(offset, group, self.buffer)
                group.set_full(full)
                told = diverges if group is self.groups[0] else None
                group.catch_up()
                self._under_way += group.all_gather(full, group.owned_param, "gather", told)
            if aside is not None:
                self._copied = aside.record()
        return self._under_way[0]

    def move(self, arena: Arena) -> None:
        """Moves the values into another buffer. Users who hold views of them keep the old ones, whatever is written
        into the new one."""
        self.wait()
        old = self.buffer
        assert old is not None, self.name
        self.buffer = arena.take(apart=None if self.is_leaf else self.nbytes)
        self.buffer.memory[: self.nbytes].copy_(old.memory[: self.nbytes])
        for offset, group in zip(self._offsets, self.groups, strict=True):
            group.edits.move(_full_at(offset, group, self.buffer))
        arena.give_back(old, apart=not self.is_leaf)

    def pass_by(self, diverges: bool | None = None) -> Gather:
        """Takes part in the other ranks' gather of the unit, and keeps no values. Returns what `gather` returns."""
        begun: list[Gather] = []
        for group in self.groups:
            group.catch_up()
            begun += group.pass_by(group.owned_param, "gather", None if begun else diverges)
        return begun[0]

    def group_at(self, offset: int) -> tuple[ShardGroup, int]:
        """Returns the group that a byte of the buffer belongs to, and the byte at which the group starts."""
        at = bisect.bisect_right(self._offsets, offset) - 1
        return self.groups[at], self._offsets[at]

    @property
    def is_shared(self) -> bool:
        """Whether users, or graphs, hold views of the values."""
        return self.is_shared_beside(0)

    def is_shared_beside(self, assigned: int) -> bool:
        """As `is_shared`, where so many parameters show other tensors, which users have assigned to `p.data`."""
        assert self.buffer is not None, self.name
        return self.buffer.is_held_beside(sum(1 + len(group.slots) for group in self.groups) - assigned)

    def wait(self) -> None:
        """Waits until the values are in the buffer."""
        while self._under_way:
            self._under_way.pop(0).wait()
        if self._copied is not None:
            assert self.buffer is not None
            wait_for(self._copied, self.buffer.memory.device)
            self._copied = None

    def release(self, arena: Arena) -> None:
        """Gives the buffer back to the arena. Users who still hold views of the values keep them."""
        self.wait()  # a gather under way still writes into the buffer
        buffer, self.buffer = self.buffer, None
        assert buffer is not None, self.name
        for group in self.groups:
            group.clear_full()
        arena.give_back(buffer, apart=not self.is_leaf)


def _full_at(offset: int, group: ShardGroup, buffer: Buffer) -> Tensor:
    """Returns the memory of a group's full array, ``(N * S,)``, which begins at a byte of a buffer."""
    dtype = group.kind.resting
    with torch.inference_mode(False):
        return buffer.memory[offset : offset + group.layout.numel * dtype.itemsize].view(dtype)
