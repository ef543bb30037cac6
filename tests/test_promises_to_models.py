"""Rows of the acceptance list about users' models and code, each by its number (R25, R53 and R57: test_kinds)."""

import itertools
import random
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import user_jobs
from lightning_zero.run.engine import Engine
from lightning_zero.wire.comm import Comm, Gather, Work
from models import seeded
from ranks import RankPool
from unit_jobs import assert_same_bits, on_engine, on_one_device, state_of, tower, x

DDP = "ddp_find_unused_parameters_true"
STAGES = [1, 2, 3]
PRECISIONS = ["32-true", "bf16-mixed"]


def delay(comm: Comm, seed: int) -> None:
    """Makes every collective of this rank begin and end late, by times of its own."""
    generator = random.Random(seed + comm.rank)

    def delayed(begin: Any) -> Any:
        def begin_late(*args: Any) -> Work:
            time.sleep(generator.choice([0, 0, 0.002]))
            work = begin(*args)

            def finish() -> None:
                time.sleep(generator.choice([0, 0, 0.002]))
                work.wait()

            return Gather(finish, work.has_divergence) if isinstance(work, Gather) else Work(finish)

        return begin_late

    comm._all_gather = delayed(comm._all_gather)  # type: ignore[method-assign]
    comm._reduce_scatter = delayed(comm._reduce_scatter)  # type: ignore[method-assign]


@pytest.mark.parametrize("stage", STAGES)
def test_r04_overlap_changes_no_bit_in_fifty_steps_whoever_is_late(stage: int) -> None:
    def act(model: Any, engine: Engine | None, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        assert comm is not None
        if engine is not None and engine.options.overlap:
            delay(comm, seed=stage)
        for step in range(50):
            optimizer.zero_grad()
            model(x(1.0 + 0.1 * step + comm.rank)).square().mean().backward()
            optimizer.step()
        return state_of(model, engine)

    in_turn = on_engine(tower(6), act, stage, bucket_bytes=256, overlap=False, prefetch=0)
    at_once = on_engine(tower(6), act, stage, bucket_bytes=256, overlap=True, prefetch=2)
    for found, expected in zip(at_once, in_turn, strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_r15_ranks_that_take_different_branches_equal_ddp(stage: int, precision: str, two_ranks: RankPool) -> None:
    """Experts that one rank does not use, heads and blocks that it does not call, or calls twice."""
    found = two_ranks.run(user_jobs.fit_routed, {"stage": stage}, precision=precision)
    expected = two_ranks.once(user_jobs.fit_routed, DDP, precision=precision)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert_same_bits(mine["weights"], theirs["weights"])


class Views(nn.Module):
    """A trunk that several views go through, activations checkpointed or not."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.trunk = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, 8)
        self.reentrant = reentrant

    def forward(self, view: Tensor) -> Tensor:
        for block in self.trunk:
            view = block(view) if self.reentrant is None else checkpoint(block, view, use_reentrant=self.reentrant)
        return self.head(view)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpointed", "reentrant"])
@pytest.mark.parametrize("backwards", ["summed", "separate", "retained"])
@pytest.mark.parametrize("forwards", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_r20_forwards_and_backwards_in_any_number_equal_one_device(
    stage: int, forwards: int, backwards: str, reentrant: bool | None
) -> None:
    """In every bit with one backward for a step, to 1e-6 with several (decision 3)."""

    def act(model: Any, engine: Engine | None, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        def run_backward(loss: Any) -> None:
            with nullcontext() if engine is None else engine.backward():  # as Lightning does
                loss.backward(retain_graph=backwards != "summed")  # the losses share what they compare

        for step in range(2):
            optimizer.zero_grad()
            outputs = [model((x() + number + step).requires_grad_()) for number in range(forwards)]
            losses = [(one - other.mean()).square().mean() for one, other in itertools.pairwise([*outputs, outputs[0]])]
            for loss in [sum(losses)] if backwards == "summed" else losses:
                run_backward(loss)
            if backwards == "retained":
                run_backward(losses[0])
            optimizer.step()
        return state_of(model, engine)

    start = seeded(lambda: Views(reentrant))
    overlap = reentrant is not True  # a second gradient after the first has left is an error with this remedy
    expected = on_one_device(start, act)
    for found in on_engine(start, act, stage, overlap=overlap):
        if backwards == "summed":
            assert_same_bits(found, expected)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_r26_gradients_and_their_norms_read_as_under_ddp(stage: int, precision: str, two_ranks: RankPool) -> None:
    found = two_ranks.run(user_jobs.read_gradients, {"stage": stage}, precision)
    expected = two_ranks.once(user_jobs.read_gradients, DDP, precision)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["none"] == theirs["none"]
        assert_same_bits(mine["grads"], theirs["grads"])
        assert_same_bits(mine["full_grads"], theirs["grads"])
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)
        assert mine["grad_norms"] == pytest.approx(
            {name: grad.double().norm().item() for name, grad in theirs["grads"].items()}, rel=1e-6
        )


@pytest.mark.parametrize("accumulation", ["sharded", "local"])
@pytest.mark.parametrize("stage", STAGES)
def test_r27_one_step_reduces_every_micro_batch_or_once(stage: int, accumulation: str) -> None:
    def act(model: Any, engine: Engine | None, optimizer: Any, comm: Comm | None) -> int:
        assert engine is not None
        assert comm is not None
        before = comm.calls["reduce_scatter"]
        with engine.accumulating():
            for _ in range(3):
                model(x()).square().mean().backward()
        model(x()).square().mean().backward()
        optimizer.step()
        return comm.calls["reduce_scatter"] - before

    groups = 3 if stage == 3 else 1
    reductions = 4 if accumulation == "sharded" and stage > 1 else 1
    assert on_engine(tower(3), act, stage, accumulation=accumulation) == [groups * reductions] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_r27_accumulation_may_change_by_epoch(stage: int, two_ranks: RankPool) -> None:
    expected = two_ranks.once(user_jobs.accumulate_by_epoch, DDP)
    for accumulation in ("sharded", "local"):
        found = two_ranks.run(user_jobs.accumulate_by_epoch, {"stage": stage, "accumulation": accumulation})
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_r27_no_sync_is_legal_in_a_training_step(stage: int, two_ranks: RankPool) -> None:
    expected = two_ranks.once(user_jobs.accumulate_by_hand, DDP)
    for mine, theirs in zip(two_ranks.run(user_jobs.accumulate_by_hand, {"stage": stage}), expected, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert_same_bits(mine["weights"], theirs["weights"])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_r32_any_method_uses_any_weight_and_generates_any_length(
    stage: int, precision: str, two_ranks: RankPool
) -> None:
    found = two_ranks.run(user_jobs.fit_talkative, {"stage": stage}, precision)
    expected = two_ranks.once(user_jobs.fit_talkative, DDP, precision)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert mine["val_loss"] == theirs["val_loss"]
        assert torch.equal(mine["generated"], theirs["generated"])
        assert_same_bits(mine["weights"], theirs["weights"])
