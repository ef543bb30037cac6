"""What begins to train in the middle of training: whole runs on two real ranks, beside a DDP that averages it."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import regroup_jobs
from compare import assert_same_bits, differing
from lightning_zero.config import Offload
from lightning_zero.run.engine import Engine, Options
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from ranks import RankPool
from thread_world import ThreadWorld
from unit_jobs import WIDTH, assert_as_on_one_device, state_of, tower, x

STAGES = [1, 2, 3]
BESIDE = {"Grown": "GrownFromTheStart", "Assigned": "AssignedFromTheStart"}
NAMES = [name for name in regroup_jobs.MODULES if not name.endswith("FromTheStart")]


@pytest.mark.parametrize("name", NAMES)
def test_what_begins_to_train_equals_ddp(name: str, two_ranks: RankPool) -> None:
    beside = BESIDE.get(name, name)
    expected = two_ranks.once(regroup_jobs.fit, "ddp", beside)
    for stage in STAGES:
        for mine, theirs in zip(two_ranks.run(regroup_jobs.fit, {"stage": stage}, name), expected, strict=True):
            assert mine["losses"] == theirs["losses"], stage
            assert mine["rates"] == theirs["rates"]
            assert differing(mine["weights"], theirs["weights"]) == [], stage


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"units": "auto"}, {}),
        ({"accumulation": "local"}, {"accumulate_grad_batches": 2}),
        ({}, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
        ({}, {"precision": "bf16-mixed"}),
        ({"offload": {"optimizer": "cpu"}}, {}),
        ({"offload": {"optimizer": "cpu", "parameters": "cpu"}}, {}),
    ],
)
def test_what_begins_to_train_equals_ddp_with_other_options(options: dict, settings: dict, two_ranks: RankPool) -> None:
    expected = two_ranks.once(regroup_jobs.fit, "ddp", "FineTuned", **settings)[0]
    for stage in STAGES if "parameters" not in options.get("offload", {}) else [3]:
        found = two_ranks.run(regroup_jobs.fit, {"stage": stage, **options}, "FineTuned", **settings)[0]
        assert found["losses"] == expected["losses"], stage
        assert differing(found["weights"], expected["weights"]) == [], stage


GIVEN_FROZEN = ["GivenFrozen", "ThawedInForward", "ThawedOneByOne", "UsedByOneRank"]


@pytest.mark.parametrize("name", GIVEN_FROZEN)
def test_at_stage_0_what_an_optimizer_has_frozen_and_then_trains_equals_ddp(name: str, two_ranks: RankPool) -> None:
    expected = two_ranks.once(regroup_jobs.fit, "ddp", name)
    for mine, theirs in zip(two_ranks.run(regroup_jobs.fit, {"stage": 0}, name), expected, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert differing(mine["weights"], theirs["weights"]) == []


@pytest.mark.parametrize("name", GIVEN_FROZEN)
@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"units": "modules"}, {}),
        ({"bucket_size_mb": 0.0002}, {}),
        ({"accumulation": "local"}, {"accumulate_grad_batches": 2}),
        ({}, {"precision": "bf16-mixed", "gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
        ({"offload": {"optimizer": "cpu"}}, {}),
        ({"overlap": False}, {}),
    ],
)
def test_what_an_optimizer_has_frozen_and_then_trains_equals_ddp_with_other_options(
    name: str, options: dict, settings: dict, two_ranks: RankPool
) -> None:
    expected = two_ranks.once(regroup_jobs.fit, "ddp", name, **settings)
    for stage in STAGES:
        if "offload" in options and stage < 2:
            continue
        found = two_ranks.run(regroup_jobs.fit, {"stage": stage, **options}, name, **settings)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine["losses"] == theirs["losses"], stage
            assert differing(mine["weights"], theirs["weights"]) == [], stage


@pytest.mark.parametrize("name", ["GivenFrozenToSGD", "ThawedOneByOne", "UsedByOneRank"])
@pytest.mark.parametrize("bucket", [0.0002, 25])
def test_micro_batches_may_be_the_first_in_which_frozen_parameters_train(
    name: str, bucket: float, two_ranks: RankPool
) -> None:
    """To rounding, as each is averaged by itself. The gradient of a bias before a batch norm is rounding alone, of
    which Adam makes whole steps; the mean of what the norm sees follows it."""
    expected = two_ranks.once(regroup_jobs.fit, "ddp", name, accumulate_grad_batches=2)
    noise = set() if name == "GivenFrozenToSGD" else {"backbone.0.bias", "backbone.1.running_mean"}
    for stage in STAGES:
        strategy = {"stage": stage, "bucket_size_mb": bucket}
        found = two_ranks.run(regroup_jobs.fit, strategy, name, accumulate_grad_batches=2)
        for mine, theirs in zip(found, expected, strict=True):
            for at in theirs["weights"].keys() - noise:
                assert torch.allclose(mine["weights"][at], theirs["weights"][at]), (stage, at)


def may_wait_before_and_after_a_thaw(comm: Comm) -> list[bool]:
    """With two buckets, and three layers of the size of one."""
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].weight.requires_grad_(False)
    engine = Engine(model, [optimizer], stage=2, comm=comm, options=Options(bucket_bytes=2**10))
    found = []
    for trains in (False, True):
        model[0].weight.requires_grad_(trains)
        with engine.forward():
            loss = model(torch.ones(2, 16)).sum()
        with engine.backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(engine.runner.reductions.may_wait)
    engine.close()
    return found


def test_what_was_frozen_at_set_up_waits_for_buckets_as_soon_as_it_trains() -> None:
    """Ranks then agree before they reduce: one that waits for a bucket could not serve the others."""
    assert ThreadWorld(2, 20).run(may_wait_before_and_after_a_thaw) == [[False, True]] * 2


def test_a_run_goes_on_in_mid_freeze_with_groups_that_were_added(two_ranks: RankPool, tmp_path: Path) -> None:
    expected = two_ranks.run(regroup_jobs.resume, "ddp", tmp_path)[0]
    assert len(expected["groups"]) == 3
    on_disk = {"optimizer": "nvme", "parameters": "nvme", "path": str(tmp_path)}
    for number, strategy in enumerate([*({"stage": stage} for stage in STAGES), {"stage": 3, "offload": on_disk}]):
        found = two_ranks.run(regroup_jobs.resume, strategy, tmp_path / str(number))[0]
        assert found["losses"] == expected["losses"], strategy
        assert found["groups"] == expected["groups"]
        assert differing(found["weights"], expected["weights"]) == [], strategy


def test_the_state_of_a_group_that_was_given_later_is_saved_after_fit(two_ranks: RankPool, tmp_path: Path) -> None:
    ddp = "ddp_find_unused_parameters_true"
    expected = two_ranks.run(regroup_jobs.state_saved_after_fit, ddp, tmp_path / "ddp.ckpt")[0]
    for stage in STAGES:
        found = two_ranks.run(regroup_jobs.state_saved_after_fit, {"stage": stage}, tmp_path / f"{stage}.ckpt")[0]
        assert differing(found, expected) == [], stage


@pytest.mark.parametrize("name", ["FineTunedBackbone", "FineTuned", "Assigned"])
def test_on_one_rank_what_begins_to_train_equals_a_single_device(name: str, pool_of: Callable[[int], RankPool]) -> None:
    (expected,) = pool_of(1).run(regroup_jobs.fit, "auto", name, world=1)
    for stage in STAGES:
        (found,) = pool_of(1).run(regroup_jobs.fit, {"stage": stage}, name, world=1)
        assert (found["losses"], found["rates"]) == (expected["losses"], expected["rates"]), stage
        assert differing(found["weights"], expected["weights"]) == [], stage


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_users_give_what_is_frozen_is_stepped(stage: int) -> None:
    """Of what an optimizer has and nothing trains, a step takes no notice otherwise."""

    def train(module: Any, engine: Any, optimizer: Any) -> dict[str, torch.Tensor]:
        module(x()).square().mean().backward()
        module[0][0].weight.grad = torch.full((WIDTH, WIDTH), 0.5)
        optimizer.step()
        return state_of(module, engine)

    def begin() -> tuple[Any, Any]:
        module = tower()
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        module[0].requires_grad_(False)
        return module, optimizer

    def on_rank(comm: Comm) -> dict[str, torch.Tensor]:
        module, optimizer = begin()
        engine = Engine(module, [optimizer], stage=stage, comm=comm, options=Options())
        return train(module, engine, optimizer)

    module, optimizer = begin()
    expected = train(module, None, optimizer)
    for found in ThreadWorld(2).run(on_rank):
        assert_same_bits(found, expected)


def halve(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


def assign(weight: nn.Parameter) -> None:
    weight.data = weight.detach() * 0.5


def write_past_torch(weight: nn.Parameter) -> None:
    weight.data.numpy()[:] *= 0.5


@pytest.mark.parametrize("options", [{}, {"offload": Offload("cpu")}], ids=["on the device", "offloaded"])
@pytest.mark.parametrize("edit", [halve, assign, write_past_torch])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_that_begin_to_train_later_may_be_edited_between_steps(
    stage: int, edit: Callable[[nn.Parameter], None], options: dict[str, Any]
) -> None:
    start = tower()
    start[1].requires_grad_(False)

    def act(model: Any, engine: Engine | None, optimizer: Any, _: Comm | None) -> dict[str, torch.Tensor]:
        for step in range(4):
            if step == 1:
                model[1].requires_grad_()
                model.append(nn.Linear(WIDTH, WIDTH, bias=False))
                model[-1].weight.data.fill_(0.1)
                optimizer.add_param_group({"params": [*model[1].parameters(), *model[-1].parameters()]})
            if step >= 2:
                edit(model[1][0].weight)
                edit(model[-1].weight)
            with nullcontext() if engine is None else engine.forward():
                loss = model(x(1.0 + step)).square().mean()
            with nullcontext() if engine is None else engine.backward():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model, engine)

    assert_as_on_one_device(start, act, stage, **options)


@pytest.mark.parametrize("stage", [0, *STAGES])
def test_what_is_made_in_mid_training_rests_and_computes_in_the_param_dtype_that_was_asked_for(stage: int) -> None:
    def train(comm: Comm) -> dict[str, torch.Tensor]:
        model = nn.Sequential(tower())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        engine = Engine(model, [optimizer], stage=stage, comm=comm, options=Options(param_dtype=torch.bfloat16))
        for step in range(3):
            if step == 1:
                model.append(nn.Linear(WIDTH, WIDTH))
                nn.init.constant_(model[-1].weight, 0.1)
                nn.init.constant_(model[-1].bias, 0.1)
                optimizer.add_param_group({"params": [*model[-1].parameters()]})
            with engine.forward():
                loss = model(x(1.0 + step).bfloat16()).square().mean()
            with engine.backward():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model[-1].weight.dtype == torch.bfloat16
        return engine.states.full_model()

    found, beside = ThreadWorld(2).run(train)
    assert_same_bits(found, beside)
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert_same_bits(found, train(LocalComm()))
