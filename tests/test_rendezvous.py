"""Ranks that go different ways where no gradients are computed; all come to the end, and nothing is mixed up."""

from typing import Any

import pytest
import torch
from torch import Tensor

import user_jobs
from lightning_zero.comm import Comm, RankTimeoutError, ThreadWorld
from lightning_zero.mesh import Mesh
from lightning_zero.rendezvous import Rendezvous
from ranks import RankPool
from unit_jobs import assert_same_bits, on_engine, on_one_device, state_of, tower, x

DDP = "ddp_find_unused_parameters_true"
STAGES = [0, 1, 2, 3]
DTYPES = [None, torch.bfloat16]  # of autocast


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_rank_gets_what_it_wants_in_its_own_order(world: int) -> None:
    orders = [(0, 1, 2, 2), (2, 0), (1,), (1, 1, 1, 1, 1, 0)]

    def rank_main(comm: Comm) -> list[list[int]]:
        rendezvous = Rendezvous(Mesh.of(comm, 1))
        served: list[list[int]] = []

        def serving(number: int) -> Any:
            def serve(keep: bool) -> None:
                rows = torch.empty(comm.size, 1, dtype=torch.int64)
                comm.all_gather(rows, torch.tensor([10 * number + comm.rank]), f"serve {number}").wait()
                if keep:
                    served.append(rows.flatten().tolist())

            return serve

        for number in range(3):
            rendezvous.enroll(str(number), serving(number))
        for want in orders[comm.rank]:
            rendezvous.want(want)
        comm.all_reduce(torch.zeros(1), "any other collective waits for the others' end")
        assert not rendezvous.is_open
        return served

    for order, served in zip(orders, ThreadWorld(world, 5).run(rank_main), strict=False):
        assert served == [[10 * number + peer for peer in range(world)] for number in order]


def test_a_rank_that_never_comes_is_told_with_what_was_wanted() -> None:
    def rank_main(comm: Comm) -> str | None:
        rendezvous = Rendezvous(Mesh.of(comm, 1))
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
