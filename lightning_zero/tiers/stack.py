"""Room for activation checkpoints: each in memory of its own, or all in one array (memory defragmentation, MD; ZeRO
section 6.3)."""

import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lightning_zero.tiers.ledger import Category, Ledger, Place

ALIGNMENT_BYTES = 64  # a cache line; what torch's own allocator gives each tensor on the host


@final
class Region:
    """Memory ``(nbytes,)`` uint8, which is its holder's for as long as the region is referred to."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory


class Room(ABC):
    """Memory at a place."""

    def __init__(self, ledger: Ledger, place: Place) -> None:
        self._ledger = ledger
        self._place = place

    @abstractmethod
    def take(self, nbytes: int) -> Region:
        """A region of uninitialised memory."""

    def _allocate(self, nbytes: int) -> Tensor:
        return self._ledger.allocate(Category.ACTIVATION_CHECKPOINT, nbytes, torch.uint8, self._place)


@final
class Loose(Room):
    """Each region is an allocation of its own."""

    def take(self, nbytes: int) -> Region:
        return Region(self._allocate(nbytes))


@dataclass(eq=False)
class _End:
    """Where a region of the array ends."""

    at: int  # bytes from the start of the array
    is_free: bool = False


@final
class Stack(Room):
    """All regions lie one behind the other in one array; what was taken last is given back first, as backward does.

    How large the array must be is learnt in the first step, whose regions are allocations of their own; it is allocated
    when the second begins. It is allocated anew only where a later step has needed more.
    """

    def __init__(self, ledger: Ledger, place: Place) -> None:
        super().__init__(ledger, place)
        self._array: Tensor | None = None  # (nbytes,) uint8
        self._ends: list[_End] = []  # of the regions that have been taken, in order
        self._most = 0  # bytes that regions have reached to

    def take(self, nbytes: int) -> Region:
        if not self._ends:
            self._fit()
        start = self._ends[-1].at if self._ends else 0
        end = _End(start + -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        self._ends.append(end)
        self._most = max(self._most, end.at)
        is_inside = self._array is not None and end.at <= self._array.numel()
        region = Region(self._array[start : start + nbytes] if is_inside else self._allocate(nbytes))  # type: ignore[index]
        weakref.finalize(region, self._give_back, end)
        return region

    def _give_back(self, end: _End) -> None:
        end.is_free = True
        while self._ends and self._ends[-1].is_free:
            self._ends.pop()

    def _fit(self) -> None:
        """Nothing is taken now: the array may become another one."""
        if self._most > (0 if self._array is None else self._array.numel()):
            self._array = None  # before, so that never both are there
            self._array = self._allocate(self._most)
