"""`Ledger`: bytes by category and tier. It makes, or books, all large or long-lived tensors, so its sums are right."""

import ctypes
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from lightning_zero.device import Limit, PinnedMemory
from lightning_zero.tiers.disk import Disk
from lightning_zero.torch_private import storage_key
from lightning_zero.wire.comm import Comm

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc; None elsewhere
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
_M_MMAP_THRESHOLD = -3
LARGE = 2**20  # bytes


def return_freed_memory() -> None:
    """Returns the memory of freed tensors to the system. Does nothing unless the C library is glibc.

    glibc keeps that memory in holes of its heap: for a GPT with 97.7M parameters on two ranks, 150 to 250 MB stay
    resident at the end of a step, more at stage 3 than at stage 2. The call takes about 10 ms there.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


def keep_no_freed_memory() -> None:
    """Makes large blocks return to the system as soon as they are freed. Does nothing unless the C library is glibc.

    glibc maps large blocks only until the first of them is freed; after that its heap keeps blocks of up to 32 MiB.
    With a GPT of 50.5M parameters offloaded to disk, 475 MB are resident at the peak of a step, and 120 MB after this.
    """
    if _mallopt is not None:
        _mallopt(_M_MMAP_THRESHOLD, LARGE)


class Category(StrEnum):
    """The purpose of a tensor: a row of the memory report."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    MASTER = "master"
    OPTIMIZER_STATE = "optimizer state"
    AVERAGE = "average"
    BUCKET = "bucket"
    GATHERED = "gathered"
    ACTIVATION_CHECKPOINT = "activation checkpoint"


class Tier(StrEnum):
    """The kind of memory that holds a tensor. When training on a CPU, host memory is the tier DEVICE."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


LASTING = (Category.PARAMETER, Category.MASTER, Category.OPTIMIZER_STATE, Category.AVERAGE)  # as long as a training


def category_in(category: Category, tier: Tier) -> str:
    """Returns the name of a category in memory reports."""
    return str(category) if tier is Tier.DEVICE else f"{category} ({tier})"


@dataclass(frozen=True)
class Place:
    """Where tensors are kept, and on which device they are read and written."""

    device: torch.device
    tier: Tier = Tier.DEVICE
    pinned: bool = False  # page-locked, so that copies to and from a device need no copy in between
    disk: Disk | None = None  # the file, of the tier DISK
    limit: Limit | None = field(default=None, compare=False)  # of waits of the host for copies from and to the device


class Ledger:
    """Live and peak bytes of this rank's tensors."""

    def __init__(self) -> None:
        self.live: dict[Category, int] = dict.fromkeys(Category, 0)  # over all tiers
        self.peak: dict[Category, int] = dict.fromkeys(Category, 0)
        self.tiers: dict[Tier, int] = dict.fromkeys(Tier, 0)  # live, over all categories
        self.tier_peak: dict[Tier, int] = dict.fromkeys(Tier, 0)
        self.live_in: Counter[tuple[Category, Tier]] = Counter()
        self.peak_in: Counter[tuple[Category, Tier]] = Counter()
        self.rested: Mapping[tuple[Category, Tier], int] = {}  # see `note_rest`
        self._booked: set[int] = set()  # addresses of storages
        self.pinned = PinnedMemory()

    def allocate(
        self, category: Category, numel: int, dtype: torch.dtype, place: Place, comm: Comm | None = None
    ) -> Tensor:
        """Allocates an uninitialised flat tensor ``(numel,)`` in memory, and books it. `comm` is given for one that
        it sends often: see `Comm.empty`."""
        # Otherwise a buffer that is first made in the sanity check of validation would stay an inference tensor, and
        # training could not write to it.
        with torch.inference_mode(False):
            if place.pinned:
                tensor, nbytes = self.pinned.empty(numel, dtype, lasts=category in LASTING)
                self.book_tensor(category, tensor, place.tier, nbytes)
                return tensor
            if comm is None:
                tensor = torch.empty(numel, dtype=dtype, device=place.device)
            else:
                tensor = comm.empty(numel, dtype, place.device)
        self.book_tensor(category, tensor, place.tier)
        return tensor

    def book_tensor(
        self, category: Category, tensor: Tensor, tier: Tier = Tier.DEVICE, nbytes: int | None = None
    ) -> None:
        """Books a tensor that was made elsewhere. Books each storage once, even if several views of it come; `nbytes`
        are what it takes where that is more than its storage has, as page-locked memory does."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key not in self._booked:
            self._booked.add(key)
            self.book(category, tier, storage.nbytes() if nbytes is None else nbytes, storage)
            weakref.finalize(storage, self._booked.discard, key)

    def has_booked(self, storage: torch.UntypedStorage) -> bool:
        """Whether `book_tensor` or `allocate` has booked this storage."""
        return storage_key(storage) in self._booked

    def book(self, category: Category, tier: Tier, nbytes: int, owner: object) -> None:
        """Books bytes for as long as `owner` is alive."""
        self._add(category, tier, nbytes)
        weakref.finalize(owner, self._add, category, tier, -nbytes)

    def note_rest(self) -> None:
        """Notes what is live as what rests between steps: what grows from here on is of the step that comes."""
        self.rested = self.live_in.copy()

    def _add(self, category: Category, tier: Tier, nbytes: int) -> None:
        self.live[category] += nbytes
        self.tiers[tier] += nbytes
        self.live_in[category, tier] += nbytes
        self.peak[category] = max(self.peak[category], self.live[category])
        self.tier_peak[tier] = max(self.tier_peak[tier], self.tiers[tier])
        self.peak_in[category, tier] = max(self.peak_in[category, tier], self.live_in[category, tier])
