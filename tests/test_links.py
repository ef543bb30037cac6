"""Ranks of one machine reach each other past the network, and hear of it when one is gone."""

import atexit
import datetime
import gc
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import jobs
from compare import differing
from lightning_zero.wire import links
from lightning_zero.wire.exchange import _HEADER, _TAKEN, INLINE, Exchange
from lightning_zero.wire.gloo import GlooComm, own_group
from lightning_zero.wire.links import ONLY_TCP, Links
from ranks import RankPool, run_alone

SOON = datetime.timedelta(seconds=20)
SIZES = [0, 1, 8, INLINE - 1, INLINE, INLINE + 1, 2**21 + 3]  # bytes


def comm_of_world() -> GlooComm:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return GlooComm(own_group("gloo"), SOON)


def values(seed: int, nbytes: int) -> Tensor:
    return torch.randint(256, (nbytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def send_to_each_other(late: int) -> bool:
    """Every rank sends each other one tensors of all sizes; rank `late` asks for its own when they have come."""
    comm = comm_of_world()
    linked, peers = Links(comm), [peer for peer in range(comm.size) if peer != comm.rank]
    assert all(peer in linked for peer in peers)
    sent = [
        linked.send(peer, values(100 * comm.rank + tag, nbytes), tag)
        for peer in peers
        for tag, nbytes in enumerate(SIZES)
    ]
    if comm.rank == late:
        time.sleep(0.3)
    landed = {(peer, tag): torch.zeros(SIZES[tag], dtype=torch.uint8) for peer in peers for tag in range(len(SIZES))}
    received = [linked.receive(peer, landed[peer, tag], tag) for peer, tag in reversed(landed)]
    for message in [*received, *sent]:
        message.wait(SOON)
    return all(torch.equal(landed[peer, tag], values(100 * peer + tag, SIZES[tag])) for peer, tag in landed)


@pytest.mark.parametrize("late", [0, 1, 9])
@pytest.mark.parametrize("size", [2, 4])
def test_tensors_of_every_size_arrive_whoever_comes_first(size: int, late: int, pool_of: Any) -> None:
    assert all(pool_of(size).run(send_to_each_other, late))


def send_in_order(nbytes: int) -> list[int]:
    comm = comm_of_world()
    linked, peer = Links(comm), 1 - comm.rank
    sent = [linked.send(peer, torch.full((nbytes,), number, dtype=torch.uint8), 7) for number in range(5)]
    landed = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(5)]
    for message in [*[linked.receive(peer, tensor, 7) for tensor in landed], *sent]:
        message.wait(SOON)
    return [int(tensor[-1]) for tensor in landed]


@pytest.mark.parametrize("nbytes", [4, 2 * INLINE])
def test_messages_with_one_tag_keep_their_order(nbytes: int, two_ranks: RankPool) -> None:
    assert two_ranks.run(send_in_order, nbytes) == [[0, 1, 2, 3, 4]] * 2


def change_after_wait() -> float:
    """Rank 0 overwrites what it has sent as soon as `wait` allows that."""
    comm = comm_of_world()
    linked, tensor = Links(comm), torch.ones(2**20)
    for tag in range(20):
        if comm.rank == 0:
            linked.send(1, tensor.fill_(1.0), tag).wait(SOON)
            tensor.fill_(2.0)
        else:
            linked.receive(0, tensor, tag).wait(SOON)
            assert bool((tensor == 1.0).all())
    return float(tensor.sum())


def test_a_tensor_is_the_senders_again_once_it_has_arrived(two_ranks: RankPool) -> None:
    assert two_ranks.run(change_after_wait) == [2.0**21, 2.0**20]


def disagree_on_size() -> str:
    comm = comm_of_world()
    linked = Links(comm)
    sent = torch.zeros(INLINE)
    with pytest.raises(RuntimeError) as caught:
        (linked.send(1, sent, 1) if comm.rank == 0 else linked.receive(0, torch.zeros(4), 1)).wait(SOON)
    return str(caught.value)


def test_another_size_than_expected_is_told_and_ends_the_senders_wait(two_ranks: RankPool) -> None:
    assert two_ranks.run(disagree_on_size) == [
        "connection closed by peer",
        f"rank 0 sent {4 * INLINE} bytes where 16 were expected",
    ]


def send_much_at_once() -> bool:
    """While the threads copy a large tensor, for which each then has an answer to send, small ones fill the sockets."""
    comm = comm_of_world()
    linked, peer = Links(comm), 1 - comm.rank
    sizes = [2**26, *[INLINE] * 30]
    landed = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in sizes]
    leaving = [torch.full((nbytes,), tag + comm.rank, dtype=torch.uint8) for tag, nbytes in enumerate(sizes)]
    comm.all_gather_object(0, "both begin")
    messages = [linked.receive(peer, landed[0], 0)]
    messages += [linked.send(peer, tensor, tag) for tag, tensor in enumerate(leaving)]
    messages += [linked.receive(peer, tensor, tag) for tag, tensor in enumerate(landed) if tag]
    for message in messages:
        message.wait(SOON)
    return all(bool((tensor == tag + peer).all()) for tag, tensor in enumerate(landed))


def test_ranks_that_send_more_than_their_sockets_hold_do_not_wait_for_each_other(two_ranks: RankPool) -> None:
    assert two_ranks.run(send_much_at_once) == [True, True]


def send_to_one_that_is_stopped() -> float:
    comm = comm_of_world()
    linked = Links(comm)
    pids = comm.all_gather_object(os.getpid(), "pids")
    if comm.rank == 1:
        landed = [torch.zeros(INLINE, dtype=torch.uint8) for _ in range(40)]
        for message in [linked.receive(0, tensor, 1) for tensor in landed]:
            message.wait(SOON)
        assert [int(tensor[0]) for tensor in landed] == list(range(40))
        return float(comm.all_gather_object(0.0, "received")[0])
    os.kill(pids[1], signal.SIGSTOP)
    try:
        started = time.monotonic()
        for number in range(40):
            linked.send(1, torch.full((INLINE,), number, dtype=torch.uint8), 1).wait(SOON)
        seconds = time.monotonic() - started
    finally:
        os.kill(pids[1], signal.SIGCONT)
    return float(comm.all_gather_object(seconds, "received")[0])


def test_sending_does_not_wait_for_a_rank_that_is_stopped(two_ranks: RankPool) -> None:
    assert two_ranks.run(send_to_one_that_is_stopped)[0] < 15.0  # a wait that ends by itself takes 20 s


def wait_for_one_that_dies(nbytes: int) -> tuple[str, str, float]:
    comm = comm_of_world()
    linked = Links(comm)
    if comm.rank == 1:
        time.sleep(0.2)
        os._exit(1)
    started, told = time.monotonic(), []
    messages = linked.receive(1, torch.zeros(nbytes, dtype=torch.uint8), 1), linked.send(1, torch.zeros(2**20), 2)
    for message in messages:
        with pytest.raises(RuntimeError) as caught:
            message.wait(SOON)
        told.append(str(caught.value))
    with pytest.raises(RuntimeError):
        linked.receive(1, torch.zeros(1), 3).wait(SOON)  # and at once from then on
    return told[0], told[1], time.monotonic() - started


@pytest.mark.parametrize("nbytes", [10, 2 * INLINE])
def test_waits_end_when_a_rank_dies(nbytes: int) -> None:
    pool = RankPool(2)
    try:
        pool.begin(wait_for_one_that_dies, nbytes)
        rank, (received, sent, seconds), _ = pool.next_outcome(60.0)
    finally:
        pool.kill()
    assert rank == 0
    assert received == sent == "connection closed by peer"
    assert seconds < 15.0


def time_out() -> tuple[str, float]:
    """Rank 0 gives up a wait, and uses its tensors for something else; rank 1 is late."""
    comm = comm_of_world()
    linked, peer, limit = Links(comm), 1 - comm.rank, datetime.timedelta(seconds=0.1)
    mine, theirs = torch.ones(INLINE), torch.zeros(INLINE)
    if comm.rank == 1:
        comm.all_gather_object(0, "rank 0 has given up")
        limit = SOON
    linked.send(peer, mine, 1)
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        linked.receive(peer, theirs, 1).wait(limit)
    assert time.monotonic() - started < 15.0
    if comm.rank == 0:
        mine.fill_(7.0)
        comm.all_gather_object(0, "rank 0 has given up")
    comm.all_gather_object(0, "rank 1 has tried")
    return str(caught.value), float(theirs.sum())


def test_a_wait_has_a_time_limit_after_which_nothing_is_sent_or_received(two_ranks: RankPool) -> None:
    assert two_ranks.run(time_out) == [("timed out after 0.1 s", 0.0), ("connection closed by peer", 0.0)]


def test_an_answer_that_comes_after_the_end_of_its_wait_does_not_end_the_thread() -> None:
    """The thread begins when one peer's answer to an offer, which nobody waits for any more, and another peer's tensor
    have come."""
    ends, others = zip(*(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)), strict=True)
    one, other = Exchange(dict(enumerate(ends)), {}), Exchange({9: others[1]}, {})
    sent = one.send(0, torch.zeros(INLINE), 7)
    others[0].send(_HEADER.pack(_TAKEN, 7, 0, 0))
    with pytest.raises(RuntimeError, match="timed out"):
        sent.wait(datetime.timedelta(seconds=0.01))
    thread = threading.Thread(target=one.run)
    thread.start()
    time.sleep(0.1)  # it reads the answer first
    other.send(9, torch.ones(2), 3).wait(SOON)
    landed = torch.zeros(2)
    try:
        one.receive(1, landed, 3).wait(SOON)
    finally:
        one.quit()
        thread.join(60.0)
    assert landed.tolist() == [1.0, 1.0]


def fork_a_child_that_ends() -> bool:
    comm = comm_of_world()
    linked, peer, theirs = Links(comm), 1 - comm.rank, torch.zeros(1)
    child = os.fork()
    if not child:
        try:
            atexit._run_exitfuncs()  # as at the end of an ordinary process
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    linked.send(peer, torch.ones(1), 1)
    linked.receive(peer, theirs, 1).wait(SOON)
    return bool(theirs)


def test_a_forked_child_that_ends_leaves_its_parents_links_alone() -> None:
    assert run_alone(2, fork_a_child_that_ends)[0] == [True, True]


def die_before_a_child(folder: str) -> float:
    comm = comm_of_world()
    linked = Links(comm)
    if comm.rank == 1:
        child = os.fork()
        if not child:
            time.sleep(20)
            os._exit(0)
        Path(folder, "child").write_text(str(child))
        os._exit(1)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        linked.receive(1, torch.zeros(1), 1).wait(SOON)
    return time.monotonic() - started


def test_a_rank_that_dies_is_noticed_although_a_child_of_it_lives(tmp_path: Path) -> None:
    pool = RankPool(2)
    try:
        pool.begin(die_before_a_child, str(tmp_path))
        rank, seconds, _ = pool.next_outcome(60.0)
    finally:
        pool.kill()
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert rank == 0
    assert seconds < 15.0


def refuse(rank: int, how: str) -> list[bool]:
    """Who has a link to whom where `rank` cannot, or is not to, have any."""
    comm = comm_of_world()

    def is_refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    told = patch.dict(os.environ, {ONLY_TCP: "1"} if how == "told" and comm.rank == rank else {})
    read = is_refused if how == "kernel" and comm.rank == rank else links.read
    with told, patch.object(links, "read", read):
        linked = Links(comm)
    return [peer in linked for peer in range(comm.size)]


@pytest.mark.parametrize("how", ["told", "kernel"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_cannot_read_the_others_memory_has_no_link_and_they_none_to_it(
    rank: int, how: str, pool_of: Any
) -> None:
    others = {0, 1, 2} - {rank}
    expected = [[one != other and {one, other} <= others for other in range(3)] for one in range(3)]
    assert pool_of(3).run(refuse, rank, how) == expected


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def make_and_drop() -> tuple[int, int, int]:
    comm = comm_of_world()
    comm.all_gather_object(0, "warm")
    before, files = thread_names().count("lightning_zero links"), len(os.listdir("/proc/self/fd"))
    linked = Links(comm)
    during = thread_names().count("lightning_zero links")
    del linked
    gc.collect()
    comm.all_gather_object(0, "all have dropped theirs")
    until = time.monotonic() + 60.0
    while thread_names().count("lightning_zero links") > before and time.monotonic() < until:
        time.sleep(0.01)
    gc.collect()
    after = thread_names().count("lightning_zero links")
    return during - before, after - before, len(os.listdir("/proc/self/fd")) - files


def test_nothing_is_left_of_links_that_nobody_has() -> None:
    assert run_alone(2, make_and_drop) == ([(1, 0, 0)] * 2, [None, None])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_over_tcp_gives_ddps_bits(stage: int, precision: str, two_ranks: RankPool) -> None:
    """As between machines; all other tests that train have links."""
    found = two_ranks.run(jobs.over_tcp, jobs.fit, {"stage": stage}, 2, precision=precision)
    expected = two_ranks.once(jobs.fit, "ddp_find_unused_parameters_true", 2, precision=precision)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert differing(mine["weights"], theirs["weights"]) == []


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_with_links_to_some_ranks_gives_ddps_bits(stage: int, pool_of: Any) -> None:
    """As on two machines of two ranks, with numbers whose sum has the same bits in any order."""
    found = pool_of(4).run(jobs.over_tcp, jobs.fit_exactly, {"stage": stage}, 4, but=[{0, 1}, {2, 3}])
    expected = pool_of(4).once(jobs.fit_exactly, "ddp", 4)
    for mine, theirs in zip(found, expected, strict=True):
        assert differing(mine, theirs) == []
