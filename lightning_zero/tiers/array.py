"""`Array`: flat values that rest in a tier, in memory or in a file; read, written and edited part by part."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, final

import torch
from torch import Tensor

from lightning_zero.tiers.disk import Disk
from lightning_zero.tiers.ledger import Category, Ledger, Place, Tier

ALL = slice(None)
ZEROS = 2**22  # elements that are written at a time


class Array(ABC):
    """Values ``(numel,)`` that rest at `place`."""

    def __init__(self, numel: int, dtype: torch.dtype, place: Place) -> None:
        self.numel = numel
        self.dtype = dtype
        self.place = place

    @property
    @abstractmethod
    def version(self) -> int:
        """Another one after each change."""

    @abstractmethod
    def read(self, part: slice = ALL) -> Tensor:
        """The values of a part, on `place.device`, not to be written to; a view where they are in memory."""

    @abstractmethod
    def write(self, part: slice, values: Tensor, *, stays: bool = False) -> None:
        """Replaces the values of a part by others, of any dtype and device. Unless it `stays` as it is until a device
        has read it, `values` is the caller's again at once."""

    @contextmanager
    def edit(self, part: slice = ALL) -> Iterator[Tensor]:
        """Inside, the values of a part; what becomes of them there stays."""
        values = self.read(part)
        yield values
        self.write(part, values)


@final
class InMemory(Array):
    """Of the device, or of its host."""

    def __init__(self, values: Tensor, place: Place) -> None:
        super().__init__(values.numel(), values.dtype, place)
        self._values = values
        self._written: torch.cuda.Event | None = None  # by a copy from a device, which may be under way

    @property
    def version(self) -> int:
        return self._values._version

    def read(self, part: slice = ALL) -> Tensor:
        if self._written is not None:
            self._written.synchronize()
            self._written = None
        return self._values[part]

    def write(self, part: slice, values: Tensor, *, stays: bool = False) -> None:
        leaves = self.place.pinned and values.is_cuda
        self._values[part].copy_(values, non_blocking=leaves or stays)
        if leaves:
            self._written = torch.cuda.current_stream(values.device).record_event()

    @contextmanager
    def edit(self, part: slice = ALL) -> Iterator[Tensor]:
        yield self.read(part)


@final
class OnDisk(Array):
    """In the file of `place.disk`, for as long as this engine runs."""

    def __init__(self, numel: int, dtype: torch.dtype, place: Place) -> None:
        super().__init__(numel, dtype, place)
        assert place.disk is not None
        self.disk: Disk = place.disk
        self._start = self.disk.reserve(numel * dtype.itemsize)
        self._version = 0
        weakref.finalize(self, self.disk.give_back, self._start, numel * dtype.itemsize)

    @property
    def version(self) -> int:
        return self._version

    def at(self, part: slice) -> int:
        """Where a part lies in the file."""
        return self._start + part.indices(self.numel)[0] * self.dtype.itemsize

    def read(self, part: slice = ALL) -> Tensor:
        start, stop, _ = part.indices(self.numel)
        values = torch.empty(stop - start, dtype=self.dtype)
        self.disk.read(self.at(part), values)
        return values

    def write(self, part: slice, values: Tensor, *, stays: bool = False) -> None:
        self._version += 1
        self.disk.write(self.at(part), values.to("cpu", self.dtype).contiguous())

    def note_write(self) -> None:
        """Somebody else has written to the file."""
        self._version += 1


class Part(NamedTuple):
    """Values that are to be read when they are needed, a part of an array, in a dtype that may be wider than its."""

    array: Array
    part: slice
    dtype: torch.dtype

    def read(self) -> Tensor:
        return self.array.read(self.part).to(self.dtype)


def read_late(array: Array, part: slice) -> "Tensor | Part":
    """The values of a part; of what rests on disk, where they are."""
    return Part(array, part, array.dtype) if isinstance(array, OnDisk) else array.read(part)


def empty(category: Category, numel: int, dtype: torch.dtype, place: Place, ledger: Ledger) -> Array:
    """An array of whatever was there before, booked."""
    if place.tier is Tier.DISK:
        array = OnDisk(numel, dtype, place)
        ledger.book(category, Tier.DISK, numel * dtype.itemsize, array)
        return array
    return InMemory(ledger.allocate(category, numel, dtype, place), place)


def zeros(category: Category, numel: int, dtype: torch.dtype, place: Place, ledger: Ledger) -> Array:
    """An array of zeros, booked."""
    array = empty(category, numel, dtype, place, ledger)
    if isinstance(array, InMemory):
        array.read().zero_()
    else:
        for start in range(0, numel, ZEROS):  # the room may have been another's
            array.write(slice(start, start + ZEROS), torch.zeros(min(ZEROS, numel - start), dtype=dtype))
    return array
