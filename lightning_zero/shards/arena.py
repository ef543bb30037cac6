"""The arena: room for gathered units, allocated once (memory defragmentation, MD; ZeRO section 6.3)."""

from typing import final

import torch
from torch import Tensor

from lightning_zero.tiers.ledger import Category, Ledger, Place


@final
class Buffer:
    """Room for one unit: ``(nbytes,)`` uint8."""

    def __init__(self, nbytes: int, ledger: Ledger, place: Place) -> None:
        self.memory: Tensor = ledger.allocate(Category.GATHERED, nbytes, torch.uint8, place)
        self._holders = self._count_holders()

    @property
    def storage(self) -> int:
        """Identifies the memory, also in tensors that are views of it."""
        return int(self.memory.untyped_storage()._cdata)

    def is_held_beside(self, own: int) -> bool:
        """Whether anything else refers to the memory than the buffer and `own` tensors: a view that a user has kept, or
        a graph that saved one where we could not note its place instead."""
        return self._count_holders() > self._holders + own

    def _count_holders(self) -> int:
        return int(torch._C._storage_Use_Count(self.memory.untyped_storage()._cdata))


@final
class Arena:
    """`count` buffers of what the largest unit takes. Where more are in use at a time than that, others are made and
    given up again."""

    def __init__(self, count: int, nbytes: int, ledger: Ledger, place: Place) -> None:
        self._count = count
        self._nbytes = nbytes
        self._ledger = ledger
        self._place = place
        self._free = [Buffer(nbytes, ledger, place) for _ in range(count)]

    def take(self, apart: int | None = None) -> Buffer:
        """Room for any unit that the arena is for; or of `apart` bytes, for one that is used for longer than those."""
        if apart is None and self._free:
            return self._free.pop()
        return Buffer(self._nbytes if apart is None else apart, self._ledger, self._place)

    def give_back(self, buffer: Buffer, *, apart: bool) -> None:
        """The reverse of `take`. A buffer that somebody else still refers to is left to them."""
        if not apart and not buffer.is_held_beside(0) and len(self._free) < self._count:
            self._free.append(buffer)

    def close(self) -> None:
        """Frees the room for good."""
        self._free.clear()
        self._count = 0
