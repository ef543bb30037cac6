"""Ranks of one machine reach each other past the network, and hear of it when one is gone."""

import atexit
import ctypes
import datetime
import errno
import fcntl
import gc
import mmap
import os
import pickle
import platform
import signal
import socket
import struct
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import jobs
from compare import differing
from lightning_zero.wire import desk, links
from lightning_zero.wire.desk import Desk, Segment, Segments, open_desk
from lightning_zero.wire.exchange import (
    _FREE,
    _HEADER,
    _OFFER,
    _PART,
    _PAYLOAD,
    _READ,
    _SEGMENT,
    _WANTED,
    INLINE,
    Exchange,
)
from lightning_zero.wire.gloo import GlooComm
from lightning_zero.wire.landing import Arrival, Landing
from lightning_zero.wire.links import ONLY_TCP, Links
from lightning_zero.wire.local import LocalComm
from lightning_zero.wire.outbox import Outbox
from lightning_zero.wire.worlds import own_group
from ranks import AT_ONCE, HANGS, PATIENCE, SHORT, RankPool, run_alone

SOON = datetime.timedelta(seconds=PATIENCE)
SIZES = [0, 1, 8, INLINE - 1, INLINE, INLINE + 1, 2**21 + 3, 2**23 + 5]  # bytes; the last is more than a desk holds


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


def change_after_wait(in_room: bool) -> float:
    """Rank 0 overwrites what it has sent as soon as `wait` allows that."""
    comm = comm_of_world()
    linked = Links(comm)
    tensor = room_of(linked, 2**20) if in_room else torch.ones(2**20)
    for tag in range(20):
        if comm.rank == 0:
            linked.send(1, tensor.fill_(1.0), tag).wait(SOON)
            tensor.fill_(2.0)
        else:
            linked.receive(0, tensor, tag).wait(SOON)
            assert bool((tensor == 1.0).all())
    return float(tensor.sum())


@pytest.mark.parametrize("in_room", [False, True])
def test_a_tensor_is_the_senders_again_once_it_has_arrived(in_room: bool, two_ranks: RankPool) -> None:
    assert two_ranks.run(change_after_wait, in_room) == [2.0**21, 2.0**20]


def room_of(linked: Links, numel: int) -> Tensor:
    memory = linked.empty(4 * numel)
    assert memory is not None
    return torch.frombuffer(memory, dtype=torch.float32).fill_(1.0)


def send_from_rooms() -> int:
    """Bytes that pass the desk while tensors, and parts of them, are sent from a room: to a rank, and into sums."""
    comm = comm_of_world()
    linked, put = Links(comm), []
    rows = room_of(linked, comm.size * 2**21).view(comm.size, -1)  # more than a desk holds
    rows.copy_(torch.arange(2**21).expand_as(rows)).add_(comm.rank)
    comm = GlooComm(own_group("gloo"), SOON, linked)
    full, total = torch.zeros_like(rows), torch.zeros(2**21)
    with patch.object(Desk, "put", lambda *_: put.append(1)):
        comm.reduce_scatter(total, rows, rows[:0], "sum").wait()
        comm.all_gather(rows, total, "gather").wait()
        sent = {peer: linked.send(peer, rows[comm.rank, 5:-3], 7) for peer in range(comm.size) if peer != comm.rank}
        for peer in sent:
            linked.receive(peer, full[peer, 5:-3], 7).wait(SOON)
            assert torch.equal(full[peer, 5:-3], rows[peer, 5:-3])
        for message in sent.values():
            message.wait(SOON)
    assert torch.equal(total, comm.size * torch.arange(2**21) + sum(range(comm.size)))
    assert all(torch.equal(row, total) for row in rows)
    return len(put)


@pytest.mark.parametrize("size", [2, 3])
def test_a_tensor_that_peers_can_read_arrives_without_the_senders_copy(size: int, pool_of: Any) -> None:
    assert pool_of(size).run(send_from_rooms) == [0] * size


def bytes_over_desk(stage: int) -> float:
    """Bytes that pass the desk of a rank in one step, in those that a rank's half of the model takes."""
    passed, steps, put = [0], [], Desk.put

    class Count(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            steps.append(sum(passed))

    def count(desk: Desk, offset: int, address: int, nbytes: int) -> None:
        passed.append(nbytes)
        put(desk, offset, address, nbytes)

    with patch.object(Desk, "put", count):
        run = jobs.trainer({"stage": stage}, 2, max_steps=3, callbacks=[Count()])
        run.fit(jobs.Wide(512, 4), DataLoader(TensorDataset(torch.zeros(6, 1)), batch_size=1))
    return (steps[2] - steps[1]) / (2 * jobs.WIDE_PSI)


def test_in_training_only_what_stages_1_and_2_publish_passes_the_desk(two_ranks: RankPool) -> None:
    """Buckets and the buffers of gathered units lie where peers read them."""
    assert two_ranks.run(bytes_over_desk, 3) == [0.0, 0.0]
    assert two_ranks.run(bytes_over_desk, 2) == [1.0, 1.0]


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


def test_what_is_sent_while_something_waits_for_room_comes_after_it() -> None:
    own, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(PATIENCE)
    outbox = Outbox({1: own})
    sent, received = 0, []

    def send() -> None:
        nonlocal sent
        outbox.post(1, sent.to_bytes(4, "little"), bytes(INLINE))
        sent += 1

    def receive() -> None:
        received.append(int.from_bytes(peer.recv(2 * INLINE)[:4], "little"))

    while not outbox.peers:
        send()
    send()
    for _ in range(sent // 2):
        receive()
    send()  # the socket has room
    while len(received) < sent:
        outbox.flush(1)
        receive()
    assert received == [*range(sent)]
    assert not outbox.peers
    outbox.close()
    peer.close()


def receive_in_another_order() -> bool:
    """Each of two tensors fills the desk; the receiver wants the second one first."""
    comm = comm_of_world()
    linked, peer = Links(comm), 1 - comm.rank
    sent = [linked.send(peer, torch.full((2**22,), 10.0 * comm.rank + tag), tag) for tag in range(2)]
    for tag in (1, 0):
        landed = torch.zeros(2**22)
        linked.receive(peer, landed, tag).wait(SOON)
        assert bool((landed == 10.0 * peer + tag).all())
    for message in sent:
        message.wait(SOON)
    return True


def test_a_tensor_that_nobody_wants_yet_keeps_none_out_that_is_wanted(two_ranks: RankPool) -> None:
    assert two_ranks.run(receive_in_another_order) == [True, True]


def sum_in_another_order() -> bool:
    """Three sums are under way at once, and every rank began them in an order of its own."""
    comm = comm_of_world()
    linked, columns = Links(comm), 2**21
    comm = GlooComm(own_group("gloo"), SOON, linked)
    assert comm.scratch_rows == 0
    totals = torch.empty(3, columns)
    terms = [torch.full((3, columns), 10.0**number * (1 + comm.rank)) for number in range(3)]
    works = [
        comm.reduce_scatter(totals[number], terms[number], torch.empty(0, columns), f"{number}")
        for number in ((comm.rank + step) % 3 for step in range(3))
    ]
    comm.all_gather_object(0, "all have begun")
    for work in works:
        work.wait()
    return all(bool((totals[number] == 6 * 10.0**number).all()) for number in range(3))


def test_sums_that_ranks_begin_in_different_orders_do_not_wait_for_each_other(pool_of: Any) -> None:
    assert pool_of(3).run(sum_in_another_order) == [True] * 3


def sum_every_dtype(size: int) -> list[str]:
    """What differs from the same sum after TCP, in dtype and number of elements: inline, in one part and in several.
    And from the same average, and where the sum takes the place of this rank's term."""
    comm = comm_of_world()
    linked, wrong = GlooComm(own_group("gloo"), SOON, Links(comm)), []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64):
        for columns in (0, 1, 1001, 2**16 + 1, *([2**21 + 3] if dtype in (torch.float32, torch.bfloat16) else [])):
            full = torch.randn(size, columns, generator=torch.Generator().manual_seed(comm.rank)).mul_(100).to(dtype)
            found, expected = torch.empty(2, columns, dtype=dtype)
            for one, total in ((linked, found), (comm, expected)):
                one.reduce_scatter(total, full, full.new_empty(one.scratch_rows, columns), "sum").wait()
            if not torch.equal(found, expected):
                wrong.append(f"{dtype} {columns}")
            for one in (linked, comm):
                rows = full.clone()
                one.reduce_scatter(rows[comm.rank], rows, full.new_empty(one.scratch_rows, columns), "in place").wait()
                wrong += [] if torch.equal(rows[comm.rank], expected) else [f"in place {dtype} {columns}"]
            if dtype.is_floating_point:
                for one in (linked, comm):
                    one.reduce_scatter(found, full, full.new_empty(one.scratch_rows, columns), "average", size).wait()
                    wrong += [] if torch.equal(found, expected / size) else [f"average of {dtype} {columns}"]
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_averages_over_links_have_the_bits_of_those_over_tcp(size: int, pool_of: Any) -> None:
    assert pool_of(size).run(sum_every_dtype, size) == [[]] * size


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
    assert two_ranks.run(send_to_one_that_is_stopped)[0] < AT_ONCE


def wait_for_one_that_dies(nbytes: int) -> tuple[str, str, float]:
    comm = comm_of_world()
    linked, told = Links(comm), list[str]()
    if comm.rank == 1:
        linked.receive(0, torch.zeros(1), 4).wait(SOON)  # rank 0 has begun to send and to receive
        os._exit(1)
    messages = linked.receive(1, torch.zeros(nbytes, dtype=torch.uint8), 1), linked.send(1, torch.zeros(2**20), 2)
    linked.send(1, torch.zeros(1), 4)
    started = time.monotonic()
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
        rank, (received, sent, seconds), _ = pool.next_outcome()
    finally:
        pool.kill()
    assert rank == 0
    assert received == sent == "connection closed by peer"
    assert seconds < AT_ONCE


def test_the_wait_for_a_term_ends_when_a_rank_dies_that_has_offered_it() -> None:
    """Meanwhile the sum waits for the term of another rank."""
    (one, peer), (other, _silent) = (socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    desk_here = Desk([1, 2], SLOT, MARK)
    exchange = Exchange({1: one, 2: other}, desk_here, {})
    thread = threading.Thread(target=exchange.run)
    thread.start()
    try:
        into = torch.zeros(SLOT)
        messages = exchange.sum(into, [1, 2], 7)
        peer.send(_HEADER.pack(_OFFER, 7, 0, into.nbytes))
        while not exchange._offers:
            time.sleep(0.001)
        peer.close()
        with pytest.raises(RuntimeError, match="closed by peer"):
            messages[1].wait(SOON)
    finally:
        exchange.quit()
        thread.join(AT_ONCE)
        desk_here.close_file()


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
    assert time.monotonic() - started < AT_ONCE
    if comm.rank == 0:
        mine.fill_(7.0)
        comm.all_gather_object(0, "rank 0 has given up")
    comm.all_gather_object(0, "rank 1 has tried")
    return str(caught.value), float(theirs.sum())


def test_a_wait_has_a_time_limit_after_which_nothing_is_sent_or_received(two_ranks: RankPool) -> None:
    assert two_ranks.run(time_out) == [("timed out after 0.1 s", 0.0), ("connection closed by peer", 0.0)]


def count_what_is_held() -> int:
    """How many tensors that have been sent or received, and summed, are alive when nothing here refers to them."""
    comm, peer = comm_of_world(), 1 - comm_of_world().rank
    linked, alive = Links(comm), []
    for tag, size in enumerate((8, 2**20)):
        sent, landed, total = torch.ones(size), torch.zeros(size), torch.zeros(size)
        alive += [weakref.ref(tensor.untyped_storage()) for tensor in (sent, landed, total)]
        messages = [linked.send(peer, sent, tag), linked.receive(peer, landed, tag), linked.send(peer, sent, 10 + tag)]
        messages += linked.sum(total, [peer, sent], 10 + tag).values()
        for message in messages:
            message.wait(SOON)
        del sent, landed, total  # but not `messages`
        held = sum(storage() is not None for storage in alive)
        comm.all_gather_object(0, "both have counted")
        if held:
            break
    return held


def test_a_tensor_is_let_go_of_when_its_wait_ends(two_ranks: RankPool) -> None:
    assert two_ranks.run(count_what_is_held) == [0, 0]


def count_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:lightning_zero")


def drop_a_room() -> tuple[int, int, int]:
    """How many more memories this process has, and files, while a tensor is in a room and peers read it; and after."""
    comm = comm_of_world()
    linked, peer = Links(comm), 1 - comm.rank
    linked.send(peer, torch.zeros(1), 0)
    linked.receive(peer, torch.zeros(1), 0).wait(SOON)  # now the thread has all its files
    before, files = count_mappings(), len(os.listdir("/proc/self/fd"))
    comm.all_gather_object(0, "both have counted before")  # or the peer's room would be among these on a late rank
    tensor = room_of(linked, INLINE)
    for message in linked.send(peer, tensor[4:], 1), linked.receive(peer, torch.zeros(INLINE - 4), 1):
        message.wait(SOON)
    during, view = count_mappings(), tensor[7:9]
    del tensor, message
    assert view.tolist() == [1.0, 1.0]
    comm.all_gather_object(0, "both have counted")
    del view
    until = time.monotonic() + 60.0
    # The file is not read at one moment, while a thread unmaps: what ends the wait is what is told, and no second look.
    while (left := count_mappings()) > before and time.monotonic() < until:
        time.sleep(0.01)
    return during - before, left - before, len(os.listdir("/proc/self/fd")) - files


def test_memory_that_peers_read_goes_back_to_the_system_with_its_tensor() -> None:
    assert run_alone(2, drop_a_room) == ([(2, 0, 0)] * 2, [None, None])


def ask_for_shared_memory() -> list[int]:
    comm = comm_of_world()
    linked, asked = Links(comm), list[int]()
    comm = GlooComm(own_group("gloo"), SOON, linked)
    with patch.object(linked, "empty", asked.append):
        for nbytes in (INLINE, INLINE + 4):
            assert comm.empty(nbytes // 4, torch.float32, torch.device("cpu")).nbytes == nbytes
    return asked


def test_tensors_lie_where_peers_read_them_from_the_size_on_that_no_datagram_holds(two_ranks: RankPool) -> None:
    assert two_ranks.run(ask_for_shared_memory) == [[INLINE + 4]] * 2


SLOT = 2**16
MARK = b"0123456789abcdef"
PLACE = 4096


class Pair:
    """An exchange whose thread runs, with one peer, number 1: a test plays that by hand, datagram by datagram."""

    def __init__(self) -> None:
        own, self.peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.peer.settimeout(60.0)
        self.desk, theirs = Desk([1], SLOT, MARK), Desk([0], SLOT, MARK)
        self.put, (self.slot, *_) = theirs.put, theirs.free[0]
        memory = open_desk(theirs.file, MARK)
        assert memory is not None
        self.exchange = Exchange({1: own}, self.desk, {1: memory})
        self.thread = threading.Thread(target=self.exchange.run)
        self.thread.start()
        self.values = torch.arange(SLOT // 2, dtype=torch.float32)  # of the peer, which it offers from a room
        self.room = Segment(PLACE, self.values.nbytes)
        ctypes.memmove(self.room.address, self.values.data_ptr(), self.values.nbytes)

    def offer_from_room(self) -> None:
        header = _HEADER.pack(_SEGMENT, 0, PLACE, 0)
        socket.send_fds(self.peer, [header], [self.room.file])
        self.tell(_OFFER, 7, PLACE, self.values.nbytes)

    def tell(self, kind: bytes, tag: int = 0, offset: int = 0, nbytes: int = 0) -> None:
        self.peer.send(_HEADER.pack(kind, tag, offset, nbytes))

    def hear(self) -> tuple[bytes, int, int, int] | None:
        """The next datagram, or None if the link is closed."""
        datagram = self.peer.recv(2 * INLINE)
        return _HEADER.unpack_from(datagram) if datagram else None

    def close(self) -> None:
        self.exchange.quit()
        self.thread.join(60.0)
        self.desk.close_file()
        self.room.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_an_answer_that_comes_after_the_end_of_its_wait_does_not_end_the_thread(pair: Pair) -> None:
    late = pair.exchange.send(1, torch.zeros(INLINE), 7)
    assert pair.hear() == (_OFFER, 7, 0, 4 * INLINE)
    with pytest.raises(RuntimeError, match="timed out"):
        late.wait(datetime.timedelta(seconds=0.01))
    with suppress(OSError):
        pair.tell(_WANTED, 7)
    assert pair.hear() is None
    assert pair.thread.is_alive()
    assert {len(slots) for slots in pair.desk.free.values()} == {2}  # nothing of the tensor has left


def test_a_tensor_is_the_users_again_as_soon_as_one_of_its_waits_has_timed_out() -> None:
    """Before the link is closed, which the thread that fills it may hear of later; and although it waits for others."""
    given_up: list[tuple[int, bool]] = []
    landing = Landing(torch.zeros(4), [1, 2], lambda peer: given_up.append((peer, landing.has_failed)))
    with pytest.raises(RuntimeError, match="timed out"):
        landing.messages[2].wait(datetime.timedelta(0))
    assert given_up == [(2, True)]


def test_a_wait_may_have_the_longest_time_limit_there_is() -> None:
    message = Landing(torch.zeros(4), [1], lambda _: None).messages[1]
    threading.Timer(0.02, message.complete).start()
    message.wait(datetime.timedelta.max)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_may_fill_the_memory_of_whichever_of_its_terms_is_this_ranks(dtype: torch.dtype) -> None:
    terms = [torch.tensor([1, 2]).mul(10**number).to(dtype) for number in (0, 1, 0, 1)]
    for own in range(4):
        into = terms[own].clone()
        landing = Landing(into, [into if number == own else number for number in range(4)], lambda _: None, 2)
        landing.fill({number: terms[number].data_ptr() for number in landing.messages}, into.nbytes)
        assert into.tolist() == [11, 22], own


def test_what_arrives_after_the_end_of_a_wait_touches_no_tensor(pair: Pair) -> None:
    """The wait ends in the middle of a tensor."""
    into, part = torch.zeros(SLOT), torch.ones(SLOT // 4)
    received = pair.exchange.receive(1, into, 7)
    pair.tell(_OFFER, 7, 0, into.nbytes)
    assert pair.hear() == (_WANTED, 7, 0, 0)
    pair.put(pair.slot, part.data_ptr(), part.nbytes)
    pair.tell(_PART, 0, pair.slot, part.nbytes)
    assert pair.hear() == (_FREE, 0, pair.slot, 0)
    pair.tell(_PART, 0, pair.slot, part.nbytes)
    assert pair.hear() is not None
    with pytest.raises(RuntimeError, match="timed out"):
        received.wait(datetime.timedelta(seconds=0.01))
    into.zero_()
    with suppress(OSError):
        pair.tell(_PART, 0, pair.slot, part.nbytes)
    assert pair.hear() is None
    time.sleep(0.05)
    assert not into.any()
    assert pair.thread.is_alive()


@pytest.mark.parametrize("nbytes", [16, 4 * INLINE])
def test_a_smaller_tensor_than_expected_is_not_read_beyond_its_end(nbytes: int, pair: Pair) -> None:
    into = torch.zeros(2 * nbytes // 4)
    received = pair.exchange.receive(1, into, 7)
    if nbytes <= INLINE:
        pair.peer.send(_HEADER.pack(_PAYLOAD, 7, 0, nbytes) + bytes(nbytes))
    else:
        pair.tell(_OFFER, 7, 0, nbytes)
    with pytest.raises(RuntimeError, match=f"rank 1 sent {nbytes} bytes where {2 * nbytes} were expected"):
        received.wait(datetime.timedelta(seconds=SHORT))


def test_a_sum_waits_no_more_for_offers_once_it_has_all() -> None:
    """It would be held until the end of the link, and end with it once more."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    own = {peer: theirs for peer, (theirs, _) in enumerate(pairs, 1)}
    desk_of_both = Desk([1, 2], SLOT, MARK)
    exchange = Exchange(own, desk_of_both, {})
    exchange.sum(torch.zeros(INLINE), [1, 2], 7)
    for peer, (_, end) in enumerate(pairs, 1):
        end.send(_HEADER.pack(_OFFER, 7, 0, 4 * INLINE))
        exchange._read_datagram(peer)
        exchange._land(exchange._land_arrival, *exchange._matched.popleft())
        assert len(exchange._offers) == (peer == 1)
    for _, end in pairs:
        assert _HEADER.unpack(end.recv(INLINE))[:2] == (_WANTED, 7)
        end.close()
    desk_of_both.close_file()


def test_every_wait_ends_with_the_link_however_far_its_tensor_has_come(pair: Pair) -> None:
    waits = [pair.exchange.send(1, torch.zeros(SLOT), tag) for tag in (7, 8)]
    waits += [pair.exchange.receive(1, torch.zeros(INLINE), tag) for tag in (9, 10)]
    pair.tell(_WANTED, 8)
    pair.tell(_OFFER, 10, 0, 4 * INLINE)
    heard = [pair.hear() for _ in range(5)]
    assert [told[0] for told in heard if told is not None] == [_OFFER, _OFFER, _PART, _PART, _WANTED]
    pair.peer.close()
    for message in waits:
        with pytest.raises(RuntimeError, match="closed by peer"):
            message.wait(datetime.timedelta(seconds=SHORT))


def test_memory_of_a_peer_that_has_gone_goes_back_to_the_system(pair: Pair) -> None:
    before = count_mappings()
    pair.offer_from_room()
    pair.exchange.receive(1, torch.zeros_like(pair.values), 7).wait(SOON)
    assert count_mappings() == before + 1
    pair.peer.close()
    while not pair.exchange._closed:
        time.sleep(0.001)
    with pair.exchange._lock:  # held while a link is closed
        assert count_mappings() == before


def test_until_its_process_is_gone_no_peer_hears_that_a_rank_has_failed(pair: Pair) -> None:
    assert not pair.exchange._outbox.close.atexit  # other code may run then, as what waits for saves


@pytest.mark.parametrize("kind", [_PART, _WANTED, _READ])
def test_an_answer_about_a_tensor_that_nobody_waits_for_any_more_is_let_pass(kind: bytes, pair: Pair) -> None:
    pair.exchange.quit()
    pair.thread.join(60.0)
    pair.tell(kind, 7, pair.slot, 16)
    assert pair.exchange._read_datagram(1)


def test_what_came_before_a_peer_went_is_received_and_what_did_not_is_not_waited_for(pair: Pair) -> None:
    """It goes with something of ours unread, which the system tells before it gives what has come."""
    pair.exchange.send(1, torch.zeros(4), 9)
    with pair.exchange._lock:  # the thread comes no further than the first
        for tag in (7, 8):
            pair.peer.send(_HEADER.pack(_PAYLOAD, tag, 0, 16) + struct.pack("=4f", *[tag] * 4))
        pair.peer.close()
    while not pair.exchange._closed:
        time.sleep(0.001)
    for tag in (7, 8):
        into = torch.zeros(4)
        pair.exchange.receive(1, into, tag).wait(SOON)
        assert into.tolist() == [tag] * 4
    with pytest.raises(RuntimeError, match="closed by peer"):
        pair.exchange.receive(1, torch.zeros(4), 9).wait(datetime.timedelta(seconds=SHORT))


def test_what_has_come_when_a_wait_ends_and_is_not_taken_yet_touches_no_tensor(pair: Pair) -> None:
    pair.exchange.quit()
    pair.thread.join(60.0)
    into = torch.zeros(4)
    received = pair.exchange.receive(1, into, 7)
    pair.peer.send(_HEADER.pack(_PAYLOAD, 7, 0, 16) + struct.pack("=4f", *[1.0] * 4))
    assert pair.exchange._read_datagram(1)
    with pytest.raises(RuntimeError, match="timed out"):
        received.wait(datetime.timedelta(0))
    pair.exchange._land(pair.exchange._land_arrival, *pair.exchange._matched.popleft())
    assert not into.any()


def test_a_tag_is_used_again_whoever_came_first_before(pair: Pair) -> None:
    key, datagram = (1, 7), _HEADER.pack(_PAYLOAD, 7, 0, 16) + bytes(16)
    for arrives_first in (True, False, False, True):
        if arrives_first:
            pair.peer.send(datagram)
            while not pair.exchange._arrived.get(key):
                time.sleep(0.001)
        received = pair.exchange.receive(1, torch.ones(4), 7)
        if not arrives_first:
            pair.peer.send(datagram)
        received.wait(datetime.timedelta(seconds=SHORT))
    assert key not in pair.exchange._arrived
    assert key not in pair.exchange._awaited


def test_the_thread_rests_again_when_what_waited_for_room_has_left(pair: Pair) -> None:
    flushed: list[int] = []
    flush, sent = Outbox.flush, 0

    def note(box: Outbox, peer: int) -> None:
        flushed.append(peer)
        flush(box, peer)

    with patch.object(Outbox, "flush", note):
        while not pair.exchange._outbox.peers:
            pair.exchange.send(1, torch.zeros(INLINE // 4), 7)
            sent += 1
        for _ in range(sent):
            assert pair.hear() is not None
        before = 0
        while len(flushed) != before:  # it would flush nothing, again and again
            before = len(flushed)
            assert before < 100 * sent
            time.sleep(0.02)


def test_a_room_that_cannot_be_mapped_is_passed_by_the_desk(pair: Pair) -> None:
    pair.exchange.receive(1, torch.zeros_like(pair.values), 7)
    with patch.object(desk, "open_desk", side_effect=OSError):
        pair.offer_from_room()
        assert pair.hear() == (_WANTED, 7, 0, 0)


def test_what_a_peer_may_have_changed_because_it_has_given_up_counts_as_lost(pair: Pair) -> None:
    """It gives up while the tensor is being read."""
    into, fill = torch.zeros_like(pair.values), Landing.fill

    def give_up_meanwhile(landing: Landing, *args: Any) -> None:
        pair.peer.shutdown(socket.SHUT_RDWR)
        fill(landing, *args)

    received = pair.exchange.receive(1, into, 7)
    with patch.object(Landing, "fill", give_up_meanwhile):
        pair.offer_from_room()
        with pytest.raises(RuntimeError, match="closed by peer"):
            received.wait(SOON)
    assert torch.equal(into, pair.values)


@pytest.mark.parametrize("error", [BlockingIOError(), OSError(errno.ETOOMANYREFS, "too many files are under way")])
def test_memory_that_the_system_does_not_give_is_ordinary_memory_and_its_tensor_passes_the_desk(
    error: OSError, pair: Pair
) -> None:
    with patch.object(desk, "_create_file", side_effect=OSError):
        assert pair.exchange.segments.empty(4 * INLINE) is None
    memory = pair.exchange.segments.empty(4 * INLINE)
    assert memory is not None
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    with patch.object(socket, "send_fds", side_effect=error):
        message = pair.exchange.send(1, tensor, 7)
    assert pair.hear() == (_OFFER, 7, 0, 4 * INLINE)
    pair.tell(_WANTED, 7)
    message.wait(SOON)


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


def what_a_child_has_of_desks() -> tuple[int, int, bool]:
    """How many more desks are mapped here after linking, how many of these in a forked child, and whether ranks still
    reach each other after it. Links of earlier jobs may end meanwhile, in their threads; a room of theirs that is still
    there is a copy in the child, and shared by nobody."""

    def desks() -> set[str]:
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:lightning_zero" in line]
        return {line for line in lines if line.split()[1].endswith("s")}

    comm, before = comm_of_world(), desks()
    linked, peer, theirs = Links(comm), 1 - comm.rank, torch.zeros(INLINE)
    child = os.fork()
    if not child:
        os._exit(len(desks() - before))
    (_, status), here = os.waitpid(child, 0), desks()
    for message in linked.send(peer, torch.ones(INLINE), 1), linked.receive(peer, theirs, 1):
        message.wait(SOON)
    return len(here - before), os.waitstatus_to_exitcode(status), bool(theirs.all())


def test_a_forked_child_has_no_part_of_shared_memory(two_ranks: RankPool) -> None:
    assert two_ranks.run(what_a_child_has_of_desks) == [(2, 0, True)] * 2


def write_in_a_child() -> tuple[list[float], int, list[float], bool]:
    """What the child has seen, how many files more than here it has, what is here after it has written, and whether the
    tensor can still be sent."""
    comm = comm_of_world()
    linked, peer, theirs = Links(comm), 1 - comm.rank, torch.zeros(INLINE)
    tensor, (ready, done) = room_of(linked, INLINE), os.pipe()
    child = os.fork()
    if not child:
        try:
            seen = [float(tensor.min()), float(tensor.fill_(5.0).max())]
            room_files = len([name for name in os.listdir("/proc/self/fd") if _is_room(name)])
            del tensor
            os.write(done, pickle.dumps((seen, room_files)))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    seen, child_files = pickle.loads(os.read(ready, 4096))
    for file in (ready, done):
        os.close(file)
    for message in linked.send(peer, tensor, 1), linked.receive(peer, theirs, 1):
        message.wait(SOON)
    return seen, child_files, [float(tensor.min()), float(tensor.max())], bool((theirs == 1.0).all())


def _is_room(name: str) -> bool:
    with suppress(OSError):
        return "memfd:lightning_zero" in str(Path("/proc/self/fd", name).readlink())
    return False


def test_a_forked_child_sees_a_copy_of_what_peers_read_and_has_no_file_of_it(two_ranks: RankPool) -> None:
    assert two_ranks.run(write_in_a_child) == [([1.0, 5.0], 0, [1.0, 1.0], True)] * 2


@pytest.mark.parametrize("stage", [1, 2])  # at stage 3 a worker cannot read what lies in shards
def test_a_worker_that_edits_the_model_edits_a_copy_as_under_ddp(stage: int, two_ranks: RankPool) -> None:
    """The worker sees the weights as they were when it was started, and then its own edits."""
    found = two_ranks.run(jobs.fit_beside_a_worker_that_edits, {"stage": stage})
    expected = two_ranks.once(jobs.fit_beside_a_worker_that_edits, "ddp")
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["seen"] == theirs["seen"]
        assert mine["seen"][0] != mine["seen"][-1] == 0.0
        assert differing(mine["weights"], theirs["weights"]) == []


def die_before_a_child(folder: str) -> float:
    comm = comm_of_world()
    linked = Links(comm)
    if comm.rank == 1:
        child = os.fork()
        if not child:
            time.sleep(HANGS)
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
        rank, seconds, _ = pool.next_outcome()
    finally:
        pool.kill()
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert rank == 0
    assert seconds < AT_ONCE


def refuse(rank: int, how: str) -> list[bool]:
    """Who has a link to whom where `rank` is not to have any, can open no socket, can share no memory, can map no
    peer's, or is another user than the others."""
    comm = comm_of_world()

    def is_refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    is_here, user = comm.rank == rank, os.geteuid()
    with (
        patch.object(os, "geteuid", lambda: user + (how == "another user" and is_here)),
        patch.dict(os.environ, {ONLY_TCP: "1"} if how == "told" and is_here else {}),
        patch.object(links, "_new_socket", is_refused if how == "opens none" and is_here else links._new_socket),
        patch.object(links, "Desk", is_refused if how == "shares none" and is_here else links.Desk),
        patch.object(links, "open_desk", is_refused if how == "maps none" and is_here else links.open_desk),
    ):
        linked = Links(comm)
    return [peer in linked for peer in range(comm.size)]


@pytest.mark.parametrize("how", ["told", "opens none", "shares none", "maps none", "another user"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_can_share_no_memory_has_no_link_and_the_others_none_to_it(
    rank: int, how: str, pool_of: Any
) -> None:
    others = {0, 1, 2} - {rank}
    expected = [[one != other and {one, other} <= others for other in range(3)] for one in range(3)]
    assert pool_of(3).run(refuse, rank, how) == expected


def begin_stranger(name: bytes, user: int) -> int:
    """Starts a process of that user, which connects to the socket of this name and then says nothing."""
    ready, done = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setuid(user)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(name)
                os.write(done, b".")
                time.sleep(PATIENCE)
        finally:
            os._exit(0)
    assert os.read(ready, 1) == b"."
    os.close(ready)
    os.close(done)
    return child


def link_beside_strangers() -> tuple[float, bool, bool]:
    """How long linking takes, whether the ranks are linked, and whether anybody can connect to this rank after it."""
    comm, listen, names, strangers = comm_of_world(), links._listen, [], []

    def listen_to_strangers(name: bytes) -> socket.socket | None:
        listener = listen(name)
        names.append(name)
        for user in {os.getuid(), 65534 if os.getuid() == 0 else os.getuid()}:  # only root can become another user
            strangers.append(begin_stranger(name, user))
        return listener

    try:
        comm.all_gather_object(0, "both begin")
        started = time.monotonic()
        with patch.object(links, "_listen", listen_to_strangers):
            linked = Links(comm)
        seconds = time.monotonic() - started
    finally:
        for stranger in strangers:
            os.kill(stranger, signal.SIGKILL)
            os.waitpid(stranger, 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late:
        is_open = late.connect_ex(names[0]) == 0
    return seconds, 1 - comm.rank in linked, is_open


def test_strangers_who_connect_delay_nobody_and_after_linking_nobody_can(two_ranks: RankPool) -> None:
    for seconds, are_linked, is_open in two_ranks.run(link_beside_strangers):
        assert seconds < AT_ONCE / 2  # where a stranger is waited for, 60
        assert are_linked
        assert not is_open


def test_a_desk_can_be_read_and_not_be_written_or_cut_by_who_gets_its_file() -> None:
    shared, value = Desk([1], SLOT, MARK), torch.arange(4)
    shared.put(shared.free[1][0], value.data_ptr(), value.nbytes)
    assert os.pread(shared.file, value.nbytes, shared.free[1][0]) == value.numpy().tobytes()
    memory = open_desk(os.dup(shared.file), MARK)
    assert memory is not None
    assert open_desk(os.dup(shared.file), b"f" * 16) is None
    for forbidden in (
        lambda: os.pwrite(shared.file, b"x", 0),
        lambda: os.ftruncate(shared.file, 0),
        lambda: os.open(f"/proc/self/fd/{shared.file}", os.O_RDWR | os.O_TRUNC),
        lambda: mmap.mmap(shared.file, SLOT),
        lambda: fcntl.fcntl(shared.file, 1033, 8),
    ):
        with pytest.raises(OSError, match="not permitted"):
            forbidden()
    shared.close_file()


def test_a_room_can_be_read_and_not_be_written_or_cut_by_who_gets_its_file() -> None:
    room = Segment(PLACE, SLOT)
    assert open_desk(os.dup(room.file)) is not None
    for forbidden in (
        lambda: os.pwrite(room.file, b"x", 0),
        lambda: os.ftruncate(room.file, 0),
        lambda: mmap.mmap(room.file, SLOT),
        lambda: fcntl.fcntl(room.file, 1033, 8),
    ):
        with pytest.raises(OSError, match="not permitted"):
            forbidden()
    room.close()


def test_a_tensor_is_found_in_the_room_that_it_lies_in_and_nowhere_beyond_its_end() -> None:
    """Where one room ends, the next one begins."""
    peer = 1
    woken = threading.Event()
    rooms = Segments([peer], weakref.WeakMethod(woken.set))
    own = []
    for value in b"ab":
        memory = rooms.empty(mmap.PAGESIZE)
        assert memory is not None
        memory.raw = bytes([value]) * mmap.PAGESIZE
        room = rooms.holding(ctypes.addressof(memory))
        assert room is not None
        rooms.see(peer, room.start, [os.dup(room.file)])
        own.append((memory, room))
    (_, first), (_, second) = own
    assert second.start == first.start + first.nbytes
    for room, value in ((first, b"a"), (second, b"b")):
        address = rooms.address_of(peer, Arrival(8, None, room.start))
        assert address is not None
        assert ctypes.string_at(address, 8) == 8 * value
        assert rooms.address_of(peer, Arrival(8, None, room.start + room.nbytes - 4)) is None


# Classic BPF for seccomp: an instruction is (code, jump if true, jump if false, value). The numbers of calls are those
# of ptrace, process_vm_readv, process_vm_writev and prctl.
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
KILL, ALLOW = 0x80000000, 0x7FFF0000
NUMBERS = {"x86_64": (101, 310, 311, 157), "aarch64": (117, 270, 271, 167)}
SET_PTRACER = 0x59616D61


def die_of_access_to_other_processes() -> None:
    """From now on a call that reads or writes another process, or lets another one do so here, ends this process."""
    ptrace, read, write, prctl = NUMBERS[platform.machine()]
    kill, allow, load_first_argument = (RETURN, 0, 0, KILL), (RETURN, 0, 0, ALLOW), (LOAD, 0, 0, 16)
    program = [
        (LOAD, 0, 0, 0),
        *[(JUMP_IF_EQUAL, 6 - number, 0, call) for number, call in enumerate((ptrace, read, write))],
        (JUMP_IF_EQUAL, 0, 2, prctl),
        load_first_argument,
        (JUMP_IF_EQUAL, 1, 0, SET_PTRACER),
        allow,
        kill,
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    held = ctypes.create_string_buffer(code, len(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, struct.pack("HxxxxxxP", len(program), ctypes.addressof(held))) == 0  # PR_SET_SECCOMP


def fit_without_access() -> Any:
    die_of_access_to_other_processes()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with patch.object(GlooComm, "_sum_over_links", autospec=True, side_effect=GlooComm._sum_over_links) as over_links:
        found = jobs.fit({"stage": 2}, 2)
    assert over_links.called
    return found


def test_ranks_share_memory_without_access_to_each_others_processes(two_ranks: RankPool) -> None:
    """A call that reads another process, or allows one to read this one, would end a rank here."""
    results, errors = run_alone(2, fit_without_access)
    assert errors == [None, None]
    expected = two_ranks.once(jobs.fit, "ddp_find_unused_parameters_true", 2)
    for mine, theirs in zip(results, expected, strict=True):
        assert differing(mine["weights"], theirs["weights"]) == []


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


def warned_of() -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)
        assert make_and_drop() == (1, 0, 0)
    return [str(warning.message) for warning in told]


def test_links_that_nobody_has_are_closed_without_a_warning_of_pythons() -> None:
    """Which is an error, and fails a user's tests, under ``python -W error``."""
    assert run_alone(2, warned_of) == ([[], []], [None, None])


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


def test_no_two_jobs_of_a_machine_listen_at_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of the same number: one would not start, or be taken for the other."""
    names: list[bytes] = []
    monkeypatch.setattr(links, "_listen", names.append)
    for _ in range(2):
        Links(LocalComm())
    first, second = names
    assert first != second
    assert first.startswith(b"\0"), "it is no file"
