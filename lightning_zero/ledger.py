"""Bytes by category: every large or long-lived tensor of the engine is made here, so the books are true.

Allocation happens outside inference mode: a buffer first made during the sanity check of validation would
otherwise stay an inference tensor for ever, and training could not write to it.
"""

import weakref
from enum import StrEnum

import torch
from torch import Tensor


class Category(StrEnum):
    """What a tensor is for; the rows of the memory report."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    MASTER = "master"
    OPTIMIZER_STATE = "optimizer state"
    BUCKET = "bucket"
    GATHERED = "gathered"
    ACTIVATION_CHECKPOINT = "activation checkpoint"


class Ledger:
    """Live and peak bytes of each category on this rank."""

    def __init__(self) -> None:
        self.live: dict[Category, int] = dict.fromkeys(Category, 0)
        self.peak: dict[Category, int] = dict.fromkeys(Category, 0)
        self._booked: dict[int, tuple[Category, int]] = {}  # storage -> what is booked for it

    def allocate(self, category: Category, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised flat tensor of ``(numel,)``."""
        with torch.inference_mode(False):
            tensor = torch.empty(numel, dtype=dtype, device=device)
        self.adopt(category, tensor)
        return tensor

    def adopt(self, category: Category, tensor: Tensor) -> None:
        """Books a tensor that somebody else made; a storage is booked once, whatever views of it there are."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._booked:
            self._booked[key] = (category, 0)
            self._rebook(key, storage.nbytes())
            weakref.finalize(storage, self._forget, key)

    def resize(self, tensor: Tensor, nbytes: int) -> None:
        """Grows or frees the storage of an allocated tensor; views of it, also those autograd saved, follow."""
        storage = tensor.untyped_storage()
        with torch.inference_mode(False):
            storage.resize_(nbytes)
        self._rebook(storage._cdata, nbytes)

    def _rebook(self, key: int, nbytes: int) -> None:
        category, before = self._booked[key]
        self._booked[key] = (category, nbytes)
        self.live[category] += nbytes - before
        self.peak[category] = max(self.peak[category], self.live[category])

    def _forget(self, key: int) -> None:
        self._rebook(key, 0)
        del self._booked[key]
