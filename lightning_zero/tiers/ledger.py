"""Bytes by category and tier: every large or long-lived tensor of the engine is made here, so the books are true.

Allocation happens outside inference mode: a buffer first made during the sanity check of validation would
otherwise stay an inference tensor for ever, and training could not write to it.
"""

import ctypes
import weakref
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_zero.tiers.disk import Disk

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
_M_MMAP_THRESHOLD = -3
LARGE = 2**20  # bytes


def return_freed_memory() -> None:
    """Gives the memory of freed tensors back to the system, where the C library is glibc.

    glibc keeps it in holes of its heap: of a GPT with 97.7M parameters on two ranks, 150 to 250 MB stay resident at the
    end of a step, more at stage 3 than at stage 2. The call takes about 10 ms there.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


def keep_no_freed_memory() -> None:
    """From here on large blocks are the system's again as soon as they are freed, where the C library is glibc.

    glibc maps large blocks only until the first of them is freed; from then on its heap keeps those of up to 32 MiB.
    Of a GPT with 50.5M parameters that rests on disk, 475 MB are resident at the peak of a step, and 120 MB with this.
    """
    if _mallopt is not None:
        _mallopt(_M_MMAP_THRESHOLD, LARGE)


class Category(StrEnum):
    """What a tensor is for; the rows of the memory report."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    MASTER = "master"
    OPTIMIZER_STATE = "optimizer state"
    AVERAGE = "average"
    BUCKET = "bucket"
    GATHERED = "gathered"
    ACTIVATION_CHECKPOINT = "activation checkpoint"


class Tier(StrEnum):
    """What kind of memory a tensor lives in. On a CPU the device is the host."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True)
class Place:
    """Where tensors live, and on which device they are worked on."""

    device: torch.device
    tier: Tier = Tier.DEVICE
    pinned: bool = False  # page-locked, so that copies to and from a device need no copy between
    disk: "Disk | None" = None  # the file, of the tier of that name


class Ledger:
    """Live and peak bytes on this rank."""

    def __init__(self) -> None:
        self.live: dict[Category, int] = dict.fromkeys(Category, 0)  # over all tiers
        self.peak: dict[Category, int] = dict.fromkeys(Category, 0)  # the most there ever were
        self.tiers: dict[Tier, int] = dict.fromkeys(Tier, 0)  # live, over all categories
        self.tier_peak: dict[Tier, int] = dict.fromkeys(Tier, 0)
        self.live_in: Counter[tuple[Category, Tier]] = Counter()
        self.peak_in: Counter[tuple[Category, Tier]] = Counter()
        self._booked: set[int] = set()  # storages

    def allocate(self, category: Category, numel: int, dtype: torch.dtype, place: Place) -> Tensor:
        """An uninitialised flat tensor of ``(numel,)``, in memory."""
        with torch.inference_mode(False):
            tensor = torch.empty(numel, dtype=dtype, device=place.device, pin_memory=place.pinned)
        self.adopt(category, tensor, place.tier)
        return tensor

    def adopt(self, category: Category, tensor: Tensor, tier: Tier = Tier.DEVICE) -> None:
        """Books a tensor that somebody else made; a storage is booked once, whatever views of it there are."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._booked:
            self._booked.add(key)
            self.book(category, tier, storage.nbytes(), storage)
            weakref.finalize(storage, self._booked.discard, key)

    def has_booked(self, storage: torch.UntypedStorage) -> bool:
        """Whether the books have this storage already."""
        return storage._cdata in self._booked

    def book(self, category: Category, tier: Tier, nbytes: int, owner: object) -> None:
        """Books bytes that are there as long as `owner` is."""
        self._add(category, tier, nbytes)
        weakref.finalize(owner, self._add, category, tier, -nbytes)

    def _add(self, category: Category, tier: Tier, nbytes: int) -> None:
        self.live[category] += nbytes
        self.tiers[tier] += nbytes
        self.live_in[category, tier] += nbytes
        self.peak[category] = max(self.peak[category], self.live[category])
        self.tier_peak[tier] = max(self.tier_peak[tier], self.tiers[tier])
        self.peak_in[category, tier] = max(self.peak_in[category, tier], self.live_in[category, tier])
