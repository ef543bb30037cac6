"""Layouts: integers only, so every property is checked over random shapes, ranks, buckets and alignments."""

import math

from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.extents import Layout

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
