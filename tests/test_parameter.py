"""Parameters between uses, at stage 3 and in two bytes: never empty storage, never another number."""

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.run.engine import Engine, Options
from lightning_zero.views.lazy import LazyTensor, OfOneRank
from lightning_zero.wire.comm import Comm
from models import assorted, clone, loss_of, sgd
from thread_world import ThreadWorld

SETTINGS: list[tuple[int, torch.dtype | None]] = [(1, None), (2, torch.bfloat16), (3, None), (3, torch.bfloat16)]


def on_two_ranks(stage: int, dtype: torch.dtype | None, act: Callable[..., Any], steps: int = 1) -> list[Any]:
    """Trains a little, then calls `act(model, plain, comm, engine, optimizer)`; `plain` has the same values."""
    start = assorted()

    def rank_main(comm: Comm) -> Any:
        model = clone(start)
        optimizer, _ = sgd(model)
        engine = Engine(model, [optimizer], stage=stage, comm=comm, options=Options(autocast_dtype=dtype))
        for step in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
                loss = loss_of(model, comm.rank, step)
            loss.backward()
            optimizer.step()
        plain = clone(start)
        plain.load_state_dict(engine.states.full_model())
        return act(model, plain, comm, engine, optimizer)

    return ThreadWorld(2).run(rank_main)


@pytest.mark.parametrize(("stage", "dtype"), SETTINGS)
def test_reading_in_any_way_gives_whole_declared_values(stage: int, dtype: torch.dtype | None) -> None:
    def read(model: Any, plain: Any, comm: Comm, engine: Engine, _: Any) -> None:
        for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(found + 1, expected + 1), name
            assert torch.equal(copy.deepcopy(found), expected), name
            assert type(copy.deepcopy(found)) is nn.Parameter
            assert torch.equal(found.detach(), expected)
            assert "Parameter" in repr(found) or "tensor" in repr(found)
            assert found.dtype == expected.dtype
            file = io.BytesIO()
            torch.save(found, file)
            file.seek(0)
            assert torch.equal(torch.load(file, weights_only=False), expected), name

    on_two_ranks(stage, dtype, read)


@pytest.mark.parametrize(("stage", "dtype"), SETTINGS)
def test_a_view_outlives_the_loan(stage: int, dtype: torch.dtype | None) -> None:
    def keep(model: Any, plain: Any, comm: Comm, engine: Engine, optimizer: Any) -> None:
        kept = model.blocks[0]["up"].weight.detach()
        engine.loans.end_all()
        loss_of(model, comm.rank, 9)
        assert torch.equal(kept, plain.blocks[0]["up"].weight)

    on_two_ranks(stage, dtype, keep)


@pytest.mark.parametrize(("stage", "dtype"), SETTINGS)
def test_edits_in_place_persist(stage: int, dtype: torch.dtype | None) -> None:
    def edit(model: Any, plain: Any, comm: Comm, engine: Engine, optimizer: Any) -> None:
        for each in (model, plain):
            with torch.no_grad():
                each.blocks[0]["up"].weight.mul_(1.001)  # too little for two bytes to show
                each.norm.weight.copy_(torch.arange(10.0))
                nn.init.constant_(each.blocks[1]["down"].bias, 0.3)
                each.embedding.weight.data.clamp_(-0.5, 0.5)
        engine.loans.end_all()
        for name, value in engine.states.full_model().items():
            assert torch.equal(value, plain.state_dict()[name]), name

    on_two_ranks(stage, dtype, edit)


@pytest.mark.parametrize(("stage", "dtype"), SETTINGS)
def test_edits_of_a_frozen_weight_through_its_array_persist(stage: int, dtype: torch.dtype | None) -> None:
    def edit(model: Any, plain: Any, comm: Comm, engine: Engine, optimizer: Any) -> None:
        for each in (model, plain):
            array = each.frozen.weight.numpy()
            array[1] = 3
        assert torch.equal(model.frozen.weight + 0, plain.frozen.weight)
        engine.loans.end_all()
        assert torch.equal(engine.states.full_model()["frozen.weight"], plain.frozen.weight)

    on_two_ranks(stage, dtype, edit)


@pytest.mark.parametrize(("stage", "dtype"), SETTINGS)
def test_an_edit_of_many_returns_what_it_was_given(stage: int, dtype: torch.dtype | None) -> None:
    def edit(model: Any, plain: Any, comm: Comm, engine: Engine, optimizer: Any) -> None:
        for each in (model, plain):
            many = [each.norm.weight, each.blocks[0]["up"].weight]
            with torch.no_grad():
                found = torch._foreach_mul_(many, 0.5)
            assert found is None or (
                found is many and all(one is other for one, other in zip(found, many, strict=True))
            )
        engine.loans.end_all()
        for name, value in engine.states.full_model().items():
            assert torch.equal(value, plain.state_dict()[name]), name

    on_two_ranks(stage, dtype, edit)


@pytest.mark.parametrize(("stage", "dtype"), SETTINGS[2:])
def test_what_a_checkpoint_holds_may_be_assigned_to_p_data(stage: int, dtype: torch.dtype | None) -> None:
    def edit(model: Any, plain: Any, comm: Comm, engine: Engine, optimizer: Any) -> None:
        saved = [torch.full((10,), value, dtype=model.norm.weight.dtype) for value in (5.0, 6.0)]
        model.norm.weight.data = LazyTensor(OfOneRank("while it rests", saved[0]))
        engine.loans.end_all()
        assert torch.equal(engine.states.full_model()["norm.weight"], saved[0])
        with engine.full_parameters(model.norm, write=True):
            model.norm.weight.data = LazyTensor(OfOneRank("while its values are there", saved[1]))
        assert torch.equal(engine.states.full_model()["norm.weight"], saved[1])

    on_two_ranks(stage, dtype, edit)


@pytest.mark.parametrize(("stage", "dtype"), SETTINGS)
def test_what_a_call_has_edited_before_it_raised_is_kept(stage: int, dtype: torch.dtype | None) -> None:
    def edit(model: Any, plain: Any, comm: Comm, engine: Engine, optimizer: Any) -> None:
        engine.loans.end_all()
        before = dict(engine.ledger.live)
        for each in (model, plain):
            values = [torch.full((10,), 5.0), torch.ones(11)]
            with torch.no_grad(), pytest.raises(RuntimeError, match="size"):
                torch._foreach_copy_([each.norm.weight, each.norm.bias], values)
        engine.loans.end_all()
        assert torch.equal(engine.states.full_model()["norm.weight"], torch.full((10,), 5.0))
        assert dict(engine.ledger.live) == before

    on_two_ranks(stage, dtype, edit)


@pytest.mark.parametrize(("stage", "dtype"), SETTINGS)
def test_metadata_costs_no_communication(stage: int, dtype: torch.dtype | None) -> None:
    def look(model: Any, plain: Any, comm: Comm, engine: Engine, optimizer: Any) -> None:
        before = dict(comm.calls)
        for parameter in model.parameters():
            assert parameter.numel() == parameter.shape.numel()
            assert parameter.requires_grad in (True, False)
            assert parameter.dtype == torch.float32
            assert parameter.is_leaf
            assert parameter.dim() == len(parameter.size())
        optimizer.zero_grad()
        model.requires_grad_(True)
        assert dict(comm.calls) == before

    on_two_ranks(stage, dtype, look)


@pytest.mark.parametrize(("stage", "dtype"), SETTINGS)
def test_weights_used_by_another_module_get_the_right_gradient(stage: int, dtype: torch.dtype | None) -> None:
    def borrow(model: Any, plain: Any, comm: Comm, engine: Engine, optimizer: Any) -> None:
        x = torch.linspace(-1, 1, 30).view(3, 10)
        for each in (model, plain):
            each.zero_grad()
            nn.functional.linear(x, each.blocks[0]["up"].weight).square().mean().backward()
        found = engine.gradients.full(model.blocks[0]["up"].weight)
        assert found is not None
        assert torch.equal(found, plain.blocks[0]["up"].weight.grad)  # the same data on both ranks: the mean is it

    on_two_ranks(stage, dtype, borrow)


@pytest.mark.parametrize(("stage", "dtype"), SETTINGS)
def test_a_gradient_that_was_lent_before_a_step_is_none_of_the_next_one(stage: int, dtype: torch.dtype | None) -> None:
    def lend(model: Any, plain: Any, comm: Comm, engine: Engine, optimizer: Any) -> None:
        weight, before = model.blocks[0]["up"].weight, plain.blocks[0]["up"].weight
        held = []
        for factor in (1.0, 2.0):
            for each in (weight, before):
                each.grad = None
                (each * factor).sum().backward()
            held.append(weight.grad.view(-1))  # through which users may edit it
            assert torch.equal(held[-1] + 0, before.grad.view(-1))
            engine.loans.end_all()
            assert torch.equal(weight.grad + 0, before.grad)

    on_two_ranks(stage, dtype, lend)


def test_a_two_byte_module_sees_fp32_where_autocast_is_off() -> None:
    def island(model: Any, plain: Any, comm: Comm, engine: Engine, optimizer: Any) -> None:
        x = torch.linspace(-1, 1, 30).view(3, 10)
        found, expected = (each.blocks[0]["up"](x) for each in (model, plain))
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(model.blocks[0]["up"](x), plain.blocks[0]["up"](x))

    on_two_ranks(2, torch.bfloat16, island)


class Saves(torch.autograd.Function):
    """Computes in backward with a weight that it has saved, as adjoint methods do (neural ODEs)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seen: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.seen = seen
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        ctx.seen.append(weight.clone())
        grad = grads[0].to(weight.dtype)
        return grad @ weight, grad.t() @ x, None


@pytest.mark.parametrize(("stage", "dtype"), SETTINGS)
def test_a_weight_that_a_function_of_the_users_saves_has_its_declared_values(
    stage: int, dtype: torch.dtype | None
) -> None:
    def save(model: Any, plain: Any, comm: Comm, engine: Engine, optimizer: Any) -> None:
        optimizer.zero_grad()
        x, seen = torch.linspace(-1, 1, 30).view(3, 10), list[Tensor]()
        for each, forward in ((model, engine.forward()), (plain, nullcontext())):
            with forward, torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
                loss = Saves.apply(x, each.blocks[0]["up"].weight, seen).square().sum()
            loss.backward()
        found, expected = seen
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)
        assert torch.equal(model.blocks[0]["up"].weight.grad + 0, plain.blocks[0]["up"].weight.grad)

    on_two_ranks(stage, dtype, save)


def test_two_byte_weights_do_rest_in_two_bytes() -> None:
    def rests(model: Any, plain: Any, comm: Comm, engine: Engine, optimizer: Any) -> int:
        groups = [
            shard.group for shard in engine.runner.reductions.gradients if shard.group.kind.resting == torch.bfloat16
        ]
        return sum(slot.numel for group in groups for slot in group.slots)

    linear = sum(p.numel() for block in assorted().blocks for p in block.parameters())
    unused = 3 * 5 + 5
    assert on_two_ranks(2, torch.bfloat16, rests)[0] == linear + unused


def test_full_parameters_lends_all_at_once_and_keeps_edits_only_when_asked() -> None:
    def edit(model: Any, plain: Any, comm: Comm, engine: Engine, optimizer: Any) -> None:
        before = engine.states.full_model()["norm.weight"]
        for write, expected in ((False, before), (True, before + 1)):
            with engine.full_parameters(write=write), torch.no_grad():
                model.norm.weight.add_(1)
            assert torch.equal(engine.states.full_model()["norm.weight"], expected)

    on_two_ranks(3, None, edit)


@pytest.mark.parametrize(("stage", "dtype"), [(0, None), *SETTINGS])
def test_after_a_failure_what_is_spread_over_ranks_is_refused_and_all_else_is_read(
    stage: int, dtype: torch.dtype | None
) -> None:
    def fail(model: Any, plain: Any, comm: Comm, engine: Engine, _: Any) -> dict[str, str]:
        engine.close(whole=False)
        refused = {}
        for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            try:
                assert torch.equal(found + 1, expected + 1), name
            except RuntimeError as error:
                refused[name] = str(error)
        return refused

    everything = {name for name, _ in assorted().named_parameters()}
    linear = {name for name in everything if name.startswith("blocks.")}
    for refused in on_two_ranks(stage, dtype, fail):
        assert all("training ended with an error" in told for told in refused.values())
        if stage == 3:
            assert refused.keys() == everything
        elif dtype is None:
            assert not refused
        else:
            assert linear <= refused.keys()
            assert "norm.weight" not in refused
