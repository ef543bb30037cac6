"""`Slot`: a parameter in its group, and the one map from a parameter to its slot."""

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.shards.early import class_of, nothing
from lightning_zero.shards.layout import Piece
from lightning_zero.shards.local import make_local
from lightning_zero.tiers.array import Array

if TYPE_CHECKING:
    from lightning_zero.shards.gradient import GradientShard
    from lightning_zero.shards.group import ShardGroup

no_interception = torch._C.DisableTorchFunctionSubclass


_SLOTS = WeakIdKeyDictionary()  # Parameter -> weak reference to its Slot, which would keep it alive for good


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
        _SLOTS[parameter] = weakref.ref(self)

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


def slot_of(parameter: Parameter) -> Slot | None:
    """Where a parameter lives; None for one that no engine holds."""
    slot = _SLOTS.get(parameter)
    return None if slot is None else slot()


def forget_slot(slot: Slot) -> None:
    """The engine does not hold the parameter any more."""
    _SLOTS.pop(slot.parameter, None)


def point_at_nothing(slot: Slot) -> None:
    """The parameter keeps shape and dtype, and holds no memory. Its class keeps readers away (`views.parameter`); what
    goes past that finds NaN, and no memory of somebody else's."""
    dtype, device = slot.group.kind.resting, slot.group.setting.places.gathered.device
    with no_interception(), torch.inference_mode(False):
        slot.local.values = nothing(slot.shape, dtype, device)
