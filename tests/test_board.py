"""Agreements through the store: the same verdict on every rank, and the names of those who are not there."""

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_zero.wire.board import AgreementError, Board
from lightning_zero.wire.local import LocalComm
from ranks import AT_ONCE
from thread_world import ThreadWorld

SILENCE = 2.0  # s, after which a rank counts as dead: twenty times as long as those that live are silent here


def total(records: list[dict[str, Any]]) -> dict[str, Any]:
    return {"total": sum(record["value"] for record in records)}


def error_of(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(AgreementError) as raised:
        function(*args, **kwargs)
    return str(raised.value)


def test_every_rank_hears_what_rank_0_decides_from_all_records() -> None:
    found = ThreadWorld(4).run(lambda comm: comm.board.agree("sum", {"value": comm.rank}, total))
    assert found == [{"total": 6}] * 4


def test_one_rank_agrees_with_itself() -> None:
    assert LocalComm().board.agree("sum", {"value": 3}, total) == {"total": 3}


def test_what_one_rank_failed_with_is_raised_on_all_in_the_same_words() -> None:
    def agree(comm: Any) -> str:
        record = {"error": "no space"} if comm.rank == 2 else {"value": 1}
        return error_of(comm.board.agree, "sum", record, total)

    assert ThreadWorld(3).run(agree) == ["rank 2: no space"] * 3


def test_what_rank_0_cannot_decide_is_raised_on_all() -> None:
    def refuse(_: Any) -> Any:
        raise ValueError("not like this")

    def agree(comm: Any) -> str:
        return error_of(comm.board.agree, "sum", {}, refuse)

    assert ThreadWorld(3).run(agree) == ["ValueError: not like this"] * 3


def test_rank_0_stays_until_all_others_have_parted() -> None:
    parted: list[int] = []

    def part(comm: Any) -> list[int]:
        if comm.rank:
            time.sleep(0.1 * comm.rank)
            parted.append(comm.rank)
        comm.board.part("end")
        return [*parted]

    assert ThreadWorld(3).run(part)[0] == [1, 2]


def test_rank_0_stays_no_longer_than_a_dead_rank_may_be_silent() -> None:
    started = time.monotonic()
    ThreadWorld(2, SILENCE).run(lambda comm: None if comm.rank else comm.board.part("end"))
    assert SILENCE <= time.monotonic() - started < AT_ONCE


@pytest.mark.parametrize("absent", [{0}, {1}, {2, 3}, {0, 3}])
def test_ranks_that_do_not_come_are_named_in_time_by_all_that_did(absent: set[int]) -> None:
    here = threading.Barrier(4 - len(absent))  # no thread that comes is begun later than the others' limit

    def agree(comm: Any) -> str | None:
        if comm.rank in absent:
            return None
        here.wait(60)
        return error_of(comm.board.agree, "sum", {"value": 1}, total, "come here; missing: {missing}")

    started = time.monotonic()
    found = ThreadWorld(4, SILENCE).run(agree)
    assert time.monotonic() - started < AT_ONCE
    for rank, error in enumerate(found):
        assert error == (None if rank in absent else f"come here; missing: {sorted(absent)}")


def test_a_rank_that_is_slow_but_shows_life_is_waited_for() -> None:
    def agree(comm: Any) -> Any:
        if comm.rank == 1:
            for _ in range(30):
                time.sleep(SILENCE / 20)
                comm.board.beat()
        return comm.board.agree("sum", {"value": 1}, total)

    assert ThreadWorld(2, SILENCE).run(agree) == [{"total": 2}] * 2


def test_a_rank_whose_work_cannot_tell_how_it_gets_on_is_waited_for() -> None:
    def agree(comm: Any) -> Any:
        if comm.rank == 1:
            with comm.board.alive():
                time.sleep(1.5 * SILENCE)
        return comm.board.agree("sum", {"value": 1}, total)

    assert ThreadWorld(2, SILENCE).run(agree) == [{"total": 2}] * 2


def test_such_work_is_not_believed_in_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_zero.wire.board._LONGEST_WORK", 0.5)
    has_given_up = threading.Event()

    def agree(comm: Any) -> str | None:
        if comm.rank == 1:
            with comm.board.alive():  # until rank 0 has given up, and not a moment less
                assert has_given_up.wait(AT_ONCE)
            return None
        told = error_of(comm.board.agree, "sum", {"value": 1}, total)
        has_given_up.set()
        return told

    assert ThreadWorld(2, SILENCE).run(agree) == ["ranks [1] never came", None]


def test_what_another_thread_of_a_rank_does_is_no_sign_of_life() -> None:
    """The run of that rank may hang while its save in the background goes on."""
    has_given_up = threading.Event()

    def agree(comm: Any) -> str | None:
        if comm.rank == 1:
            with comm.board.clone().alive():
                assert has_given_up.wait(AT_ONCE)
            return None
        told = error_of(comm.board.agree, "sum", {"value": 1}, total)
        has_given_up.set()
        return told

    assert ThreadWorld(2, 0.5).run(agree) == ["ranks [1] never came", None]


def test_ranks_that_wait_at_two_topics_do_not_wait_for_each_other_for_ever() -> None:
    """Both show life. A daemon does it: a rank that waits for ever would keep the session from its end."""
    found: dict[int, str] = {}

    def agree(comm: Any) -> None:
        found[comm.rank] = error_of(comm.board.agree, f"topic {comm.rank}", {"value": 1}, total)

    waits = threading.Thread(target=ThreadWorld(2, 0.5).run, args=(agree,), daemon=True)
    waits.start()
    waits.join(AT_ONCE)
    assert found == {0: "ranks [1] never came", 1: "ranks [0] never came"}


def test_an_error_that_was_survived_is_not_named_as_the_cause_of_a_later_one() -> None:
    has_given_up = threading.Event()

    def agree(comm: Any) -> bool:
        if comm.rank == 0:
            error_of(comm.board.agree, "alone", {}, total)
            has_given_up.set()
        assert has_given_up.wait(60)
        comm.board.agree("sum", {"value": 1}, total)
        return comm.board._has("lost/0")

    assert ThreadWorld(2, 2.0).run(agree) == [False, False]


def test_two_threads_of_each_rank_agree_side_by_side() -> None:
    def agree(comm: Any) -> Any:
        found: list[Any] = []
        other = comm.board.clone()
        thread = threading.Thread(target=lambda: found.append(other.agree("behind", {"value": 2}, total)))
        thread.start()
        in_front = comm.board.agree("before", {"value": 1}, total)
        thread.join()
        return in_front, found[0]

    assert ThreadWorld(3).run(agree) == [({"total": 3}, {"total": 6})] * 3


def test_a_clone_may_have_a_time_limit_of_its_own() -> None:
    def agree(comm: Any) -> tuple[str, float] | None:
        board = comm.board.clone(timedelta(seconds=0.2))
        if comm.rank == 1:
            return None
        started = time.monotonic()
        return error_of(board.agree, "sum", {"value": 1}, total), time.monotonic() - started

    told, seconds = ThreadWorld(2).run(agree)[0]
    assert told == "ranks [1] never came"
    assert seconds < AT_ONCE


def test_the_store_does_not_grow_with_agreements() -> None:
    store = dist.HashStore()
    boards = [Board(store, rank, 2, timedelta(seconds=10)) for rank in range(2)]
    keys = []
    for number in range(20):
        threads = [
            threading.Thread(target=board.agree, args=(f"sum {number}", {"value": 1}, total)) for board in boards
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        keys.append(store.num_keys())
    assert keys[-1] == keys[1]
