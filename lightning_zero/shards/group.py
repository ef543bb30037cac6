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
from lightning_zero.shards.layout import Layout, Slice, overlap
from lightning_zero.shards.local import local_of
from lightning_zero.shards.setting import Kind, Setting
from lightning_zero.shards.slot import Slot, forget_slot, no_interception, point_at_nothing, slot_of
from lightning_zero.tiers.alignment import ALIGNMENT_BYTES
from lightning_zero.tiers.array import Array, InMemory, move, zeros
from lightning_zero.tiers.ledger import Category, Place, return_freed_memory
from lightning_zero.torch_private import edits_of
from lightning_zero.wire.comm import Gather

MUCH = 4 * 2**20  # bytes; a freed parameter that is larger is given back to the system at once


class _Postponed(NamedTuple):
    step: Callable[[], None]
    needs_all: bool  # all ranks take it together


@final
class ShardGroup:
    """The values of some parameters: taken over, gathered, published, edited. Gradients are in a `GradientShard`."""

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
        self.stays_full = stays_full  # full_param always exists; otherwise a unit gathers it for each use
        self.is_cut = setting.partition.optimizer and self.comm.size > 1  # ranks step parts of parameters
        self.upcasts = kind.is_cast and setting.as_declared  # users read the declared dtype, not the resting one
        self.dtype = kind.declared if self.upcasts else kind.resting  # in which users read the values
        self.is_plain = stays_full and not self.upcasts  # parameters always hold their values, in the declared dtype
        self.is_lost = False  # a rank failed: the values are spread over ranks that no longer answer
        self._shown: list[tuple[int, int, int]] | None = None  # state of the parameters, while they are shown
        self.layout = Layout.pack(
            [(name, tuple(local_of(parameter).shape)) for name, parameter in parameters.items()],
            ranks=self.comm.size,
            bucket_numel=setting.bucket_bytes // kind.declared.itemsize,
            # Replicas divide every chunk once more.
            alignment=math.lcm(ALIGNMENT_BYTES // kind.resting.itemsize, self.replicate.size, setting.block),
            in_one=stays_full,
        )
        self._owned_numel = self.layout.shard_numel if self.is_cut else self.layout.numel
        start = self.comm.rank * self._owned_numel if self.is_cut else 0
        self.own_range = slice(start, start + self._owned_numel)  # of a full_param that stays: what this rank steps
        self.slots = [Slot(self, index, parameter) for index, parameter in enumerate(parameters.values())]
        self.full_param: Tensor | None = None
        self._postponed: list[_Postponed] = []
        self.is_behind = False  # full_param is older than the latest step
        self._arriving: list[Gather] = []  # begun by `begin_publish`
        self.taken_back = 0  # how often a copy in the declared dtype was lent and may have been edited
        self.owned_param, self.master = self._take_over()

    # -- steps that are postponed until the values are wanted

    def postpone(self, step: Callable[[], None], *, needs_all: bool = False) -> None:
        """Has `step` taken before the values are used next; by all ranks together if it `needs_all`."""
        self._postponed.append(_Postponed(step, needs_all))
        self.leave_behind()

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
        if self._postponed:
            steps, self._postponed = self._postponed, []
            for postponed in steps:
                postponed.step()

    def catch_up_alone(self) -> None:
        """Takes the postponed steps that this rank takes alone. Its part of the optimizer state is up to date then."""
        steps, self._postponed = self._postponed, [one for one in self._postponed if one.needs_all]
        for postponed in steps:
            if not postponed.needs_all:
                postponed.step()

    def begin_training(self) -> None:
        """Notes that optimizers step the values from now on, where they already rest."""
        self.kind = replace(self.kind, trainable=True)

    def begin_having_gradients(self) -> None:
        """Notes that parameters, which were idle, have gradients from now on, on any rank."""
        self.kind = replace(self.kind, is_idle=False)

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
        return zeros(category, self._owned_numel, dtype, place, self.setting.ledger)

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
            own = shard.read(each.in_shard) if is_there else shard.send(each.in_shard, rows[self.comm.rank])
            told, name = None if number else diverges, f"{purpose} {self.name}[{number}]"
            begun.append(self.comm.all_gather(rows, own, name, diverges=told))
            if full is None:
                begun[-1].wait()
        return begun

    def pass_by(self, shard: Array, purpose: str, diverges: bool | None = None) -> list[Gather]:
        """Takes part in the other ranks' `all_gather`, and keeps nothing."""
        return self.all_gather(None, shard, purpose, diverges)

    # -- after a step, or an edit

    def _replace(self, slots: Iterable[Slot], before: Tensor) -> None:
        """Prepares for other values of some slots in place of those in the full array `before`. Graphs that saved the
        old values keep these, as they would keep the tensor that `p.data` was, and the copies that autocast makes."""
        if not self.stays_full:
            for slot in slots:
                slot.replace(slot.view(before))
            return
        assert self.full_param is not None  # which graphs refer to themselves
        self.catch_up()
        is_master = self.master is self.owned_param
        full = self._allocate_full().copy_(self.full_param)
        self.owned_param = InMemory(full[self.own_range], self.places.gathered)
        self.set_full(full)
        if is_master:
            self.master = self.owned_param

    def take_masters(self, slots: Iterable[Slot] | None = None) -> None:
        """Copies the master to owned_param: all of it, or everything from the first to the last of `slots`."""
        if self.master is self.owned_param:
            return
        pieces = [slot.piece.in_shard for slot in (self.slots if slots is None else slots) if slot.piece.numel]
        stepped = slice(min((p.start for p in pieces), default=0), max((p.stop for p in pieces), default=0))
        for each in [found.in_shard for found in self.layout.slices] if self.is_cut else [stepped]:
            part = overlap(stepped, each)
            if part.start < part.stop:
                move(part, self.master, self.owned_param)

    def begin_publish(self) -> None:
        """Starts the all-gather of the stepped values into full_param, in a group that stays full."""
        if self.stays_full and not self.is_arriving:
            self.catch_up()
            if self.is_cut:
                assert self.full_param is not None
                self._arriving = self.all_gather(self.full_param, self.owned_param, "publish")

    def end_publish(self) -> None:
        """Waits until full_param has the stepped values of all ranks."""
        while self._arriving:
            self._arriving.pop(0).wait()
        self.is_behind = False

    @property
    def is_arriving(self) -> bool:
        """Whether the all-gather of stepped values is under way."""
        return bool(self._arriving)

    def leave_behind(self) -> None:
        """Notes that full_param lacks the latest step. It is published when the values are needed."""
        self.is_behind = self.stays_full
        self._shown = None  # users cannot edit what is not shown

    @property
    def is_apart(self) -> bool:
        """Whether parameters always hold their values, and masters are elsewhere: edits must be noticed to be kept."""
        return self.is_plain and self.master is not self.owned_param

    def note_versions(self) -> None:
        """Notes that the parameters show full_param from now on, so that `keep_edits` can tell what users edit."""
        if self.is_apart or not self.is_plain:  # where parameters are their own masters, edits need no keeping
            self._shown = self._states()

    def _states(self) -> list[tuple[int, int, int]]:
        """Returns the versions of the parameters and of what they hold here, which differ in a DTensor, and where."""
        shown = [(slot.parameter, slot.local.values) for slot in self.slots]
        return [(edits_of(parameter), edits_of(values), values.data_ptr()) for parameter, values in shown]

    def keep_edits(self, *, is_edited: bool = False) -> None:
        """Keeps edits that users have made in the parameters since `note_versions`, as versions and `p.data` tell. Pass
        `is_edited` if something else has told of them."""
        is_edited, self._shown = is_edited or self.is_edited, None
        if is_edited:
            assert self.full_param is not None
            self.adopt_assigned()
            self.take_edits(self.full_param)

    @property
    def is_edited(self) -> bool:
        """Whether users have edited the parameters since `note_versions`, as versions and `p.data` tell."""
        return self._shown is not None and self.full_param is not None and self._shown != self._states()

    def _assigned(self) -> list[Slot]:
        """Returns the slots to whose `p.data` the user has assigned another tensor."""
        assert self.full_param is not None
        start, size = self.full_param.data_ptr(), self.full_param.itemsize
        return [s for s in self.slots if s.numel and s.local.values.data_ptr() != start + s.offset * size]

    def adopt_assigned(self) -> bool:
        """Copies tensors that the user has assigned to `p.data` into full_param; returns whether there were any."""
        assert self.full_param is not None
        assigned = {slot: slot.local.values.detach() for slot in self._assigned()}
        for slot in assigned:
            self.check_assigned(slot, slot.parameter, self.full_param.dtype)
        if assigned:
            self._replace(assigned, self.full_param)
        for slot, values in assigned.items():
            view = slot.view(self.full_param)
            view.copy_(values.view_as(view))
            slot.local.values = view
        return bool(assigned)

    def check_assigned(self, slot: Slot, values: Tensor, dtype: torch.dtype) -> None:
        """Raises RuntimeError if `p.data` has another dtype or device than at set-up, as after `.half()` or `.to()`."""
        device = self.setting.places.gathered.device
        if values.dtype != dtype or values.device.type != device.type:
            raise RuntimeError(
                f"Parameter {slot.name!r} was {dtype} on {device.type!r} at set-up and would now be {values.dtype} on "
                f"{values.device.type!r}. Call .to(), .half() and their like before fit, or choose "
                "Trainer(precision=...)."
            )

    def show_edits(self, full: Tensor, as_lent: Tensor | None = None) -> bool:
        """Copies what users have edited in a full array of the declared dtype, which was lent to them, into the values
        gathered on this rank, and not into its shard. Returns whether there was anything that the resting dtype tells.
        `as_lent` are the resting values when it was lent, where this rank has them no more."""
        self.taken_back += 1
        before, now = self.full_param if as_lent is None else as_lent, full.to(self.kind.resting)
        assert before is not None
        edited = [slot for slot in self.slots if not torch.equal(slot.view(now), slot.view(before))]
        if edited:
            self._replace(edited, before)
            if self.full_param is not None:
                self.full_param.copy_(now)
        return bool(edited)

    def take_edits(self, full: Tensor, as_lent: Tensor | None = None) -> None:
        """Keeps what users have edited in a full array that was lent to them, of the declared or the resting dtype; see
        `show_edits` for `as_lent`."""
        self.catch_up()
        declared = full.dtype == self.kind.declared
        if declared and self.kind.is_cast and not self.show_edits(full, as_lent) and not self._differs(full):
            return
        for slot in self.slots:
            if declared:
                self.master.write(slot.piece.in_shard, slot.own_part(full))
                self.owned_param.write(slot.piece.in_shard, slot.own_part(full))
            else:
                self._take_resting(slot, slot.own_part(full))

    def take_shown(self) -> None:
        """Keeps what users have edited in the parameters, or assigned to `p.data`, which still shows their tensor."""
        for slot in self.slots:
            self.check_assigned(slot, slot.parameter, self.kind.resting)
            self._take_resting(slot, slot.local.values.detach().reshape(-1)[slot.piece.start : slot.piece.stop])

    def _take_resting(self, slot: Slot, own: Tensor) -> None:
        """Keeps edits in this rank's part of a parameter, in the resting dtype."""
        within = slot.piece.in_shard
        with self.master.edit(within) as master:
            # Only what differs: a two-byte weight that was not edited must keep all bits of its master.
            edited = (own != master.to(own)).to(master.device)
            master.copy_(torch.where(edited, own.to(master), master))
        self.owned_param.write(within, own)

    def _differs(self, full: Tensor) -> bool:
        """Whether a full array of the declared dtype has other values than this rank's part of the masters."""
        return any(
            not torch.equal(slot.own_part(full).to(self.master.place.device), self.master.read(slot.piece.in_shard))
            for slot in self.slots
        )

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
        return bool(self.slots) and slot_of(self.slots[0].parameter) is not self.slots[0]
