"""Ranks that go different ways where no gradients are computed; all come to the end, and nothing is mixed up."""

import copy
import itertools
import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import user_jobs
from cover import name_of, pairwise
from lightning_zero.config import Offload
from lightning_zero.run import plan_cache
from lightning_zero.run.engine import Engine
from lightning_zero.run.journal import Journal
from lightning_zero.run.notices import Notice
from lightning_zero.run.plan import Residents
from lightning_zero.run.readiness import Readiness
from lightning_zero.run.reductions import GradientState
from lightning_zero.run.rendezvous import Rendezvous
from lightning_zero.run.statement import Statement
from lightning_zero.shards.offload import Machine
from lightning_zero.shards.options import Options
from lightning_zero.wire.comm import Comm, Gather, RankTimeoutError
from lightning_zero.wire.local import LocalComm
from lightning_zero.wire.mesh import Mesh
from models import seeded
from ranks import RankPool
from thread_world import ThreadComm, ThreadWorld
from unit_jobs import WIDTH, assert_as_on_one_device, assert_same_bits, on_engine, on_one_device, state_of, tower, x

DDP = "ddp_find_unused_parameters_true"
STAGES = [0, 1, 2, 3]
DTYPES = [None, torch.bfloat16]  # of autocast


class Thing:
    """A unit of one row per rank."""

    def __init__(self, number: int, things: "Things") -> None:
        self.name, self.number, self.things = f"thing {number}", number, things
        self.rows: torch.Tensor | None = None

    @property
    def is_gathered(self) -> bool:
        return self.rows is not None

    def pass_by(self, diverges: bool | None = None) -> Gather:
        gather, _ = self.send(diverges)
        gather.wait()
        return gather

    def send(self, diverges: bool | None) -> tuple[Gather, torch.Tensor]:
        comm = self.things.comm
        rows = torch.full((comm.size, 1), -1)
        self.things.served += 1
        mine = torch.tensor([10 * self.number + comm.rank])
        return comm.all_gather(rows, mine, f"serve {self.number}", diverges=diverges), rows


class Things:
    """What one rank can want, in the clothes of a `UnitCache`: room for some things, and calls, which have none."""

    def __init__(self, comm: Comm, prefetch: int, number: int = 6, calls: int = 1, replicas: int = 1) -> None:
        mesh = Mesh.of(comm, replicas)
        self.comm, self.served, self.ahead = mesh.shard, 0, 0
        self.units = [Thing(each, self) for each in range(number)]
        self.numbers = {unit: number for number, unit in enumerate(self.units)}
        self.apart: set[int] = set()
        self.room = 1 + prefetch
        self.here = Residents(self.room)
        self.gathers: dict[int, Gather] = {}
        self.called = 0
        self.reductions = FewReductions(mesh.replicate)
        self.rendezvous = Rendezvous(mesh, self, self.reductions, Journal())  # type: ignore[arg-type]
        self.calls = [self.rendezvous.serving.enroll(f"call {each}", self.serve) for each in range(calls)]

    def touch(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.here.touch(number)

    def gather(self, number: int, diverges: bool | None = None) -> Gather:
        goes = self.here.admit(number)
        if goes is not None:
            self.units[goes].rows = None
        assert sum(unit.is_gathered for unit in self.units) < self.room
        gather, self.units[number].rows = self.units[number].send(diverges)
        self.gathers[number] = gather
        return gather

    def discard(self, number: int) -> None:
        self.here.remove(number)
        self.units[number].rows = None

    def discard_all(self, but: int | None = None) -> None:
        for number in self.here:
            if number != but:
                self.discard(number)

    def serve(self, keep: bool) -> None:
        self.comm.all_reduce(torch.ones(1), "call")
        self.called += keep

    def use(self, which: int) -> None:
        if which >= len(self.units):
            before = self.called
            self.rendezvous.course.call(which)
            assert self.called == before + 1
            return
        self.ahead += self.units[which].is_gathered
        self.rendezvous.course.use(self.units[which])
        self.gathers[which].wait()
        rows = self.units[which].rows
        assert rows is not None
        assert rows.flatten().tolist() == [10 * which + peer for peer in range(self.comm.size)]

    def end_round(self) -> None:
        self.rendezvous.meet()
        assert not any(unit.is_gathered for unit in self.units)


class FewReductions:
    """Reductions of which a test says how many are complete, and notes when they start. Replicas sum each where they
    wait for it; three are under way at a time."""

    complete = 0
    gradients = range(9)
    state = GradientState.CLEAR

    def __init__(self, replicas: Comm) -> None:
        self.started = 0
        self.settled: list[int | None] = []  # the pattern of each backward, or None where ranks have met for it
        self.pools = [self]
        self._replicas = replicas
        self._summed = 0

    @property
    def pattern(self) -> int:
        return self.complete  # the same where the same is complete

    @property
    def has_gradients(self) -> bool:
        return self.state is GradientState.UNSETTLED and self.complete > 0

    def count_complete(self) -> int:
        return len(self.gradients) if self.has_gradients else self.complete

    def start(self, number: int) -> None:
        assert number <= self.count_complete(), "started before it was complete here"
        self.started = max(self.started, number)
        self._sum(self.started - 3)

    def start_all(self) -> None:
        self.started = len(self.gradients)
        self._sum(self.started - 3)

    def drain(self) -> None:
        self._sum(self.started)

    def _sum(self, number: int) -> None:
        while self._summed < number:
            self._replicas.all_reduce(torch.ones(1), f"sum {self._summed}")
            self._summed += 1

    def statement(self) -> Statement:
        late = bytes(at >= self.count_complete() for at in self.gradients)
        return Statement(self.has_gradients, bytes(len(Notice)), late, b"")

    def read(self, said: bytes) -> Statement:
        return Statement.read(said, len(self.gradients))

    def hear(self, said: Statement, *, of_all: bool) -> bytes | None:
        if said.has_gradients:
            return said.used
        self._end()
        return None

    def settle(self, flags: bytes) -> None:
        self.settled.append(None)
        self.start_all()
        self.drain()
        self._end()

    def _end(self) -> None:
        self.complete = self.started = self._summed = 0
        self.state = GradientState.CLEAR

    def learn_order(self) -> None:
        pass

    def settle_alike(self) -> None:
        assert self.state is GradientState.UNSETTLED
        assert self.started == 9
        self.settled.append(self.pattern)
        self.drain()
        self._end()


CAMPAIGN = int(os.environ.get("RANDOM_ROUNDS", "0"))
USES = st.lists(st.integers(0, 6), max_size=12)


@given(
    rounds=st.lists(
        st.tuples(
            USES,
            st.booleans(),  # as in the round before
            st.booleans(),  # with gradients
            st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 12), USES), max_size=2),
            st.lists(st.integers(0, 3), max_size=12),  # gradient groups that become complete at each use
            st.integers(1, 3),  # micro-batches, each with these uses
            st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=1),  # rank, micro-batch: lacks some
            st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=1),  # rank, use: without gradients there
        ),
        min_size=1,
        max_size=8,
    ),
    mesh=st.sampled_from([(2, 1), (3, 1), (4, 2), (6, 3)]),  # ranks, replicas
    prefetch=st.integers(0, 3),
    late=st.booleans(),
)
@settings(max_examples=CAMPAIGN or 200, derandomize=not CAMPAIGN, deadline=None)
def test_every_rank_gets_what_it_wants_whichever_way_the_others_go(
    rounds: Any, mesh: tuple[int, int], prefetch: int, late: bool
) -> None:
    """Rounds of uses: all ranks do the same as in the round before or something new, save for some that cut in."""
    world, replicas = mesh

    def rank_main(comm: Comm) -> Any:
        things = Things(comm, prefetch, replicas=replicas)
        common: tuple[list[int], bool, list[int], int] = ([], False, [], 1)
        for uses, repeats, trains, detours, becoming, micros, lacking, apart in rounds:
            common = common if repeats else (uses, trains, becoming, micros)
            shared, trains, becoming, micros = common
            with torch.set_grad_enabled(trains):
                for micro in range(micros if trains else 1):
                    mine = list(shared)
                    for rank, of, at, other in detours:
                        if rank == comm.rank and of == micro:
                            mine[at : at + len(other) // 2] = other
                    begins = len(mine) // 2 if micro else 0  # the use before which forward is over
                    for at, which in enumerate([*mine, None]):
                        if micro and at == begins:
                            things.rendezvous.settle_last_backward()
                            things.reductions.state = GradientState.COLLECTING
                        if which is not None:
                            with torch.no_grad() if (comm.rank, at) in apart else nullcontext():
                                things.use(which)
                        if trains and begins <= at < len(becoming):
                            things.reductions.complete = min(9, things.reductions.complete + becoming[at])
                    if trains:
                        if micro < micros - 1 and (comm.rank, micro) not in lacking:
                            things.reductions.complete = 9
                        things.reductions.state = GradientState.UNSETTLED
                        things.rendezvous.end_backward()
                things.end_round()
        found = things.rendezvous.course._plans
        learnt = copy.deepcopy((found._plans, found._patterns, found._beginnings, found._next))
        return learnt, things.reductions.settled

    ranks, shards = ThreadWorld(world, learns_late=late).run(rank_main), world // replicas
    assert all(settled == ranks[0][1] for _, settled in ranks), "ranks have settled different gradients"
    for first in range(0, world, shards):
        assert all(learnt == ranks[first][0] for learnt, _ in ranks[first : first + shards])


def forward_and_backward(layers: int) -> list[int]:
    return [*range(layers), *reversed(range(layers))]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_ranks_that_go_one_way_gather_ahead_what_is_not_there_and_send_nothing_else(prefetch: int) -> None:
    """Forward and backward of a model of five units, as often as it takes to learn the way."""

    def rank_main(comm: Comm) -> tuple[list[int], list[int], list[int]]:
        things = Things(comm, prefetch)
        served, ahead, messages = [], [], []
        for _ in range(4):
            before, calls, gone = things.served, comm.calls["all_reduce"], things.ahead
            for which in forward_and_backward(5):
                things.use(which)
            things.end_round()
            served.append(things.served - before)
            messages.append(comm.calls["all_reduce"] - calls)
            ahead.append(things.ahead - gone)
        return served, messages, ahead

    gathers = 10 - (1 + prefetch)  # the last of forward are still there
    for served, messages, ahead in ThreadWorld(2).run(rank_main):
        assert served == [gathers] * 4
        assert messages[0] == gathers + 1  # one with each gather, and one to meet
        assert messages[2:] == [1, 1]
        assert ahead[-1] == (9 if prefetch else 1)


def messages_in(things: Things, rounds: Sequence[list[int]]) -> list[int]:
    """How many messages this rank sends in each round."""
    messages = []
    for uses in rounds:
        calls = things.comm.calls["all_reduce"]
        for which in uses:
            things.use(which)
        things.end_round()
        messages.append(things.comm.calls["all_reduce"] - calls)
    return messages


def messages_of(rounds: Sequence[list[int]]) -> list[list[int]]:
    """The same of two ranks, which go one way."""
    return ThreadWorld(2).run(lambda comm: messages_in(Things(comm, 1), rounds))


WAY, OTHER = forward_and_backward(5), [5, *forward_and_backward(4)]


def test_ranks_that_change_their_way_learn_what_comes_after_what_and_send_nothing_else() -> None:
    """One round for some time, and then two by turns, as when a warm-up has ended."""
    for messages in messages_of([WAY] * 3 + [OTHER, WAY] * 4):
        assert messages[3] > 1
        assert messages[-6:] == [1] * 6


@pytest.mark.parametrize("times", [2, 3, 5])
def test_a_way_that_is_taken_some_times_and_then_another_one_is_learnt_with_its_number(times: int) -> None:
    """As where several micro-batches make a step."""
    for messages in messages_of([*[WAY] * times, OTHER] * 4):
        assert messages[-2 * (times + 1) :] == [1] * 2 * (times + 1)


def test_what_came_next_is_remembered_of_the_newest_ways_alone() -> None:
    """Ways that never come again, as where a model skips modules at random, take no memory for ever."""
    ways = [[number % 6, *[number // 6**place % 6 for place in range(1, 4)]] for number in range(60)]

    def rank_main(comm: Comm) -> tuple[int, list[int]]:
        things = Things(comm, 1)
        messages = messages_in(things, [*ways, *[WAY] * 3])
        return len(things.rendezvous.course._plans._next), messages

    with patch.object(plan_cache, "_MOST_NEXT", 20):
        for remembered, messages in ThreadWorld(2).run(rank_main):
            assert remembered == 20
            assert messages[-1] == 1


def messages_of_steps(
    stage: int, micros: int | list[int], clips: bool = False, start: nn.Module | None = None, **options: Any
) -> list[list[dict[str, int]]]:
    """What each rank sends beside gathers and reductions, in each of some steps of so many micro-batches."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> list[dict[str, int]]:
        messages = []
        for step, many in enumerate([micros] * 6 if isinstance(micros, int) else micros):
            before = issued_in(engine)
            for micro in range(many):
                with engine.accumulating() if micro < many - 1 else nullcontext():
                    with engine.forward():
                        loss = model(x(1.0 + step + comm.rank)).sum()
                    with engine.backward():
                        loss.backward()
            if clips:
                engine.gradients.clip_by_norm_(optimizer, 0.1)
            optimizer.step()
            optimizer.zero_grad()
            sent = issued_in(engine) - before
            sent = Counter({name.partition(" reduce ")[0]: n for name, n in sent.items()})  # of marks, beside any group
            messages.append({name: n for name, n in sent.items() if not name.startswith(("all_gather", "reduce_sc"))})
        return messages

    options = {"unit_classes": ("Linear",), "bucket_bytes": FEW_BUCKETS, **options}
    return on_engine(start or tower(5), act, stage, **options)


def issued_in(engine: Engine) -> Counter[str]:
    """How often this rank has sent what to ranks of its mesh."""
    return sum((comm._issued for comm in engine.mesh.comms if comm.size > 1), Counter())


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(
    ("stage", "micros", "agreements"),
    [(0, 1, 1), (0, 4, 1), (1, 1, 1), (1, 4, 1), (2, 1, 1), (2, 4, 1), (3, 1, 1), (3, 4, 1)],
)
def test_ranks_that_do_the_same_send_few_messages_beside_their_data(
    stage: int, micros: int, agreements: int, clips: bool
) -> None:
    """Clipping sends a sum of norms. As code of users may come after it, ranks agree once more before the step."""
    for messages in messages_of_steps(stage, micros, clips):
        more = clips and stage > 0
        expected = {"all_reduce rendezvous": agreements + more} | ({"all_reduce norm": 1} if more else {})
        if stage < 3:  # beside the first reduction of each backward, and nobody waits for it alone
            expected["mark"] = micros if stage == 2 else 1
        assert messages[3:] == [expected] * 3


@pytest.mark.parametrize("micros", [1, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_agree_as_often_where_all_buckets_travel_at_once(stage: int, micros: int) -> None:
    """No reduction waits there for another one. Marks travel only where several backwards of a step are reduced, each
    of which would need a meeting of its own without."""
    expected = {"all_reduce rendezvous": 1} | ({"mark": micros} if stage == 2 and micros > 1 else {})
    for messages in messages_of_steps(stage, micros, bucket_bytes=None):
        assert messages[3:] == [expected] * 3


def test_ranks_whose_steps_come_to_have_fewer_micro_batches_agree_once_in_each_from_the_third_on() -> None:
    """The mark that tells of several backwards still travels beside the only one."""
    before, after = {"all_reduce rendezvous": 1, "mark": 3}, {"all_reduce rendezvous": 1, "mark": 1}
    for messages in messages_of_steps(2, [3, 3, 3, 3, 1, 1, 1, 1], bucket_bytes=None):
        assert messages[3] == before
        assert messages[6:] == [after] * 2


HYBRID = {  # ranks, replicas, tensor-parallel ranks
    "replicas": (4, 2, 1),
    "tensor-parallel": (4, 1, 2),
    "replicas, tensor-parallel": (8, 2, 2),
}


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(("stage", "micros"), [(0, 4), (1, 4), (2, 1), (2, 4), (3, 1), (3, 4)])
@pytest.mark.parametrize("mesh", HYBRID)
def test_ranks_of_a_mesh_agree_as_often_and_once_more_with_those_that_hold_other_parts(
    mesh: str, stage: int, micros: int, clips: bool
) -> None:
    """Replicas reduce together, and need no agreement of their own where no units are gathered. Each of them gathers
    its own units: beside the first reduction of each micro-batch, it tells the others that it has begun, and beside the
    last one, which parameters have gradients."""
    world, replicas, tensor_ranks = HYBRID[mesh]
    shards = world // replicas // tensor_ranks
    meetings = 1 + (clips and stage > 0)
    expected = Counter({"all_reduce rendezvous": meetings if shards > 1 else 0})
    expected["all_reduce settle"] = meetings * ((tensor_ranks > 1) + (replicas > 1 and stage == 3))
    if clips:
        expected["all_reduce norm"] = (tensor_ranks > 1) + (stage > 0 and (tensor_ranks == 1 or replicas > 1))
    if stage < 3 and shards > 1:
        expected["mark"] = micros if stage == 2 else 1
    elif stage == 3 and replicas > 1:
        expected["mark replicas"] = expected["mark settle"] = micros - 1 + meetings
    options = {"world": world, "replicate_size": replicas, "tensor_parallel_size": tensor_ranks}
    for messages in messages_of_steps(stage, micros, clips, **options):
        assert messages[3:] == [+expected] * 3


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_micro_batches_of_which_each_is_reduced_need_no_agreement_between_them(prefetch: int, overlap: bool) -> None:
    for messages in messages_of_steps(3, 3, prefetch=prefetch, overlap=overlap):
        assert messages[3:] == [{"all_reduce rendezvous": 1}] * 3


def test_parameters_that_no_rank_uses_cost_no_agreement() -> None:
    start = tower(5)
    start[2].register_module("unused", nn.Linear(WIDTH, WIDTH))
    for messages in messages_of_steps(3, 3, start=start):
        assert messages[3:] == [{"all_reduce rendezvous": 1}] * 3


def test_micro_batches_agree_one_by_one_where_no_gather_could_tell_that_a_rank_is_not_ready() -> None:
    """All units stay gathered from one micro-batch to the next. That is found out once, and not in each step."""
    with patch.object(plan_cache, "ends_in_time", Mock(wraps=plan_cache.ends_in_time)) as tells:
        for messages in messages_of_steps(3, 3, start=tower(2), prefetch=2):
            assert messages[3:] == [{"all_reduce rendezvous": 3}] * 3
    times = Counter(call.args[0] for call in tells.call_args_list)
    assert set(times.values()) == {2}  # of each plan once, on each rank


@pytest.mark.parametrize("micros", [1, 2])
def test_reductions_overlap_as_much_where_layers_run_in_another_order_than_they_are_defined_in(micros: int) -> None:
    start = tower(6)

    def begun(way: Sequence[int]) -> list[list[int]]:
        """How many reductions had been started at each gradient of each step, on rank 0."""

        def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> list[list[int]]:
            found: list[list[int]] = []
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda _: found[-1].append(engine.runner.reductions.started)
                )
            for step in range(5):
                found.append([])
                for micro in range(micros):
                    hidden = x(1.0 + step + comm.rank)
                    with engine.accumulating() if micro < micros - 1 else nullcontext(), engine.forward():
                        for at in way:
                            hidden = model[at](hidden)
                        hidden.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return found

        return on_engine(start, act, 3, unit_classes=("Linear",))[0]

    as_defined = begun(range(6))
    assert max(as_defined[-1]) > 0
    assert begun(range(5, -1, -1))[3:] == as_defined[3:]


def test_reductions_start_on_all_ranks_at_the_same_place_once_all_are_ready() -> None:
    """Rank 0 is ready one use before rank 1 in every round; each start must lie between the same two gathers."""

    def rank_main(comm: Comm) -> list[tuple[int, int]]:
        things = Things(comm, 1)
        starts: list[tuple[int, int]] = []
        things.reductions.start = lambda number: starts.append((things.served, number))  # type: ignore[method-assign]
        for _ in range(4):
            starts.clear()
            before = things.served
            for at, which in enumerate(forward_and_backward(6)):
                things.use(which)
                things.reductions.complete = max(0, at - 5 - comm.rank)
            things.end_round()
        counts: dict[int, int] = {}
        for place, number in starts:
            counts.setdefault(number, place - before)
        return sorted(counts.items())

    first, second = ThreadWorld(2).run(rank_main)
    assert first == second
    assert len(first) > 3


def test_a_rank_that_is_not_ready_in_time_diverges_and_nothing_starts_too_early() -> None:
    def rank_main(comm: Comm) -> int:
        things = Things(comm, 1)
        for late in (0, 0, 0, 3, 0):
            for at, which in enumerate(forward_and_backward(6)):
                things.use(which)
                things.reductions.complete = max(0, at - 5 - (late if comm.rank == 0 else 0))
            things.end_round()
        return things.served

    assert len(set(ThreadWorld(2).run(rank_main))) == 1


@pytest.mark.parametrize("apart", ["without gradients", "not ready"])
def test_what_ranks_have_not_done_alike_is_learnt_by_none(apart: str) -> None:
    """Rank 0 begins a round without gradients, or leaves its plan as its gradients come late. Both ranks use the same
    in it, and would make plans of it, or look for one, by what each knows alone."""

    def rank_main(comm: Comm) -> tuple[Any, ...]:
        things = Things(comm, 1)
        for tail, is_odd in [([], False)] * 3 + [([3, 2], True), ([4], False)]:
            for at, which in enumerate([*forward_and_backward(6), *tail]):
                is_apart = is_odd and comm.rank == 0
                with torch.no_grad() if is_apart and apart == "without gradients" and at == 0 else nullcontext():
                    things.use(which)
                late = 4 if is_apart and apart == "not ready" else 0
                things.reductions.complete = max(0, at - 5 - late)
            things.end_round()
        found = things.rendezvous.course._plans
        return found._plans, found._beginnings, found._next

    first, second = ThreadWorld(2).run(rank_main)
    assert first == second


def test_a_rank_that_never_comes_is_told_with_what_was_wanted() -> None:
    def rank_main(comm: Comm) -> str | None:
        things = Things(comm, 1)
        if comm.rank:
            return None
        with pytest.raises(RankTimeoutError) as raised:
            things.use(3)
        return str(raised.value)

    message, _ = ThreadWorld(2, 0.2).run(rank_main)
    assert message is not None
    assert message.startswith("Ranks [1] never came (wait_timeout=0.2 s), in the all-gather of thing 3, on rank 0. ")


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_uneven_forwards_without_gradients_end_and_spoil_no_training(stage: int, dtype: torch.dtype | None) -> None:
    """Rank r runs r more forwards than rank 0, in its own order, and reads a weight on the way."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        rank = 0 if comm is None else comm.rank
        results = {}
        for step in range(2):
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
                for _ in range(rank):
                    model[rank % 3](x())
                    model(x())
                for _ in range(rank + 1):
                    model[0][0].weight.norm()
                results[f"output {step}"] = model(x())
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
                loss = model(x()).float().square().mean()
            loss.backward()
            optimizer.step()
        return results | state_of(model, engine)

    expected = on_one_device(tower(), act)
    for found in on_engine(tower(), act, stage, world=3, autocast_dtype=dtype):
        if stage == 0 or dtype is None:  # three ranks' mean of equal gradients is exact to rounding
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
        assert found.keys() == expected.keys()


@pytest.mark.parametrize("stage", STAGES)
def test_a_teacher_runs_beside_the_student(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for step in range(3):
            with torch.no_grad():
                aim = model[0](model[1](x()))
                if comm is None or comm.rank == 0:
                    model[2](x())
            optimizer.zero_grad()
            (model(x(1.0 + step)) - aim).square().mean().backward()
            optimizer.step()
        return state_of(model, engine)

    expected = on_one_device(tower(), act)
    for found in on_engine(tower(), act, stage):
        assert_same_bits(found, expected)


# -- one rank alone, where no gathers tell the others


def looks_in_forward(model: Any, hidden: Tensor) -> Tensor:
    model[0].weight.norm().item()
    return model(hidden)


def looks_in_backward(model: Any, hidden: Tensor) -> Tensor:
    output = model(hidden)
    output.register_hook(lambda grad: grad + model[0].weight.norm() * 0)  # before the first gradient of a parameter
    return output


def looks_in_the_middle_of_backward(model: Any, hidden: Tensor) -> Tensor:
    hidden = model[:3](hidden)
    hidden.register_hook(lambda grad: grad + model[0].weight.norm() * 0)
    return model[3:](hidden)


def looks_in_a_block_that_recomputes(model: Any, hidden: Tensor) -> Tensor:
    def block(hidden: Tensor) -> Tensor:  # with modules on both sides, which take over what has been edited
        return model[2](model[1](hidden) + model[3].weight.float().sum() * 0)

    return model[3:](checkpoint(block, model[0](hidden), use_reentrant=False))


def has_no_gradient(model: Any, hidden: Tensor) -> Tensor:
    return torch.zeros(1, requires_grad=True)


def zero(model: Any, hidden: Tensor) -> Tensor:
    return model(hidden) * 0


def looks_at_gradients(model: Any, hidden: Tensor) -> Tensor:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.norm()
    return model(hidden)


def leaves_a_layer_out(model: Any, hidden: Tensor) -> Tensor:
    return model[3:](model[:2](hidden))


def has_zeros_for_a_layer(model: Any, hidden: Tensor) -> Tensor:
    hidden = model[:2](hidden)
    return model[3:](hidden + 0 * model[2](hidden))


SAME = {has_no_gradient: zero, leaves_a_layer_out: has_zeros_for_a_layer}
LOOKS = [looks_in_forward, looks_in_backward, looks_in_a_block_that_recomputes, looks_at_gradients, has_no_gradient]
FEW_BUCKETS = 2 * 8 * WIDTH  # bytes: no two layers travel at a time


def train_while(
    who: Collection[int], does: Any, stage: int, dtype: torch.dtype | None, micros: int, **options: Any
) -> list[dict[str, Tensor]]:
    """Gradients are accumulated; some ranks do something in each micro-batch but the first one."""
    start = seeded(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)]))

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        for step in range(2):
            for micro in range(micros):
                is_mine = comm.rank in who and (step, micro) != (0, 0)
                autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None, cache_enabled=False)
                with engine.accumulating() if micro < micros - 1 else nullcontext():
                    with engine.forward(), autocast:
                        loss = (does if is_mine else nn.Module.__call__)(model, x(1.0 + step + comm.rank)).sum()
                    with engine.backward():
                        loss.backward()
                if is_mine and does is looks_at_gradients:
                    model[0].weight.grad.norm()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model, engine)

    options = {"autocast_dtype": dtype, "unit_classes": ("Linear",), "bucket_bytes": FEW_BUCKETS, **options}
    return on_engine(start, act, stage, **options)


def accumulate_threes(engine: Any, optimizer: Any, loss_of: Callable[[int, int], Tensor]) -> None:
    """Five steps of three micro-batches; `loss_of` a step and a micro-batch."""
    for step in range(5):
        for micro in range(3):
            with engine.accumulating() if micro < 2 else nullcontext():
                with engine.forward():
                    loss = loss_of(step, micro)
                with engine.backward():
                    loss.backward()
        optimizer.step()
        optimizer.zero_grad()


MESHES = [{"world": 3}, {"world": 4, "tensor_parallel_size": 2}, {"world": 4, "replicate_size": 2}]


@pytest.mark.parametrize("does", [leaves_a_layer_out, has_no_gradient, looks_at_gradients, looks_in_forward])
@pytest.mark.parametrize("odd", [(0,), (0, 1)])
@pytest.mark.parametrize(
    ("stage", "bucket_bytes", "mesh"),
    [(2, None, MESHES[0]), *((stage, FEW_BUCKETS, mesh) for stage in (2, 3) for mesh in MESHES)],
    ids=name_of,
)
def test_micro_batches_agree_again_from_where_a_rank_has_no_gradient_or_looks_at_one(
    does: Any, odd: tuple[int, ...], stage: int, bucket_bytes: int | None, mesh: dict[str, int]
) -> None:
    """In one step, on some ranks, in the second of three micro-batches. Tensor-parallel ranks may look alone."""
    odd = (0, 1) if "tensor_parallel_size" in mesh and does in SAME else odd
    start = seeded(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)]))

    def act_with(does: Any) -> Any:
        def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> Any:
            def loss_of(step: int, micro: int) -> Tensor:
                is_odd = comm.rank in odd and (step, micro) == (3, 1)
                return (does if is_odd else nn.Module.__call__)(model, x(1.0 + step + comm.rank)).mean()

            accumulate_threes(engine, optimizer, loss_of)
            return state_of(model, engine)

        return act

    found, expected = (
        on_engine(start, act_with(one), stage, unit_classes=("Linear",), bucket_bytes=bucket_bytes, **mesh)
        for one in (does, SAME.get(does, nn.Module.__call__))
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)


class MayHoldBias(nn.Linear):
    """A layer whose bias has no gradient where a micro-batch `holds` it, or one of zeros where it `has_zeros`."""

    holds = has_zeros = False

    def forward(self, hidden: Tensor) -> Tensor:
        bias = self.bias.detach() if self.holds else self.bias
        return nn.functional.linear(hidden, self.weight, bias + self.bias * 0 if self.has_zeros else bias)


def assert_none_counts_as_zeros(start: Any, act_with: Callable[[bool], Any], stage: int) -> None:
    """Of a model of `MayHoldBias`: `act_with` is told whether a rank has gradients of zeros, or none."""
    options: dict[str, Any] = {"unit_classes": ("MayHoldBias",)} if stage == 3 else {"bucket_bytes": FEW_BUCKETS}
    found, expected = (on_engine(start, act_with(one), stage, **options) for one in (False, True))
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("steps", [range(5), [3]], ids=["always", "once"])
def test_micro_batches_agree_where_ranks_use_the_same_and_one_has_no_gradient_of_it(
    steps: Collection[int], stage: int
) -> None:
    """No gather differs. What a rank has is no pattern of all ranks, however often it comes. It is the rank that steps
    the parameter: where it learns less of the others' gradients than they know, nobody does."""
    start = seeded(lambda: nn.Sequential(*[MayHoldBias(WIDTH, WIDTH) for _ in range(5)]))

    def act_with(has_zeros: bool) -> Any:
        def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> Any:
            def loss_of(step: int, micro: int) -> Tensor:
                model[0].holds = comm.rank == 0 and step in steps and micro < 2  # the last gradient
                model[0].has_zeros = model[0].holds and has_zeros
                return model(x(1.0 + step + comm.rank)).mean()

            accumulate_threes(engine, optimizer, loss_of)
            return state_of(model, engine)

        return act

    assert_none_counts_as_zeros(start, act_with, stage)


@pytest.mark.parametrize("micros", [2, 3])
def test_ranks_that_ask_for_gradients_by_a_plan_leave_it_where_one_asks_no_more(micros: int) -> None:
    """Each has had none of one parameter; in a step, and from there on now and then, rank 0 has all."""
    start = seeded(lambda: nn.Sequential(*[MayHoldBias(WIDTH, WIDTH) for _ in range(5)]))

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> Any:
        for step, micro in itertools.product(range(8), range(micros)):
            model[4].holds = comm.rank == 0 and step not in (3, 6)
            model[0].holds = comm.rank == 1
            with engine.accumulating() if micro < micros - 1 else nullcontext():
                model(x(1.0 + step + comm.rank)).mean().backward()
            if micro == micros - 1:
                optimizer.step()
                optimizer.zero_grad()
        return state_of(model, engine)

    found = on_engine(start, act, 2, bucket_bytes=FEW_BUCKETS)
    with patch.object(Readiness, "marks_reductions", False), patch.object(Rendezvous, "spans", False):
        expected = on_engine(start, act, 2, bucket_bytes=FEW_BUCKETS, overlap=False)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_has_looked_at_its_gradients_still_tells_at_the_step_which_it_has(stage: int, micros: int) -> None:
    """Rank 0, which steps the parameter, has no gradient of it, and has heard of none."""
    start = seeded(lambda: nn.Sequential(*[MayHoldBias(WIDTH, WIDTH) for _ in range(5)]))

    def act_with(has_zeros: bool) -> Any:
        def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> Any:
            for step, micro in itertools.product(range(5), range(micros)):
                model[0].holds = comm.rank == 0
                model[0].has_zeros = comm.rank == 0 and has_zeros
                with engine.accumulating() if micro < micros - 1 else nullcontext():
                    model(x(1.0 + step + comm.rank)).mean().backward()
                if comm.rank == 1:
                    model[1].weight.grad.norm()
                if micro == micros - 1:
                    optimizer.step()
                    optimizer.zero_grad()
            return state_of(model, engine)

        return act

    assert_none_counts_as_zeros(start, act_with, stage)


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_that_no_rank_has_a_gradient_of_in_a_step_is_left_alone(stage: int, micros: int) -> None:
    """A gradient of zeros would have it decay. Ranks have had some of it before."""
    start = seeded(lambda: nn.Sequential(*[MayHoldBias(WIDTH, WIDTH) for _ in range(5)]))

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> Any:
        for step in range(5):
            model[2].holds = step == 3
            for micro in range(micros):
                accumulates = micro < micros - 1 and engine is not None
                with engine.accumulating() if accumulates else nullcontext():
                    model(x(1.0 + step)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model, engine)

    def decaying(parameters: Any) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1)

    options: dict[str, Any] = {"unit_classes": ("MayHoldBias",)} if stage == 3 else {"bucket_bytes": FEW_BUCKETS}
    assert_as_on_one_device(start, act, stage, decaying, **options)


def train_with_an_odd_replica(does: Any, odd: Collection[int]) -> list[tuple[dict[str, Tensor], list[int]]]:
    """Three micro-batches a step, in which the second of two replicas `does` something else in `odd` ones. Returns what
    each rank has trained, and how often it has met the other replica in each step."""
    start = seeded(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)]))

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> tuple[dict[str, Tensor], list[int]]:
        met = []
        for step in range(10):
            before = issued_in(engine)
            for micro in range(3):
                way = does if comm.rank > 1 and 3 * step + micro in odd else nn.Module.__call__
                with engine.accumulating() if micro < 2 else nullcontext():
                    with engine.forward():
                        loss = way(model, x(1.0 + comm.rank)).square().mean()
                    with engine.backward():
                        loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            met.append((issued_in(engine) - before)["all_reduce settle"])
        return state_of(model, engine), met

    options = {"replicate_size": 2, "unit_classes": ("Linear",), "bucket_bytes": FEW_BUCKETS}
    return on_engine(start, act, 3, momentum, world=4, **options)


@pytest.mark.parametrize(("odd", "meetings"), [(range(99), 3), (range(16, 99), 3), ([9], 1), ([10], 1), ([11], 1)])
@pytest.mark.parametrize("does", [leaves_a_layer_out, has_no_gradient])
def test_replicas_agree_for_each_micro_batch_in_which_they_have_gradients_of_other_parameters(
    does: Any, odd: Collection[int], meetings: int
) -> None:
    """Always, or for some steps after that, until each of them has found back to its plan."""
    found, expected = (train_with_an_odd_replica(one, odd) for one in (does, SAME[does]))
    for (mine, met), (theirs, usual) in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)
        assert met[-1] == meetings
        assert usual == [3, *[1] * 9]


@pytest.mark.parametrize("without", [0, 1])
@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_that_compare_their_collectives_issue_the_same_where_one_of_them_has_no_gradients(
    stage: int, without: int
) -> None:
    """All gradients fit into buckets, so that no reduction waits for another rank; compared, it would differ."""

    def act(comm: Comm) -> None:
        model = seeded(lambda: nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, given = Engine(model, [optimizer], stage=stage, comm=comm), torch.ones(2, 4, requires_grad=True)
        for _ in range(2):
            with engine.forward():
                loss = (given if comm.rank == without else model(given)).square().mean()
            with engine.backward():
                loss.backward()
            optimizer.step()
        engine.close()

    ThreadWorld(2, sanitize=True).run(act)


def test_replicas_that_compare_their_collectives_agree_for_each_micro_batch() -> None:
    with patch.object(ThreadComm, "sanitize", property(lambda _: True, lambda _, __: None), create=True):
        found = train_with_an_odd_replica(has_no_gradient, [9])
    expected = train_with_an_odd_replica(zero, [9])
    for (mine, met), (theirs, _) in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)
        assert met == [3] * 10


@pytest.mark.parametrize("stage", [2, 3])
def test_tensor_parallel_ranks_hear_a_notice_at_the_step_and_none_of_them_between_micro_batches(stage: int) -> None:
    """Between them, ranks agree with those of other batches alone, and not on what all must act upon together."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> list[set[Notice]]:
        heard, notices = [], engine.runner.reductions.notices
        if comm.rank == 0:
            notices.here.add(Notice.STOP)
        for micro in range(2):
            with engine.accumulating() if micro == 0 else nullcontext():
                model(x(1.0 + comm.rank)).sum().backward()
            heard.append(notices.anywhere)
        optimizer.step()
        return [*heard, notices.anywhere]

    for heard in on_engine(tower(3), act, stage, world=4, tensor_parallel_size=2, unit_classes=("Linear",)):
        assert heard == [set(), set(), {Notice.STOP}]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_a_rank_that_leaves_a_layer_out_meets_no_more_for_a_micro_batch_that_the_others_have_settled(
    left_out: int, prefetch: int
) -> None:
    """With prefetch 1 and without the last layer, that rank begins the next backward after the gather in which the
    others would have heard of it in time. If it waits for them there, the error tells that rank 1 never came."""
    start = seeded(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]))

    def act_with(skips: bool) -> Any:
        def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
            for step in range(5):
                for micro in range(3):
                    hidden = x(1.0 + step + comm.rank)
                    is_odd = comm.rank == 0 and (step, micro) == (3, 1)
                    for at, layer in enumerate(model):
                        if not (is_odd and at == left_out):
                            hidden = layer(hidden)
                        elif not skips:
                            hidden = hidden + 0 * layer(hidden)
                    with engine.accumulating() if micro < 2 else nullcontext():
                        hidden.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return state_of(model, engine)

        return act

    options = {"unit_classes": ("Linear",), "bucket_bytes": FEW_BUCKETS, "prefetch": prefetch}
    found, expected = (on_engine(start, act_with(skips), 3, **options) for skips in (True, False))
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)


# What user code does between two micro-batches.


def does_nothing(model: Any, optimizer: Any, rank: int) -> None: ...


def reads_a_weight(model: Any, optimizer: Any, rank: int) -> None:
    model[1][0].weight.norm().item()


def reads_a_weight_on_one_rank(model: Any, optimizer: Any, rank: int) -> None:
    if rank == 0:
        model[1][0].weight.norm().item()


def edits_a_weight(model: Any, optimizer: Any, rank: int) -> None:
    with torch.no_grad():
        model[2][0].weight.mul_(0.5)


def reads_a_gradient(model: Any, optimizer: Any, rank: int) -> None:
    (model[1][0].weight.grad * 2).sum().item()


def edits_a_gradient(model: Any, optimizer: Any, rank: int) -> None:
    model[3][0].weight.grad.mul_(0.5)


def drops_all_gradients(model: Any, optimizer: Any, rank: int) -> None:
    optimizer.zero_grad()


def fills_gradients_with_zeros(model: Any, optimizer: Any, rank: int) -> None:
    optimizer.zero_grad(set_to_none=False)


def reads_the_state(model: Any, optimizer: Any, rank: int) -> None:
    for parameter in model.parameters():
        for value in optimizer.state[parameter].values():
            value.sum().item()


def evaluates(model: Any, optimizer: Any, rank: int) -> None:
    with torch.no_grad():
        model(x(3.0))


def evaluates_on_one_rank(model: Any, optimizer: Any, rank: int) -> None:
    if rank == 0:
        with torch.no_grad():
            model(x(3.0))


BETWEEN = [
    does_nothing,
    reads_a_weight,
    reads_a_weight_on_one_rank,
    edits_a_weight,
    reads_a_gradient,
    edits_a_gradient,
    drops_all_gradients,
    fills_gradients_with_zeros,
    reads_the_state,
    evaluates,
    evaluates_on_one_rank,
]
ORDERS = {"one way": (0, 1, 2, 3), "another way": (0, 2, 1, 3), "a part": (0, 1, 3)}  # on rank 0, in the odd step
RESTS = {"the device": {}, "the host": {"parameters": "cpu", "optimizer": "cpu"}, "parameters": {"parameters": "cpu"}}
APART = Machine(host_is_apart=True)
ZEROES = ["before forward", "before backward", "after step"]


def momentum(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


@pytest.mark.parametrize(
    ("between", "rests", "order", "zeroes", "prefetch", "world", "clips", "odd"),
    pairwise(BETWEEN, [*RESTS, "disk"], [*ORDERS], ZEROES, [0, 1, 2], [1, 2], [False, True], [1, 2]),
    ids=name_of,
)
def test_a_round_that_spans_micro_batches_keeps_the_bits_whatever_user_code_does_between_them(
    between: Any, rests: str, order: str, zeroes: str, prefetch: int, world: int, clips: bool, odd: int, tmp_path: Path
) -> None:
    """Before one of three micro-batches, which may also go another way. On one rank the bits are those of one device;
    on two those of rounds that do not span."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        rank = 0 if comm is None else comm.rank
        for step in range(6):
            for micro in range(3):
                is_odd = (step, micro) == (3, odd)
                if is_odd:
                    between(model, optimizer, rank)
                if micro == 0 and zeroes == "before forward":
                    optimizer.zero_grad()
                hidden = x(1.0 + step + micro + rank)
                with nullcontext() if engine is None else engine.forward():
                    for at in ORDERS[order] if is_odd and rank == 0 else ORDERS["one way"]:
                        hidden = model[at](hidden)
                    loss = hidden.square().mean()
                if micro == 0 and zeroes == "before backward":
                    optimizer.zero_grad()
                accumulates = micro < 2 and engine is not None
                with engine.accumulating() if accumulates else nullcontext():
                    loss.backward()
            if clips and engine is not None:
                engine.gradients.clip_by_value_(optimizer, 0.01)
            elif clips:
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            if zeroes == "after step":
                optimizer.zero_grad()
        if engine is not None:
            engine.close()
        return state_of(model, engine)

    on_disk = {"parameters": "nvme", "optimizer": "nvme", "path": tmp_path}
    offload = Offload(**(on_disk if rests == "disk" else RESTS[rests])) if rests != "the device" else None
    options = {"unit_classes": ("Linear",), "prefetch": prefetch}
    if world == 1:
        expected = on_one_device(tower(4), act, momentum)
    else:
        with patch.object(Rendezvous, "spans", False):
            expected = on_engine(tower(4), act, 3, momentum, **options)[0]
    options |= {"offload": offload, "machine": APART}
    for found in on_engine(tower(4), act, 3, momentum, world=world, **options):
        assert_same_bits(found, expected)


def test_a_plan_that_begins_with_the_end_of_a_backward_is_not_taken_for_one_that_begins_with_a_unit() -> None:
    """In the first step, ranks meet before the one layer of the second micro-batch, which needs no unit in backward. A
    plan of that and the third one was followed from the first unit of the third one's backward on."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> dict[str, Tensor]:
        usual = (1, 0, 2)
        for step, micros in enumerate([[usual, (2,), usual], [(2, 1, 1), usual, usual, usual]]):
            for micro, order in enumerate(micros):
                hidden = x(1.0 + step + comm.rank)
                for at in order:
                    hidden = model[at](hidden)
                with engine.accumulating():
                    hidden.square().mean().backward()
                if (step, micro) == (0, 0):
                    reads_a_gradient(model, optimizer, comm.rank)
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model, engine)

    options = {"unit_classes": ("Linear",), "prefetch": 1}
    with patch.object(Rendezvous, "spans", False):
        expected = on_engine(tower(3), act, 3, **options)
    for found, theirs in zip(on_engine(tower(3), act, 3, **options), expected, strict=True):
        assert_same_bits(found, theirs)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("world", [1, 2])
def test_a_round_that_spans_micro_batches_goes_on_after_an_evaluation_between_a_forward_and_its_backward(
    world: int, prefetch: int
) -> None:
    """The evaluation follows a plan of its own from its second batch on."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for step in range(6):
            for micro in range(3):
                loss = model(x(1.0 + step + micro)).square().mean()
                if (step, micro) == (3, 2):
                    evaluates(model, optimizer, 0)
                    evaluates(model, optimizer, 0)
                accumulates = micro < 2 and engine is not None
                with engine.accumulating() if accumulates else nullcontext():
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model, engine)

    options = {"unit_classes": ("Linear",), "prefetch": prefetch}
    assert_as_on_one_device(tower(4), act, 3, momentum, world=world, **options)


@pytest.mark.parametrize("rests", RESTS)
@pytest.mark.parametrize("world", [1, 2])
def test_optimizers_that_step_by_turns_get_what_the_micro_batches_of_a_round_have_added_up(
    world: int, rests: str
) -> None:
    def train(comm: Comm | None, **options: Any) -> dict[str, Tensor]:
        model = copy.deepcopy(tower(4))
        optimizers = [momentum(model[:2].parameters()), momentum(model[2:].parameters())]
        engine = None
        if comm is not None:
            engine = Engine(model, optimizers, stage=3, comm=comm, options=Options(unit_classes=("Linear",), **options))
        rank = 0 if comm is None else comm.rank
        for step in range(6):
            for micro in range(3):
                accumulates = micro < 2 and engine is not None
                with engine.accumulating() if accumulates else nullcontext():
                    model(x(1.0 + step + micro + rank)).square().mean().backward()
            stepping = optimizers if step % 3 else optimizers[:1]  # the other's gradients go on adding up
            for optimizer in stepping:
                optimizer.step()
                optimizer.zero_grad()
        if engine is not None:
            engine.close()
        return state_of(model, engine)

    def on_ranks(**options: Any) -> list[dict[str, Tensor]]:
        if world == 1:
            return [train(LocalComm(), **options)]
        return ThreadWorld(world).run(lambda comm: train(comm, **options))

    if world == 1:
        expected = train(None)
    else:
        with patch.object(Rendezvous, "spans", False):
            expected = on_ranks()[0]
    for found in on_ranks(offload=Offload(**RESTS[rests]) if RESTS[rests] else None, machine=APART):
        assert_same_bits(found, expected)


@pytest.mark.parametrize(
    ("does", "stage", "dtype", "micros", "overlap"),
    pairwise(LOOKS, STAGES, DTYPES, [1, 2], [True, False]),
    ids=name_of,
)
def test_one_rank_may_look_or_have_no_gradient_while_others_wait_for_its_reductions(
    does: Any, stage: int, dtype: torch.dtype | None, micros: int, overlap: bool
) -> None:
    """A model has more buckets of gradients than travel at a time, and so waits in the middle of backward."""
    found = train_while([0], does, stage, dtype, micros, overlap=overlap)
    expected = train_while([0], SAME.get(does, nn.Module.__call__), stage, dtype, micros, overlap=overlap)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("does", [has_no_gradient, leaves_a_layer_out])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_agree_once_in_a_step_again_after_one_in_which_a_rank_has_done_something_else(
    stage: int, does: Any
) -> None:
    start = seeded(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)]))

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> tuple[list[int], list[int]]:
        agreements, marks = [], []
        for step in range(7):
            before, is_odd = Counter(comm._issued), (step, comm.rank) == (3, 0)
            with engine.forward():
                loss = (does if is_odd else nn.Module.__call__)(model, x(1.0 + step + comm.rank)).mean()
            with engine.backward():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sent = Counter(comm._issued) - before
            agreements.append(sent["all_reduce rendezvous"])
            marks.append(sum(n for name, n in sent.items() if name.startswith("mark ")))
        return agreements, marks

    for agreements, marks in on_engine(start, act, stage, bucket_bytes=FEW_BUCKETS):
        assert agreements[2] == agreements[-1] == 1
        assert marks == [0, 0, 1, 1, 1, 1, 1]
        assert (agreements[3] > 1) == (does is has_no_gradient)  # who leaves a layer out reduces all the same


WAYS = {
    "as all": nn.Module.__call__,
    "weight in forward": looks_in_forward,
    "weight in backward": looks_in_backward,
    "weight in a block": looks_in_a_block_that_recomputes,
    "gradients": looks_at_gradients,
    "no gradient": has_no_gradient,
    "layer left out": leaves_a_layer_out,
}


@given(
    steps=st.lists(
        st.tuples(
            st.booleans(),  # as in the step before
            st.integers(1, 3),  # micro-batches
            st.booleans(),  # clipped
            st.lists(  # rank, micro-batch, what it does there
                st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from([*WAYS])), max_size=2
            ),
            st.sampled_from(["", "evaluates", "a gradient", "a weight", "keeps gradients"]),  # before the step
            st.integers(0, 2),  # on ranks from this one on
            st.booleans(),  # of tensor-parallel ranks, one looks alone
        ),
        min_size=4,
        max_size=9,
    ),
    stage=st.integers(0, 3),
    # Ranks, replicas, tensor-parallel ranks.
    mesh=st.sampled_from([(2, 1, 1), (3, 1, 1), (4, 2, 1), (6, 3, 1), (4, 1, 2), (8, 2, 2)]),
    dtype=st.sampled_from(DTYPES),
    unused=st.booleans(),
    is_offloaded=st.booleans(),
    bucket_bytes=st.sampled_from([64, 128, 1024]),
)
@settings(max_examples=CAMPAIGN or 25, derandomize=not CAMPAIGN, deadline=None)
def test_ranks_that_start_to_reduce_without_asking_keep_the_bits_of_those_that_ask(
    steps: Any, stage: int, mesh: tuple[int, int, int], dtype: Any, unused: bool, is_offloaded: bool, bucket_bytes: int
) -> None:
    """Ranks leave what they have all done before at random, alone or together, and come back to it; those that are
    tensor-parallel have gradients together."""
    world, replicas, tensor_ranks = mesh
    start = seeded(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)]))
    if unused:
        start[2].register_module("unused", nn.Linear(WIDTH, WIDTH))

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        common: Any = (1, False)
        place = comm.rank // tensor_ranks
        for step, (repeats, micros, clips, apart, before, first, alone) in enumerate(steps):
            is_first = comm.rank % tensor_ranks == 0
            common = common if repeats else (micros, clips)
            micros, clips = common
            for micro in range(micros):
                way = next((WAYS[how] for rank, at, how in apart if (rank, at) == (place, micro)), WAYS["as all"])
                way = way if is_first or not alone or way in SAME else WAYS["as all"]
                autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None, cache_enabled=False)
                with engine.accumulating() if micro < micros - 1 else nullcontext():
                    with engine.forward(), autocast:
                        loss = way(model, x(1.0 + step + micro + place)).float().square().mean()
                    with engine.backward():
                        loss.backward()
            if place >= first and alone and not is_first:
                pass
            elif place >= first and before == "evaluates":
                with torch.no_grad(), engine.forward():
                    model(x())
            elif place >= first and before == "a gradient" and model[1].weight.grad is not None:
                model[1].weight.grad.norm().item()
            elif place >= first and before == "a weight":
                model[1].weight.norm().item()
            if clips:
                engine.gradients.clip_by_norm_(optimizer, 0.1)
            optimizer.step()
            if before != "keeps gradients":
                optimizer.zero_grad()
        return state_of(model, engine)

    offload = Offload(optimizer="cpu") if is_offloaded else None
    options = {"autocast_dtype": dtype, "bucket_bytes": bucket_bytes, "offload": offload, "machine": APART}
    options |= {"replicate_size": replicas, "tensor_parallel_size": tensor_ranks, "unit_classes": ("Linear",)}
    found = on_engine(start, act, stage, momentum, world=world, **options)
    options |= {"overlap": stage < 3}  # at stage 3, gathers tell who is ready
    with patch.object(Readiness, "marks_reductions", False), patch.object(Rendezvous, "spans", False):
        expected = on_engine(start, act, stage, momentum, world=world, **options)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize(
    ("does", "stage", "who", "micros", "dtype"),
    pairwise([*LOOKS, leaves_a_layer_out], STAGES, [(0,), (3,), (0, 1), (0, 2), (0, 1, 2)], [1, 2], DTYPES),
    ids=name_of,
)
def test_a_replica_may_go_its_own_way_while_another_one_waits_for_its_reductions(
    does: Any, stage: int, who: tuple[int, ...], micros: int, dtype: torch.dtype | None
) -> None:
    """All of its ranks, one of them, or one rank and its replica."""
    how = {"world": 4, "replicate_size": 2}
    found = train_while(who, does, stage, dtype, micros, **how)
    expected = train_while(who, SAME.get(does, nn.Module.__call__), stage, dtype, micros, **how)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize(
    ("does", "stage", "who", "micros", "dtype"),
    pairwise([*LOOKS, leaves_a_layer_out], STAGES, [(0,), (0, 1)], [1, 2], DTYPES),
    ids=name_of,
)
def test_one_tensor_parallel_rank_may_look_alone_and_those_of_a_batch_may_have_no_gradient(
    does: Any, stage: int, who: tuple[int, ...], micros: int, dtype: torch.dtype | None
) -> None:
    """Ranks 0 and 1 share modules and a batch."""
    who = who if does in LOOKS[:-1] else (0, 1)
    how = {"world": 4, "tensor_parallel_size": 2}
    found = train_while(who, does, stage, dtype, micros, **how)
    expected = train_while(who, SAME.get(does, nn.Module.__call__), stage, dtype, micros, **how)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)


def test_a_replica_starts_to_reduce_as_a_rank_of_it_looks_at_a_weight_while_another_one_has_no_gradients() -> None:
    """All units stay gathered, so it starts no sooner than rank 1, at the end of its backward, has rank 0 serve it."""
    start = seeded(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)]))

    def act_with(looks: bool) -> Any:
        def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
            for step in range(4):
                is_odd = step == 3
                does = (has_no_gradient if looks else zero) if is_odd and comm.rank > 1 else nn.Module.__call__
                with engine.forward(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                    loss = does(model, x(1.0 + step + comm.rank)).float().mean()
                with engine.backward():
                    loss.backward()
                if is_odd and comm.rank == 1 and looks:
                    model[0].weight.norm().item()
                optimizer.step()
                optimizer.zero_grad()
            return state_of(model, engine)

        return act

    options: dict[str, Any] = {"autocast_dtype": torch.bfloat16, "unit_classes": ("Linear",), "prefetch": 4}
    options |= {"world": 4, "replicate_size": 2, "bucket_bytes": FEW_BUCKETS}
    found, expected = (on_engine(start, act_with(looks), 3, **options) for looks in (True, False))
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_that_has_looked_at_its_gradients_leaves_the_next_backward_to_the_others(stage: int) -> None:
    """It contributes zeros, and takes over what the others have, though it has settled the last backward alone."""
    start = seeded(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)]))

    def act_with(leaves: bool) -> Any:
        def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
            for step, micro in itertools.product(range(5), range(2)):
                is_odd = comm.rank == 0 and step == 3
                if not (is_odd and micro and leaves):
                    with engine.accumulating() if micro < 1 else nullcontext():
                        with engine.forward():
                            loss = (zero if is_odd and micro else nn.Module.__call__)(model, x(1.0 + step + comm.rank))
                        with engine.backward():
                            loss.mean().backward()
                if is_odd:
                    model[0].weight.grad.norm()
                if micro:
                    optimizer.step()
                    optimizer.zero_grad()
            return state_of(model, engine)

        return act

    found, expected = (on_engine(start, act_with(one), stage, bucket_bytes=FEW_BUCKETS) for one in (True, False))
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_without_gradients_reduces_no_sooner_than_all_others_are_about_to(stage: int) -> None:
    """Rank 1 has none, and rank 0 still looks at a two-byte weight when rank 2 is about to reduce."""
    start = seeded(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)]))

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        ways = [looks_in_forward, has_no_gradient, nn.Module.__call__]
        with engine.forward(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            loss = ways[comm.rank](model, x()).sum()
        with engine.backward():
            loss.backward()
        optimizer.step()
        return state_of(model, engine)

    options = {"autocast_dtype": torch.bfloat16, "bucket_bytes": FEW_BUCKETS}
    first, *others = on_engine(start, act, stage, world=3, **options)
    for other in others:
        assert_same_bits(other, first)


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_may_fail_before_a_rank_reduces_and_while_another_one_waits_for_that(stage: int) -> None:
    """Ranks reduce the gradient of the last layer first. Rank 0 has it when backward fails, and rank 1 has another."""
    start = seeded(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]))

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        for step, fails in enumerate([False, True, False]):
            with engine.forward():
                first, last = (model[0], model[2]) if comm.rank == 0 or not fails else (model[2], model[0])
                hidden = first(x(1.0 + step + comm.rank))
                if fails:
                    hidden.register_hook(fail)
                loss = last(hidden).sum()
            with pytest.raises(ArithmeticError) if fails else nullcontext(), engine.backward():
                loss.backward()
            if not fails:
                optimizer.step()
            optimizer.zero_grad()
        return state_of(model, engine)

    first, second = on_engine(start, act, stage, unit_classes=("Linear",), bucket_bytes=FEW_BUCKETS)
    assert_same_bits(first, second)


def fail(_: Tensor) -> None:
    raise ArithmeticError


@pytest.mark.parametrize("who", [(0,), (0, 1), (1, 3)])
@pytest.mark.parametrize("does", [has_no_gradient, leaves_a_layer_out])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_replica_may_have_no_gradients_where_backward_steps_them(stage: int, does: Any, who: tuple[int, ...]) -> None:
    how = {"world": 4, "replicate_size": 2, "step_in_backward": True}
    found = train_while(who, does, stage, None, 1, **how)
    expected = train_while(who, SAME[does], stage, None, 1, **how)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_two_byte_weight_that_one_rank_reads_in_the_middle_of_backward_is_named(stage: int) -> None:
    """At stage 3 this works, too: there ranks come together in backward."""
    with pytest.raises(RankTimeoutError) as raised:
        train_while([0], looks_in_the_middle_of_backward, stage, torch.bfloat16, 1, wait_timeout=4)
    places = ["the all-gather of 0.weight", "the reduction of the gradients of model"]
    assert any(place in str(raised.value) for place in places)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_uneven_evaluation_finishes_with_ddps_outputs(precision: str, two_ranks: RankPool) -> None:
    """A declared deviation: rank 1 has two more batches; DDP has no collective there, and so no hang either."""
    expected = two_ranks.once(user_jobs.evaluate_unevenly, DDP, precision)
    for stage in (1, 2, 3):
        for mine, theirs in zip(
            two_ranks.run(user_jobs.evaluate_unevenly, {"stage": stage}, precision), expected, strict=True
        ):
            assert len(mine["outputs"]) == len(theirs["outputs"])
            assert all(torch.equal(a, b) for a, b in zip(mine["outputs"], theirs["outputs"], strict=True))
            assert mine["val_loss"] == theirs["val_loss"]
            assert mine["losses"] == theirs["losses"]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_hook_in_backward_reads_a_two_byte_weight_on_all_ranks_or_is_told_where_one_may(stage: int) -> None:
    """Gradients that do not fit into the buckets are waited for in the middle of backward."""

    def act_with(readers: tuple[int, ...]) -> Any:
        def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> Any:
            seen: list[Tensor] = []
            hook = lambda _: seen.append(model[2][0].weight.norm()) if comm.rank in readers else None  # noqa: E731
            try:
                with engine.forward(), torch.autocast("cpu", dtype=torch.bfloat16):
                    h = model[:3](x())
                    h.register_hook(hook)
                    loss = model[3](h).float().square().mean()
                with engine.backward():
                    loss.backward()
            except RankTimeoutError as error:
                return str(error)
            optimizer.step()
            return state_of(model, engine)

        return act

    options: dict[str, Any] = {"autocast_dtype": torch.bfloat16, "bucket_bytes": 64}
    expected = on_engine(tower(4), act_with(()), stage, **options)
    for found in on_engine(tower(4), act_with((0, 1)), stage, **options):
        assert_same_bits(found, expected[0])
    for found in on_engine(tower(4), act_with((0,)), stage, **options, overlap=False):
        assert_same_bits(found, expected[0])
    told = on_engine(tower(4), act_with((0,)), stage, **options, wait_timeout=4)
    assert "cannot read this on one rank alone once gradients are being reduced: read it there on every rank" in told[0]
    assert "in the reduction of the gradients of model" in told[1]
