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
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.shards.early import class_of, nothing, take_over
from lightning_zero.shards.layout import Layout, Piece, Slice
from lightning_zero.shards.local import local_of, make_local
from lightning_zero.stage import Partition
from lightning_zero.tiers.array import ALL, Array, InMemory, zeros
from lightning_zero.tiers.disk import Disk
from lightning_zero.tiers.ledger import Category, Ledger, Place, return_freed_memory
from lightning_zero.wire.comm import Gather
from lightning_zero.wire.mesh import Mesh

if TYPE_CHECKING:
    from lightning_zero.shards.gradient import GradientShard

no_interception = torch._C.DisableTorchFunctionSubclass

MUCH = 4 * 2**20  # bytes of a parameter, which are freed
ALIGNMENT_BYTES = 64  # a cache line; what torch's own allocator gives each tensor on the host


@dataclass(frozen=True)
class Kind:
    """What the parameters of one group have in common. Groups never mix kinds."""

    declared: torch.dtype  # what the user made, what the optimizer steps and checkpoints hold
    resting: torch.dtype  # what rests, travels and enters forward
    trainable: bool
    is_offloaded: bool = False  # what the optimizer works on rests in the tier that was asked for

    @property
    def is_cast(self) -> bool:
        return self.resting != self.declared


@dataclass(frozen=True)
class Places:
    """Where the parts of a group live."""

    gathered: Place  # parameters while they are used, and gradients while they travel
    parameter: Place  # parameters between uses, where they rest as shards
    gradient: Place  # averaged ones
    optimizer: Place  # masters and optimizer state
    state_dtype: torch.dtype | None = None  # of optimizer state, where it rests in another than it is stepped in

    @property
    def steps_apart(self) -> bool:
        """Whether what is stepped is brought to where, or to the dtype in which, it is."""
        return self.optimizer != self.gathered or self.state_dtype is not None

    @property
    def disk(self) -> Disk | None:
        """The file among the places."""
        return self.optimizer.disk or self.parameter.disk


@dataclass(frozen=True)
class Setting:
    """What every group of an engine shares."""

    partition: Partition  # what rests as shards
    mesh: Mesh
    ledger: Ledger
    places: Places
    bucket_bytes: int  # largest reduction
    as_declared: bool  # users read parameters in their declared dtype where they rest in another one
    aside: torch.cuda.Stream | None = None  # where a device copies and adds up beside its work; None on the host
    block: int = 1  # elements of a parameter that pieces never part
    keeps_gradients: bool = True  # averaged ones, from backward to the step; else they are stepped as they come


class _Postponed(NamedTuple):
    step: Callable[[], None]
    needs_all: bool  # ranks


@dataclass
class Rest:
    """Where a group's values are between uses, whether or not steps of them are still to be taken."""

    owned_param: Array
    master: Array


@final
class Slot:
    """A parameter (the user's own object) in its group."""

    def __init__(self, group: "ShardGroup", index: int, parameter: Parameter) -> None:
        span = group.layout.spans[index]
        self.group = group
        self.index = index
        self.parameter = parameter
        self.local = make_local(parameter, group.setting.mesh.tensor)  # what is packed, reduced and stepped of it
        self.name, self.shape, self.numel = span.name, span.shape, span.numel
        self.offset = span.offset  # in full arrays of the group
        # What this rank steps of it: its part, or all of it where the optimizer is not partitioned.
        self.piece = self._owned_piece() if group.is_cut else Piece(start=0, stop=span.numel, shard_start=span.offset)
        self.plain_class = class_of(parameter)  # what the user made it an instance of
        self.gradient: GradientShard | None = None  # of the group; None where it does not train
        self.stepper: int | None = None  # the rank that steps all of it; None: every rank steps its piece
        self._strides = self.local.values.stride()  # as the user made it: values rest in C order

    def _owned_piece(self) -> Piece:
        return self.group.layout.piece(self.index, self.group.comm.rank)

    def view(self, full: Tensor) -> Tensor:
        """This parameter in a full array of its group, in its shape."""
        return full[self.offset : self.offset + self.numel].view(self.shape)

    def own_part(self, full: Tensor) -> Tensor:
        """What this rank steps of this parameter, in a full array of its group, flat."""
        return self.view(full).view(-1)[self.piece.start : self.piece.stop]

    def stepped(self, owned: Array) -> Tensor:
        """The piece of this parameter in an owned array of its group, in `stepped_shape`."""
        return owned.read(self.piece.in_shard).view(self.stepped_shape)

    @property
    def stepped_shape(self) -> tuple[int, ...]:
        """Flat, or the parameter's own where no rank steps only a part of it."""
        return (self.piece.numel,) if self.group.is_cut else self.shape

    @property
    def share(self) -> Piece:
        """What this rank writes into checkpoints, in place in an owned array: of what it owns, its part among the
        ranks that own the same."""
        owned, (copy, copies) = self._owned_piece(), self._copy
        start, stop = (owned.start + owned.numel * at // copies for at in (copy, copy + 1))
        return Piece(start=start, stop=stop, shard_start=self.piece.shard_start + start - self.piece.start)

    @property
    def is_first_copy(self) -> bool:
        """Whether what this rank has is written by it, where ranks that have the same do not divide it."""
        return self._copy[0] == 0

    @property
    def _copy(self) -> tuple[int, int]:
        """Which copy of its values this rank has, among how many: replicas', and those of tensor-parallel ranks."""
        replicate, tensor = self.group.replicate, self.group.setting.mesh.tensor
        if self.local.is_divided:
            return replicate.rank, replicate.size
        return replicate.rank * tensor.size + tensor.rank, replicate.size * tensor.size

    @property
    def writes_once(self) -> bool:
        """Whether this rank writes what checkpoints hold once of this parameter: the rank that writes its first
        element, or rank 0 where it has none."""
        if self.local.is_divided and self.group.setting.mesh.tensor.rank:
            return False
        if not self.numel:
            return self.group.comm.rank == self._copy[0] == 0
        return self.share.start == 0 and self.share.numel > 0

    @property
    def state_piece(self) -> Piece:
        """Of which elements this rank has the optimizer's state, and where they lie in it."""
        if self.stepper is None:
            return self.piece
        return Piece(start=0, stop=self.numel if self.stepper == self.group.comm.rank else 0, shard_start=0)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of state that is cut as the parameter is, on a rank that `steps_any` of it."""
        return self.stepped_shape if self.stepper is None else self.shape

    @property
    def state_share(self) -> Piece:
        """What this rank writes of such state into checkpoints; see `share`."""
        if self.stepper is None:
            return self.share
        return replace(self.state_piece, stop=self.state_piece.stop if self._copy[0] == 0 else 0)

    @property
    def has_blocks(self) -> bool:
        """Whether it is stepped in pieces of whole blocks."""
        return self.group.is_cut and self.group.setting.block > 1 and self.stepper is None

    @property
    def blocks(self) -> int:
        """How many there are of the whole parameter."""
        return -(-self.numel // self.group.setting.block)

    @property
    def own_blocks(self) -> slice:
        """Those of this rank's piece, which begins with one."""
        size, piece = self.group.setting.block, self.piece
        return slice(piece.start // size, -(-piece.stop // size)) if piece.numel else slice(0, 0)

    @property
    def writes_state_once(self) -> bool:
        """Whether this rank writes what checkpoints hold once of its state; see `writes_once`."""
        is_stepper = self.stepper == self.group.comm.rank and self._copy[0] == 0
        return self.writes_once if self.stepper is None else is_stepper

    @property
    def steps_any(self) -> bool:
        """Whether this rank steps any of it; an empty parameter counts, as state is made for it too."""
        if self.stepper is not None:
            return self.stepper == self.group.comm.rank
        return self.piece.numel > 0 or not self.numel

    def whole(self, view: Tensor, device: torch.device) -> Tensor:
        """A copy of its values in storage of its own, and in the memory format that the user made it in."""
        made = torch.empty_strided(self.shape, self._strides, dtype=view.dtype, device=device)
        return made.copy_(view)


_SLOTS = WeakIdKeyDictionary()  # Parameter -> weak reference to its Slot, which would keep it alive for good


def slot_of(parameter: Parameter) -> Slot | None:
    """Where a parameter lives; None for one that no engine holds."""
    slot = _SLOTS.get(parameter)
    return None if slot is None else slot()


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
        for slot in self.slots:
            _SLOTS[slot.parameter] = weakref.ref(slot)
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
            _SLOTS.pop(slot.parameter, None)
        self.full_param = None
        nothing = InMemory(torch.empty(0, dtype=self.kind.resting), self.places.gathered)
        self.rest = Rest(nothing, nothing)

    @property
    def is_freed(self) -> bool:
        return bool(self.slots) and slot_of(self.slots[0].parameter) is not self.slots[0]


def point_at_nothing(slot: Slot) -> None:
    """The parameter keeps shape and dtype, and holds no memory. Its class keeps readers away (`views.parameter`); what
    goes past that finds NaN, and no memory of somebody else's."""
    dtype, device = slot.group.kind.resting, slot.group.setting.places.gathered.device
    with no_interception(), torch.inference_mode(False):
        slot.local.values = nothing(slot.shape, dtype, device)


def publish(groups: Iterable[ShardGroup]) -> None:
    """What ranks own is where forward reads it. A collective."""
    groups = list(groups)
    with torch.no_grad():
        for group in groups:
            group.begin_publish()
        for group in groups:
            group.end_publish()
