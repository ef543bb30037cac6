"""`Slot`: a parameter in its group, and the one map from a parameter to its slot."""

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.shards.early import class_of, no_interception, nothing
from lightning_zero.shards.layout import Piece
from lightning_zero.shards.local import Local
from lightning_zero.tiers.array import Array
from lightning_zero.tiers.ledger import Category

if TYPE_CHECKING:
    from lightning_zero.shards.gradient import GroupGradient
    from lightning_zero.shards.group import ShardGroup

_SLOTS = WeakIdKeyDictionary()  # Parameter -> weak reference to its Slot; a strong one would keep the parameter alive


@final
class Edition:
    """Stands for the values of a gathered parameter until the user puts others in their place. Graphs refer to it, and
    not to the values, which are gathered again. `kept` has them afterwards, ``(numel,)``, if a graph referred to it."""

    kept: Tensor | None = None


@final
class Slot:
    """A parameter (the user's own object) in its group."""

    def __init__(self, group: "ShardGroup", index: int, parameter: Parameter) -> None:
        span = group.layout.spans[index]
        self.group = group
        self.index = index
        self.parameter = parameter
        self.local = Local(parameter, group.setting.mesh.tensor)  # what is packed, reduced and stepped of it
        self.name, self.shape, self.numel = span.name, span.shape, span.numel
        self.offset = span.offset  # in full arrays of the group
        # What this rank steps: its part, or the whole parameter where the optimizer is not partitioned.
        whole = Piece(start=0, stop=span.numel, shard_start=span.offset)
        self.piece = group.layout.piece(index, group.comm.rank) if group.is_cut else whole
        self.stepped_shape = (self.piece.numel,) if group.is_cut else span.shape  # a piece is flat
        self.plain_class = class_of(parameter)  # that the user gave it
        self.gradient: GroupGradient | None = None  # of the group; None where it does not train
        self.is_sparse = False  # its optimizer steps the rows that have a gradient, and no others; see `sparse`
        self.stepper: int | None = None  # the rank that steps the whole parameter; None: every rank steps its piece
        self.edition = Edition()  # of the values that a unit gathers
        _SLOTS[parameter] = weakref.ref(self)

    def view(self, full: Tensor) -> Tensor:
        """Returns this parameter, in its shape, as a view of a full array of its group."""
        return full[self.offset : self.offset + self.numel].view(self.shape)

    def own_part(self, full: Tensor) -> Tensor:
        """Returns the elements that this rank steps, flat, as a view of a full array of the group."""
        return self.view(full).view(-1)[self.piece.start : self.piece.stop]

    def stepped(self, owned: Array) -> Tensor:
        """Returns the piece of this parameter, in `stepped_shape`, from an owned array of its group; to be edited."""
        values = owned.editable(self.piece.in_shard)
        return values if self.group.is_cut else values.view(self.stepped_shape)  # a piece is flat already

    def check_assigned(self, values: Tensor, dtype: torch.dtype) -> None:
        """Raises RuntimeError if `p.data` has another dtype or device than at set-up, as after `.half()` or `.to()`."""
        device = self.group.places.gathered.device
        if values.dtype != dtype or values.device.type != device.type:
            raise RuntimeError(
                f"Parameter {self.name!r} was {dtype} on {device.type!r} at set-up and would now be {values.dtype} on "
                f"{values.device.type!r}. Call .to(), .half() and their like before fit, or choose "
                "Trainer(precision=...)."
            )

    def replace(self, values: Tensor) -> None:
        """Notes that others take the place of the gathered `values`. Graphs that have saved these keep a copy, as they
        would keep the tensor that `p.data` was. They could not gather it later: other ranks' graphs, which may have
        saved nothing here, would not come to that."""
        before = weakref.ref(self.edition)
        self.edition = Edition()
        if (edition := before()) is not None:  # a graph refers to it
            group = self.group
            ledger, place = group.setting.ledger, group.places.gathered
            kept = ledger.allocate(Category.GATHERED, self.numel, values.dtype, place)
            edition.kept = kept.copy_(values.reshape(-1))

    # -- optimizer state that is cut as the parameter is

    @property
    def state_piece(self) -> Piece:
        """The elements whose optimizer state this rank has, placed in that state."""
        if self.stepper is None:
            return self.piece
        return Piece(start=0, stop=self.numel if self.stepper == self.group.comm.rank else 0, shard_start=0)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of this state on a rank that `steps_any` of the parameter."""
        return self.stepped_shape if self.stepper is None else self.shape

    @property
    def has_blocks(self) -> bool:
        """Whether each rank steps a piece that consists of whole blocks."""
        return self.group.is_cut and self.group.setting.block > 1 and self.stepper is None

    @property
    def blocks(self) -> int:
        """Blocks of the whole parameter."""
        return -(-self.numel // self.group.setting.block)

    @property
    def own_blocks(self) -> slice:
        """The blocks of this rank's piece, which begins with a block."""
        size, piece = self.group.setting.block, self.piece
        return slice(piece.start // size, -(-piece.stop // size)) if piece.numel else slice(0, 0)

    @property
    def steps_any(self) -> bool:
        """Whether this rank steps any of the parameter. All ranks step an empty one: it has optimizer state too."""
        if self.stepper is not None:
            return self.stepper == self.group.comm.rank
        return self.piece.numel > 0 or not self.numel


def slot_of(parameter: Parameter) -> Slot | None:
    """Returns the slot of a parameter; None if no engine holds the parameter."""
    slot = _SLOTS.get(parameter)
    return None if slot is None else slot()


def forget_slot(slot: Slot) -> None:
    """Notes that the engine no longer holds the parameter."""
    _SLOTS.pop(slot.parameter, None)


def point_at_nothing(slots: Iterable[Slot]) -> None:
    """Takes the values from parameters, which keep their shapes and dtypes and hold no memory.

    The class of a parameter intercepts readers (`run.parameter`). A read past that finds NaN, and never memory that
    holds another tensor by now.
    """
    with no_interception(), torch.inference_mode(False):
        for slot in slots:
            local, group = slot.local, slot.group
            if local.nothing is None or slot.numel == 1:  # a single element can be written to
                local.nothing = nothing(slot.shape, group.kind.resting, group.places.gathered.device)
            local.values = local.nothing
