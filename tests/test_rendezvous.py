"""Ranks that go different ways where no gradients are computed; all come to the end, and nothing is mixed up."""

import functools
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import user_jobs
from lightning_zero.comm import Comm, RankTimeoutError
from lightning_zero.mesh import Mesh
from lightning_zero.rendezvous import Rendezvous
from lightning_zero.threads import ThreadWorld
from ranks import RankPool
from unit_jobs import assert_same_bits, on_engine, on_one_device, state_of, tower, x

DDP = "ddp_find_unused_parameters_true"
STAGES = [0, 1, 2, 3]
DTYPES = [None, torch.bfloat16]  # of autocast


class Things:
    """What one rank can want, each a number per rank; kept until they are let go."""

    def __init__(self, comm: Comm, prefetch: int, number: int = 6) -> None:
        self.comm = comm
        self.rendezvous = Rendezvous(Mesh.of(comm, 1), prefetch)
        self.held: dict[int, list[int]] = {}
        self.served = 0
        for which in range(number):
            held = None if which == 0 else functools.partial(self.held.__contains__, which)  # 0 is never gathered ahead
            self.rendezvous.enroll(f"thing {which}", functools.partial(self.serve, which), held)

    def serve(self, which: int, keep: bool) -> None:
        rows = torch.empty(self.comm.size, 1, dtype=torch.int64)
        self.comm.all_gather(rows, torch.tensor([10 * which + self.comm.rank]), f"serve {which}").wait()
        self.served += 1
        if keep and which not in self.held:
            self.held[which] = rows.flatten().tolist()

    def use(self, which: int) -> None:
        if which not in self.held or self.rendezvous.is_ahead(which):
            self.rendezvous.want(which)
        assert self.held[which] == [10 * which + peer for peer in range(self.comm.size)]

    def let_go(self, which: int) -> None:
        if not self.rendezvous.is_ahead(which):
            self.held.pop(which, None)

    def end_round(self) -> None:
        self.rendezvous.meet()
        assert not self.rendezvous.is_open
        self.held.clear()


CAMPAIGN = int(os.environ.get("RANDOM_ROUNDS", "0"))
USES = st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=8)  # which, and whether it is let go at once


@given(
    rounds=st.lists(
        st.tuples(USES, st.booleans(), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 8), USES), max_size=2)),
        min_size=1,
        max_size=6,
    ),
    world=st.integers(2, 3),
    prefetch=st.integers(0, 3),
)
@settings(max_examples=CAMPAIGN or 150, deadline=None, derandomize=not CAMPAIGN)
def test_every_rank_gets_what_it_wants_whichever_way_the_others_go(rounds: Any, world: int, prefetch: int) -> None:
    """Rounds of uses: all ranks do the same as in the round before or something new, save for some that cut in."""

    def rank_main(comm: Comm) -> None:
        things = Things(comm, prefetch)
        common: list[tuple[int, bool]] = []
        for uses, repeats, detours in rounds:
            common = common if repeats else uses
            mine = list(common)
            for rank, at, other in detours:
                if rank == comm.rank:
                    mine[at : at + len(other) // 2] = other
            for which, lets_go in mine:
                things.use(which)
                if lets_go:
                    things.let_go(which)
            things.end_round()

    ThreadWorld(world, 5).run(rank_main)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_ranks_that_go_one_way_gather_each_thing_once_and_ahead(prefetch: int) -> None:
    """Forward and backward of a model of five units, as often as it takes to learn the way."""

    def rank_main(comm: Comm) -> tuple[list[int], int]:
        things, ahead = Things(comm, prefetch), 0
        served = []
        for _ in range(4):
            before, ahead = things.served, 0
            for which in [1, 2, 3, 4, 5, 5, 4, 3, 2, 1]:
                things.use(which)
                ahead = max(ahead, len(things.held) - 1)
                things.let_go(which)
            things.end_round()
            served.append(things.served - before)
        assert not things.rendezvous.went_apart
        return served, ahead

    assert ThreadWorld(2, 5).run(rank_main) == [([10, 10, 10, 10], prefetch)] * 2


def test_reductions_start_on_all_ranks_at_the_same_place_when_all_can() -> None:
    def rank_main(comm: Comm) -> list[tuple[int, int]]:
        things = Things(comm, 1)
        started: list[tuple[int, int]] = []
        for _ in range(3):
            started.clear()
            for step, which in enumerate([1, 2, 3, 4, 5]):
                things.rendezvous.count_complete = lambda done=step: min(done, 2) if comm.rank else done
                things.rendezvous.start_reductions = lambda number, at=step: started.append((at, number))
                things.use(which)
                things.let_go(which)
            things.end_round()
        return [each for each in started if each[1]]

    first, second = ThreadWorld(2, 5).run(rank_main)
    assert first == second
    assert first[:3] == [(2, 1), (3, 2), (4, 2)]


def test_a_rank_that_never_comes_is_told_with_what_was_wanted() -> None:
    def rank_main(comm: Comm) -> str | None:
        rendezvous = Rendezvous(Mesh.of(comm, 1), 1)
        rendezvous.enroll("block.3", lambda keep: None)
        if comm.rank:
            return None
        with pytest.raises(RankTimeoutError) as raised:
            rendezvous.want(0)
        return str(raised.value)

    message, _ = ThreadWorld(2, 0.2).run(rank_main)
    assert message is not None
    assert message.startswith("Rank 0 wanted block.3. ")
    assert "ranks [1] never came" in message


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


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_uneven_evaluation_finishes_with_ddps_outputs(precision: str, two_ranks: RankPool) -> None:
    """A declared deviation: rank 1 has two more batches; DDP has no collective there, and so no hang either."""
    expected = two_ranks.run(user_jobs.evaluate_unevenly, DDP, precision)
    for stage in (1, 2, 3):
        for mine, theirs in zip(
            two_ranks.run(user_jobs.evaluate_unevenly, {"stage": stage}, precision), expected, strict=True
        ):
            assert len(mine["outputs"]) == len(theirs["outputs"])
            assert all(torch.equal(a, b) for a, b in zip(mine["outputs"], theirs["outputs"], strict=True))
            assert mine["val_loss"] == theirs["val_loss"]
            assert mine["losses"] == theirs["losses"]
