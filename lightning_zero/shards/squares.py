"""`Squares`: sums of squares of averaged gradients, taken on the device before they leave for another tier."""

from typing import final

import torch
from torch import Tensor

from lightning_zero.shards.layout import Chunk, overlap
from lightning_zero.shards.slot import Slot
from lightning_zero.tiers.array import Array


@final
class Squares:
    """What the norm needs of the gradients in `array`, by parameter and chunk, as long as nobody else changes them.

    The device reads an average at some thirty times the rate of its host, and has it at hand. Without these sums the
    host would measure gradients when all have come: a pass over them that nothing runs beside.
    """

    def __init__(self, array: Array) -> None:
        self._array = array
        self._version = array.version  # of the array when the sums were taken
        self._sums: dict[int, dict[int, tuple[int, Tensor]]] = {}  # index -> start -> elements, 0-d float64

    def write(self, chunk: Chunk, average: Tensor, slots: list[Slot]) -> None:
        """Replaces the values of a chunk by `average`, of any device, on which it is measured."""
        if self._array.version != self._version:  # somebody has edited them
            self.forget()
        start = chunk.in_shard.start
        parts = {index: overlap(slots[index].piece.in_shard, chunk.in_shard) for index in chunk.of.parameters}
        for index, part in parts.items():
            if numel := part.stop - part.start:
                values = average[part.start - start : part.stop - start]
                norm = torch.linalg.vector_norm(values, dtype=torch.float64)
                self._sums.setdefault(index, {})[part.start] = (numel, norm.square())
        self._array.write(chunk.in_shard, average)
        self._version = self._array.version

    def forget(self) -> None:
        """Drops the sums, which are memory of the device."""
        self._sums.clear()

    def sum_of(self, slot: Slot) -> Tensor | None:
        """Returns the sum of squares of this rank's piece, 0-d, float64, on the device; None where it is not known."""
        found = self._sums.get(slot.index, {}).values()
        is_known = self._array.version == self._version and sum(numel for numel, _ in found) == slot.piece.numel
        return torch.stack([square for _, square in found]).sum() if found and is_known else None
