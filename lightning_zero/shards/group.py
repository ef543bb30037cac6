"""`ShardGroup`: parameters of one kind as one flat, evenly divided array; a parameter in it is a `Slot`.

Tensors of a group (N ranks, S = shard_numel; *owned* is S where the optimizer is partitioned, else N * S):

    full_param    (N * S,)   resting dtype; the module's parameters are views of it. At stage 3 it is there only while
                             the unit is gathered, in a buffer of the arena
    owned_param   (owned,)   resting dtype; a view of full_param where that is always there, else an array of its own,
                             in the tier that parameters are offloaded to
    master        (owned,)   declared dtype, what the optimizer steps, in the tier that its state is offloaded to;
                             owned_param itself where dtype and tier agree

On one rank shard and full array are the same storage.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.shards.early import take_over
from lightning_zero.shards.layout import Layout, Slice
from lightning_zero.shards.local import local_of
from lightning_zero.shards.setting import Kind, Setting
from lightning_zero.shards.slot import Slot, forget_slot, no_interception, point_at_nothing, slot_of
from lightning_zero.tiers.array import ALL, Array, InMemory, zeros
from lightning_zero.tiers.ledger import Category, Place, return_freed_memory
from lightning_zero.wire.comm import Gather

MUCH = 4 * 2**20  # bytes of a parameter, which are freed
ALIGNMENT_BYTES = 64  # a cache line; what torch's own allocator gives each tensor on the host


class _Postponed(NamedTuple):
    step: Callable[[], None]
    needs_all: bool  # ranks


@dataclass
class Rest:
    """Where a group's values are between uses, whether or not steps of them are still to be taken."""

    owned_param: Array
    master: Array


@final
class ShardGroup:
    """The values of some parameters, taken over: gathered, published, edited. Gradients live in `gradient`."""

    def __init__(
        self, name: str, parameters: dict[str, Parameter], kind: Kind, setting: Setting, *, stays_full: bool
    ) -> None:
        self.name = name  # the same on all ranks: collectives are matched by it
        self.kind = kind
        self.setting = setting
        self.places = setting.places
        if not kind.is_offloaded:
            here = setting.places.gathered
            self.places = replace(setting.places, gradient=here, optimizer=here, state_dtype=None)
        self.comm = setting.mesh.shard
        self.replicate = setting.mesh.replicate
        self.stays_full = stays_full  # full_param is always there; otherwise a unit brings it when it is used
        self.is_cut = setting.partition.optimizer and self.comm.size > 1  # ranks step parts of parameters
        self.upcasts = kind.is_cast and setting.as_declared  # readers see the declared dtype
        self.is_lost = False  # a rank failed: the values are spread over ranks that no longer answer
        self._shown_versions: list[int] | None = None  # of the parameters, while they are shown plain
        self.layout = Layout.pack(
            [(name, tuple(local_of(parameter).shape)) for name, parameter in parameters.items()],
            ranks=self.comm.size,
            bucket_numel=setting.bucket_bytes // kind.declared.itemsize,
            # Every chunk is divided once more between replicas.
            alignment=math.lcm(ALIGNMENT_BYTES // kind.resting.itemsize, self.replicate.size, setting.block),
            in_one=stays_full,
        )
        self.slots = [Slot(self, index, parameter) for index, parameter in enumerate(parameters.values())]
        self.full_param: Tensor | None = None
        self._postponed: list[_Postponed] = []  # steps of it
        self.is_behind = False  # what is there in full is older than the latest step
        self._arriving: list[Gather] = []  # what other ranks have made of their parts
        self.rest = self._take_over()

    # -- steps that are taken when the values are wanted

    @property
    def owned_param(self) -> Array:
        self.catch_up()
        return self.rest.owned_param

    @property
    def master(self) -> Array:
        self.catch_up()
        return self.rest.master

    def postpone(self, step: Callable[[], None], *, needs_all: bool = False) -> None:
        """`step` is to be taken before anybody looks at the values; by all ranks together if it `needs_all`."""
        self._postponed.append(_Postponed(step, needs_all))
        self.leave_behind()

    @property
    def has_postponed(self) -> bool:
        """Whether steps are still to be taken on this rank."""
        return bool(self._postponed)

    @property
    def needs_all(self) -> bool:
        """Whether `catch_up` is a collective now."""
        return any(postponed.needs_all for postponed in self._postponed)

    def catch_up(self) -> None:
        """Takes the steps that have been postponed, on this rank."""
        if self._postponed:
            steps, self._postponed = self._postponed, []
            for postponed in steps:
                postponed.step()

    def catch_up_alone(self) -> None:
        """Takes those of them that this rank takes alone: its part of the optimizer's state is there after them."""
        steps, self._postponed = self._postponed, [one for one in self._postponed if one.needs_all]
        for postponed in steps:
            if not postponed.needs_all:
                postponed.step()

    def begin_training(self) -> None:
        """From here on optimizers step the values, where they rest now."""
        self.kind = replace(self.kind, trainable=True)

    def _take_over(self) -> Rest:
        places, kind = self.places, self.kind
        full: Tensor | None = None
        if self.stays_full:
            full = self._allocate(self.layout.numel)
            owned: Array = InMemory(full[self.own_range], places.gathered)
        else:
            owned = self._make_array(Category.PARAMETER, kind.resting, places.parameter)
        rest = Rest(owned, owned)
        place = places.optimizer if kind.trainable else owned.place
        if kind.is_cast or place != owned.place:
            rest.master = self._make_array(Category.MASTER, kind.declared, place)
        for slot in self.slots:
            self._take_values(slot, rest, full)
        if full is not None:
            self.hold(full)
        return rest

    @staticmethod
    def _take_values(slot: Slot, rest: Rest, full: Tensor | None) -> None:
        take_over(slot.parameter)
        values = slot.local.values.detach().reshape(-1)
        if full is not None:
            slot.view(full).view(-1).copy_(values)
        for array in {id(array): array for array in (rest.owned_param, rest.master)}.values():
            array.write(slot.piece.in_shard, values[slot.piece.start : slot.piece.stop])
        if full is None:
            nbytes = values.nbytes
            del values
            point_at_nothing(slot)  # at once: no two parameters are whole at the same time, not even here
            if nbytes > MUCH:
                return_freed_memory()

    def _allocate(self, numel: int) -> Tensor:
        """For parameters that are there in full; zeros, since padding travels too."""
        return self.setting.ledger.allocate(Category.PARAMETER, numel, self.kind.resting, self.places.gathered).zero_()

    def _make_array(self, category: Category, dtype: torch.dtype, place: Place) -> Array:
        numel = self.layout.shard_numel if self.is_cut else self.layout.numel
        return zeros(category, numel, dtype, place, self.setting.ledger)

    @property
    def own_range(self) -> slice:
        """What this rank steps of a full array that is always there."""
        if not self.is_cut:
            return slice(0, self.layout.numel)
        start = self.comm.rank * self.layout.shard_numel
        return slice(start, start + self.layout.shard_numel)

    @property
    def is_plain(self) -> bool:
        """Whether the module's parameters are always there, as the user declared them."""
        return self.stays_full and not self.upcasts

    @property
    def dtype(self) -> torch.dtype:
        """Of the values that readers see."""
        return self.kind.declared if self.upcasts else self.kind.resting

    # -- full arrays

    def hold(self, full: Tensor) -> None:
        """`full` is full_param from here on, and the module's parameters are views of it; the Parameter objects stay
        the user's own."""
        self.full_param = full
        with no_interception(), torch.inference_mode(False):
            for slot in self.slots:
                slot.local.values = slot.view(full)

    def let_go(self) -> None:
        """The reverse of `hold`: full_param belongs to somebody else from here on."""
        self.full_param = None
        for slot in self.slots:
            point_at_nothing(slot)

    def matrix(self, full: Tensor, of: Slice) -> Tensor:
        """A slice ``(N, width)`` of a full array."""
        return full[of.start : of.start + self.layout.ranks * of.width].view(self.layout.ranks, of.width)

    def all_gather(self, full: Tensor | None, shard: Array, purpose: str, diverges: bool | None = None) -> list[Gather]:
        """Fills a full array from all ranks' shards, a collective for each slice; the first one tells `diverges`.
        Without a full array nothing is kept, and one slice at a time is here in passing."""
        begun = []
        device, is_there = self.places.gathered.device, shard.place == self.places.gathered
        for number, each in enumerate(self.layout.slices):
            shape = (self.layout.ranks, each.width)
            rows = torch.empty(shape, dtype=shard.dtype, device=device) if full is None else self.matrix(full, each)
            own = shard.read(each.in_shard)
            if not is_there:
                own = rows[self.comm.rank].copy_(own, non_blocking=True)
            told, name = None if number else diverges, f"{purpose} {self.name}[{number}]"
            begun.append(self.comm.all_gather(rows, own, name, diverges=told))
            if full is None:
                begun[-1].wait()
        return begun

    def pass_by(self, shard: Array, purpose: str, diverges: bool | None = None) -> list[Gather]:
        """Takes part in `all_gather` without keeping anything."""
        return self.all_gather(None, shard, purpose, diverges)

    # -- after a step, or an edit

    def renew(self) -> None:
        """New storage for values that are about to change by an edit of their declared copy: graphs keep the old ones,
        as they keep the copies that autocast makes. (Where parameters rest as declared, the edit was to themselves.)"""
        if not self.kind.is_cast:
            return
        if self.stays_full:
            full = self._allocate(self.layout.numel).copy_(self.full_param)  # type: ignore[arg-type]
            self.rest.owned_param = InMemory(full[self.own_range], self.places.gathered)
            self.hold(full)
        else:
            old = self.owned_param
            self.rest.owned_param = self._make_array(Category.PARAMETER, self.kind.resting, self.places.parameter)
            self.owned_param.write(ALL, old.read())

    def take_masters(self, slots: Iterable[Slot] | None = None) -> None:
        """`owned_param` has the values of the master: all, or what lies from the first to the last of `slots`."""
        owned_param, master = self.rest.owned_param, self.rest.master  # a step of them may be under way
        if master is owned_param:
            return
        pieces = [slot.piece.in_shard for slot in (self.slots if slots is None else slots) if slot.piece.numel]
        start, stop = min((p.start for p in pieces), default=0), max((p.stop for p in pieces), default=0)
        for each in [found.in_shard for found in self.layout.slices] if self.is_cut else [slice(0, self.layout.numel)]:
            part = slice(max(start, each.start), min(stop, each.stop))
            if part.start < part.stop:
                owned_param.write(part, master.read(part), stays=True)

    def begin_publish(self) -> None:
        """Sends what ranks own to where all read it, if they do not have it already."""
        if self.stays_full and not self.is_arriving:
            self.catch_up()
            if self.is_cut:
                assert self.full_param is not None
                self._arriving = self.all_gather(self.full_param, self.owned_param, "publish")

    def end_publish(self) -> None:
        """What ranks own is where all read it."""
        while self._arriving:
            self._arriving.pop(0).wait()
        self.is_behind = False

    @property
    def is_arriving(self) -> bool:
        """Whether it is on its way."""
        return bool(self._arriving)

    def leave_behind(self) -> None:
        """The latest values are there when somebody wants them."""
        self.is_behind = self.stays_full
        self._shown_versions = None  # nobody can edit what is not shown

    def note_versions(self) -> None:
        """The parameters show full_param from here on, plain."""
        self._shown_versions = [slot.parameter._version for slot in self.slots]

    def keep_edits(self) -> None:
        """Takes over what has been done to the parameters since they were shown, as far as torch can tell."""
        versions, self._shown_versions = self._shown_versions, None
        if versions is None or self.full_param is None:
            return
        replaced = self.adopt_assigned()
        if replaced or versions != [slot.parameter._version for slot in self.slots]:
            self.take_edits(self.full_param)

    def adopt_assigned(self) -> bool:
        """Takes over tensors that the user has put into `p.data` in place of our views; whether there were any."""
        assert self.full_param is not None
        start, size, found = self.full_param.data_ptr(), self.full_param.itemsize, False
        for slot in self.slots:
            if slot.local.values.data_ptr() != start + slot.offset * size and slot.numel:
                self.check_assigned(slot, slot.parameter, self.full_param.dtype)
                view = slot.view(self.full_param)
                view.copy_(slot.local.values.detach().view_as(view))
                slot.local.values = view
                found = True
        return found

    def check_assigned(self, slot: Slot, values: Tensor, dtype: torch.dtype) -> None:
        """Raises RuntimeError for `p.data` in another dtype or on another device, as `.half()` and `.to()` leave it."""
        device = self.setting.places.gathered.device
        if values.dtype != dtype or values.device.type != device.type:
            raise RuntimeError(
                f"Parameter {slot.name!r} was {dtype} on {device.type!r} at set-up and would now be {values.dtype} on "
                f"{values.device.type!r}. Call .to(), .half() and their like before fit, or choose "
                "Trainer(precision=...)."
            )

    def take_edits(self, full: Tensor) -> None:
        """Takes over what users have edited in a full array that was lent to them, of declared or of resting dtype."""
        declared = full.dtype == self.kind.declared
        if declared and self.kind.is_cast:
            if not self._differs(full):
                return
            self.renew()
            if self.full_param is not None:
                self.full_param.copy_(full)
        for slot in self.slots:
            within, own = slot.piece.in_shard, slot.own_part(full)
            if declared:
                self.master.write(within, own)
            else:  # only what differs: a two-byte weight that nobody touched must keep all bits of its master
                with self.master.edit(within) as master:
                    edited = (own != master.to(own)).to(master.device)
                    master.copy_(torch.where(edited, own.to(master), master))
            self.owned_param.write(within, own)

    def _differs(self, full: Tensor) -> bool:
        """Whether a full array of declared dtype has other values than this group."""
        if self.full_param is not None and not torch.equal(full.to(self.kind.resting), self.full_param):
            return True
        return any(
            not torch.equal(slot.own_part(full).to(self.master.place.device), self.master.read(slot.piece.in_shard))
            for slot in self.slots
        )

    def free(self) -> None:
        """Lets go of all values for good; the layout stays, for what was made by it (optimizer state)."""
        for slot in self.slots:
            forget_slot(slot)
        self.full_param = None
        nothing = InMemory(torch.empty(0, dtype=self.kind.resting), self.places.gathered)
        self.rest = Rest(nothing, nothing)

    @property
    def is_freed(self) -> bool:
        return bool(self.slots) and slot_of(self.slots[0].parameter) is not self.slots[0]


def publish(groups: Iterable[ShardGroup]) -> None:
    """What ranks own is where forward reads it. A collective."""
    groups = list(groups)
    with torch.no_grad():
        for group in groups:
            group.begin_publish()
        for group in groups:
            group.end_publish()
