"""Rooms in memory for what is there only while it is stepped."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_zero.shards.staging import Staged, StagingPool, _may_rest
from lightning_zero.tiers.ledger import Category, Ledger


def test_rooms_are_used_again_while_no_window_is_larger_than_they_are() -> None:
    ledger = Ledger()
    pool = StagingPool(ledger, pinned=False)
    room = pool.take(4096)
    pool.give_back(room)
    assert pool.take(64) is room
    assert ledger.live[Category.BUCKET] == 4096


def test_a_room_of_smaller_windows_is_none_for_a_larger_one_whenever_it_comes_back() -> None:
    pool = StagingPool(Ledger(), pinned=False)
    free, late = pool.take(64), pool.take(64)
    pool.give_back(free)
    assert pool.take(128).numel() == 128
    pool.give_back(late)
    assert pool.take(128).numel() == 128


def test_a_write_that_failed_is_told_before_its_room_is_given_back() -> None:
    pool, failed = StagingPool(Ledger(), pinned=False), Future[None]()
    failed.set_exception(OSError("No space left on device"))
    staged = Staged(torch.optim.SGD([torch.ones(1)]), [], pool, late=False)
    staged._room = pool.take(64)
    staged._writes.append(failed)
    with pytest.raises(OSError, match="No space left"):
        staged.finish()
    assert pool.take(64) is not staged._room


CUT: Any = SimpleNamespace(stepper=None, shape=(2, 3), piece=SimpleNamespace(numel=3))
NONE_HERE: Any = SimpleNamespace(stepper=None, shape=(2, 3), piece=SimpleNamespace(numel=0))
WHOLE: Any = SimpleNamespace(stepper=0, shape=(2, 3), piece=SimpleNamespace(numel=3))
SCALAR: Any = SimpleNamespace(stepper=None, shape=(), piece=SimpleNamespace(numel=1))


@pytest.mark.parametrize(
    ("slot", "shape", "is_cut", "expected"),
    [
        (CUT, (3,), True, True),
        (CUT, (3,), False, False),  # one for each of three blocks, say
        (CUT, (2, 3), True, False),
        (NONE_HERE, (0,), True, False),
        (SCALAR, (1,), True, False),
        (WHOLE, (2, 3), False, True),  # a rank may step too few to tell by the name
        (WHOLE, (3, 2), False, False),
        (WHOLE, (3,), True, False),
    ],
)
def test_state_is_offloaded_if_it_is_cut_as_its_parameter_or_whole_as_it(
    slot: Any, shape: tuple[int, ...], is_cut: bool, expected: bool
) -> None:
    assert _may_rest(slot, torch.ones(shape), is_cut) is expected
