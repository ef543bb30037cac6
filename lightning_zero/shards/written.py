"""`Written`: what this rank writes of a parameter, and of its optimizer state, into checkpoints."""

from typing import final

from lightning_zero.shards.layout import Piece
from lightning_zero.shards.slot import Slot


@final
class Written:
    """The elements of a slot that this rank writes. Replicas hold copies of the values, and so do tensor-parallel ranks
    if the parameter is not divided: ranks that hold copies divide them evenly."""

    def __init__(self, slot: Slot) -> None:
        replicate, tensor = slot.group.setting.mesh.replicate, slot.group.setting.mesh.tensor
        self._slot = slot
        self._copy, self._copies = replicate.rank, replicate.size
        if not slot.local.is_divided:
            self._copy, self._copies = self._copy * tensor.size + tensor.rank, self._copies * tensor.size
        self.is_first_copy = self._copy == 0  # writes the tensors that ranks with copies do not divide

    @property
    def values(self) -> Piece:
        """The elements of the parameter, placed in an owned array."""
        slot = self._slot
        owned = slot.group.layout.piece(slot.index, slot.group.comm.rank)
        start, stop = (owned.start + owned.numel * at // self._copies for at in (self._copy, self._copy + 1))
        return Piece(start=start, stop=stop, shard_start=slot.piece.shard_start + start - slot.piece.start)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what a checkpoint holds once per parameter: true on the rank that writes its first
        element, and on rank 0 for an empty parameter."""
        slot = self._slot
        if slot.local.is_divided and slot.group.setting.mesh.tensor.rank:
            return False
        if not slot.numel:
            return slot.group.comm.rank == 0 and self.is_first_copy
        return self.values.start == 0 and self.values.numel > 0

    @property
    def state(self) -> Piece:
        """The elements of optimizer state that is cut as the parameter is, placed as `Slot.state_piece` is."""
        if self._slot.stepper is None:
            return self.values
        return self._slot.state_piece if self.is_first_copy else Piece(start=0, stop=0, shard_start=0)

    @property
    def is_first_of_state(self) -> bool:
        """Whether this rank writes the state that a checkpoint holds once per parameter; see `is_first`."""
        slot = self._slot
        return self.is_first if slot.stepper is None else slot.stepper == slot.group.comm.rank and self.is_first_copy
