"""`ShardGroup`: parameters of one kind as one flat, evenly divided array; a parameter in it is a `Slot`.

Tensors of a group (N ranks, S = shard_numel; *owned* is S where the optimizer is partitioned, else N * S):

    full_param    (N * S,)   resting dtype; the module's parameters are views of it. At stage 3 it exists only while
                             the unit is gathered, in a buffer of the arena
    owned_param   (owned,)   resting dtype; a view of full_param where that always exists, else an array of its own,
                             in the tier that parameters are offloaded to
    master        (owned,)   declared dtype, what the optimizer steps, in the tier that its state is offloaded to;
                             owned_param itself where dtype and tier agree

On one rank shard and full array share their storage.

Reading any of them steps and waits for nothing. Where a step of the group is postponed, they hold the values before it;
code that needs those after it calls `catch_up` first.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.shards.early import take_over
from lightning_zero.shards.edits import Edits
from lightning_zero.shards.layout import Layout, Slice, overlap
from lightning_zero.shards.local import local_of
from lightning_zero.shards.setting import Kind, Setting
from lightning_zero.shards.slot import Slot, forget_slot, no_interception, point_at_nothing, slot_of
from lightning_zero.tiers.alignment import ALIGNMENT_BYTES
from lightning_zero.tiers.array import Array, InMemory, move, zeros
from lightning_zero.tiers.ledger import Category, Place, return_freed_memory
from lightning_zero.wire.comm import Gather

MUCH = 4 * 2**20  # bytes; a freed parameter that is larger is given back to the system at once


class _Postponed(NamedTuple):
    step: Callable[[], None]
    needs_all: bool  # all ranks take it together


@final
class Publish:
    """Brings the values that ranks have stepped into full_param of a group that stays full. A unit needs no such
    all-gather: it gathers the latest values for each use."""

    def __init__(self, group: "ShardGroup") -> None:
        self._group = group
        self._arriving: list[Gather] = []
        self.is_due = False  # full_param is older than the latest step

    def begin(self) -> None:
        """Starts the all-gather, after the postponed steps."""
        group = self._group
        if group.stays_full and not self._arriving:
            group.catch_up()
            if group.is_cut:
                assert group.full_param is not None
                self._arriving = group.all_gather(group.full_param, group.owned_param, "publish")

    def end(self) -> None:
        """Waits until full_param has the stepped values of all ranks."""
        while self._arriving:
            self._arriving.pop(0).wait()
        self.is_due = False

    @property
    def is_arriving(self) -> bool:
        """Whether the all-gather is under way."""
        return bool(self._arriving)

    def put_off(self) -> None:
        """Notes that full_param lacks the latest step until the values are needed, and is not shown meanwhile."""
        self.is_due = self._group.stays_full
        self._group.edits.note_hidden()


@final
class ShardGroup:
    """The values of some parameters: taken over, gathered, stepped. Gradients are in a `GroupGradient`."""

    def __init__(
        self, name: str, parameters: dict[str, Parameter], kind: Kind, setting: Setting, *, stays_full: bool
    ) -> None:
        self.name = name  # the same on all ranks: collectives are matched by it
        self.kind = kind
        self.setting = setting
        self.places = setting.places if kind.is_offloaded else setting.places.without_offload
        self.comm = setting.mesh.shard
        self.stays_full = stays_full  # full_param always exists; otherwise a unit gathers it for each use
        self.is_cut = setting.partition.optimizer and self.comm.size > 1  # ranks step parts of parameters
        self.layout = Layout.pack(
            [(name, tuple(local_of(parameter).shape)) for name, parameter in parameters.items()],
            ranks=self.comm.size,
            bucket_numel=setting.bucket_bytes // kind.declared.itemsize,
            # Replicas divide every chunk once more.
            alignment=math.lcm(ALIGNMENT_BYTES // kind.resting.itemsize, setting.mesh.replicate.size, setting.block),
            in_one=stays_full,
        )
        self.slots = [Slot(self, index, parameter) for index, parameter in enumerate(parameters.values())]
        self.full_param: Tensor | None = None
        self.publish = Publish(self)  # of what is stepped, into full_param
        self.edits = Edits(self)  # that users make
        self._postponed: list[_Postponed] = []
        self.owned_param, self.master = self._take_over()

    @property
    def is_plain(self) -> bool:
        """Whether the parameters always hold their values, in the dtype in which users read them."""
        return self.stays_full and not self.kind.upcasts

    @property
    def is_apart(self) -> bool:
        """Whether parameters always hold their values, and masters are elsewhere: edits must be noticed to be kept."""
        return self.stays_full and self.master is not self.owned_param and not self.kind.upcasts

    @property
    def own_range(self) -> slice:
        """What this rank steps, of a full_param that stays."""
        start, numel = self.comm.rank * self.layout.shard_numel, self.layout.shard_numel
        return slice(start, start + numel) if self.is_cut else slice(0, self.layout.numel)

    def begin_training(self, *, is_offloaded: bool) -> None:
        """Notes that optimizers step the values from now on, and takes masters to where that is done."""
        self.kind = replace(self.kind, trainable=True, is_offloaded=is_offloaded)
        self.places = self.setting.places if is_offloaded else self.setting.places.without_offload
        frozen, place = self.master, self.places.optimizer
        if frozen.place != place:
            self.master = self._make_array(Category.MASTER, self.kind.declared, place)
            self._move(slice(0, frozen.numel), frozen, self.master)

    def begin_having_gradients(self) -> None:
        """Notes that parameters, which were idle, have gradients from now on, on any rank."""
        self.kind = replace(self.kind, is_idle=False)

    # -- arrays

    def _take_over(self) -> tuple[Array, Array]:
        """Allocates the arrays, and moves the values of the parameters into them. Returns owned_param and master."""
        places, kind = self.places, self.kind
        full: Tensor | None = None
        if self.stays_full:
            full = self._allocate_full()
            owned: Array = InMemory(full[self.own_range], places.gathered)
        else:
            owned = self._make_array(Category.PARAMETER, kind.resting, places.parameter)
        master, place = owned, places.optimizer if kind.trainable else owned.place
        if kind.is_cast or place != owned.place:
            master = self._make_array(Category.MASTER, kind.declared, place)
        for slot in self.slots:
            take_over(slot.parameter)
            values = slot.local.values.detach().reshape(-1)
            for array in dict.fromkeys((owned, master)):
                array.write(slot.piece.in_shard, values[slot.piece.start : slot.piece.stop])
            if full is not None:
                slot.view(full).view(-1).copy_(values)
                continue
            nbytes = values.nbytes
            del values
            point_at_nothing([slot])  # frees it before the next one is taken over: a rank never holds two of them whole
            if nbytes > MUCH:
                return_freed_memory()
        if full is not None:
            self.set_full(full)
        return owned, master

    def _allocate_full(self) -> Tensor:
        """Allocates full_param for a group that stays full, as zeros: padding travels in collectives too."""
        place, ledger = self.places.gathered, self.setting.ledger
        return ledger.allocate(Category.PARAMETER, self.layout.numel, self.kind.resting, place).zero_()

    def _make_array(self, category: Category, dtype: torch.dtype, place: Place) -> Array:
        numel = self.layout.shard_numel if self.is_cut else self.layout.numel
        return zeros(category, numel, dtype, place, self.setting.ledger)

    def take_masters(self, slots: Iterable[Slot] | None = None) -> None:
        """Copies the master to owned_param: all of it, or everything from the first to the last of `slots`."""
        if self.master is self.owned_param:
            return
        pieces = [slot.piece.in_shard for slot in (self.slots if slots is None else slots) if slot.piece.numel]
        stepped = slice(min((p.start for p in pieces), default=0), max((p.stop for p in pieces), default=0))
        self._move(stepped, self.master, self.owned_param)

    def _move(self, part: slice, source: Array, target: Array) -> None:
        """Copies a part of what this rank owns from one array to the other, slice by slice."""
        for each in [found.in_shard for found in self.layout.slices] if self.is_cut else [part]:
            both = overlap(part, each)
            if both.start < both.stop:
                move(both, source, target)

    def free(self) -> None:
        """Frees all values permanently. The layout stays: optimizer state is still cut by it."""
        for slot in self.slots:
            forget_slot(slot)
        self.full_param = None
        place = self.places.gathered
        nothing = InMemory(torch.empty(0, dtype=self.kind.resting, device=place.device), place)
        self.owned_param = self.master = nothing

    @property
    def is_freed(self) -> bool:
        """Whether the parameters no longer belong to this group."""
        return slot_of(self.slots[0].parameter) is not self.slots[0]

    # -- full arrays

    def set_full(self, full: Tensor) -> None:
        """Makes `full` full_param, and the parameters views of it. The Parameter objects stay the user's own."""
        self.full_param = full
        with no_interception(), torch.inference_mode(False):
            for slot in self.slots:
                slot.local.values = slot.view(full)

    def clear_full(self) -> None:
        """Undoes `set_full`: the parameters have no values any more, and the memory may be used again."""
        self.full_param = None
        point_at_nothing(self.slots)

    def renew_full(self) -> None:
        """Puts a copy in place of a full_param that stays, to be edited. Graphs that saved the old one keep it."""
        assert self.full_param is not None
        is_master = self.master is self.owned_param
        full = self._allocate_full().copy_(self.full_param)
        self.owned_param = InMemory(full[self.own_range], self.places.gathered)
        self.set_full(full)
        if is_master:
            self.master = self.owned_param

    def matrix(self, full: Tensor, of: Slice) -> Tensor:
        """Returns a slice of a full array, as a view of shape ``(N, width)``."""
        return full[of.start : of.start + self.layout.ranks * of.width].view(self.layout.ranks, of.width)

    def all_gather(self, full: Tensor | None, shard: Array, purpose: str, diverges: bool | None = None) -> list[Gather]:
        """Starts to fill a full array from all ranks' shards, by one collective for each slice; the first one carries
        `diverges`. Without a full array it receives one slice at a time, and drops it."""
        begun = []
        device, is_there = self.places.gathered.device, shard.place == self.places.gathered
        for number, each in enumerate(self.layout.slices):
            shape = (self.layout.ranks, each.width)
            rows = torch.empty(shape, dtype=shard.dtype, device=device) if full is None else self.matrix(full, each)
            own = shard.read(each.in_shard) if is_there else shard.copy_to(each.in_shard, rows[self.comm.rank])
            told, name = None if number else diverges, f"{purpose} {self.name}[{number}]"
            begun.append(self.comm.all_gather(rows, own, name, diverges=told))
            if full is None:
                begun[-1].wait()
        return begun

    def pass_by(self, shard: Array, purpose: str, diverges: bool | None = None) -> list[Gather]:
        """Takes part in the other ranks' `all_gather`, and keeps nothing."""
        return self.all_gather(None, shard, purpose, diverges)

    def sum_over_replicas(self, total: Tensor, purpose: str) -> None:
        """Sums a part of a gradient over the ranks that hold the same shard, in place: 1/N of a gradient crosses
        between shard groups."""
        replicate, place = self.setting.mesh.replicate, self.places.gathered
        rows = total.view(replicate.size, -1)
        shape = (1 + replicate.scratch_rows, rows.shape[1])
        beside = self.setting.ledger.allocate(Category.BUCKET, math.prod(shape), rows.dtype, place).view(shape)
        replicate.reduce_scatter(beside[0], rows, beside[1:], purpose).wait()
        replicate.all_gather(rows, beside[0], purpose).wait()

    # -- steps that are postponed until the values are wanted

    def postpone(self, step: Callable[[], None], *, needs_all: bool = False) -> None:
        """Has `step` taken before the values are used next; by all ranks together if it `needs_all`."""
        self._postponed.append(_Postponed(step, needs_all))
        self.publish.put_off()

    @property
    def has_postponed(self) -> bool:
        """Whether steps are still due on this rank."""
        return bool(self._postponed)

    @property
    def needs_all(self) -> bool:
        """Whether `catch_up` is a collective now."""
        return any(postponed.needs_all for postponed in self._postponed)

    def catch_up(self) -> None:
        """Takes the postponed steps. Collective if one of them `needs_all`."""
        steps, self._postponed = self._postponed, []
        for postponed in steps:
            postponed.step()

    def catch_up_alone(self) -> None:
        """Takes the postponed steps that this rank takes alone. Its part of the optimizer state is up to date then."""
        steps, self._postponed = self._postponed, [one for one in self._postponed if one.needs_all]
        for postponed in steps:
            if not postponed.needs_all:
                postponed.step()
