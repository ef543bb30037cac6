"""Layouts: integers only, so every property is checked over random shapes, ranks and alignments."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.shards.layout import Layout

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
def test_owners_are_the_ranks_that_have_a_piece(layout: Layout) -> None:
    for index in range(len(layout.spans)):
        have = [rank for rank in range(layout.ranks) if layout.piece(index, rank).numel]
        assert list(layout.owners(index)) == have


@given(layouts)
def test_a_piece_lies_in_the_shard_where_the_parameter_lies_in_the_flat_array(layout: Layout) -> None:
    for index, span in enumerate(layout.spans):
        of = layout.slice_of(index)
        for rank in range(layout.ranks):
            piece = layout.piece(index, rank)
            if piece.numel:
                column = piece.shard_start - of.shard_start
                assert 0 <= column <= column + piece.numel <= of.width
                assert of.start + rank * of.width + column == span.offset + piece.start


@given(layouts)
def test_slices_tile_the_flat_array_and_the_shard_in_order(layout: Layout) -> None:
    start = shard_start = 0
    for of in layout.slices:
        assert (of.start, of.shard_start) == (start, shard_start)
        start += layout.ranks * of.width
        shard_start += of.width
    assert (start, shard_start) == (layout.numel, layout.shard_numel)
    assert [index for of in layout.slices for index in of.parameters] == list(range(len(layout.spans)))


@given(layouts)
def test_a_slice_holds_whole_parameters_in_order(layout: Layout) -> None:
    for of in layout.slices:
        end = of.start
        for index in of.parameters:
            assert layout.spans[index].offset >= end
            end = layout.spans[index].offset + layout.spans[index].numel
        assert end <= of.start + layout.ranks * of.width


@given(layouts)
def test_chunks_tile_the_slices_and_cut_only_one_that_holds_one_parameter(layout: Layout) -> None:
    assert [column for chunk in layout.chunks for column in range(chunk.in_shard.start, chunk.in_shard.stop)] == list(
        range(layout.shard_numel)
    )
    assert all(chunk.is_whole or len(chunk.of.parameters) == 1 for chunk in layout.chunks)


@given(layouts, st.sampled_from([1, 2, 16]))
def test_padding_is_bounded_by_the_alignment(layout: Layout, alignment: int) -> None:
    used = sum(span.numel for span in layout.spans)
    aligned = Layout.pack(
        [(span.name, span.shape) for span in layout.spans], ranks=layout.ranks, bucket_numel=10, alignment=alignment
    )
    assert aligned.numel - used < alignment * (len(layout.spans) + len(aligned.slices) * (layout.ranks + 1))
    assert all(span.offset % alignment == 0 for span in aligned.spans)
    assert all(of.width % alignment == 0 for of in aligned.slices)


def test_small_parameters_share_slices_of_at_most_a_bucket_and_a_large_one_travels_in_chunks() -> None:
    shapes = [("a", (30, 10)), ("b", (30,)), ("c", (40, 10)), ("w", (1000, 10)), ("d", (7,))]
    layout = Layout.pack(shapes, ranks=4, bucket_numel=900, alignment=16)
    assert [list(of.parameters) for of in layout.slices] == [[0, 1, 2], [3], [4]]
    assert [layout.ranks * of.width for of in layout.slices[::2]] == [768, 64]
    assert max(4 * chunk.width for chunk in layout.chunks) == 896
    assert sum(chunk.of is layout.slices[1] for chunk in layout.chunks) == 12


def test_in_one_slice_what_a_rank_owns_is_one_run_of_the_flat_array() -> None:
    layout = Layout.pack([("a", (30, 10)), ("b", (1000,))], ranks=4, bucket_numel=100, in_one=True)
    assert len(layout.slices) == 1
    assert layout.shard_numel == layout.slices[0].width == 325


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_the_number_of_slices_and_chunks_does_not_depend_on_the_number_of_ranks(sizes: list[int]) -> None:
    """But for rounding to the alignment, which a bucket of many ranks' rows is larger than."""
    numel = 2**20
    found = set()
    for ranks in (2, 64, 1024):
        shapes = [(str(at), (size * 2**15,)) for at, size in enumerate(sizes)]
        layout = Layout.pack(shapes, ranks=ranks, bucket_numel=numel, alignment=16)
        found.add((len(layout.slices), len(layout.chunks)))
    assert len(found) == 1
