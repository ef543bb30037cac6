"""`Layout`: where the parameters of a group lie in one flat array, and which part of it each rank owns.

The flat array is a row of *slices*. A slice holds whole parameters, of at most one bucket (a larger parameter has one
to itself), and is divided evenly: seen as a matrix of ``(ranks, width)`` in C order, row r is what rank r owns of it.

    slices    |<------- slice 0 ------->|<------------- slice 1 ------------>|
    flat      | a a a a a a a b b b . . | c c c c c c c c c c c c c c c c . . |       . = padding
    rows      |   rank 0   |   rank 1   |      rank 0      |      rank 1      |
    shard of rank 0:  a a a a a a | c c c c c c c c c          contiguous: its rows, one after the other

So a rank owns of each parameter at most one run of elements, which is one view of its shard and one of the full array;
a gather of a slice and a reduction of it are single collectives on contiguous memory, in place; and packing a slice
copies each of its parameters once, however many ranks there are.
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Span:
    """Where a parameter lies in the flat array: ``[offset, offset + numel)``, in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Parameters that travel together: ``ranks * width`` elements of the flat array."""

    start: int  # in the flat array
    width: int  # elements of one rank's row
    shard_start: int  # of that row in the rank's shard
    parameters: range  # indices of those in it

    @cached_property
    def in_shard(self) -> slice:
        """What a rank owns of it."""
        return slice(self.shard_start, self.shard_start + self.width)


class Chunk(NamedTuple):
    """Columns of a slice that are reduced at once: all of them, unless that is more than a bucket."""

    of: Slice
    start: int  # column
    stop: int

    @property
    def width(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.width == self.of.width

    @property
    def in_shard(self) -> slice:
        """What a rank owns of it."""
        return slice(self.of.shard_start + self.start, self.of.shard_start + self.stop)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one rank owns of one parameter: elements ``[start, stop)`` of it, none when they are equal."""

    start: int
    stop: int
    shard_start: int  # where they lie in the rank's shard

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def in_shard(self) -> slice:
        return slice(self.shard_start, self.shard_start + self.numel)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parameters, slices and chunks in order, as the module's docstring draws them."""

    spans: tuple[Span, ...]
    slices: tuple[Slice, ...]
    chunks: tuple[Chunk, ...]  # of all slices
    ranks: int  # how many shards there are

    @classmethod
    def pack(
        cls,
        parameters: Sequence[tuple[str, tuple[int, ...]]],
        *,
        ranks: int,
        bucket_numel: int,
        alignment: int = 1,
        in_one: bool = False,
    ) -> "Layout":
        """Places `parameters` (name and shape of each) one after the other. A reduction moves at most `bucket_numel`.

        Every parameter and row starts at a multiple of `alignment` elements, so that kernels see the same alignment as
        for a tensor of its own (some sum in another order otherwise). `in_one` puts all into one slice, so that what a
        rank owns is one run of the flat array, too.
        """
        spans: list[Span] = []
        slices: list[Slice] = []
        chunks: list[Chunk] = []
        columns = max(alignment, bucket_numel // ranks // alignment * alignment)
        start = shard_start = 0
        sizes = [round_up(math.prod(shape), alignment) for _, shape in parameters]
        for indices in [range(len(sizes))] if in_one else fill(sizes, bucket_numel):
            offset = start
            for index in indices:
                spans.append(Span(name=parameters[index][0], shape=tuple(parameters[index][1]), offset=offset))
                offset += sizes[index]
            width = max(round_up(-(-(offset - start) // ranks), alignment), alignment)
            slices.append(Slice(start=start, width=width, shard_start=shard_start, parameters=indices))
            step = width if len(indices) > 1 or ranks * width <= bucket_numel else columns
            chunks += [Chunk(slices[-1], at, min(at + step, width)) for at in range(0, width, step)]
            start += ranks * width
            shard_start += width
        return cls(spans=tuple(spans), slices=tuple(slices), chunks=tuple(chunks), ranks=ranks)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one rank's shard."""
        return sum(found.width for found in self.slices)

    @property
    def numel(self) -> int:
        """Elements of the flat array, padding included."""
        return self.ranks * self.shard_numel

    def index_at(self, offset: int) -> int:
        """The parameter that an element of the flat array belongs to."""
        return bisect.bisect_right(self._offsets, offset) - 1

    @cached_property
    def _offsets(self) -> list[int]:
        return [span.offset for span in self.spans]

    def slice_of(self, index: int) -> Slice:
        """The slice that parameter `index` lies in."""
        return self._slices[index]

    @cached_property
    def _slices(self) -> list[Slice]:
        return [found for found in self.slices for _ in found.parameters]

    def owners(self, index: int) -> range:
        """The ranks that own any of parameter `index`: neighbours, however many ranks there are."""
        span, of = self.spans[index], self._slices[index]
        start = span.offset - of.start
        return range(start // of.width, -(-(start + span.numel) // of.width)) if span.numel else range(0)

    def piece(self, index: int, rank: int) -> Piece:
        """What `rank` owns of parameter `index`."""
        span, of = self.spans[index], self._slices[index]
        row = of.start + rank * of.width
        start = min(max(row - span.offset, 0), span.numel)
        stop = min(max(row + of.width - span.offset, start), span.numel)
        shard_start = of.shard_start + span.offset + start - row if stop > start else 0
        return Piece(start=start, stop=stop, shard_start=shard_start)


def fill(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Runs of neighbours that are at most `most` together; one that is larger is a run of its own."""
    first = filled = 0
    for index, size in enumerate(sizes):
        if index > first and filled + size > most:
            yield range(first, index)
            first, filled = index, 0
        filled += size
    if sizes:
        yield range(first, len(sizes))


def round_up(numel: int, multiple: int) -> int:
    """The next multiple of `multiple`."""
    return -(-numel // multiple) * multiple
