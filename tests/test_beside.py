"""What a rank keeps beside averages that rest as shards, apart from the engine that collects it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_zero.shards.beside import Beside

SLOT: Any = SimpleNamespace(index=0)


@pytest.fixture
def beside() -> Beside:
    averaged: Any = SimpleNamespace(ranks=2)
    return Beside(averaged)


@pytest.mark.parametrize("drop", [lambda beside: beside.drop(0), Beside.clear], ids=["drop", "clear"])
def test_what_is_kept_after_an_edited_sum_was_dropped_is_no_edit(
    drop: Callable[[Beside], None], beside: Beside
) -> None:
    beside.show(0, torch.ones(2), is_edited=True)
    drop(beside)
    beside.keep(SLOT, torch.full((2,), 3.0))
    taken, is_addition = beside.take(0)
    assert is_addition
    assert taken.tolist() == [3.0, 3.0]


def test_a_sum_that_users_had_views_of_is_gone_with_the_backward_that_failed(beside: Beside) -> None:
    total = torch.ones(2)
    beside.show(0, total, is_edited=False)
    assert beside.has(0)
    assert beside.seen(0) is total
    beside.clear()
    assert not beside.has(0)
    assert beside.seen(0) is None


def test_what_autograd_adds_to_an_edited_sum_is_seen_in_it(beside: Beside) -> None:
    beside.show(0, torch.ones(2), is_edited=True)
    beside.add(SLOT, torch.full((2,), 3.0))
    assert beside.seen(0) is None  # or it would be shown without the addition
    assert beside.add_to(torch.zeros(2), 0).tolist() == [4.0, 4.0]
