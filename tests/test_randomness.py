"""Random state of a rank, and what a fit goes on from."""

import random

import numpy
import pytest
import torch

from lightning_zero.checkpoint import randomness
from lightning_zero.checkpoint.resume import ResumeEntry
from lightning_zero.views.lazy import materialize

HOST = torch.device("cpu")


def draw() -> tuple[float, ...]:
    numbers = (random.random(), random.gauss(0, 1), float(numpy.random.rand()), float(numpy.random.randn()))
    return (*numbers, *torch.rand(3).tolist(), *torch.randn(17).tolist())


def test_every_generator_goes_on_where_it_was() -> None:
    draw()  # half a pair of normal numbers is kept for the next time: that is state, too
    state = randomness.capture(HOST)
    expected = [draw(), draw()]
    draw()
    randomness.restore(state, HOST)
    assert [draw(), draw()] == expected


def test_derived_states_differ_by_seed_step_and_rank_and_are_the_same_again() -> None:
    keys = [(0, 10, 0), (0, 10, 1), (0, 11, 0), (1, 10, 0)]
    first, second = [], []
    for drawn in (first, second):
        for key in keys:
            randomness.derive(*key)
            drawn.append(draw())
    assert first == second
    assert len(set(first)) == len(keys)


def test_as_many_ranks_go_on_with_their_own_numbers() -> None:
    said: list[str] = []
    saved = ResumeEntry(1, 2, 1, HOST, said.append).capture(5, [])
    expected = draw()
    ResumeEntry(1, 2, 1, HOST, said.append).restore_random({**saved, "random": materialize(dict(saved["random"]))})
    assert draw() == expected
    assert said == []


@pytest.mark.parametrize("world", [1, 3])
def test_more_or_fewer_ranks_take_new_numbers_and_say_so(world: int) -> None:
    said: list[str] = []
    saved = ResumeEntry(0, 2, 1, HOST, said.append).capture(5, [])
    before = draw()
    drawn = []
    for rank in range(world):
        ResumeEntry(rank, world, 1, HOST, said.append).restore_random(saved)
        drawn.append(draw())
    assert before not in drawn
    assert len(set(drawn)) == world
    assert f"of 2 ranks, and there are {world}" in said[0]


def test_new_numbers_are_others_after_another_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is cut off each hour, on whatever machines are free, must not begin with the same ones each time."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    drawn = []
    for step in (5, 6, 5):
        ResumeEntry(0, 3, 1, HOST, lambda _: None).restore_random(
            ResumeEntry(0, 2, 1, HOST, lambda _: None).capture(step, [])
        )
        drawn.append(draw())
    assert drawn[0] == drawn[2] != drawn[1]


def test_ranks_that_share_modules_take_the_same_new_numbers_and_the_others_others() -> None:
    saved = ResumeEntry(0, 2, 1, HOST, lambda _: None).capture(5, [])
    drawn = []
    for rank in range(4):
        ResumeEntry(rank, 4, 2, HOST, lambda _: None).restore_random(saved)
        drawn.append(draw())
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
