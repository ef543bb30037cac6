"""Tensors that are spread over the ranks, as checkpoints hold them: each rank writes, and reads, its own part alone."""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zero.distributed_private import local_tensor
from lightning_zero.shards.extents import Extent
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.local import Box
from lightning_zero.shards.slot import Slot
from lightning_zero.shards.staging import StateElsewhere
from lightning_zero.shards.units import as_written
from lightning_zero.shards.written import Written
from lightning_zero.tiers.array import Array, LatePart, read_late
from lightning_zero.views.lazy import LazyTensor, Range, Spread, Stored
from lightning_zero.wire.mesh import Mesh

WHOLE = " (whole)"  # ends the names of optimizer state that is not cut like its parameter


class ModelValues(NamedTuple):
    """The values of a model: its own, or an average of them."""

    name: str  # begins the names of its tensors in a checkpoint
    groups: Collection[ShardGroup]  # whose values these are; other groups have the model's own
    full: Callable[[ShardGroup], Tensor]  # returns the full array of a group, (N * S,), read-only. Collective
    owned: Callable[[ShardGroup], Array]  # returns this rank's part of it, of which steps may be postponed
    buffers: Mapping[int, Tensor]  # id of a buffer -> its values, where they are not the model's own


@final
class SpreadParameter(Spread):
    """A parameter, in the dtype in which its values are held. `whole` is collective."""

    def __init__(self, slot: Slot, values: ModelValues) -> None:
        name = f"{values.name}:{as_written(slot.name)}"
        super().__init__(name, slot.local.box.whole, values.owned(slot.group).dtype)
        self._slot = slot
        self._values = values

    def whole(self) -> Tensor:
        self._refuse_freed()
        view = self._slot.view(self._values.full(self._slot.group))
        return self._slot.local.gathered(view).to("cpu", copy=True)

    def pieces(self) -> list[Range]:
        self._refuse_freed()
        slot, written = self._slot, Written(self._slot)
        share = written.values
        slot.group.catch_up()  # on every rank: it may be collective
        owned = self._values.owned(slot.group)
        if not (share.numel or written.is_first):
            return []
        return [Range(slot.local.box.extent(self.name, share.start, share.stop), read_late(owned, share.in_shard))]

    def _refuse_freed(self) -> None:
        if self._slot.group.is_freed:
            raise RuntimeError(
                f"{self.name!r} was put into a checkpoint during fit, and is looked at after it. Look at "
                "module.state_dict() instead."
            )


@final
class SpreadPart(Spread):
    """A DTensor that no group holds: frozen, a buffer, or put into a checkpoint by users. `whole` is collective, for
    tensor-parallel ranks."""

    def __init__(self, name: str, tensor: DTensor, mesh: Mesh) -> None:
        super().__init__(name, tuple(tensor.shape), tensor.dtype)
        self._tensor = tensor
        self._mesh = mesh

    def whole(self) -> Tensor:
        return self._tensor.full_tensor().to("cpu", copy=True)

    def pieces(self) -> list[Range]:
        box, mesh = Box.of(self._tensor), self._mesh
        is_first = mesh.shard.rank == mesh.replicate.rank == 0 and (box.shape != box.whole or mesh.tensor.rank == 0)
        return [Range(box.extent(self.name), local_tensor(self._tensor).reshape(-1))] if is_first else []


@final
class SpreadState(Spread):
    """A tensor of optimizer state that is cut like its parameter. This rank has the part of the piece that it steps."""

    def __init__(self, name: str, slot: Slot, piece: Tensor) -> None:
        super().__init__(name, slot.local.box.whole, piece.dtype)
        self._slot = slot
        self._piece = piece

    def whole(self) -> Tensor:
        raise RuntimeError(
            f"{self.name!r} is spread over the ranks, and each knows only of its own. Look at it with "
            "checkpoint=Checkpoint(format='full'), or in the checkpoint once it is written."
        )

    def pieces(self) -> list[Range]:
        slot, share = self._slot, Written(self._slot).state
        start = share.shard_start - slot.state_piece.shard_start
        part, piece = slice(start, start + share.numel), self._piece
        if isinstance(piece, StateElsewhere):
            piece.keep_edits()
            values: Tensor | LatePart = LatePart(piece.array, part, piece.dtype)
        else:
            values = piece.detach().reshape(-1)[part]
        return [Range(slot.local.box.extent(self.name, share.start, share.stop), values)]


@final
class SpreadBlocks(Spread):
    """A tensor of optimizer state with one element for each block of its parameter, of which this rank writes those of
    its piece. It is named as not cut like its parameter, so that an optimizer that steps no blocks loads all of it."""

    def __init__(self, name: str, slot: Slot, entries: Tensor) -> None:
        super().__init__(name + WHOLE, (slot.blocks,), entries.dtype)
        self._slot = slot
        self._entries = entries

    def whole(self) -> Tensor:
        raise RuntimeError(f"{self.name!r} is spread over the ranks: look at it in the checkpoint once it is written.")

    def pieces(self) -> list[Range]:
        own = self._slot.own_blocks
        return [Range(Extent.of_whole(self.name, self.shape, own.start, own.stop), self._entries)]


def read_part(saved: Tensor, box: Box, start: int, stop: int, device: torch.device) -> Tensor:
    """Returns elements ``[start, stop)`` of a box of a saved tensor, flat, in storage of their own. Of a tensor in a
    checkpoint nothing else is read, and `device` gets them; others stay on their device."""
    source = saved.source if isinstance(saved, LazyTensor) else None
    if isinstance(source, Stored):
        part = torch.empty(stop - start, dtype=source.dtype, device=device)
        source.read(box.extent(source.name, start, stop), part)
        return part
    whole = saved if source is None else source.whole()
    return box.part(whole).reshape(-1)[start:stop].clone()
