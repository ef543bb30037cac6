"""`Stack`: memory for activation checkpoints, also all in one array (memory defragmentation, MD; ZeRO, section 6.3)."""

import weakref
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lightning_zero.tiers.alignment import ALIGNMENT_BYTES, round_up
from lightning_zero.tiers.ledger import Category, Ledger, Place


@final
@dataclass(eq=False)
class Region:
    """Memory that is reserved for as long as the region is referred to."""

    memory: Tensor  # (nbytes,) uint8


@dataclass(eq=False)
class _End:
    """Where a region of the array ends."""

    at: int  # bytes from the start of the array
    is_free: bool = False


@final
class Stack:
    """Gives out regions of memory at `place`. Each is an allocation of its own, unless `contiguous`.

    Contiguous regions lie one behind the other in one array; backward gives back first what was taken last. The first
    step shows how large the array must be: its regions are allocations of their own. The array is allocated when the
    second step begins, and again only after a later step has needed more.
    """

    def __init__(self, ledger: Ledger, place: Place, *, contiguous: bool) -> None:
        self._ledger = ledger
        self._place = place
        self._is_contiguous = contiguous
        self._array = torch.empty(0, dtype=torch.uint8, device=place.device)  # (nbytes,)
        self._ends: list[_End] = []  # of the regions that are taken, in order
        self._most = 0  # bytes of the array that regions have needed at most

    def take(self, nbytes: int) -> Region:
        """Returns a region of uninitialised memory."""
        if not self._is_contiguous:
            return Region(self._allocate(nbytes))
        if not self._ends and self._most > self._array.numel():
            self._array = self._array.new_empty(0)  # freed before the new one is allocated
            self._array = self._allocate(self._most)
        start = self._ends[-1].at if self._ends else 0
        end = _End(start + round_up(nbytes, ALIGNMENT_BYTES))
        self._ends.append(end)
        self._most = max(self._most, end.at)
        is_inside = end.at <= self._array.numel()
        region = Region(self._array[start : start + nbytes] if is_inside else self._allocate(nbytes))
        weakref.finalize(region, self._give_back, end)
        return region

    def _allocate(self, nbytes: int) -> Tensor:
        return self._ledger.allocate(Category.ACTIVATION_CHECKPOINT, nbytes, torch.uint8, self._place)

    def _give_back(self, end: _End) -> None:
        end.is_free = True
        while self._ends and self._ends[-1].is_free:
            self._ends.pop()
