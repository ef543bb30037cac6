"""Backwards that do not follow the modules' forwards, or do not end well: parity with one device, or a clear error."""

import functools
import inspect
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_zero.wire.comm import Comm
from models import seeded
from unit_jobs import WIDTH, assert_as_on_one_device, on_engine, on_one_device, state_of, tower, x
from watched import check_program

STAGES = [0, 1, 2, 3]


class Routed(nn.Module):
    """A block that leaves an auxiliary loss behind, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        out = torch.tanh(self.up(hidden))
        self.auxiliary = torch.tanh(self.gate(hidden)).square().mean()
        return out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Routed() for _ in range(3)])

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean() + sum(block.auxiliary for block in self.blocks)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_that_a_block_leaves_on_itself_reaches_its_weights(stage: int, prefetch: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for _ in range(3):
            optimizer.zero_grad()
            model(x()).backward()
            optimizer.step()
        return state_of(model, engine)

    assert_as_on_one_device(seeded(Mixture), act, stage, prefetch=prefetch)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_penalty_trains_as_on_one_device(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for _ in range(2):
            optimizer.zero_grad()
            at = x().requires_grad_(True)
            score = model(at).sum()
            (slope,) = torch.autograd.grad(score, at, create_graph=True)
            (score * 0.01 + (slope.norm(2, 1) - 1).square().mean()).backward()
            optimizer.step()
        return state_of(model, engine)

    assert_as_on_one_device(tower(), act, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_autograd_grad_returns_gradients_and_leaves_p_grad_alone(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        gradients = torch.autograd.grad(model(x()).square().mean(), list(model.parameters()))
        assert all(parameter.grad is None for parameter in model.parameters())
        model(x(0.5)).square().mean().backward()  # and what comes after is unharmed
        optimizer.step()
        return state_of(model, engine) | {f"gradient {at}": grad for at, grad in enumerate(gradients)}

    assert_as_on_one_device(tower(), act, stage)


GIVEN_PARAMETERS = {
    "grad": lambda loss, parameters: torch.autograd.grad(loss, parameters),
    "grad, with zeros": lambda loss, parameters: torch.autograd.grad(loss, parameters, materialize_grads=True),
    "backward": lambda loss, parameters: loss.backward(inputs=parameters),
}


@pytest.mark.parametrize("way", GIVEN_PARAMETERS)
@pytest.mark.parametrize("stage", STAGES)
def test_hooks_read_parameters_while_gradients_of_given_parameters_are_computed(stage: int, way: str) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}
        for step in range(2):
            hidden = model[0](x())
            hidden.register_hook(lambda grad: grad * model[0][0].bias.detach().mean())
            loss = model[2](model[1](hidden)).square().mean()
            given = [p for p in model.parameters() if way == "grad, with zeros" or p is not model[2][0].bias]
            found = GIVEN_PARAMETERS[way](loss, given) or [parameter.grad for parameter in given]
            seen |= {f"{step} {at}": grad.clone() for at, grad in enumerate(found)}
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model, engine) | seen

    assert_as_on_one_device(tower(), act, stage, prefetch=0)


@pytest.mark.parametrize("bracketed", [False, True])
@pytest.mark.parametrize("accumulation", ["sharded", "local"])
@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_alone_may_differentiate_in_the_forward_of_a_micro_batch(
    stage: int, accumulation: Any, bracketed: bool
) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for step in range(3):
            for micro in range(2):
                with nullcontext() if engine is None or micro == 1 else engine.accumulating():
                    hidden = model[1](model[0](x()))
                    if comm is not None and comm.rank == step % 2:
                        torch.autograd.grad(hidden.sum(), list(model[0].parameters()), retain_graph=True)
                    loss = model[2](hidden).square().mean()
                    with nullcontext() if engine is None or not bracketed else engine.backward():
                        loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model, engine)

    assert_as_on_one_device(tower(), act, stage, accumulation=accumulation)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("bracketed", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_after_a_backward_that_failed_on_all_ranks(stage: int, bracketed: bool) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for step in range(3):
            optimizer.zero_grad()
            hidden = model[1](model[0](x(1.0 + step)))
            if step == 1:
                hidden = Fails.apply(hidden)
            loss = model[2](hidden).square().mean()
            try:
                with engine.backward() if engine is not None and bracketed else nullcontext():
                    loss.backward()
            except RuntimeError as error:
                assert "out of memory" in str(error)  # noqa: PT017
                optimizer.zero_grad()
                continue
            optimizer.step()
        return state_of(model, engine)

    assert_as_on_one_device(tower(), act, stage)


@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_the_error_of_a_backward_may_be_caught_inside_of_the_forward_that_it_is_in(stage: int, meets: bool) -> None:
    """As in manual optimization, where ranks meet after each batch."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for step in range(4):
            with nullcontext() if engine is None else engine.forward():
                hidden = model[1](model[0](x(1.0 + step)))
                if step == 1:
                    hidden = Fails.apply(hidden)
                loss = model[2](hidden).square().mean()
                with pytest.raises(RuntimeError, match="out of memory") if step == 1 else nullcontext():
                    with nullcontext() if engine is None else engine.backward():
                        loss.backward()
                    optimizer.step()
                optimizer.zero_grad()
            if engine is not None and meets:
                engine.runner.meet()
        return state_of(model, engine)

    assert_as_on_one_device(tower(), act, stage)


@pytest.mark.parametrize("does", ["clips", "measures", "only steps"])
@pytest.mark.parametrize(("stage", "replicas"), [(0, 1), (1, 1), (2, 1), (3, 1), (2, 2), (3, 2)])
def test_a_step_may_follow_a_backward_that_failed(stage: int, replicas: int, does: str) -> None:
    """As where an error is caught around the backward alone. There are no gradients then."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for step in range(3):
            hidden = model[0](x(1.0 + step))
            hidden = Fails.apply(hidden) if step == 1 else hidden
            try:
                model[1:](hidden).square().mean().backward()
            except RuntimeError as error:
                assert "out of memory" in str(error)  # noqa: PT017
                optimizer.zero_grad()
            if engine is not None and does == "clips":
                assert (engine.gradients.clip_by_norm_(optimizer, 1e9) == 0) == (step == 1)
            if engine is not None and does == "measures":
                assert (not engine.gradients.norms()) == (step == 1)
            optimizer.step()
            if engine is not None:
                check_program(engine)
            optimizer.zero_grad()
        return state_of(model, engine)

    options = {"world": 2 * replicas, "replicate_size": replicas, "unit_classes": ("Linear",)}
    assert_as_on_one_device(tower(6), act, stage, **options)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (2, 0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("fails_in", [0, 1])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_plan_that_a_failed_backward_has_left_reduces_nothing_in_the_next_one(
    prefetch: int, fails_in: int, order: tuple[int, ...]
) -> None:
    """What ranks do from there on is not what they had planned, whether or not the next micro-batches go the old way.
    The step with the failure is not learnt either: the one after the next goes the same way, and fails nowhere."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        def backward(micro: int, order: tuple[int, ...], *, fails: bool = False) -> None:
            hidden = x(1.0 + micro)
            for at in order:
                hidden = model[at](hidden)
                hidden = Fails.apply(hidden) if fails and at == order[0] else hidden
            with engine.accumulating() if engine is not None and micro == 0 else nullcontext():
                hidden.square().mean().backward()

        one_way = (0, 1, 2, 3)
        for step in range(8):
            for micro in range(2):
                if step in (4, 6) and micro == fails_in:
                    with pytest.raises(RuntimeError, match="out of memory"):
                        backward(micro, one_way, fails=True)
                    optimizer.zero_grad()
                backward(micro, order if step in (4, 5, 6) else one_way)
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model, engine)

    assert_as_on_one_device(tower(4), act, 3, prefetch=prefetch, unit_classes=("Linear",))


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("bucket_bytes", [2 * 8 * WIDTH, 2**20])
@pytest.mark.parametrize(
    ("stage", "replicas", "micro"), [*((stage, 1, micro) for stage in STAGES for micro in (0, 1)), (3, 2, 0)]
)
def test_a_backward_may_fail_on_each_rank_in_another_layer(
    stage: int, replicas: int, micro: int, bucket_bytes: int, goes_on: bool
) -> None:
    """Reductions may be under way on one rank that the other one has not come to. Training goes on, or ends there."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        def backward(scale: float, at: int, *, fails: bool) -> None:
            hidden = x(scale)
            for number, layer in enumerate(model):
                hidden = layer(hidden)
                if fails and number == (0 if comm is None else comm.rank):
                    hidden = Fails.apply(hidden)
            with engine.accumulating() if engine is not None and at == 0 else nullcontext():
                hidden.square().mean().backward()

        for step in range(4 if goes_on else 3):
            for at in range(2):
                if (step, at) != (2, micro):
                    backward(1.0 + step, at, fails=False)
                    continue
                with pytest.raises(RuntimeError, match="out of memory"):
                    backward(1.0 + step, at, fails=True)
                optimizer.zero_grad()
                if not goes_on:
                    if engine is not None:
                        engine.close()
                    return state_of(model, engine)
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model, engine)

    ranks = {"world": 2 * replicas, "replicate_size": replicas}
    assert_as_on_one_device(tower(4), act, stage, unit_classes=("Linear",), bucket_bytes=bucket_bytes, **ranks)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_ranks_may_go_different_ways_right_after_a_failed_backward(prefetch: int) -> None:
    """One of them ends its next backward while the other one is still in forward: what that had collected when it
    failed is not taken for complete."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> dict[str, Tensor]:
        with pytest.raises(RuntimeError, match="out of memory"):
            model[2](model[1](Fails.apply(model[0](x())))).sum().backward()
        optimizer.zero_grad()
        hidden = model[0](model[0](x(0.5)))
        if comm.rank:
            hidden = model[2](model[1](hidden))
        hidden.square().mean().backward()
        optimizer.step()
        return state_of(model, engine)

    first, second = on_engine(tower(), act, 3, prefetch=prefetch, unit_classes=("Linear",), bucket_bytes=2 * 8 * WIDTH)
    assert all(torch.equal(second[name], value) for name, value in first.items())


def test_a_backward_after_a_failed_one_is_reduced() -> None:
    """The ranks' batches differ: gradients that nobody averages would make their weights differ."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> dict[str, Tensor]:
        with pytest.raises(RuntimeError, match="out of memory"):
            model[2](model[1](Fails.apply(model[0](x())))).sum().backward()
        optimizer.zero_grad()
        model(x(1.0 + comm.rank)).square().mean().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    for stage in STAGES:
        first, second = on_engine(tower(), act, stage)
        assert all(torch.equal(second[name], value) for name, value in first.items()), stage


@pytest.mark.parametrize("bracketed", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_checkpointed_blocks_train_as_on_one_device(stage: int, reentrant: bool, bracketed: bool) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for _ in range(2):
            optimizer.zero_grad()
            hidden = x().requires_grad_(True)
            for block in model:
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
            with engine.backward() if engine is not None and bracketed else nullcontext():
                hidden.square().mean().backward()
            optimizer.step()
        return state_of(model, engine)

    assert_as_on_one_device(tower(), act, stage)


KEPT = {  # by selective checkpoints: results, and a view of a weight
    "addmm": [torch.ops.aten.addmm.default],
    "t tanh": [torch.ops.aten.t.default, torch.ops.aten.tanh.default],
}
# What torch 2.15 asks of it: whether hooks around it, which are ours here and no user's, see what it keeps.
RESPECTS = [{}]
if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
    RESPECTS.append({"respect_saved_tensors_hooks": True})


@pytest.mark.filterwarnings("error:A saved_tensors_hooks context:FutureWarning")
@pytest.mark.parametrize("respects", RESPECTS, ids=str)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("stage", STAGES)
def test_blocks_that_keep_what_some_operations_return_train_as_on_one_device(
    stage: int, kept: str, half: bool, respects: dict[str, bool]
) -> None:
    """When they are computed again, torch expects the operations of their forward, and no others."""
    chosen = functools.partial(create_selective_checkpoint_contexts, KEPT[kept])
    again = functools.partial(checkpoint, use_reentrant=False, context_fn=chosen, **respects)

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                hidden = again(lambda hidden: model[1](again(model[0], hidden)), x())
                loss = again(model[2], hidden).float().square().mean()
            loss.backward()
            optimizer.step()
        return state_of(model, engine)

    assert_as_on_one_device(tower(), act, stage, prefetch=0, autocast_dtype=torch.bfloat16 if half else None)


class Nested(nn.Module):
    """A checkpoint that changes a buffer, inside another one."""

    def __init__(self, frozen: str, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), last
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        for name in frozen.split():
            self.get_submodule(name).requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(self.outer, hidden, use_reentrant=False).square().mean()

    def outer(self, hidden: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, self.first(hidden), use_reentrant=False))


@pytest.mark.parametrize("frozen", ["", "last", "first last", "first inner last"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_inside_another_one_is_recomputed_as_often_as_on_one_device(stage: int, frozen: str) -> None:
    """Each time changes its statistics. Where layers are frozen, a weight may be all that they save."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}
        for step in range(3):
            hidden = x(1.0 + step).requires_grad_()
            model(hidden).backward()
            assert hidden.grad is not None
            seen[f"gradient {step}"] = hidden.grad
            optimizer.step()
            optimizer.zero_grad()
        return seen | state_of(model, engine)

    for last in (
        nn.Linear(WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.Sequential(nn.Unflatten(0, (1, 4)), nn.Conv1d(4, 4, 1)),
    ):
        start = seeded(lambda last=last: Nested(frozen, last))
        start.register_parameter("more", nn.Parameter(torch.zeros(1)))  # something trains in any case
        assert_as_on_one_device(start, act, stage)


@pytest.mark.parametrize("bracketed", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_of_two_reentrant_checkpoints_gets_both_gradients_or_an_error(stage: int, bracketed: bool) -> None:
    """DDP raises, since the parameter becomes ready twice; silently keeping one of the two would be wrong."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        hidden = x().requires_grad_(True)
        for block in (*model, *model):
            hidden = checkpoint(block, hidden, use_reentrant=True)
        with engine.backward() if engine is not None and bracketed else nullcontext():
            hidden.square().mean().backward()
        optimizer.step()
        return state_of(model, engine)

    expected = on_one_device(tower(), act)
    try:
        results = on_engine(tower(), act, stage)
    except RuntimeError as error:
        assert "use_reentrant=False" in str(error)  # noqa: PT017
    else:
        for found in results:  # several reductions make one gradient here: equal to rounding
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("stage", STAGES)
def test_only_part_of_the_model_runs_backward(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for part in (0, 2, 1):
            optimizer.zero_grad()
            hidden = model[part](x()) if part else model[0](x()).detach() + model[1](x())
            hidden.square().mean().backward()
            optimizer.step()
        return state_of(model, engine)

    assert_as_on_one_device(tower(), act, stage, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5))


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_of_users_on_parameters_change_the_gradient(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        model[1][0].weight.register_hook(lambda grad: grad * 3)
        for _ in range(2):
            optimizer.zero_grad()
            model(x()).square().mean().backward()
            optimizer.step()
        return state_of(model, engine)

    assert_as_on_one_device(tower(), act, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_recurrent_module_uses_its_weights_many_times(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for _ in range(2):
            optimizer.zero_grad()
            hidden = x()
            for _ in range(4):
                hidden = model[0](hidden) + model[1](hidden)
            hidden.square().mean().backward()
            optimizer.step()
        return state_of(model, engine)

    assert_as_on_one_device(tower(2), act, stage)
