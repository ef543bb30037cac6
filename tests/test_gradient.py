"""`p.grad` as the user sees it, and what accumulates when."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from compare import assert_same_bits
from lightning_zero import Offload
from lightning_zero.run.engine import Engine, Options
from lightning_zero.run.sharded_gradient import ShardedGradient
from lightning_zero.wire.comm import Comm
from models import assorted, clone, loss_of, seeded, sgd
from thread_world import ThreadWorld
from unit_jobs import assert_as_on_one_device, on_engine, on_one_device, state_of, tower, x
from watched import check_program

STAGES = [0, 1, 2, 3]


def on_two_ranks(
    stage: int, act: Callable[[nn.Module, Engine, Any, Comm], Any], world: int = 2, **options: Any
) -> list[Any]:
    start = assorted()

    def rank_main(comm: Comm) -> Any:
        model = clone(start)
        optimizer, _ = sgd(model)
        return act(
            model, Engine(model, [optimizer], stage=stage, comm=comm, options=Options(**options)), optimizer, comm
        )

    return ThreadWorld(world).run(rank_main)


def average(*steps: int, ranks: int = 2) -> dict[str, Tensor | None]:
    """DDP's gradients after backwards over these steps, each reduced on its own."""
    total: dict[str, Tensor | None] = {}
    for step in steps:
        grads = []
        for rank in range(ranks):
            model = clone(assorted())
            loss_of(model, rank, step).backward()
            grads.append({name: p.grad for name, p in model.named_parameters()})
        for name, first in grads[0].items():
            mean = None if first is None else sum((g[name] for g in grads[1:]), start=first.clone()) / ranks
            total[name] = mean if total.get(name) is None else total[name] + mean
    return total


def assert_grads(model: nn.Module, expected: dict[str, Tensor | None], scale: float = 1.0) -> None:
    for name, parameter in model.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            torch.testing.assert_close(parameter.grad + 0, expected[name] * scale, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("stage", STAGES)
def test_grad_reads_as_ddps_average_in_full_shape(stage: int) -> None:
    expected = average(0)

    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        loss_of(model, comm.rank, 0).backward()
        assert_grads(model, expected)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert parameter.grad.shape == parameter.shape
                assert torch.equal(engine.gradients.full(parameter), expected[name]), name
        assert isinstance(model.norm.weight.grad, ShardedGradient) == (stage > 0)

    on_two_ranks(stage, act)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_average_lands_where_it_rests_and_passes_no_bucket(stage: int) -> None:
    expected = average(0)

    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        totals = [bucket.total.fill_(torch.nan) for pool in engine.runner.reductions.pools for bucket in pool._buckets]
        loss_of(model, comm.rank, 0).backward()
        assert_grads(model, expected)
        assert totals
        assert all(total.isnan().all() for total in totals)

    on_two_ranks(stage, act)


@pytest.mark.parametrize("stage", STAGES)
def test_writing_a_grad_in_place_reaches_the_step(stage: int) -> None:
    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> Tensor:
        loss_of(model, comm.rank, 0).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        assert_grads(model, average(0), 0.5)
        before = engine.states.full_model()["blocks.0.up.weight"]
        optimizer.step()
        after = engine.states.full_model()["blocks.0.up.weight"]
        expected = before - 0.05 * 0.5 * average(0)["blocks.0.up.weight"]
        torch.testing.assert_close(after, expected, rtol=1e-6, atol=1e-7)
        return after

    on_two_ranks(stage, act)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_backwards_without_zero_grad_add_their_averages(stage: int, replicas: int) -> None:
    ranks = 2 * replicas

    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        for step in range(3):
            loss_of(model, comm.rank, step).backward()
        assert_grads(model, average(0, 1, 2, ranks=ranks))
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        loss_of(model, comm.rank, 1).backward()
        assert_grads(model, average(1, ranks=ranks))
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, comm.rank, 2).backward()
        assert_grads(model, average(2, ranks=ranks))

    on_two_ranks(stage, act, ranks, replicate_size=replicas)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_was_dropped_is_replaced_where_the_others_of_its_bucket_add_up(stage: int) -> None:
    dropped = "blocks.0.up.weight"

    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        loss_of(model, comm.rank, 0).backward()
        model.get_parameter(dropped).grad = None
        loss_of(model, comm.rank, 1).backward()
        assert_grads(model, {**average(0, 1), dropped: average(1)[dropped]})

    on_two_ranks(stage, act, bucket_bytes=2**20)


@pytest.mark.parametrize("accumulation", ["sharded", "local"])
@pytest.mark.parametrize("stage", STAGES)
def test_no_sync_keeps_backwards_local_until_one_reduces_them(stage: int, accumulation: str) -> None:
    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        before = comm.calls["reduce_scatter"]
        with engine.no_sync():
            loss_of(model, comm.rank, 0).backward()
            loss_of(model, comm.rank, 1).backward()
        assert comm.calls["reduce_scatter"] == before
        loss_of(model, comm.rank, 2).backward()
        assert model.norm.weight.grad is not None  # what is left to reduce goes when somebody asks, or steps
        assert comm.calls["reduce_scatter"] > before
        assert_grads(model, average(0, 1, 2))

    on_two_ranks(stage, act, accumulation=accumulation)


def penalize(model: Any, *, all_parameters: bool) -> None:
    """The gradient of a penalty that is the same on all ranks, which nobody has to reduce."""
    weights = model.parameters() if all_parameters else [model.norm.weight]
    sum(weight.square().sum() for weight in weights if weight.requires_grad).backward()


@pytest.mark.parametrize("all_parameters", [True, False], ids=["of all", "of one"])
@pytest.mark.parametrize("offload", [None, Offload("cpu")], ids=["", "offloaded"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_backward_that_is_not_reduced_adds_to_the_average_before_it(
    stage: int, offload: Offload | None, all_parameters: bool
) -> None:
    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> dict[str, Tensor]:
        found = {}
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, comm.rank, step).backward()
            with engine.no_sync():
                penalize(model, all_parameters=all_parameters)
            if step != 1:
                for name, parameter in model.named_parameters():
                    if parameter.grad is not None:
                        found[f"{name}.grad {step}"] = parameter.grad.clone()
                        assert torch.equal(engine.gradients.full(parameter), found[f"{name}.grad {step}"])
            optimizer.step()
        check_program(engine)
        return found | engine.states.full_model()

    found, of_stage_0 = on_two_ranks(stage, act, offload=offload, merges_units=False), on_two_ranks(0, act)
    for mine, expected in zip(found, of_stage_0, strict=True):
        assert_same_bits(mine, expected)


@pytest.mark.parametrize("on", [{0, 1}, {0}], ids=["", "on one rank"])
@pytest.mark.parametrize("all_parameters", [True, False], ids=["of all", "of one"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_backward_reduces_what_others_have_added_to_an_average_on_each_rank(
    stage: int, all_parameters: bool, on: set[int]
) -> None:
    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> dict[str, Tensor]:
        read: list[Tensor] = []  # views, through which nothing is edited
        loss_of(model, comm.rank, 0).backward()
        with engine.no_sync():
            for _ in range(2 if comm.rank in on else 0):
                penalize(model, all_parameters=all_parameters)
                for parameter in model.parameters() if stage > 1 or len(on) == 2 else ():  # else an error, see below
                    read += [] if parameter.grad is None else [parameter.grad.view(-1)]
        model.norm.weight.sum().backward()  # leaves what was added to the others as it is
        found = {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        check_program(engine)
        return found | engine.states.full_model()

    for mine, expected in zip(on_two_ranks(stage, act, merges_units=False), on_two_ranks(0, act), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_measuring_gradients_leaves_what_the_next_backward_is_to_reduce(stage: int) -> None:
    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        loss_of(model, comm.rank, 0).backward()
        with engine.no_sync():
            loss_of(model, comm.rank, 1).backward()
        engine.gradients.norms()
        loss_of(model, comm.rank, 2).backward()
        assert_grads(model, average(0, 1, 2))

    on_two_ranks(stage, act)


@pytest.mark.parametrize("ends", ["clipped", "averaged", "edited by a view", "replaced", "dropped"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_users_do_with_such_a_gradient_is_stepped(stage: int, ends: str) -> None:
    is_averaged = ends in ("averaged", "clipped")

    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> dict[str, Tensor]:
        for step in range(2):
            loss_of(model, comm.rank, step).backward()
            with engine.no_sync():
                loss_of(model, comm.rank, step + 2).backward()
            if is_averaged:
                average_by_hand(model, comm)
            if ends == "clipped":
                engine.gradients.clip_by_norm_(optimizer, 0.05)
            for parameter in () if is_averaged else model.parameters():
                if parameter.grad is not None and ends == "edited by a view":
                    parameter.grad.view(-1).fill_(0.5)
                elif parameter.grad is not None:
                    parameter.grad = torch.full_like(parameter, 0.25) if ends == "replaced" else None
            optimizer.step()
            optimizer.zero_grad()
        check_program(engine)
        return engine.states.full_model()

    for mine, expected in zip(on_two_ranks(stage, act), on_two_ranks(0, act), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def reduce_a_loss(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
    loss_of(model, comm.rank, 0).backward()


def reduce_one(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
    (model.scale.square().sum() * comm.rank).backward()


def reduce_apart(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
    (model.norm.weight if comm.rank else model.scale).square().sum().backward()


def keep_a_loss(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
    with engine.no_sync():
        loss_of(model, 0, 1).backward()


def keep_a_penalty(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
    with engine.no_sync():
        penalize(model, all_parameters=False)


def keep_penalties(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
    with engine.no_sync():
        penalize(model, all_parameters=True)


class Stops(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, *grads: Any) -> Any:
        raise ZeroDivisionError


def fail_in_the_middle(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
    """As code does that catches an error on every rank, and drops what there was."""
    with pytest.raises(ZeroDivisionError):
        (model.norm(Stops.apply(model.scale * torch.ones(1, 10)))).sum().backward()
    optimizer.zero_grad()


def step(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
    optimizer.step()


def drop_all(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
    optimizer.zero_grad()


def drop_one(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
    model.norm.weight.grad = None


def replace_one(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
    model.norm.weight.grad = torch.full((10,), 0.25)


def halve(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def edit_by_views(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.view(-1).add_(0.25)


def clip(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
    engine.gradients.clip_by_norm_(optimizer, 0.5)


def read_on_rank_0(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
    for parameter in model.parameters() if comm.rank == 0 else ():
        if parameter.grad is not None:
            float(parameter.grad.sum())


ACTS = [
    reduce_a_loss, reduce_one, reduce_apart, keep_a_loss, keep_a_penalty, keep_penalties, fail_in_the_middle,
    step, drop_all, drop_one, replace_one, halve, edit_by_views, clip, read_on_rank_0,
]  # fmt: skip


@settings(max_examples=12)
@given(acts=st.lists(st.sampled_from(ACTS), min_size=3, max_size=8))
@example(acts=[reduce_a_loss, keep_a_penalty, reduce_one])
@example(acts=[reduce_a_loss, keep_a_penalty, edit_by_views, reduce_one])
@example(acts=[reduce_a_loss, drop_one, keep_penalties, reduce_one])
@example(acts=[reduce_one, clip, keep_a_loss])
@example(acts=[keep_a_loss, step, replace_one, reduce_one])
@example(acts=[reduce_a_loss, replace_one, keep_a_loss, fail_in_the_middle])
@example(acts=[reduce_a_loss, keep_a_loss, edit_by_views, edit_by_views])
@example(acts=[reduce_a_loss, read_on_rank_0, halve, halve])
@example(acts=[reduce_a_loss, read_on_rank_0, edit_by_views, reduce_one])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_backwards_and_edits_in_any_order_have_the_gradients_of_stage_0(stage: int, acts: list[Any]) -> None:
    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> dict[str, Tensor]:
        found = {}
        for number, one in enumerate(acts):
            one(model, engine, optimizer, comm)
            for name, parameter in model.named_parameters() if number % 2 else ():
                if parameter.grad is not None:
                    view = parameter.grad.detach()  # so that what acts edit is lent already
                    found[f"{name}.grad after {number}"] = view.clone()
        optimizer.step()
        check_program(engine)
        return found | engine.states.full_model()

    for mine, expected in zip(on_two_ranks(stage, act, merges_units=False), on_two_ranks(0, act), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def average_by_hand(model: Any, comm: Comm) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.copy_(comm.all_reduce(parameter.grad.clone(), "by hand") / 2)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_users_average_by_hand_are_stepped(stage: int) -> None:
    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm, by_hand: bool) -> dict[str, Tensor]:
        for step in range(3):
            optimizer.zero_grad()
            with engine.no_sync() if by_hand else nullcontext():
                loss_of(model, comm.rank, step).backward()
            if by_hand:
                average_by_hand(model, comm)
            optimizer.step()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        model.norm.weight.sum().backward()  # adds to these averages, and to no others that were there before
        check_program(engine)
        optimizer.step()
        return engine.states.full_model()

    expected = on_two_ranks(stage, partial(act, by_hand=False))[0]
    added = expected.pop("norm.weight")  # in another order: to rounding
    for found in on_two_ranks(stage, partial(act, by_hand=True)):
        torch.testing.assert_close(found.pop("norm.weight"), added)
        assert_same_bits(found, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_rank_makes_of_accumulated_gradients_is_averaged_where_the_last_backward_leaves_them_out(
    stage: int,
) -> None:
    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        with engine.no_sync(), engine.forward():
            (model.unused(torch.ones(1, 3)).sum() * (1 + comm.rank)).backward()
        model.unused.bias.grad = model.unused.bias.grad / 4  # 1/4 and 2/4
        with engine.forward():
            model.norm(torch.ones(1, 10)).sum().backward()
        torch.testing.assert_close(engine.gradients.full(model.unused.bias), torch.full((5,), 0.375))
        torch.testing.assert_close(engine.gradients.full(model.unused.weight), torch.full((5, 3), 1.5))

    on_two_ranks(stage, act)


@pytest.mark.parametrize("stage", STAGES)
def test_accumulated_gradients_that_have_changed_places_are_added_to_where_they_are(stage: int) -> None:
    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        first, second = (block.up.bias for block in model.blocks)
        with engine.no_sync(), engine.forward():
            (first.sum() + 2 * second.sum()).backward()
        first.grad, second.grad = second.grad, first.grad
        with engine.backward():
            (4 * first.sum() + 4 * second.sum()).backward()
        assert [float(engine.gradients.full(p)[0]) for p in (first, second)] == [6.0, 5.0]

    on_two_ranks(stage, act)


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def halve_a_view(parameter: Tensor) -> None:
    assert parameter.grad is not None
    view = parameter.grad.view(-1)
    view.mul_(0.5)


def replace_by_half(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 0.5


def drop(parameter: Tensor) -> None:
    parameter.grad = None


@pytest.mark.parametrize("leaves", ["the average", "zeros", "what has accumulated"])
@pytest.mark.parametrize("how", [halve, halve_a_view, replace_by_half, drop])
@pytest.mark.parametrize("stage", STAGES)
def test_a_hook_on_an_accumulated_gradient_finds_the_average_in_it_and_changes_both(
    stage: int, how: Callable[[Tensor], None], leaves: str
) -> None:
    """Each rank adds 8 or 16 to what an earlier backward has left in `p.grad`, as under DDP. What is dropped stays so,
    and the next backward adds to nothing."""

    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        weight = model.blocks[0].up.bias
        seen: list[float] = []
        with engine.backward():
            (2 * weight.sum()).backward()
        engine.gradients.full(weight)
        if leaves == "zeros":
            optimizer.zero_grad(set_to_none=False)
        elif leaves == "what has accumulated":
            with engine.no_sync():
                (weight.sum() * 2).backward()
        before = {"the average": 2, "zeros": 0, "what has accumulated": 4}[leaves]
        weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(float(parameter.grad[0])))
        hook = weight.register_post_accumulate_grad_hook(how)
        with engine.backward():
            (8 * weight.sum() * (1 + comm.rank)).backward()
        hook.remove()
        found = engine.gradients.full(weight)
        assert found is None if how is drop else torch.equal(found, torch.full_like(found, (before + 12) / 2))
        optimizer.zero_grad(set_to_none=how is drop)
        (8 * weight.sum() * (1 + comm.rank)).backward()
        assert torch.equal(engine.gradients.full(weight), torch.full_like(weight, 12.0))
        assert seen == [before + 8.0 * (1 + comm.rank), 8.0 * (1 + comm.rank)]

    on_two_ranks(stage, act)


@pytest.mark.parametrize("adds", ["on all ranks", "on one rank", "nothing"])
@pytest.mark.parametrize("how", [halve, halve_a_view, replace_by_half])
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_edited_after_a_backward_that_only_accumulates_is_each_ranks_own_until_one_reduces(
    stage: int, how: Callable[[Tensor], None], adds: str
) -> None:
    """Also where only some ranks have added to the average, or none has. Zeros are the same for all."""

    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        weight = model.blocks[0].up.bias
        added = {"on all ranks": [8, 16], "on one rank": [8, 0], "nothing": [0, 0]}[adds]

        def run(factor: int) -> None:
            (factor * (weight if factor else model.norm.weight).sum()).backward()

        run(2)
        with engine.no_sync():
            run(added[comm.rank])
        how(weight)
        own = [(2 + more) / 2 for more in added]
        assert torch.equal(weight.grad.clone(), torch.full_like(weight, own[comm.rank]))
        run(4)
        assert torch.equal(engine.gradients.full(weight), torch.full_like(weight, sum(own) / 2 + 4))
        with engine.no_sync():
            run(added[comm.rank])
        optimizer.zero_grad(set_to_none=False)
        how(weight)
        run(4)
        assert torch.equal(engine.gradients.full(weight), torch.full_like(weight, 4))

    on_two_ranks(stage, act)


@pytest.mark.parametrize("stage", STAGES)
def test_a_view_of_a_gradient_that_only_accumulates_shows_and_takes_edits_until_the_next_backward(stage: int) -> None:
    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        first, second = (block.up.bias for block in model.blocks)
        (2 * first.sum() + 2 * second.sum()).backward()
        with engine.no_sync():
            (8 * (1 + comm.rank) * first.sum()).backward()
        views = [parameter.grad.view(-1) for parameter in (first, second)]
        for view in views:
            view.mul_(0.5)
        first.grad.add_(1)
        assert float(views[0][0]) == 2 + 4 * comm.rank + 4
        (4 * first.sum() + 4 * second.sum()).backward()
        assert [float(engine.gradients.full(p)[0]) for p in (first, second)] == [8 + 4, 1 + 4]

    on_two_ranks(stage, act)


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_making_zeros_of_gradients_gathers_none(stage: int, at_once: bool) -> None:
    """Also where one rank alone has added to them since, which at stage 1 has written over averages."""

    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        def zero() -> None:
            before = engine.mesh.bytes_sent["all_gather"]
            optimizer.zero_grad(set_to_none=False)
            assert engine.mesh.bytes_sent["all_gather"] == before

        weight, other = (block.up.bias for block in model.blocks)
        optimizer.defaults["foreach"] = at_once
        for added in ([0, 0], [8, 16], [8, 0]):
            with engine.forward(), engine.backward():
                (2 * weight.sum() + 4 * other.sum()).backward()
            view = weight.grad.view(-1)
            with engine.forward(), engine.no_sync(), engine.backward():
                (added[comm.rank] * (weight if added[comm.rank] else model.norm.weight).sum()).backward()
            zero()
            assert float(view.sum()) == 2 * view.numel(), "a loan ends with the next forward"
            with engine.forward(), engine.backward():
                (2 * weight.sum()).backward()
            view = weight.grad.view(-1)
            zero()
            assert not view.any()
            assert not any(bool(p.grad.any()) for p in (weight, other))
        with engine.forward(), engine.backward():
            (2 * weight.sum()).backward()
        assert [float(engine.gradients.full(p)[0]) for p in (weight, other)] == [2, 0]

    on_two_ranks(stage, act)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_users_average_by_hand_are_unscaled_and_stepped(stage: int) -> None:
    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm, by_hand: bool) -> dict[str, Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        for step in range(2):
            optimizer.zero_grad()
            with engine.no_sync() if by_hand else nullcontext():
                scaler.scale(loss_of(model, comm.rank, step)).backward()
            if by_hand:
                average_by_hand(model, comm)
            assert engine.gradients.unscale_(scaler, optimizer).ranks == []
            scaler.step(optimizer)
            scaler.update()
        check_program(engine)
        return engine.states.full_model()

    expected = on_two_ranks(stage, partial(act, by_hand=False))
    for found in on_two_ranks(stage, partial(act, by_hand=True)):
        assert_same_bits(found, expected[0])


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_have_only_accumulated_are_read_as_this_ranks_own(stage: int) -> None:
    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        loss_of(model, comm.rank, 0).backward()
        optimizer.zero_grad()
        alone = clone(assorted())
        with engine.no_sync():
            loss_of(model, comm.rank, 1).backward()
        loss_of(alone, comm.rank, 1).backward()
        norms = engine.gradients.norms()
        for (name, parameter), own in zip(model.named_parameters(), alone.parameters(), strict=True):
            found = engine.gradients.full(parameter)
            assert (found is None) == (own.grad is None) == (name not in norms)
            if found is not None:
                assert torch.equal(found, own.grad)
                assert torch.equal(norms[name], torch.linalg.vector_norm(own.grad))
        loss_of(model, comm.rank, 2).backward()
        assert_grads(model, average(1, 2))

    on_two_ranks(stage, act)


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_gradients_that_have_only_accumulated_reduces_none(stage: int) -> None:
    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        for step in range(3):
            loss_of(model, comm.rank, step).backward()
            optimizer.zero_grad()
            with engine.no_sync():
                loss_of(model, comm.rank, step).backward()
            engine.gradients.clip_by_norm_(optimizer, 0.5)
            loss_of(model, comm.rank, 2 + step).backward()
            optimizer.step()
        check_program(engine)

    on_two_ranks(stage, act, merges_units=False)


@pytest.mark.parametrize("stage", STAGES)
def test_leaving_an_inner_no_sync_leaves_the_outer_one_in_force(stage: int) -> None:
    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        before = comm.calls["reduce_scatter"]
        with engine.no_sync():
            with engine.no_sync():
                loss_of(model, comm.rank, 0).backward()
            loss_of(model, comm.rank, 1).backward()
            engine.runner.rendezvous.meet()
            assert comm.calls["reduce_scatter"] == before
        loss_of(model, comm.rank, 2).backward()
        assert_grads(model, average(0, 1, 2))

    on_two_ranks(stage, act)


@pytest.mark.parametrize("stage", STAGES)
def test_retained_graphs_may_run_backward_twice(stage: int) -> None:
    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        loss = loss_of(model, comm.rank, 0)
        loss.backward(retain_graph=True)
        loss.backward()
        assert_grads(model, average(0, 0))

    on_two_ranks(stage, act)


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_used_on_one_rank_only_counts_as_zero_on_the_other(stage: int) -> None:
    x = torch.ones(1, 3)

    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        loss = loss_of(model, comm.rank, 0)
        if comm.rank == 1 and stage < 3:  # at stage 3 its gather is a collective
            loss = loss + model.unused(x).sum()
        loss.backward()
        if stage < 3:
            torch.testing.assert_close(engine.gradients.full(model.unused.bias), torch.full((5,), 0.5))
            assert_grads(
                model, average(0) | {"unused.bias": torch.full((5,), 0.5), "unused.weight": torch.full((5, 3), 0.5)}
            )
        optimizer.zero_grad()
        loss_of(model, comm.rank, 0).backward()
        before = engine.states.full_model()["unused.bias"]
        optimizer.step()
        assert model.unused.bias.grad is None
        assert torch.equal(engine.states.full_model()["unused.bias"], before)  # no step, no decay

    on_two_ranks(stage, act)


@pytest.mark.parametrize("accumulation", ["sharded", "local"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_leaves_a_parameter_out_adds_nothing_of_what_was_cleared(stage: int, accumulation: str) -> None:
    """Both ranks have added micro-batches up in it, and then stepped and cleared it."""
    x = torch.ones(1, 3)

    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        for user in (0, 1):  # either rank has a part of it
            for micro in range(2):
                with nullcontext() if micro else engine.accumulating(), engine.forward():
                    model.unused(x).sum().backward()
            torch.testing.assert_close(engine.gradients.full(model.unused.bias), torch.full((5,), 2.0))
            optimizer.step()
            optimizer.zero_grad()
            with engine.forward():
                loss = model.norm(torch.ones(1, 10)).sum()
                if comm.rank == user:
                    loss = loss + model.unused(x).sum()
            loss.backward()
            torch.testing.assert_close(engine.gradients.full(model.unused.bias), torch.full((5,), 0.5))
            torch.testing.assert_close(engine.gradients.full(model.unused.weight), torch.full((5, 3), 0.5))
            optimizer.zero_grad()

    on_two_ranks(stage, act, accumulation=accumulation)


@pytest.mark.parametrize("accumulation", ["sharded", "local"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_leaves_a_parameter_out_contributes_what_its_user_has_put_into_its_gradient(
    stage: int, accumulation: str
) -> None:
    """As under DDP, which averages what is in `p.grad` after backward on each rank."""

    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        loss_of(model, comm.rank, 0).backward()
        for parameter in (model.unused.bias, model.unused.weight, model.norm.weight):
            parameter.grad = torch.full_like(parameter, 3.0)
        with engine.accumulating(), engine.forward():
            model.norm(torch.ones(1, 10)).sum().backward()
        with engine.forward():
            loss = model.norm(torch.ones(1, 10)).sum()
            if comm.rank == 1:
                loss = loss + model.unused(torch.ones(1, 3)).sum()
        loss.backward()
        torch.testing.assert_close(model.unused.bias.grad + 0, torch.full((5,), 3.5))
        torch.testing.assert_close(engine.gradients.full(model.unused.weight), torch.full((5, 3), 3.5))
        model.unused.bias.grad = torch.full((5,), 2.0)
        model.norm(torch.ones(1, 10)).sum().backward()  # no rank uses it
        torch.testing.assert_close(model.unused.bias.grad + 0, torch.full((5,), 2.0))
        torch.testing.assert_close(engine.gradients.full(model.unused.bias), torch.full((5,), 2.0))

    on_two_ranks(stage, act, accumulation=accumulation)


@pytest.mark.parametrize("accumulation", ["sharded", "local"])
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_cleared_between_two_micro_batches_counts_no_more(stage: int, accumulation: str) -> None:
    """Both ranks have used two layers in the first one. In the second, one rank uses one of them."""

    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        with engine.accumulating(), engine.forward():
            (loss_of(model, comm.rank, 0) + model.unused(torch.ones(1, 3)).sum()).backward()
        optimizer.zero_grad()
        with engine.forward():
            loss = model.norm(torch.ones(1, 10)).sum()
            if comm.rank == 1:
                loss = loss + model.unused(torch.ones(1, 3)).sum()
        loss.backward()
        torch.testing.assert_close(engine.gradients.full(model.unused.bias), torch.full((5,), 0.5))
        assert engine.gradients.full(model.blocks[0].up.weight) is None

    on_two_ranks(stage, act, accumulation=accumulation)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_left_after_a_fit_where_no_rank_has_dropped_them(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> list[str]:
        model(x()).square().mean().backward()
        if comm.rank == 1:
            model[0][0].weight.grad = None
        left = engine.gradients.whole_on_host()
        return [name for name, parameter in model.named_parameters() if parameter not in left]

    assert on_engine(tower(), act, stage) == [["0.0.weight"]] * 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_torchs_own_clipping_scales_sharded_gradients(stage: int) -> None:
    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> None:
        loss_of(model, comm.rank, 0).backward()
        reference = {name: grad for name, grad in average(0).items() if grad is not None}
        norm = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in reference.values()]))
        found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(found, norm)
        assert_grads(model, average(0), float(0.1 / (norm + 1e-6)))

    on_two_ranks(stage, act)


def _halve_numpy(grad: Tensor) -> None:
    grad.detach().cpu().numpy()[...] *= 0.5


def _zero_first(grad: Tensor) -> None:
    grad[0] = 0


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "item": _zero_first,
    "slice": lambda grad: grad[:2].mul_(2),
    "view": lambda grad: grad.view(-1)[:3].zero_(),
    "flatten": lambda grad: grad.flatten()[1:3].fill_(0.1),
    "narrow": lambda grad: grad.narrow(0, 1, 2).mul_(3),
    "chunk": lambda grad: [part.mul_(1.5) for part in grad.chunk(3)],
    "unbind": lambda grad: grad.unbind()[1].zero_(),
    "transposed": lambda grad: grad.T[0].mul_(0.5) if grad.dim() == 2 else grad.mul_(0.5),
    "diagonal": lambda grad: grad.diagonal().fill_(0.2) if grad.dim() == 2 else None,
    "data": lambda grad: grad.data[:1].zero_(),
    "detached": lambda grad: grad.detach()[0].mul_(0.7),
    "rows": lambda grad: [row.clamp_(-0.01, 0.01) for row in grad],
    "numpy": _halve_numpy,
}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_edits_of_views_of_a_gradient_persist(stage: int) -> None:
    """Rows of an embedding are frozen so. A view may be edited later than it was taken, and shows what is edited."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        found = {}
        for name, edit in EDITS.items():
            model(x()).square().mean().backward()
            kept = [parameter.grad[-1] for parameter in model.parameters()]
            for parameter in model.parameters():
                edit(parameter.grad)
            for view in kept:
                view.add_(0.125)
            for number, parameter in enumerate(model.parameters()):
                found[f"{name} {number}"] = torch.from_numpy(np.array(parameter.grad))
                found[f"{name} {number} kept"] = kept[number].clone()
            optimizer.step()
            optimizer.zero_grad()
        return {**found, **state_of(model, engine)}

    assert_as_on_one_device(tower(), act, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_two_parameters_change_places_as_copies_where_they_rest_in_shards(stage: int) -> None:
    def act_with(taken: Callable[[Tensor], Tensor]) -> Any:
        def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
            first, second = model[0][0].weight, model[1][0].weight
            for _ in range(3):
                model(x()).square().mean().backward()
                first.grad, second.grad = taken(second.grad), taken(first.grad)
                optimizer.step()
                optimizer.zero_grad()
            return state_of(model, engine)

        return act

    def as_it_is(grad: Tensor) -> Tensor:
        return grad

    assert_as_on_one_device(tower(), act_with(Tensor.clone), stage)
    if stage == 0:
        assert_as_on_one_device(tower(), act_with(as_it_is), stage)
    else:
        with pytest.raises(
            RuntimeError, match=r"'1.0.weight' rests in shards, .*Put a copy there: q\.grad = p\.grad\.c"
        ):
            on_engine(tower(), act_with(as_it_is), stage)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_was_kept_is_what_later_backwards_add_to_or_says_that_it_is_gone(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> None:
        weight = model[0][0].weight

        def backward() -> Tensor:
            model(x()).square().mean().backward()
            return weight.grad

        kept, once = backward(), weight.grad.clone()
        backward()
        assert torch.equal(kept, 2 * once)
        optimizer.zero_grad()
        assert torch.equal(kept, 2 * once)
        backward()
        with pytest.raises(RuntimeError, match=r"'0.0.weight' in an earlier backward is there no more.*p\.grad\.clone"):
            kept.norm()
        assert torch.equal(weight.grad, once)
        weight.grad = 3 * once
        optimizer.step()
        kept = weight.grad
        weight.grad = 4 * once
        optimizer.step()
        weight.grad = kept
        with pytest.raises(RuntimeError, match="Put a copy there"):
            optimizer.step()

    on_engine(tower(), act, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_sparse_gradients_are_averaged_as_dense_ones(stage: int) -> None:
    rows = torch.tensor([1, 3, 3, 5])

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        found = {}
        for step in range(3):
            model(rows + step).square().mean().backward()
            found[f"gradient {step}"] = model[0].weight.grad.to_dense().clone()
            optimizer.step()
            optimizer.zero_grad()
        return {**found, **state_of(model, engine)}

    model = seeded(lambda: nn.Sequential(nn.Embedding(9, 5, sparse=True), nn.Linear(5, 3)))
    for make in (lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)):
        expected = on_one_device(model, act, make)
        for found in on_engine(model, act, stage, make):
            for name, value in expected.items():  # sparse kernels round otherwise
                torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


def test_a_gradient_whose_engine_is_gone_says_so_and_may_be_replaced() -> None:
    """Stage 2. At stage 3 whoever has the parameter has the engine's shards with it, and reading goes on gathering."""

    def keep(model: nn.Module, engine: Engine, optimizer: Any, comm: Comm) -> nn.Parameter:
        with engine.forward():
            loss = loss_of(model, comm.rank, 0)
        with engine.backward():
            loss.backward()
        assert model.norm.weight.grad.norm() > 0
        return model.norm.weight

    for weight in on_two_ranks(2, keep):
        gc.collect()
        assert "norm.weight" in repr(weight.grad)
        with pytest.raises(RuntimeError, match=r"'norm.weight' .* engine that is gone.*set p\.grad to None"):
            weight.grad.norm()
        weight.grad = None


@pytest.mark.parametrize("stage", [2, 3])
def test_an_average_that_replaces_the_last_one_passes_no_bucket_and_one_that_is_added_does(stage: int) -> None:
    def act(model: nn.Module, engine: Engine, optimizer: Any, comm: Comm) -> list[bool]:
        untouched = []
        for clears in (True, False):
            if clears:
                optimizer.zero_grad()
            totals = [bucket.total for pool in engine.runner.reductions.pools for bucket in pool._buckets]
            for total in totals:
                total.fill_(float("nan"))
            with engine.forward():
                loss = loss_of(model, comm.rank, 0)
            with engine.backward():
                loss.backward()
            [parameter.grad for parameter in model.parameters()]  # which settles them
            untouched.append(all(bool(total.isnan().all()) for total in totals))
        return untouched

    assert on_two_ranks(stage, act) == [[True, False]] * 2


def _layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)])


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_users_give_to_a_frozen_parameter_is_stepped(stage: int) -> None:
    start = seeded(_layers)

    def train(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        for step in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 5)).square().mean().backward()
            if step == 1:
                model[1].weight.grad = torch.ones(5, 5)
            optimizer.step()
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model: Any = clone(start)
        model[1].requires_grad_(False)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def on_rank(comm: Comm) -> dict[str, Tensor]:
        model, optimizer = made()
        engine = Engine(model, [optimizer], stage=stage, comm=comm)
        train(model, optimizer)
        engine.close()
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    expected = train(*made())
    for found in ThreadWorld(2).run(on_rank):
        assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in expected.items())
        assert not found["1.weight"].equal(start.state_dict()["1.weight"])


@pytest.mark.parametrize(
    "options", [{}, {"step_in_backward": True}, {"replicate_size": 2}, {"bucket_bytes": 64}], ids=str
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_layer_that_is_thawed_on_some_ranks_is_averaged_over_all(stage: int, options: dict[str, Any]) -> None:
    """At first it has a gradient on rank 1 alone, and in the end on none."""
    if "step_in_backward" in options and stage < 2:
        return
    start, world = seeded(_layers), 4

    def loss(model: Any, rank: int, step: int) -> Tensor:
        hidden = model[0](torch.full((2, 5), 1.0 + rank))
        other = hidden if step in (0, 1, 5) or (step == 2 and rank != 1) else model[1](hidden)
        return model[2](other).square().mean()

    def on_rank(comm: Comm) -> dict[str, Tensor]:
        model: Any = clone(start)
        model[1].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        given = Options(unit_classes=("Linear",) if stage == 3 else None, **options)
        engine = Engine(model, [optimizer], stage=stage, comm=comm, options=given)
        for step in range(6):
            model[1].requires_grad_(step >= 2)
            optimizer.zero_grad()
            with engine.forward():
                mine = loss(model, comm.rank, step)
            with engine.backward():
                mine.backward()
            optimizer.step()
        engine.close()
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    alone: Any = clone(start)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9)
    for step in range(6):
        optimizer.zero_grad()
        torch.stack([loss(alone, rank, step) for rank in range(world)]).mean().backward()
        optimizer.step()
    for found in ThreadWorld(world).run(on_rank):
        for name, value in alone.state_dict().items():
            assert torch.allclose(found[name], value, atol=1e-6), name


@pytest.mark.parametrize("act_on", ["in place", "given", "zeroed"])
@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_may_look_alone_before_all_edit_gradients_and_read_them_again(stage: int, act_on: str) -> None:
    """The others are ahead of it by an edit when it answers them: it must not send its part of before."""
    name = "blocks.0.up.weight"
    expected = average(0)[name]
    assert expected is not None

    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> list[Tensor | None]:
        weight = model.get_parameter(name)
        loss_of(model, comm.rank, 0).backward()
        if comm.rank == 0:
            float(weight.grad.sum())
            with torch.no_grad():
                loss_of(model, 0, 1)
        if act_on == "in place":
            weight.grad.mul_(0.5)
        elif act_on == "given":
            weight.grad = torch.full_like(weight, 0.5)
        else:
            optimizer.zero_grad(set_to_none=False)
        return [weight.grad + 0, engine.gradients.full(weight)]

    edited = {"in place": 0.5 * expected, "given": torch.full_like(expected, 0.5), "zeroed": 0 * expected}[act_on]
    for found in on_two_ranks(stage, act, merges_units=False):
        for grad in found:
            torch.testing.assert_close(grad, edited, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("act_on", ["each in place", "at once", "a kept view", "given"])
@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_may_still_read_a_gradient_alone_that_the_others_are_about_to_edit(stage: int, act_on: str) -> None:
    """They would edit their part of it, and send that."""
    expected = {name: grad for name, grad in average(0).items() if grad is not None}

    def act(model: Any, engine: Engine, _: Any, comm: Comm) -> dict[str, Tensor]:
        loss_of(model, comm.rank, 0).backward()
        having = {name: p for name, p in model.named_parameters() if p.grad is not None}
        if comm.rank == 0:
            for parameter in having.values():
                float(parameter.grad.sum())
        views = {name: parameter.grad.detach() for name, parameter in having.items()}
        read = {name: view.clone() for name, view in views.items()}
        if act_on == "each in place":
            for parameter in having.values():
                parameter.grad.mul_(0.5)
        elif act_on == "at once":
            torch._foreach_mul_([parameter.grad for parameter in having.values()], 0.5)
        elif act_on == "a kept view":
            for view in views.values():
                view.mul_(0.5)
        else:
            for name, parameter in having.items():
                parameter.grad = 0.5 * expected[name]
        after = {f"{name} after": engine.gradients.full(parameter) for name, parameter in having.items()}
        return read | after

    for found in on_two_ranks(stage, act, merges_units=False):
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(found[f"{name} after"], 0.5 * grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("changes", ["clip", "step", "step, and zero_grad"])
@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_one_rank_reads_alone_after_a_change_is_that_of_its_backward_or_an_error_says_why(
    stage: int, reduces: bool, changes: str
) -> None:
    """The other rank goes on to the next backward meanwhile. At stage 1 that writes over the average."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> Any:
        weight = model[1][0].weight
        backward(model, engine, scale=1.0)
        if changes == "clip":
            engine.gradients.clip_by_norm_(optimizer, 1e-3)
        else:
            optimizer.step()
        on_all, found = weight.grad.clone(), None
        if comm.rank == 0:
            try:
                found = weight.grad * 1.0
            except RuntimeError as error:
                found = str(error)
        if "zero" in changes:
            optimizer.zero_grad()
        with nullcontext() if reduces else engine.no_sync():
            backward(model, engine, scale=2.0)
        optimizer.zero_grad()
        backward(model, engine, scale=3.0)
        return on_all, found, weight.grad.clone()

    def backward(model: Any, engine: Any, scale: float) -> None:
        with engine.forward(reduces=engine.runner.reductions.is_on):
            loss = model(x(scale)).square().mean()
        with engine.backward():
            loss.backward()

    (on_all, found, last), (_, _, last_there) = on_engine(tower(), act, stage)
    if stage == 1:
        assert found.startswith("The averaged gradient of '1.0.weight' cannot be read any more: another rank")
    else:
        assert torch.equal(found, on_all)
    assert torch.equal(last, last_there)


@pytest.mark.parametrize("stage", STAGES)
def test_what_users_have_put_in_place_of_accumulated_gradients_can_be_read_after_the_step(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> Tensor:
        with engine.no_sync(), engine.backward():
            model(x()).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.25)
        optimizer.step()
        return torch.stack([parameter.grad.mean() for parameter in model.parameters()])

    for found in on_engine(tower(), act, stage):
        assert found.tolist() == [0.25] * 6


@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("how", ["by norm", "by value"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_a_rank_has_added_to_an_average_it_clips_for_itself(stage: int, how: str, zeroed: bool) -> None:
    """As under DDP, and the next backward reduces what each has clipped."""

    def act(model: Any, engine: Engine, optimizer: Any, comm: Comm) -> dict[str, Tensor]:
        loss_of(model, comm.rank, 0).backward()
        if zeroed:
            optimizer.zero_grad(set_to_none=False)
        with engine.no_sync():
            loss_of(model, comm.rank, 1).backward()
        if how == "by norm":
            engine.gradients.clip_by_norm_(optimizer, 0.05)
        else:
            engine.gradients.clip_by_value_(optimizer, 1e-3)
        clipped = {f"{name} clipped": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        loss_of(model, comm.rank, 2).backward()
        return clipped | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    for mine, expected in zip(on_two_ranks(stage, act), on_two_ranks(0, act), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-7)
