"""What ranks own of parameters and optimizer state, as checkpoints hold it: each rank its ranges, nobody the whole."""

from typing import final

from torch import Tensor

from lightning_zero.extents import Extent
from lightning_zero.group import ShardGroup
from lightning_zero.lazy import Spread
from lightning_zero.units import as_written


def is_first(group: ShardGroup, index: int) -> bool:
    """Whether this rank is the one that writes what there is once of parameter `index`: that which writes its first
    element too, or rank 0 where it has none."""
    if not group.layout.spans[index].numel:
        return group.comm.rank == group.replicate.rank == 0
    share = group.share(index)
    return share.start == 0 and share.numel > 0


WHOLE = " (whole)"  # ends the names of optimizer state that is not cut like its parameter


@final
class SpreadParameter(Spread):
    """A parameter in its declared dtype. Reading it is a collective.

    Args:
        group: that holds it.
        index: of it there.
    """

    def __init__(self, group: ShardGroup, index: int) -> None:
        span = group.layout.spans[index]
        super().__init__(f"model:{as_written(span.name)}", span.shape, group.kind.declared)
        self._group = group
        self._index = index

    def whole(self) -> Tensor:
        self._refuse_freed()
        return self._group.view_of(self._group.full_master(), self._index).to("cpu", copy=True)

    def pieces(self) -> list[tuple[Extent, Tensor]]:
        self._refuse_freed()
        share = self._group.share(self._index)
        if not (share.numel or is_first(self._group, self._index)):
            return []
        values = self._group.master[share.shard_start : share.shard_stop]
        return [(Extent.of_whole(self.name, self.shape, share.start, share.stop), values)]

    def _refuse_freed(self) -> None:
        if self._group.is_freed:
            raise RuntimeError(
                f"{self.name!r} was put into a checkpoint during fit, and is looked at after it. Look at "
                "module.state_dict() instead."
            )


@final
class SpreadState(Spread):
    """A tensor of an optimizer's state that is cut like its parameter.

    Args:
        name: of it.
        group: that holds the parameter.
        index: of it there.
        piece: the state of the piece that this rank steps.
    """

    def __init__(self, name: str, group: ShardGroup, index: int, piece: Tensor) -> None:
        super().__init__(name, group.layout.spans[index].shape, piece.dtype)
        self._group = group
        self._index = index
        self._piece = piece.detach().reshape(-1)

    def whole(self) -> Tensor:
        raise RuntimeError(
            f"{self.name!r} is spread over the ranks, and each knows only of its own. Look at it with "
            "checkpoint=Checkpoint(format='full'), or in the checkpoint once it is written."
        )

    def pieces(self) -> list[tuple[Extent, Tensor]]:
        share, owned = self._group.share(self._index), self._group.piece(self._index)
        if not (share.numel or is_first(self._group, self._index)):
            return []
        values = self._piece[share.start - owned.start : share.stop - owned.start]
        return [(Extent.of_whole(self.name, self.shape, share.start, share.stop), values)]


@final
class OfOneRank(Spread):
    """A small tensor that this rank alone writes: its random state, or a tensor of optimizer state that is not cut as
    its parameter is."""

    def __init__(self, name: str, values: Tensor) -> None:
        super().__init__(name, tuple(values.shape), values.dtype)
        self._values = values

    def whole(self) -> Tensor:
        return self._values.to("cpu", copy=True)

    def pieces(self) -> list[tuple[Extent, Tensor]]:
        return [(Extent.of_whole(self.name, self.shape), self._values.reshape(-1))]
