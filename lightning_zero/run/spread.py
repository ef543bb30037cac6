"""What ranks own of parameters and optimizer state, as checkpoints hold it: each rank its ranges, nobody the whole."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple, final

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zero.shards.extents import Extent
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.layout import Piece
from lightning_zero.shards.local import Box
from lightning_zero.shards.slot import Slot
from lightning_zero.shards.units import as_written
from lightning_zero.shards.window import StateElsewhere
from lightning_zero.tiers.array import Array, Part, read_late
from lightning_zero.views.lazy import Spread
from lightning_zero.wire.mesh import Mesh

WHOLE = " (whole)"  # ends the names of optimizer state that is not cut like its parameter


class ModelValues(NamedTuple):
    """Values for all of a model: its own, or those of an average of it."""

    name: str  # what the names of its tensors in a checkpoint begin with
    groups: Collection[ShardGroup]  # that these are of; others have the model's own
    full: Callable[[ShardGroup], Tensor]  # of a group, (N * S,), not to be written to. A collective
    owned: Callable[[ShardGroup], Array]  # what this rank owns of them
    buffers: Mapping[int, Tensor]  # id -> values, where those are not its own


@final
class SpreadParameter(Spread):
    """A parameter, in the dtype in which its values are held. Reading it is a collective."""

    def __init__(self, slot: Slot, values: ModelValues) -> None:
        name = f"{values.name}:{as_written(slot.name)}"
        super().__init__(name, slot.local.box.whole, values.owned(slot.group).dtype)
        self._slot = slot
        self._values = values

    def whole(self) -> Tensor:
        self._refuse_freed()
        view = self._slot.view(self._values.full(self._slot.group))
        return self._slot.local.gathered(view).to("cpu", copy=True)

    def pieces(self) -> list[tuple[Extent, Tensor | Part]]:
        self._refuse_freed()
        slot = self._slot
        return _written(self, slot, slot.share, slot.writes_once, partial(read_late, self._values.owned(slot.group)))

    def _refuse_freed(self) -> None:
        if self._slot.group.is_freed:
            raise RuntimeError(
                f"{self.name!r} was put into a checkpoint during fit, and is looked at after it. Look at "
                "module.state_dict() instead."
            )


@final
class SpreadPart(Spread):
    """A DTensor that no group holds (frozen, a buffer, or put into a checkpoint by users). Reading it is a collective
    of tensor-parallel ranks."""

    def __init__(self, name: str, tensor: DTensor, mesh: Mesh) -> None:
        super().__init__(name, tuple(tensor.shape), tensor.dtype)
        self._tensor = tensor
        self._mesh = mesh

    def whole(self) -> Tensor:
        return self._tensor.full_tensor().to("cpu", copy=True)

    def pieces(self) -> list[tuple[Extent, Tensor | Part]]:
        box, mesh = Box.of(self._tensor), self._mesh
        is_first = mesh.shard.rank == mesh.replicate.rank == 0 and (box.shape != box.whole or mesh.tensor.rank == 0)
        return [(box.extent(self.name), self._tensor._local_tensor.reshape(-1))] if is_first else []


@final
class SpreadState(Spread):
    """A tensor of an optimizer's state that is cut like its parameter: this rank has that of the piece it steps."""

    def __init__(self, name: str, slot: Slot, piece: Tensor) -> None:
        super().__init__(name, slot.local.box.whole, piece.dtype)
        self._slot = slot
        self._piece = piece

    def whole(self) -> Tensor:
        raise RuntimeError(
            f"{self.name!r} is spread over the ranks, and each knows only of its own. Look at it with "
            "checkpoint=Checkpoint(format='full'), or in the checkpoint once it is written."
        )

    def pieces(self) -> list[tuple[Extent, Tensor | Part]]:
        slot = self._slot
        return _written(self, slot, slot.state_share, slot.writes_state_once, self._read)

    def _read(self, part: slice) -> Tensor | Part:
        start = self._slot.state_piece.shard_start
        part = slice(part.start - start, part.stop - start)
        if isinstance(self._piece, StateElsewhere):
            self._piece.settle()
            return Part(self._piece.array, part, self._piece.dtype)
        return self._piece.detach().reshape(-1)[part]


@final
class SpreadBlocks(Spread):
    """A tensor of an optimizer's state with one entry for each block of its parameter, of which this rank has those of
    its piece. Whoever steps no blocks reads it as what is not cut like its parameter."""

    def __init__(self, name: str, slot: Slot, entries: Tensor) -> None:
        super().__init__(name + WHOLE, (slot.blocks,), entries.dtype)
        self._slot = slot
        self._entries = entries

    def whole(self) -> Tensor:
        raise RuntimeError(f"{self.name!r} is spread over the ranks: look at it in the checkpoint once it is written.")

    def pieces(self) -> list[tuple[Extent, Tensor | Part]]:
        own = self._slot.own_blocks
        is_written = self._slot.is_first_copy and self._slot.piece.numel
        return [(Extent.of_whole(self.name, self.shape, own.start, own.stop), self._entries)] if is_written else []


def _written(
    source: Spread, slot: Slot, share: Piece, writes_once: bool, read: Callable[[slice], Tensor | Part]
) -> list[tuple[Extent, Tensor | Part]]:
    """What this rank writes: its share among those that have the same."""
    if not (share.numel or writes_once):
        return []
    return [(slot.local.box.extent(source.name, share.start, share.stop), read(share.in_shard))]
