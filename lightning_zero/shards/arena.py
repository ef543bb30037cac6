"""`Arena`: buffers for gathered units, allocated once (memory defragmentation, MD; ZeRO section 6.3)."""

from typing import final

import torch
from torch import Tensor

from lightning_zero.tiers.ledger import Category, Ledger, Place
from lightning_zero.torch_private import count_users, storage_key
from lightning_zero.wire.comm import Comm


@final
class Buffer:
    """Memory for one gathered unit: ``(nbytes,)`` uint8."""

    def __init__(self, nbytes: int, ledger: Ledger, place: Place, comm: Comm | None = None) -> None:
        self.memory: Tensor = ledger.allocate(Category.GATHERED, nbytes, torch.uint8, place, comm)
        self._holders = self._count_holders()

    @property
    def storage(self) -> int:
        """Address of the storage, which tells whether another tensor is a view of it."""
        return storage_key(self.memory.untyped_storage())

    def is_held_beside(self, own: int) -> bool:
        """Whether anything but the buffer and `own` tensors refers to the memory: a view that a user has kept, or a
        graph that saved a view because hooks could not note its place instead."""
        return self._count_holders() > self._holders + own

    def _count_holders(self) -> int:
        return count_users(self.storage)


@final
class Arena:
    """`count` buffers of `nbytes`, the size of the largest unit, which `comm` gathers into. When all are in use, `take`
    makes temporary ones."""

    def __init__(self, count: int, nbytes: int, ledger: Ledger, place: Place, comm: Comm | None = None) -> None:
        self.count = count
        self.nbytes = nbytes
        self._ledger = ledger
        self._place = place
        self._free = [Buffer(nbytes, ledger, place, comm) for _ in range(count)]

    def take(self, apart: int | None = None) -> Buffer:
        """Returns a buffer for any unit that the arena is for; or a new one of `apart` bytes, for a unit around others,
        which is in use for longer than they are."""
        if apart is None and self._free:
            return self._free.pop()
        return Buffer(self.nbytes if apart is None else apart, self._ledger, self._place)

    def give_back(self, buffer: Buffer, *, apart: bool) -> None:
        """Undoes one `take`. A buffer that anything else still refers to is not used again."""
        if not apart and not buffer.is_held_beside(0) and len(self._free) < self.count:
            self._free.append(buffer)

    def close(self) -> None:
        """Frees the buffers permanently."""
        self._free.clear()
        self.count = 0
