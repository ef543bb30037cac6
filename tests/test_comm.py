"""One protocol, several worlds: the same results from threads and from gloo on real processes."""

import ast
import datetime
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_zero.distributed_private import default_store
from lightning_zero.wire import gloo, native
from lightning_zero.wire.comm import CollectiveMismatchError, Comm, RankTimeoutError, Work, place_of
from lightning_zero.wire.gloo import GlooComm
from lightning_zero.wire.local import CountingComm, LocalComm
from lightning_zero.wire.native import NativeComm, make_comm
from lightning_zero.wire.worlds import own_group
from ranks import AT_ONCE, PATIENCE, RankPool, free_port
from thread_world import ThreadWorld

PACKAGE = Path(__file__).parent.parent / "lightning_zero"

CPU = torch.device("cpu")


def exercise(comm: Comm) -> dict[str, Any]:
    """Every operation once, on values that tell ranks apart."""
    rank, size = comm.rank, comm.size
    gathered = torch.zeros(size, 2)
    comm.all_gather(gathered, torch.tensor([rank, -rank], dtype=torch.float32), "apart").wait()
    in_place = torch.zeros(size, 4)
    in_place[rank] = rank + 1.0
    comm.all_gather(in_place, in_place[rank], "in place", diverges=False).wait()
    full = torch.arange(size * 3, dtype=torch.float32).view(size, 3) * (rank + 1)
    total = torch.empty(3)
    comm.reduce_scatter(total, full, torch.empty(comm.scratch_rows, 3), "sum").wait()
    quarter = torch.empty(3)
    comm.reduce_scatter(quarter, full, torch.empty(comm.scratch_rows, 3), "a quarter", divisor=4).wait()
    sent = torch.full((2, 2), float(rank))
    comm.broadcast(sent, "from 0")
    of_last = torch.full((2, 2), float(rank))
    comm.broadcast(of_last, "from the last", source=size - 1)
    landed = [torch.empty(source) for source in range(size)]  # rank j sends j elements to everybody
    comm.all_to_all(landed, [torch.full((rank,), 10.0 * rank + peer) for peer in range(size)], "to each")
    told = comm.host.tell(-10 * rank, "numbers")
    told.wait()
    return {
        "told": told.numbers,
        "to each": torch.cat(landed),
        "gathered": gathered,
        "in place": in_place,
        "sum": total,
        "a quarter of the sum": quarter,
        "broadcast": sent,
        "broadcast of the last": of_last,
        "bytes of broadcasts": comm.bytes_sent["broadcast"],
        "max": comm.all_reduce(torch.tensor([rank, 7 - rank]), "max", "max"),
        "add": comm.all_reduce(torch.tensor(rank + 1.0, dtype=torch.float64), "add"),
        "min": comm.all_reduce(torch.tensor([3 - rank]), "min", "min"),
        "empty": comm.all_reduce(torch.tensor([], dtype=torch.uint8), "empty", "min"),
        "objects": comm.all_gather_object({"rank": rank, "long": "x" * rank}, "objects"),
        "calls": dict(comm.calls),
    }


def expected(rank: int, size: int) -> dict[str, Any]:
    factor = size * (size + 1) / 2
    return {
        "told": [-10 * source for source in range(size)],
        "to each": torch.tensor([10.0 * source + rank for source in range(size) for _ in range(source)]),
        "gathered": torch.tensor([[float(r), -float(r)] for r in range(size)]),
        "in place": torch.arange(1.0, size + 1).view(-1, 1).expand(-1, 4),
        "sum": torch.arange(rank * 3, rank * 3 + 3) * factor,
        "a quarter of the sum": torch.arange(rank * 3, rank * 3 + 3) * factor / 4,
        "broadcast": torch.zeros(2, 2),
        "broadcast of the last": torch.full((2, 2), size - 1.0),
        "bytes of broadcasts": (size - 1) * 16 * [0, size - 1].count(rank),
        "max": torch.tensor([size - 1, 7]),
        "add": torch.tensor(factor, dtype=torch.float64),
        "min": torch.tensor([4 - size]),
        "empty": torch.tensor([], dtype=torch.uint8),
        "objects": [{"rank": r, "long": "x" * r} for r in range(size)],
    }


def assert_as_expected(found: dict[str, Any], rank: int, size: int) -> None:
    for name, value in expected(rank, size).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value


@pytest.mark.parametrize("size", [2, 3, 4])
def test_threads_compute_every_collective(size: int) -> None:
    for rank, found in enumerate(ThreadWorld(size).run(exercise)):
        assert_as_expected(found, rank, size)


def test_a_world_of_one_computes_every_collective() -> None:
    assert_as_expected(exercise(LocalComm()), 0, 1)


def on_gloo(sanitize: bool = False, wait_timeout: float = PATIENCE) -> Comm:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return make_comm(CPU, datetime.timedelta(seconds=wait_timeout), sanitize=sanitize)


def on_native() -> Comm:
    """Torch's own collectives, as NCCL would run them, over gloo's."""
    control = on_gloo()
    assert isinstance(control, GlooComm)
    return NativeComm(own_group("gloo", range(dist.get_world_size())), control)


def exercise_gloo() -> dict[str, Any]:
    return exercise(on_gloo())


def exercise_tcp() -> dict[str, Any]:
    on_gloo()
    return exercise(GlooComm(own_group("gloo"), datetime.timedelta(seconds=PATIENCE)))


def exercise_native() -> dict[str, Any]:
    return exercise(on_native())


def test_a_world_that_is_destroyed_leaves_its_port_to_the_next_one_and_says_so() -> None:
    """Else ranks of the next world would look for each other at the addresses of this one."""
    address, comms = f"tcp://127.0.0.1:{free_port()}", list[Comm]()
    for _ in range(2):
        dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
        try:
            assert not default_store().check(["seen"])
            default_store().set("seen", "yes")
            control = GlooComm(own_group("gloo"), datetime.timedelta(seconds=PATIENCE))
            comms += [control, control.for_model(1), NativeComm(own_group("gloo"), control)]
            for comm in comms[-3:]:
                comm.board.raise_flag("there")
        finally:
            dist.destroy_process_group()
        for comm in comms:
            assert comm.has_ended
            with pytest.raises(RuntimeError, match=r"destroy_process_group\(\) has ended the world"):
                comm.board.raise_flag("there")


@pytest.mark.parametrize("function", [exercise_gloo, exercise_tcp, exercise_native])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_real_ranks_compute_every_collective(size: int, function: Any, pool_of: Any) -> None:
    for rank, found in enumerate(pool_of(size).run(function)):
        assert_as_expected(found, rank, size)


def send_what_is_never_summed(dtype: torch.dtype) -> list[list[list[float]]]:
    """The values of the last rank, those of all ranks, and what each rank has sent to this one."""
    comm, ones = on_native(), torch.ones(4)
    own = (ones * comm.rank).to(dtype)
    last, rows, told = own.clone(), torch.empty(comm.size, 4, dtype=dtype), torch.empty(comm.size, 4, dtype=dtype)
    comm.broadcast(last, "values", source=comm.size - 1)
    comm.broadcast(last[0], "a single one")
    comm.all_gather(rows, own, "rows").wait()
    comm.all_gather(told, own, "rows", diverges=False).wait()
    sent = [(ones * (10 * comm.rank + peer)).to(dtype) for peer in range(comm.size)]
    received = [torch.empty_like(own) for _ in sent]
    comm.all_to_all(received, sent, "parts")
    return [tensor.float().tolist() for tensor in (last.view(1, 4), rows, told, torch.stack(received))]


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.float8_e4m3fn], ids=str)
def test_torchs_collectives_send_also_what_they_cannot_sum(dtype: torch.dtype, two_ranks: RankPool) -> None:
    """Buffers, and frozen tables, may be of any dtype; NCCL has no 16-bit integers."""
    for rank, (last, rows, told, received) in enumerate(two_ranks.run(send_what_is_never_summed, dtype)):
        assert last == [[1.0] * 4]
        assert rows == told == [[0.0] * 4, [1.0] * 4]
        assert received == [[float(10 * peer + rank)] * 4 for peer in range(2)]


# The error of NCCL 2.28 on a GPU whose peer has been killed, where the next collective starts.
NCCL_SAYS = """NCCL error in: a.cpp:3780, remote process exited or there was a network error, NCCL version 2.28.9
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgress: Connection closed by remote peer localhost<56394>"""


def start_beside_a_rank_that_is_gone(call: str) -> str | None:
    comm = on_native()
    if comm.rank == 1:
        return None

    def fails(*_: Any, **__: Any) -> None:
        raise dist.DistBackendError(NCCL_SAYS)

    full, own = torch.zeros(2, 3), torch.zeros(3)
    name, start = {
        "all_gather": ("_all_gather_single", lambda: comm.all_gather(full, own, call)),
        "reduce_scatter": ("_reduce_scatter_single", lambda: comm.reduce_scatter(own, full, own.new_empty(0, 3), call)),
    }[call]
    with patch.object(native, name, fails), pytest.raises(RankTimeoutError) as told:
        start()
    return str(told.value)


@pytest.mark.parametrize("call", ["all_gather", "reduce_scatter"])
def test_who_is_gone_is_named_where_the_next_collective_starts(call: str, two_ranks: RankPool) -> None:
    told, _ = two_ranks.run(start_beside_a_rank_that_is_gone, call)
    assert told.startswith("Rank 1 died (remote process exited)")


def sum_what_rounds() -> float:
    """1 is lost beside 1e8: only in the order of ranks the sum is 0."""
    comm = on_gloo()
    total, mine = torch.empty(2), [1e8, 1.0, -1e8][comm.rank]
    comm.reduce_scatter(total, torch.full((3, 2), mine), torch.empty(comm.scratch_rows, 2), "rounds").wait()
    return float(total[0])


def test_gloo_sums_in_the_order_of_ranks_on_every_rank(pool_of: Any) -> None:
    assert pool_of(3).run(sum_what_rounds) == [0.0, 0.0, 0.0]


def go_on_after_a_run_that_failed() -> tuple[float, str]:
    """Of the first communicator, rank 0 has sent what nobody receives, and told what it has decided."""
    first, second = on_gloo(), on_gloo()
    if first.rank == 0:
        first.broadcast(torch.tensor([1.0]), "x")
    first.board.agree("1: save", {}, lambda _: {"by": "the first"})
    received = torch.tensor([2.0 if second.rank == 0 else 0.0])
    second.broadcast(received, "x")

    def decide(_: Any) -> dict[str, str]:
        time.sleep(0.2)  # in which rank 1 would find the first one's
        return {"by": "the second"}

    return received.item(), second.board.agree("1: save", {}, decide)["by"]


def test_what_an_earlier_communicator_of_the_same_ranks_has_left_is_not_taken_for_ones_own(two_ranks: RankPool) -> None:
    assert two_ranks.run(go_on_after_a_run_that_failed) == [(2.0, "the second")] * 2


def diverge(comm: Comm) -> list[bool]:
    """Whether this rank learns that rank 1 diverges with the second gather, and what the first one gave."""
    learnt, kept = [], []
    for number in range(3):
        full = torch.full((comm.size, 4), 9.0)
        diverges = (comm.rank, number) == (1, 1)
        shard = torch.full((4,), float(comm.rank))
        gather = comm.all_gather(full, shard, "flagged", diverges=diverges)
        gather.wait()
        kept.append(shard.eq(comm.rank).all())
        learnt.append(gather.has_divergence())
        if not learnt[-1] or comm.learns_late:  # else the rows are void
            assert full[:, 0].tolist() == list(range(comm.size))
    assert all(kept)  # what is gathered again is what this rank has
    return learnt


def diverge_on_gloo() -> list[bool]:
    return diverge(on_gloo())


def diverge_on_native() -> list[bool]:
    return diverge(on_native())


@pytest.mark.parametrize("size", [2, 3])
def test_a_gather_tells_all_ranks_that_one_diverges(size: int, pool_of: Any) -> None:
    expected = [[False, True, False]] * size
    assert ThreadWorld(size).run(diverge) == expected
    assert pool_of(size).run(diverge_on_gloo) == expected
    assert pool_of(size).run(diverge_on_native) == expected


def count_messages(size: int) -> int:
    """The most that any rank sends for one small agreement."""
    comm = on_gloo()
    assert isinstance(comm, GlooComm)
    sent: list[int] = []
    start = comm._start_messages

    def start_and_note(receives: Any, sends: Any, key: str) -> Any:
        sent.extend(sends)
        return start(receives, sends, key)

    comm._start_messages = start_and_note  # type: ignore[method-assign]
    comm.all_reduce(torch.tensor([comm.rank]), "counted", "max")
    return len(sent)


def test_a_small_agreement_costs_a_rank_few_messages(pool_of: Any) -> None:
    assert max(pool_of(2).run(count_messages, 2)) == 1
    assert max(pool_of(3).run(count_messages, 3)) == 2
    assert max(pool_of(4).run(count_messages, 4)) == 2
    assert max(pool_of(8).run(count_messages, 8)) == 3


def count_bytes_of_objects() -> int:
    comm = on_gloo()
    comm.all_gather_object(bytes(1000), "counted")
    return comm.bytes_sent["object"]


def test_bytes_of_objects_are_counted_where_they_are_sent(two_ranks: RankPool) -> None:
    assert all(1000 <= sent < 2000 for sent in two_ranks.run(count_bytes_of_objects))


def add_in_a_tree() -> float:
    values = [1.0, 1e8, -1e8, 1.0, 3.0]
    comm = on_gloo()
    return comm.all_reduce(torch.tensor(values[comm.rank]), "order").item()


def test_all_ranks_end_with_the_same_bits_of_a_sum(pool_of: Any) -> None:
    for size in (3, 4):
        assert len(set(pool_of(size).run(add_in_a_tree))) == 1


def test_sums_go_in_rank_order_whoever_comes_first() -> None:
    values = [1.0, 1e8, -1e8, 1.0]  # in another order the ones survive, or do not

    def reduce(comm: Comm) -> float:
        time.sleep(0.02 * (comm.size - comm.rank))
        total, full = torch.empty(1), torch.full((comm.size, 1), values[comm.rank])
        comm.reduce_scatter(total, full, torch.empty(comm.scratch_rows, 1), "order").wait()
        return total.item()

    in_order = ((torch.tensor(1.0) + 1e8) + -1e8 + 1.0).item()
    assert ThreadWorld(4).run(reduce) == [in_order] * 4
    assert in_order == 1.0 != sum(sorted(values))


def issue_in_different_order() -> list[list[float]]:
    comm = on_gloo()
    names = ["a", "b"] if comm.rank == 0 else ["b", "a"]
    results = {name: torch.zeros(comm.size, 1) for name in names}
    sent = {"a": torch.tensor([1.0 + comm.rank]), "b": torch.tensor([10.0 + comm.rank])}
    works: list[Work] = [comm.all_gather(results[name], sent[name], name) for name in names]
    for work in works:
        work.wait()
    return [results["a"].flatten().tolist(), results["b"].flatten().tolist()]


def test_operations_issued_in_different_order_do_not_swap_data(two_ranks: RankPool) -> None:
    assert two_ranks.run(issue_in_different_order) == [[[1.0, 2.0], [10.0, 11.0]]] * 2


def tell_of_two_models(make: Callable[[], Comm]) -> list[list[int]]:
    """What ranks tell each other by the same name, each of another model first."""
    comm = make()
    models = [comm, comm.for_model(2)]
    told = {at: models[at].host.tell(10 * at + comm.rank, "a number") for at in (comm.rank, 1 - comm.rank)}
    for work in told.values():
        work.wait()
    return [told[at].numbers for at in range(2)]


@pytest.mark.parametrize("make", [on_gloo, on_native])
def test_what_ranks_tell_of_one_model_is_not_taken_for_what_they_tell_of_another(
    make: Callable[[], Comm], two_ranks: RankPool
) -> None:
    assert two_ranks.run(tell_of_two_models, make) == [[[0, 1], [10, 11]]] * 2


# What the others have reported, by rank; whom this rank waits for; what has happened; and what users are told.
LOST: list[tuple[dict[int, str], int | None, str, str]] = [
    ({}, 2, "timed out after 7 s", "Rank 2 did not come within wait_timeout=7 s"),
    ({}, None, "timed out after 7 s", "Rank 1 did not come within wait_timeout=7 s"),
    ({1: " waits"}, 1, "timed out after 7 s", "Rank 2 did not come within wait_timeout=7 s"),
    ({2: " failed: ValueError"}, 1, "timed out after 7 s", "Rank 2 failed"),
    ({2: " failed: ValueError"}, 1, "Connection closed by peer", "Rank 2 failed"),
    ({}, 2, "[pair.cc:1] Read error: Connection reset by peer", "Rank 2 died (connection reset)"),
    ({1: " waits"}, 1, "Connection closed by peer", "Rank 2 died (connection closed)"),
    ({1: " waits", 2: " waits"}, 1, "Connection closed by peer", "Rank 1 gave up"),
    ({1: " waits", 2: " waits"}, None, "timed out after 7 s", "Another rank did not come within wait_timeout=7 s"),
]


def explain_who_is_lost() -> list[tuple[str, str]]:
    comm = on_gloo(wait_timeout=7.0)
    assert isinstance(comm, GlooComm)
    told = []
    for reports, awaited, cause, _ in LOST if comm.rank == 0 else ():
        for peer, report in reports.items():
            comm._torch_store.set(f"lost/{peer}", f"Rank {peer}{report}")
        with (
            patch.object(gloo, "_GRACE_S", 0.0),
            pytest.raises(RankTimeoutError) as raised,
            comm.explaining("all_gather gather layers.3/float32/0[1] #7", awaited),
        ):
            raise RuntimeError(cause)
        told.append((raised.value.lost, str(raised.value)))
        for peer in reports:
            comm._torch_store.delete_key(f"lost/{peer}")
    return told


def test_who_is_lost_is_told_by_what_the_others_report_and_by_how_the_wait_has_ended(pool_of: Any) -> None:
    explained = pool_of(3).run(explain_who_is_lost)[0]
    for (reports, _, cause, expected), (lost, message) in zip(LOST, explained, strict=True):
        assert lost == expected
        silent = [] if "closed" in cause or "reset" in cause or "failed" in expected else {1, 2} - reports.keys()
        for peer in (1, 2):
            assert (f"Rank {peer} reported nothing: it has died, or is busy" in message) == (peer in silent)
            assert (f"Rank {peer}{reports.get(peer)}." in message) == (peer in reports)
        assert message.endswith(
            f"Cause: {cause.removeprefix('[pair.cc:1] ')}. Operation: 'all_gather gather layers.3/float32/0[1] #7'."
        )


def explain_while(store: Any, cause: str) -> tuple[list[float], str]:
    """How long this rank listens to another one's report, and what it says in the end."""
    comm = on_gloo()
    assert isinstance(comm, GlooComm)
    begun, listens = time.monotonic(), list[float]()

    def hears_nothing(store: Any, peer: int, until: float) -> None:
        listens.append(until - begun)

    with patch.object(gloo, "_report_of", hears_nothing), patch.object(gloo, "default_store", store or default_store):
        return listens, str(comm.explain("object x #1", 1 - comm.rank, cause))


def test_a_rank_listens_for_long_only_where_none_has_closed_a_connection(two_ranks: RankPool) -> None:
    ((long,), _), ((_,), _) = two_ranks.run(explain_while, None, "timed out after 7 s")
    ((short,), _), ((_,), _) = two_ranks.run(explain_while, None, "Connection closed by peer")
    assert long >= gloo._GRACE_S > short  # when a rank has died, Lightning's launcher soon kills this one


def no_store() -> Any:
    raise ConnectionError("gone")


def test_a_store_that_does_not_answer_is_told_with_the_rank_that_was_waited_for(two_ranks: RankPool) -> None:
    (heard, told), _ = two_ranks.run(explain_while, no_store, "timed out after 7 s")
    assert heard == []
    assert told.startswith("Rank 1 did not come within wait_timeout=120 s, in the exchange about x. ")
    assert "The store on rank 0 does not answer (ConnectionError)" in told


def disagree(is_split: bool) -> str | None:
    comm = on_gloo(sanitize=True)
    comm = comm.split([[1, 0]]) if is_split else comm
    try:
        comm.all_gather(torch.zeros(2, 3), torch.zeros(3), "head_a" if comm.rank == 0 else "head_b").wait()
    except CollectiveMismatchError as error:
        return str(error)
    return None


@pytest.mark.parametrize("is_split", [False, True])
def test_sanitize_names_what_each_rank_issues(is_split: bool, two_ranks: RankPool) -> None:
    for error in two_ranks.run(disagree, is_split):
        assert error is not None
        assert "rank 0: all_gather head_a (3,) torch.float32" in error
        assert "rank 1: all_gather head_b" in error


def test_a_missing_rank_is_named() -> None:
    def leave_early(comm: Comm) -> None:
        if comm.rank != 1:
            comm.all_reduce(torch.ones(1), "alone")

    with pytest.raises(
        RankTimeoutError, match=r"Ranks \[1\] never came \(wait_timeout=2 s\), in the all-reduce of alone\."
    ):
        ThreadWorld(3, 2.0).run(leave_early)


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("all_gather gather layers.3/float32/0[1] #7", "the all-gather of the parameters of layers.3"),
        ("all_reduce rendezvous #40", "the agreement on what comes next"),
        ("object reading the model #3", "the exchange about reading the model"),
        ("length of object reading the model #3", "the exchange about reading the model"),
        ("broadcast something new #2", "the broadcast of something new"),
    ],
)
def test_a_message_says_in_words_where_a_rank_waited(key: str, place: str) -> None:
    assert RankTimeoutError("Rank 1 did not come", key).place == place


def named_collectives() -> Iterator[str]:
    """Keys of the collectives that the package issues, as far as their names are written where they are issued."""
    kinds = {kind: kind for kind in ("all_gather", "reduce_scatter", "all_to_all", "broadcast", "all_reduce")}
    kinds |= {"all_reduce_bytes": "all_reduce", "tell": "mark"}
    for module in sorted(PACKAGE.rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Call)]
        for call in (one for one in calls if isinstance(one.func, ast.Attribute) and one.func.attr in kinds):
            assert isinstance(call.func, ast.Attribute)
            texts = [one.values[0] if isinstance(one, ast.JoinedStr) else one for one in call.args]
            names = [one.value for one in texts if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            yield from (f"{kinds[call.func.attr]} {name} #1" for name in names if name not in ("sum", "max", "min"))


def test_every_collective_has_words_of_its_own_for_messages() -> None:
    keys = {*named_collectives()}
    assert len(keys) > 25
    kinds_and_names = [(key, *key.removesuffix(" #1").split(" ", 1)) for key in sorted(keys)]
    assert [
        key for key, kind, name in kinds_and_names if place_of(key) == f"the {kind.replace('_', '-')} of {name}"
    ] == []


def test_a_rank_that_fails_ends_the_others_with_its_own_error() -> None:
    def fail(comm: Comm) -> None:
        if comm.rank == 1:
            raise ValueError("rank 1 broke")
        comm.all_reduce(torch.ones(1), "waits")

    started = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 broke"):
        ThreadWorld(2).run(fail)
    assert time.monotonic() - started < AT_ONCE


def test_counting_moves_nothing_and_counts_what_would_be_sent() -> None:
    comm = CountingComm(rank=2, size=1024)
    shard, full = torch.zeros(5), torch.zeros(1024, 5)
    comm.all_gather(full, shard + 1, "g").wait()
    comm.reduce_scatter(shard, full + 1, torch.empty(0), "r").wait()
    assert full.sum() == shard.sum() == 0
    assert comm.bytes_sent == {"all_gather": 1023 * 20, "reduce_scatter": 1023 * 20}
    assert comm.calls == {"all_gather": 1, "reduce_scatter": 1}


def test_work_finishes_once() -> None:
    finished = []
    work = Work(lambda: finished.append(1))
    work.wait()
    work.wait()
    assert finished == [1]


def test_ranks_as_threads_run_again_after_a_failure() -> None:
    world = ThreadWorld(2)

    def fail(comm: Comm) -> None:
        raise ValueError(f"rank {comm.rank}")

    with pytest.raises(ValueError, match="rank"):
        world.run(fail)
    assert world.run(lambda comm: comm.all_reduce(torch.ones(1), "again").item()) == [2.0, 2.0]
