"""`Array`: flat values that are kept in a tier, in memory or in a file, and are read, written and edited in parts."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar, final

import torch
from torch import Tensor

from lightning_zero.device import HOST, CopyToHost, Event, is_host, record, to_device, to_host, wait_for, wait_on_host
from lightning_zero.tiers.disk import Disk
from lightning_zero.tiers.ledger import Category, Ledger, Place, Tier
from lightning_zero.torch_private import edits_of

T = TypeVar("T")

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
    def copy_to(self, part: slice, target: Tensor) -> Tensor:
        """Copies the values of a part to `target`, on any device, and returns `target`. The copy may be under way."""

    @abstractmethod
    def write(self, part: slice, values: Tensor) -> None:
        """Replaces the values of a part by `values`, of any dtype and device, which may be changed at once."""

    @abstractmethod
    def editable(self, part: slice = ALL) -> Tensor:
        """Returns the values of a part; of one that is in memory, to be edited in place."""

    @contextmanager
    def edit(self, part: slice = ALL) -> Iterator[Tensor]:
        """Yields the values of a part, and keeps changes that the body makes to them."""
        values = self.read(part)
        yield values
        self.write(part, values)


@final
class InMemory(Array):
    """An array in the memory of the device or of its host. In pinned memory, copies from and to the device may be under
    way: whoever reads or edits a part waits for those of it."""

    def __init__(self, values: Tensor, place: Place) -> None:
        super().__init__(values.numel(), values.dtype, place)
        self._values = values
        self._arriving: list[tuple[slice, CopyToHost]] = []  # from the device
        self._leaving: list[tuple[slice, Event]] = []  # to the device
        self._parts: dict[tuple[int | None, int | None], Tensor] = {}  # made once: the same ones in each step

    @property
    def version(self) -> int:
        return edits_of(self._values)

    def read(self, part: slice = ALL) -> Tensor:
        for _, arrival in _take_of(self._arriving, part, self.numel):
            arrival.wait(self.place.limit)
        at = part.start, part.stop
        if at not in self._parts:
            with torch.inference_mode(False):  # an evaluation may be the first to read, and training edits it later
                self._parts[at] = self._values[part]
        return self._parts[at]

    def editable(self, part: slice = ALL) -> Tensor:
        for _, event in _take_of(self._leaving, part, self.numel):
            wait_on_host(event, self.place.limit)
        return self.read(part)

    def copy_to(self, part: slice, target: Tensor) -> Tensor:
        to_device(target, self.read(part), stays=self.place.pinned)
        if self.place.pinned and not is_host(target.device):
            # Frozen parameters are gathered again and again, and nobody edits them, who would take these.
            self._leaving = [copy for copy in self._leaving if not copy[1].query()]
            self._leaving.append((part, record(target.device)))
        return target

    def write(self, part: slice, values: Tensor) -> None:
        if not is_host(self.place.device) or is_host(values.device):
            self.editable(part).copy_(values)
            return
        for _, event in _take_of(self._leaving, part, self.numel):
            wait_for(event, values.device)
        self._arriving.append((part, to_host(self._values[part], values)))

    @contextmanager
    def edit(self, part: slice = ALL) -> Iterator[Tensor]:
        yield self.editable(part)


def _take_of(copies: list[tuple[slice, T]], part: slice, numel: int) -> list[tuple[slice, T]]:
    """Removes the copies that overlap `part`, and returns them."""
    if not copies:
        return []
    start, stop, _ = part.indices(numel)
    found = [copy for copy in copies if copy[0].indices(numel)[0] < stop and start < copy[0].indices(numel)[1]]
    copies[:] = [copy for copy in copies if copy not in found]
    return found


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

    def offset_of(self, part: slice) -> int:
        """Returns the offset in the file, in bytes, of a part."""
        return self._start + part.indices(self.numel)[0] * self.dtype.itemsize

    def read(self, part: slice = ALL) -> Tensor:
        start, stop, _ = part.indices(self.numel)
        values = torch.empty(stop - start, dtype=self.dtype, device=self.place.device)
        self.disk.read(self.offset_of(part), values)
        return values

    def editable(self, part: slice = ALL) -> Tensor:
        """A copy, of which edits are lost: what is to be edited is staged."""
        return self.read(part)

    def copy_to(self, part: slice, target: Tensor) -> Tensor:
        return to_device(target, self.read(part))

    def write(self, part: slice, values: Tensor) -> None:
        self.version += 1
        self.disk.write(self.offset_of(part), values.to("cpu", self.dtype).contiguous())

    def note_write(self) -> None:
        """Counts a write that goes to the file directly."""
        self.version += 1


def move(part: slice, source: Array, target: Array) -> None:
    """Copies a part of one array to the same part of another."""
    if isinstance(target, InMemory):
        source.copy_to(part, target.editable(part))
    else:
        target.write(part, source.read(part))


class LatePart(NamedTuple):
    """A part of an array, to be read when it is needed, in a `dtype` that may be wider than the array's."""

    array: Array
    part: slice
    dtype: torch.dtype

    def read(self) -> Tensor:
        return self.array.read(self.part).to(self.dtype)


def read_late(array: Array, part: slice) -> "Tensor | LatePart":
    """Returns the values of a part, or, if they are on disk, a `LatePart` that reads them later."""
    return LatePart(array, part, array.dtype) if isinstance(array, OnDisk) else array.read(part)


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
        array.editable().zero_()
    else:
        for start in range(0, numel, ZEROS):  # this range of the file may have held another array
            array.write(slice(start, start + ZEROS), torch.zeros(min(ZEROS, numel - start), dtype=dtype, device=HOST))
    return array
