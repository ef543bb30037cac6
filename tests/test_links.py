"""Ranks of one machine reach each other past the network, and hear of it when one is gone."""

import datetime
import gc
import os
import threading
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import jobs
from compare import differing
from lightning_zero.wire import links
from lightning_zero.wire.gloo import GlooComm, own_group
from lightning_zero.wire.links import INLINE, ONLY_TCP, Links
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
    if comm.rank == 0:
        linked.send(1, torch.zeros(3), 1)
        return ""
    with pytest.raises(RuntimeError) as caught:
        linked.receive(0, torch.zeros(4), 1).wait(SOON)
    return str(caught.value)


def test_another_size_than_expected_is_told(two_ranks: RankPool) -> None:
    assert two_ranks.run(disagree_on_size)[1] == "rank 0 sent 12 bytes where 16 were expected"


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
    assert seconds < 5.0


def time_out() -> str:
    comm = comm_of_world()
    linked = Links(comm)
    with pytest.raises(RuntimeError) as caught:
        linked.receive(1 - comm.rank, torch.zeros(1), 1).wait(datetime.timedelta(seconds=0.1))
    return str(caught.value)


def test_a_wait_has_a_time_limit(two_ranks: RankPool) -> None:
    assert two_ranks.run(time_out) == ["timed out after 0.1 s"] * 2


def refuse(rank: int, how: str) -> list[bool]:
    """Who has a link to whom where `rank` cannot, or is not to, have any."""
    comm = comm_of_world()

    def is_refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    told = patch.dict(os.environ, {ONLY_TCP: "1"} if how == "told" and comm.rank == rank else {})
    read = is_refused if how == "kernel" and comm.rank == rank else links._read
    with told, patch.object(links, "_read", read):
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
    until = time.monotonic() + 5.0
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
