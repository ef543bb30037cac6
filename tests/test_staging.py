"""Rooms in memory for what is there only while it is stepped."""

from lightning_zero.shards.staging import StagingPool
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
