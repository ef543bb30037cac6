"""Extents: integers only, so every property is checked over random shapes and boxes."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_zero.shards.extents import Extent, Overlap


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
