"""`Array`: flat values that are kept in a tier, in memory or in a file, and are read, written and edited in parts."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, final

import torch
from torch import Tensor

from lightning_zero.device import Arrival, is_host, to_device, to_host
from lightning_zero.tiers.disk import Disk
from lightning_zero.tiers.ledger import Category, Ledger, Place, Tier

ALL = slice(None)
ZEROS = 2**22  # elements that `zeros` writes at a time


class Array(ABC):
    """Values ``(numel,)`` that are kept at `place`."""

    def __init__(self, numel: int, dtype: torch.dtype, place: Place) -> None:
        self.numel = numel
        self.dtype = dtype
        self.place = place

    @property
    @abstractmethod
    def version(self) -> int:
        """A number that each change of the values changes."""

    @abstractmethod
    def read(self, part: slice = ALL) -> Tensor:
        """Returns the values of a part, on `place.device`; a view if they are in memory. Do not write to them."""

    @abstractmethod
    def write(self, part: slice, values: Tensor, *, stays: bool = False) -> None:
        """Replaces the values of a part by `values`, of any dtype and device. If `stays`, the caller leaves `values` as
        they are until the device has read them; otherwise it may change them at once."""

    @contextmanager
    def edit(self, part: slice = ALL) -> Iterator[Tensor]:
        """Yields the values of a part, and keeps changes that the body makes to them."""
        values = self.read(part)
        yield values
        self.write(part, values)


@final
class InMemory(Array):
    """An array in the memory of the device or of its host."""

    def __init__(self, values: Tensor, place: Place) -> None:
        super().__init__(values.numel(), values.dtype, place)
        self._values = values
        self._arriving: Arrival | None = None  # the latest values, from the device

    @property
    def version(self) -> int:
        return self._values._version

    def read(self, part: slice = ALL) -> Tensor:
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        return self._values[part]

    def write(self, part: slice, values: Tensor, *, stays: bool = False) -> None:
        if is_host(self.place.device):
            self._arriving = to_host(self._values[part], values)
        else:
            to_device(self._values[part], values, stays=stays)

    @contextmanager
    def edit(self, part: slice = ALL) -> Iterator[Tensor]:
        yield self.read(part)


@final
class OnDisk(Array):
    """An array in the file of `place.disk`."""

    version = 0

    def __init__(self, numel: int, dtype: torch.dtype, place: Place) -> None:
        super().__init__(numel, dtype, place)
        assert place.disk is not None
        self.disk: Disk = place.disk
        self._start = self.disk.reserve(numel * dtype.itemsize)
        weakref.finalize(self, self.disk.give_back, self._start, numel * dtype.itemsize)

    def at(self, part: slice) -> int:
        """Returns the offset in the file, in bytes, of a part."""
        return self._start + part.indices(self.numel)[0] * self.dtype.itemsize

    def read(self, part: slice = ALL) -> Tensor:
        start, stop, _ = part.indices(self.numel)
        values = torch.empty(stop - start, dtype=self.dtype)
        self.disk.read(self.at(part), values)
        return values

    def write(self, part: slice, values: Tensor, *, stays: bool = False) -> None:
        self.version += 1
        self.disk.write(self.at(part), values.to("cpu", self.dtype).contiguous())

    def note_write(self) -> None:
        """Counts a write that goes to the file directly."""
        self.version += 1


class Part(NamedTuple):
    """A part of an array, to be read when it is needed, in a `dtype` that may be wider than the array's."""

    array: Array
    part: slice
    dtype: torch.dtype

    def read(self) -> Tensor:
        return self.array.read(self.part).to(self.dtype)


def read_late(array: Array, part: slice) -> "Tensor | Part":
    """Returns the values of a part, or, if they are on disk, a `Part` that reads them later."""
    return Part(array, part, array.dtype) if isinstance(array, OnDisk) else array.read(part)


def empty(category: Category, numel: int, dtype: torch.dtype, place: Place, ledger: Ledger) -> Array:
    """Returns an uninitialised array, and books it."""
    if place.tier is Tier.DISK:
        array = OnDisk(numel, dtype, place)
        ledger.book(category, Tier.DISK, numel * dtype.itemsize, array)
        return array
    return InMemory(ledger.allocate(category, numel, dtype, place), place)


def zeros(category: Category, numel: int, dtype: torch.dtype, place: Place, ledger: Ledger) -> Array:
    """Returns an array of zeros, and books it."""
    array = empty(category, numel, dtype, place, ledger)
    if isinstance(array, InMemory):
        array.read().zero_()
    else:
        for start in range(0, numel, ZEROS):  # this range of the file may have held another array
            array.write(slice(start, start + ZEROS), torch.zeros(min(ZEROS, numel - start), dtype=dtype))
    return array
