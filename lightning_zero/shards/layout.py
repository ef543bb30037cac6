"""`Layout`: where the parameters of a group lie in one flat array, and which part of it each rank owns.

The flat array consists of *slices*. A slice holds whole parameters, up to one bucket of them (a parameter that is
larger has a slice to itself). It is a matrix ``(ranks, width)`` in C order, and rank r owns row r.

    slices    |<------- slice 0 ------->|<------------- slice 1 ------------>|
    flat      | a a a a a a a b b b . . | c c c c c c c c c c c c c c c c . . |       . = padding
    rows      |   rank 0   |   rank 1   |      rank 0      |      rank 1      |
    shard of rank 0:  a a a a a a | c c c c c c c c c          contiguous: its rows, one after the other

So a rank owns at most one run of elements of each parameter: one view of its shard, and one of the full array. A slice
is gathered or reduced by a single collective on contiguous memory, in place. Packing a slice copies each of its
parameters once, whatever the number of ranks.
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightning_zero.tiers.alignment import round_up


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Parameters that travel in one collective: ``ranks * width`` elements of the flat array."""

    start: int  # first element, in the flat array
    width: int  # elements of one rank's row
    shard_start: int  # where that row begins in the rank's shard
    parameters: range  # indices of the parameters in it

    @cached_property
    def in_shard(self) -> slice:
        """The rank's row, in its shard."""
        return slice(self.shard_start, self.shard_start + self.width)


@dataclass(frozen=True, kw_only=True)
class Span:
    """The place of a parameter in the flat array: elements ``[offset, offset + numel)``, inside one slice."""

    name: str
    shape: tuple[int, ...]
    offset: int
    slice: Slice

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Chunk(NamedTuple):
    """Columns of a slice that are reduced at once: all of them, unless the slice is larger than a bucket."""

    of: Slice
    start: int  # first column
    stop: int

    @property
    def width(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.width == self.of.width

    @property
    def in_shard(self) -> slice:
        """The rank's part of these columns, in its shard."""
        return slice(self.of.shard_start + self.start, self.of.shard_start + self.stop)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The part of one parameter that one rank owns: its elements ``[start, stop)``, none if the two are equal."""

    start: int
    stop: int
    shard_start: int  # where these elements begin in the rank's shard

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def in_shard(self) -> slice:
        return slice(self.shard_start, self.shard_start + self.numel)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parameters, slices and chunks in order, as the module's docstring draws them."""

    spans: tuple[Span, ...]  # one for each parameter
    slices: tuple[Slice, ...]
    chunks: tuple[Chunk, ...]  # of all slices
    ranks: int  # number of shards

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

        Every parameter and row starts at a multiple of `alignment` elements, so that kernels see the alignment that a
        tensor of its own would have: some kernels sum in another order otherwise. `in_one` puts all parameters into one
        slice, so that each rank owns one contiguous run of the flat array too.
        """
        spans: list[Span] = []
        slices: list[Slice] = []
        chunks: list[Chunk] = []
        columns = max(alignment, bucket_numel // ranks // alignment * alignment)
        start = shard_start = 0
        sizes = [round_up(math.prod(shape), alignment) for _, shape in parameters]
        for indices in [range(len(sizes))] if in_one else fill(sizes, bucket_numel):
            numel = sum(sizes[indices.start : indices.stop])
            width = max(round_up(-(-numel // ranks), alignment), alignment)
            slices.append(Slice(start=start, width=width, shard_start=shard_start, parameters=indices))
            offset = start
            for index in indices:
                name, shape = parameters[index]
                spans.append(Span(name=name, shape=tuple(shape), offset=offset, slice=slices[-1]))
                offset += sizes[index]
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
        """Returns the index of the parameter that element `offset` of the flat array belongs to."""
        return bisect.bisect_right(self.spans, offset, key=lambda span: span.offset) - 1

    def slice_of(self, index: int) -> Slice:
        """Returns the slice that holds parameter `index`."""
        return self.spans[index].slice

    def owners(self, index: int) -> range:
        """Returns the ranks that own any element of parameter `index`. They are consecutive."""
        span, of = self.spans[index], self.slice_of(index)
        start = span.offset - of.start
        return range(start // of.width, -(-(start + span.numel) // of.width)) if span.numel else range(0)

    def piece(self, index: int, rank: int) -> Piece:
        """Returns the part of parameter `index` that `rank` owns."""
        span, of = self.spans[index], self.slice_of(index)
        row = of.start + rank * of.width
        start = min(max(row - span.offset, 0), span.numel)
        stop = min(max(row + of.width - span.offset, start), span.numel)
        shard_start = of.shard_start + span.offset + start - row if stop > start else 0
        return Piece(start=start, stop=stop, shard_start=shard_start)


def fill(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Yields runs of neighbours whose sizes sum to at most `most`. A size that is larger makes a run of its own."""
    first = filled = 0
    for index, size in enumerate(sizes):
        if index > first and filled + size > most:
            yield range(first, index)
            first, filled = index, 0
        filled += size
    if sizes:
        yield range(first, len(sizes))


def overlap(one: slice, other: slice) -> slice:
    """Returns the elements that two runs have in common: an empty run, if there are none."""
    start = max(one.start, other.start)
    return slice(start, max(start, min(one.stop, other.stop)))
