"""`Extent`: which elements of which parameter, independent of the stage and of the number of ranks.

Layouts, checkpoints and optimizer state speak of the same extents: integers only, no tensors, no process group.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Extent:
    """A run of elements of one parameter: ``[start, stop)`` of a box, in logical C order.

    The box is the part of the parameter that this process holds: all of it, or its tensor-parallel part.
    """

    name: str
    shape: tuple[int, ...]  # of the whole parameter, over all tensor-parallel ranks
    box_offset: tuple[int, ...]
    box_shape: tuple[int, ...]
    start: int  # elements, within the box
    stop: int

    @classmethod
    def of_whole(cls, name: str, shape: Sequence[int], start: int = 0, stop: int | None = None) -> "Extent":
        """Returns elements ``[start, stop)``, by default all, of a parameter that is not tensor-parallel."""
        shape = tuple(shape)
        stop = math.prod(shape) if stop is None else stop
        return cls(name=name, shape=shape, box_offset=(0,) * len(shape), box_shape=shape, start=start, stop=stop)

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: "Extent") -> Iterator["Overlap"]:
        """Yields the elements that both extents of one parameter hold, as runs that are contiguous in both."""
        if (self.box_offset, self.box_shape) == (other.box_offset, other.box_shape):
            yield from self._clip(other, 0, 0, math.prod(self.box_shape))
            return
        low = tuple(map(max, self.box_offset, other.box_offset))
        ends = [map(sum, zip(each.box_offset, each.box_shape, strict=True)) for each in (self, other)]
        high = tuple(map(min, *ends))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return
        rows = len(low) - 1  # leading dimensions to walk through; the dimensions behind are contiguous in both boxes
        while rows and all(high[rows] - low[rows] == box[rows] for box in (self.box_shape, other.box_shape)):
            rows -= 1
        run = math.prod(b - a for a, b in zip(low[rows:], high[rows:], strict=True))
        for index in itertools.product(*map(range, low[:rows], high[:rows])):
            corner = (*index, *low[rows:])
            yield from self._clip(other, self._place(corner), other._place(corner), run)

    def _clip(self, other: "Extent", mine: int, theirs: int, run: int) -> Iterator["Overlap"]:
        """Yields the part of a run that both extents hold. The run begins at `mine` and `theirs` in their boxes."""
        skip = max(self.start - mine, other.start - theirs, 0)
        end = min(self.stop - mine, other.stop - theirs, run)
        if skip < end:
            yield Overlap(mine + skip - self.start, theirs + skip - other.start, end - skip)

    def _place(self, index: Sequence[int]) -> int:
        """Returns the position in this box of the element at `index` of the whole parameter."""
        place = 0
        for at, offset, size in zip(index, self.box_offset, self.box_shape, strict=True):
            place = place * size + at - offset
        return place


class Overlap(NamedTuple):
    """A run of `numel` elements that two extents hold, by its position within each."""

    mine: int
    theirs: int
    numel: int
