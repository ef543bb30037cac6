"""Which elements of which parameter a rank owns, as plain data: integers only, no tensors, no process group.

A `Layout` packs the parameters of a group into one flat array and divides it evenly. Seen as a matrix of
``(ranks, shard_numel)`` in C order, row r is what rank r owns:

    parameters   | a a a a a a a b b b . | b b c c c c c c d . . |        . = padding
    ranks        |<------- row 0 ------->|<------- row 1 ------->|        row = shard, contiguous
    slices       |  0  |  1  |  2  |  3  |  0  |  1  |  2  |  3  |        slice = columns, one collective

So a rank owns of each parameter at most one contiguous piece, and the piece is a view both of the shard and of
the full array. Collectives move *slices* (blocks of columns) of at most one bucket: for a group no larger than a
bucket the only slice is the whole array; a larger one travels in several.
"""

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
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
        """Elements ``[start, stop)`` of a parameter that no tensor-parallel rank shares; all of them by default."""
        shape = tuple(shape)
        stop = math.prod(shape) if stop is None else stop
        return cls(name=name, shape=shape, box_offset=(0,) * len(shape), box_shape=shape, start=start, stop=stop)

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: "Extent") -> Iterator["Overlap"]:
        """The elements that two extents of one parameter share, as runs that are contiguous in both."""
        if (self.box_offset, self.box_shape) == (other.box_offset, other.box_shape):
            yield from self._clip(other, 0, 0, math.prod(self.box_shape))
            return
        low = tuple(map(max, self.box_offset, other.box_offset))
        high = tuple(map(min, self._box_end, other._box_end))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return
        rows = len(low) - 1  # leading dimensions to walk through; what follows lies in one piece in both boxes
        while rows and all(high[rows] - low[rows] == box[rows] for box in (self.box_shape, other.box_shape)):
            rows -= 1
        run = math.prod(b - a for a, b in zip(low[rows:], high[rows:], strict=True))
        for index in itertools.product(*map(range, low[:rows], high[:rows])):
            corner = (*index, *low[rows:])
            yield from self._clip(other, self._place(corner), other._place(corner), run)

    def _clip(self, other: "Extent", mine: int, theirs: int, run: int) -> Iterator["Overlap"]:
        """The part of `run` elements, at `mine` and `theirs` in the boxes, that lies inside both ranges."""
        skip = max(self.start - mine, other.start - theirs, 0)
        end = min(self.stop - mine, other.stop - theirs, run)
        if skip < end:
            yield Overlap(mine + skip - self.start, theirs + skip - other.start, end - skip)

    def _place(self, index: Sequence[int]) -> int:
        """Where the element at `index` of the whole parameter lies in this box."""
        place = 0
        for at, offset, size in zip(index, self.box_offset, self.box_shape, strict=True):
            place = place * size + at - offset
        return place

    @property
    def _box_end(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.box_offset, self.box_shape, strict=True))


class Overlap(NamedTuple):
    """A run of `numel` elements that two extents share, by its place in either range."""

    mine: int
    theirs: int
    numel: int


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
class Piece:
    """What one rank owns of one parameter; empty when ``start == stop``."""

    start: int  # within the parameter
    stop: int
    shard_start: int  # within the rank's shard

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def shard_stop(self) -> int:
        return self.shard_start + self.numel


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of one parameter inside a slice, and where it lands in the bucket that carries the slice."""

    index: int  # of the parameter
    start: int  # within the parameter
    stop: int
    bucket_start: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The flat array of a group, evenly divided over `ranks` and cut into slices.

    Args:
        spans: the parameters, in order, aligned.
        ranks: how many shards.
        shard_numel: elements of one shard; the flat array has ``ranks * shard_numel``.
        slice_columns: columns of a full slice; the last one may be narrower.
    """

    spans: tuple[Span, ...]
    ranks: int
    shard_numel: int
    slice_columns: int

    @classmethod
    def pack(
        cls,
        parameters: Sequence[tuple[str, tuple[int, ...]]],
        *,
        ranks: int,
        bucket_numel: int,
        alignment: int = 1,
    ) -> "Layout":
        """Places `parameters` one after the other.

        Args:
            parameters: name and shape of each.
            ranks: shards to divide into.
            bucket_numel: most elements that one collective moves.
            alignment: elements; every parameter and shard starts at a multiple of it, so that kernels see
                the same alignment as for a tensor of its own (some sum in another order otherwise).
        """
        spans, offset = [], 0
        for name, shape in parameters:
            spans.append(Span(name=name, shape=tuple(shape), offset=offset))
            offset += _round_up(math.prod(shape), alignment)
        shard_numel = _round_up(-(-offset // ranks), alignment)
        slice_columns = max(alignment, bucket_numel // ranks // alignment * alignment)
        return cls(spans=tuple(spans), ranks=ranks, shard_numel=shard_numel, slice_columns=slice_columns)

    @property
    def numel(self) -> int:
        """Elements of the flat array, padding included."""
        return self.ranks * self.shard_numel

    @cached_property
    def slices(self) -> tuple[range, ...]:
        """The columns of each slice."""
        starts = range(0, self.shard_numel, self.slice_columns)
        return tuple(range(start, min(start + self.slice_columns, self.shard_numel)) for start in starts)

    @property
    def largest_slice_numel(self) -> int:
        return self.ranks * max((len(columns) for columns in self.slices), default=0)

    def index_at(self, offset: int) -> int:
        """The parameter that an element of the flat array belongs to."""
        return bisect.bisect_right(self._offsets, offset) - 1

    @cached_property
    def _offsets(self) -> list[int]:
        return [span.offset for span in self.spans]

    def piece(self, index: int, rank: int) -> Piece:
        """What `rank` owns of parameter `index`."""
        span, row = self.spans[index], rank * self.shard_numel
        start = min(max(row - span.offset, 0), span.numel)
        stop = min(max(row + self.shard_numel - span.offset, start), span.numel)
        shard_start = span.offset + start - row if stop > start else 0
        return Piece(start=start, stop=stop, shard_start=shard_start)

    def extents(self, rank: int) -> list[Extent]:
        """Everything that `rank` owns, by name; parameters it owns nothing of are left out."""
        owned = []
        for index, span in enumerate(self.spans):
            piece = self.piece(index, rank)
            if piece.numel:
                owned.append(Extent.of_whole(span.name, span.shape, piece.start, piece.stop))
        return owned

    def segments(self, columns: range) -> list[Segment]:
        """How the slice of these columns, laid out row by row in a bucket, maps to the parameters."""
        width, found = len(columns), []
        for row in range(self.ranks):
            low = row * self.shard_numel + columns.start
            for index, span in enumerate(self.spans):
                start = max(low, span.offset)
                stop = min(low + width, span.offset + span.numel)
                if start < stop:
                    at = row * width + start - low
                    found.append(
                        Segment(index=index, start=start - span.offset, stop=stop - span.offset, bucket_start=at)
                    )
        return found


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple
