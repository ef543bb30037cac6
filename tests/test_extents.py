"""Layouts and extents: integers only, so every property is checked over random shapes, ranks, boxes and alignments."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_zero.extents import Extent, Layout, Overlap

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8)
layouts = st.builds(
    lambda shapes, ranks, bucket, alignment: Layout.pack(
        [(f"p{index}", shape) for index, shape in enumerate(shapes)],
        ranks=ranks,
        bucket_numel=bucket,
        alignment=alignment,
    ),
    shapes,
    st.integers(1, 9),
    st.integers(1, 200),
    st.sampled_from([1, 2, 16]),
)


@given(layouts)
def test_pieces_tile_every_parameter_exactly_once(layout: Layout) -> None:
    for index, span in enumerate(layout.spans):
        pieces = [layout.piece(index, rank) for rank in range(layout.ranks)]
        owned = [element for piece in pieces for element in range(piece.start, piece.stop)]
        assert owned == list(range(span.numel))


@given(layouts)
def test_a_piece_lies_in_the_shard_where_the_parameter_lies_in_the_flat_array(layout: Layout) -> None:
    for index, span in enumerate(layout.spans):
        for rank in range(layout.ranks):
            piece = layout.piece(index, rank)
            assert 0 <= piece.shard_start <= piece.shard_stop <= layout.shard_numel
            if piece.numel:
                assert rank * layout.shard_numel + piece.shard_start == span.offset + piece.start


@given(layouts)
def test_slices_tile_the_shard_in_order(layout: Layout) -> None:
    assert [column for columns in layout.slices for column in columns] == list(range(layout.shard_numel))
    assert layout.largest_slice_numel == layout.ranks * max((len(columns) for columns in layout.slices), default=0)


@given(layouts)
def test_segments_of_all_slices_carry_every_element_to_its_place_once(layout: Layout) -> None:
    carried = {}
    for columns in layout.slices:
        for segment in layout.segments(columns):
            for step in range(segment.stop - segment.start):
                row, column = divmod(segment.bucket_start + step, len(columns))
                flat = row * layout.shard_numel + columns.start + column
                assert flat == layout.spans[segment.index].offset + segment.start + step
                assert flat not in carried
                carried[flat] = segment.index
    assert len(carried) == sum(span.numel for span in layout.spans)


@given(layouts, st.sampled_from([1, 2, 16]))
def test_padding_is_bounded_by_the_alignment(layout: Layout, alignment: int) -> None:
    used = sum(span.numel for span in layout.spans)
    aligned = Layout.pack(
        [(span.name, span.shape) for span in layout.spans], ranks=layout.ranks, bucket_numel=10, alignment=alignment
    )
    assert aligned.numel - used < alignment * (len(layout.spans) + layout.ranks)
    assert all(span.offset % alignment == 0 for span in aligned.spans)
    assert aligned.shard_numel % alignment == 0


@given(layouts)
def test_extents_of_all_ranks_sum_to_the_whole(layout: Layout) -> None:
    extents = [extent for rank in range(layout.ranks) for extent in layout.extents(rank)]
    for span in layout.spans:
        mine = [extent for extent in extents if extent.name == span.name]
        assert sum(extent.numel for extent in mine) == span.numel
        assert all(extent.box_shape == extent.shape == span.shape for extent in mine)


def test_a_slice_holds_at_most_one_bucket() -> None:
    layout = Layout.pack([("w", (1000, 10))], ranks=4, bucket_numel=900, alignment=16)
    assert math.ceil(layout.shard_numel / layout.slice_columns) == len(layout.slices) == 12
    assert layout.largest_slice_numel == 4 * 224 <= 900


@st.composite
def boxes(draw: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of a part of a parameter; now and then all of it, or nothing."""
    if draw(st.booleans()):
        return (0,) * len(shape), shape
    bounds = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds)


@st.composite
def extents_of(draw: Any, shape: tuple[int, ...], box: tuple[tuple[int, ...], tuple[int, ...]] | None = None) -> Extent:
    offset, box_shape = draw(boxes(shape)) if box is None else box
    start, stop = sorted(draw(st.tuples(*[st.integers(0, math.prod(box_shape))] * 2)))
    return Extent(name="p", shape=shape, box_offset=offset, box_shape=box_shape, start=start, stop=stop)


@st.composite
def pairs_of_extents(draw: Any) -> tuple[Extent, Extent]:
    """Two of one parameter, in the same box or in different ones."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4).map(tuple))
    box = draw(st.none() | boxes(shape))
    return draw(extents_of(shape, box)), draw(extents_of(shape, box))


def elements(extent: Extent) -> list[int]:
    """What an extent holds, in order, as numbers of the elements of the whole parameter."""
    whole = torch.arange(math.prod(extent.shape)).view(extent.shape)
    box = whole[tuple(slice(a, a + b) for a, b in zip(extent.box_offset, extent.box_shape, strict=True))]
    return box.reshape(-1)[extent.start : extent.stop].tolist()


def extent(shape: tuple[int, ...], offset: tuple[int, ...], box: tuple[int, ...], start: int, stop: int) -> Extent:
    return Extent(name="p", shape=shape, box_offset=offset, box_shape=box, start=start, stop=stop)


@given(pairs_of_extents())
@example((Extent.of_whole("p", ()), Extent.of_whole("p", ())))
@example((Extent.of_whole("p", (0, 3)), extent((0, 3), (0, 1), (0, 2), 0, 0)))
@example((Extent.of_whole("p", (4, 6), 3, 20), extent((4, 6), (1, 2), (3, 2), 1, 6)))
def test_overlaps_are_the_elements_that_two_extents_share_in_order(pair: tuple[Extent, Extent]) -> None:
    mine, theirs = (elements(one) for one in pair)
    runs = list(pair[0].overlaps(pair[1]))
    assert all(run.numel > 0 for run in runs)
    found = [(run.mine + step, run.theirs + step) for run in runs for step in range(run.numel)]
    places = {element: place for place, element in enumerate(theirs)}
    assert found == [(place, places[element]) for place, element in enumerate(mine) if element in places]


@given(pairs_of_extents())
def test_overlaps_look_the_same_from_either_side(pair: tuple[Extent, Extent]) -> None:
    one, other = pair
    assert [(run.theirs, run.mine, run.numel) for run in one.overlaps(other)] == list(other.overlaps(one))


def test_extents_of_one_box_share_at_most_one_run() -> None:
    runs = list(
        Extent.of_whole("p", (1000, 1000), 10, 900_000).overlaps(Extent.of_whole("p", (1000, 1000), 5, 999_999))
    )
    assert runs == [Overlap(mine=0, theirs=5, numel=899_990)]


@pytest.mark.parametrize(
    ("offset", "box", "runs"),
    [
        ((0, 0, 0), (2, 5, 6), 1),  # whole slabs lie in one piece
        ((2, 0, 0), (2, 5, 6), 1),
        ((0, 1, 0), (4, 2, 6), 4),  # whole rows: a run for each slab
        ((0, 0, 3), (4, 5, 3), 20),  # columns: a run for each row
    ],
)
def test_runs_are_as_long_as_both_boxes_allow(offset: tuple[int, ...], box: tuple[int, ...], runs: int) -> None:
    found = list(Extent.of_whole("p", (4, 5, 6)).overlaps(extent((4, 5, 6), offset, box, 0, math.prod(box))))
    assert len(found) == runs
    assert sum(run.numel for run in found) == math.prod(box)
