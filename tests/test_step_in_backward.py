"""Steps in backward (R62): the bits of steps after it, and never more than two buckets of gradients."""

import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor, nn

import offload_jobs as jobs
from compare import assert_same_bits
from lightning_zero import ZeroStrategy
from lightning_zero.run.engine import Engine, Options
from lightning_zero.run.notices import TornStepError
from lightning_zero.tiers.ledger import Category
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from ranks import RankPool
from reference import Run
from test_offload import WAYS, assert_same_run, at, on_ranks
from thread_world import ThreadWorld
from unit_jobs import WIDTH, Fails, assert_as_on_one_device, on_engine, state_of, take_step, tower

HOW: dict[str, dict[str, Any]] = {
    "plain": WAYS["plain"],
    "autocast": WAYS["autocast"],
    "two bytes at once": {"param_dtype": torch.bfloat16},
}


@functools.cache
def after_backward(world: int, stage: int, way: str) -> Run:
    """With steps after it, made once for all tiers."""
    return on_ranks(world, stage, **HOW[way])[0]


@pytest.mark.parametrize("tiers", [None, "optimizer on the host", "optimizer on disk", "both on disk"])
@pytest.mark.parametrize("way", HOW)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_r62_steps_in_backward_give_the_bits_of_steps_after_it(
    world: int, stage: int, way: str, tiers: str | None, tmp_path: Path
) -> None:
    offload = None if tiers is None else at(tiers, tmp_path)
    if stage == 2 and offload is not None and offload.parameters is not None:
        offload = dataclasses.replace(offload, parameters=None)
    found, _ = on_ranks(world, stage, step_in_backward=True, offload=offload, **HOW[way])
    assert_same_run(found, after_backward(world, stage, way))


def bytes_of_gradients(comm: Comm, layers: int, bucket: int) -> tuple[int, int]:
    """The most that autograd had made and nobody had let go of, and that the engine held."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters())
    options = Options(step_in_backward=True, bucket_bytes=bucket)
    engine = Engine(model, [optimizer], stage=2, comm=comm, options=options)
    made: list[weakref.ref[Tensor]] = []
    most = 0

    def note(gradient: Tensor) -> None:
        nonlocal most
        made.append(weakref.ref(gradient))
        most = max(most, sum(alive.nbytes for each in made if (alive := each()) is not None))

    for parameter in model.parameters():
        parameter.register_hook(note)
    for _ in range(2):
        with engine.forward():
            loss = model(torch.ones(2, 64)).sum()
        with engine.backward():
            loss.backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        optimizer.step()
    held = engine.ledger.peak[Category.GRADIENT]
    engine.close()
    return most, held


@pytest.mark.parametrize("world", [1, 2])
def test_r62_gradients_never_exceed_two_buckets(world: int) -> None:
    layer = 64 * 64 * 4
    bucket = 2 * layer
    if world == 1:
        most, held = bytes_of_gradients(LocalComm(), 12, bucket)
    else:
        most, held = ThreadWorld(2).run(lambda comm: bytes_of_gradients(comm, 12, bucket))[0]
    assert 0 < most + held <= 2 * bucket < 12 * layer


def test_a_layer_is_stepped_before_backward_comes_to_the_first() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    options = Options(step_in_backward=True, bucket_bytes=64 * 64 * 4)
    engine = Engine(model, [optimizer], stage=2, comm=LocalComm(), options=options)
    seen: list[list[bool]] = []
    model[0].weight.register_hook(lambda _: seen.append([layer.weight in optimizer.state for layer in model]))
    with engine.forward():
        loss = model(torch.ones(2, 64)).sum()
    with engine.backward():
        loss.backward()
    assert seen == [[False, False, True, True]]
    assert all(layer.weight in optimizer.state for layer in model)
    engine.close()


def linear(stage: int = 2, optimizers: int = 1) -> tuple[Engine, Any]:
    model = nn.Linear(4, 4)
    made = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(optimizers)]
    options = Options(step_in_backward=True)
    return Engine(model, made, stage=stage, comm=LocalComm(), options=options), made[0]


@pytest.mark.parametrize(("stage", "optimizers"), [(1, 1), (2, 2)])
def test_what_does_not_step_in_backward_is_refused_at_set_up(stage: int, optimizers: int) -> None:
    with pytest.raises(ValueError, match=r"stage=2 or 3.*a single optimizer; here are \d. Leave step_in_backward out"):
        linear(stage, optimizers)


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda engine, optimizer: engine.gradients.clip_by_norm_(optimizer, 1.0), "clipping"),
        (lambda engine, optimizer: engine.gradients.clip_by_value_(optimizer, 1.0), "clipping"),
        (
            lambda engine, optimizer: engine.gradients.unscale_(torch.amp.GradScaler("cpu"), optimizer),
            "a gradient scaler",
        ),
        (lambda engine, optimizer: engine.accumulating(), "accumulating gradients"),
        (lambda engine, optimizer: engine.no_sync().__enter__(), "accumulating gradients"),
    ],
)
def test_who_needs_gradients_after_backward_is_told(ask: Callable[[Engine, Any], Any], what: str) -> None:
    engine, optimizer = linear()
    with pytest.raises(RuntimeError, match=f"nothing left for {what}"):
        ask(engine, optimizer)
    engine.close()


@pytest.mark.parametrize("stage", [2, 3])
def test_training_gives_the_bits_of_steps_after_backward(stage: int, two_ranks: RankPool, tmp_path: Path) -> None:
    expected = two_ranks.run(jobs.fit, {"stage": stage}, 2, clips=False, max_epochs=2)
    for more in ({}, {"offload": {"optimizer": "nvme", "path": str(tmp_path)}}):
        strategy = {"stage": stage, "step_in_backward": True, **more}
        found = two_ranks.run(jobs.fit, strategy, 2, clips=False, max_epochs=2)
        for mine, theirs in zip(found, expected, strict=True):
            jobs.assert_same_fit(mine, theirs)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"gradient_clip_val": 0.5}, r"Trainer\(gradient_clip_val=0.5\)"),
        ({"accumulate_grad_batches": 2}, r"Trainer\(accumulate_grad_batches=2\)"),
        ({"precision": "16-mixed"}, "precision='16-mixed'"),
        ({"callbacks": [GradientAccumulationScheduler({1: 2})]}, "GradientAccumulationScheduler"),
        ({"callbacks": [StochasticWeightAveraging(0.01)]}, "StochasticWeightAveraging of batch norms"),
    ],
)
def test_a_trainer_that_needs_gradients_is_refused_with_the_reason(how: dict[str, Any], what: str) -> None:
    run = jobs.trainer_of(ZeroStrategy(stage=2, step_in_backward=True), **how)
    with pytest.raises(ValueError, match=f"step_in_backward=True takes each gradient as it comes, and {what} needs"):
        run.fit(jobs.Classifier(), jobs.loader())


@pytest.mark.parametrize("checkpoint", ["full", "sharded"])
def test_what_saves_after_an_error_does_not_hide_why_fit_is_refused(checkpoint: Any, tmp_path: Path) -> None:
    strategy = ZeroStrategy(stage=2, step_in_backward=True, checkpoint=checkpoint)
    saves = OnExceptionCheckpoint(tmp_path)
    how = {"accumulate_grad_batches": 2, "callbacks": [saves], "enable_checkpointing": True}
    run, model = jobs.trainer_of(strategy, **how), jobs.Classifier()
    with pytest.raises(ValueError, match="needs them all after backward"):
        run.fit(model, jobs.loader())
    kept = jobs.Classifier(lr=1.0)
    jobs.trainer_of(ZeroStrategy(stage=2), max_epochs=0).fit(kept, jobs.loader(), ckpt_path=saves.ckpt_path)
    assert_same_bits(kept.state_dict(), model.state_dict())


def test_manual_optimization_is_refused_as_it_may_need_gradients() -> None:
    run, model = jobs.trainer_of(ZeroStrategy(stage=2, step_in_backward=True)), jobs.Classifier()
    model.automatic_optimization = False
    with pytest.raises(ValueError, match="step_in_backward=True takes each gradient as it comes, and manual optimiz"):
        run.fit(model, jobs.loader())


class Blind(jobs.Classifier):
    """Looks at no gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


@pytest.mark.parametrize(
    "callback",
    [GradientAccumulationScheduler({1: 1}), StochasticWeightAveraging(0.01)],
    ids=lambda each: type(each).__name__,
)
def test_callbacks_that_need_no_gradients_after_backward_are_not_refused(callback: L.Callback) -> None:
    run = jobs.trainer_of(ZeroStrategy(stage=2, step_in_backward=True), callbacks=[callback], max_epochs=2)
    model = Blind()
    model.net[1] = nn.Identity()  # in place of the batch norm
    run.fit(model, jobs.loader())
    assert run.current_epoch == 2


BATCHES = [torch.linspace(-1, number, 32).view(2, 16) for number in range(3)]


class Tower(nn.Sequential):
    """The layer before the last is left out."""

    def __init__(self) -> None:
        super().__init__(*[nn.Linear(16, 16) for _ in range(4)])

    def forward(self, batch: Tensor) -> Tensor:
        *below, _, top = self
        for layer in below:
            batch = layer(batch)
        return top(batch)


class Fades(torch.optim.SGD):
    """Parameters fade in each step, with a gradient and without."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)
        return loss


def train_tower(
    comm: Comm,
    start: nn.Module,
    make: Callable[..., torch.optim.Optimizer],
    then: Callable[[nn.Module], None] = lambda _: None,
    *,
    stage: int,
    before: Callable[[nn.Module], None] = lambda _: None,
    autocast: bool = False,
    **options: Any,
) -> tuple[dict[str, Tensor], int]:
    """Weights in the end, and bytes gathered in the last step. `before` happens before each backward, `then` after."""
    model = copy.deepcopy(start)
    optimizer = make(model.parameters())
    engine = Engine(model, [optimizer], stage=stage, comm=comm, options=Options(**options))
    for batch in BATCHES:
        comm.bytes_sent.clear()
        with engine.forward(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(batch).float().square().sum()
        before(model)
        with engine.backward():
            loss.backward()
        then(model)
        optimizer.step()
        optimizer.zero_grad()
    gathered = comm.bytes_sent["all_gather"]
    with engine.full_parameters():
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine.close()
    return weights, gathered


@pytest.mark.parametrize("make", [torch.optim.AdamW, functools.partial(Fades, lr=0.01)], ids=["AdamW", "Fades"])
@pytest.mark.parametrize("stage", [2, 3])
def test_each_parameter_is_stepped_once_with_a_gradient_and_without(stage: int, make: Any) -> None:
    start, trained = Tower(), {}
    for is_early in (False, True):
        act = functools.partial(train_tower, start=start, make=make, stage=stage, bucket_bytes=1024)
        trained[is_early], _ = ThreadWorld(2).run(functools.partial(act, step_in_backward=is_early))[0]
    assert_same_bits(trained[True], trained[False])


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_are_published_once(stage: int) -> None:
    start, gathered = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]), {}
    for is_early in (False, True):
        act = functools.partial(train_tower, start=start, make=torch.optim.AdamW, stage=stage, bucket_bytes=1024)
        _, gathered[is_early] = ThreadWorld(2).run(functools.partial(act, step_in_backward=is_early))[0]
    assert gathered[True] == gathered[False] > 0


@pytest.mark.parametrize("ways", [(0, 1), (1, 0)])
def test_ranks_that_use_different_layers_publish_the_stepped_ones_in_one_order(ways: tuple[int, int]) -> None:
    """Each has stepped first what it has used. Threads match collectives by name: `sanitize` compares their order."""
    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def act(comm: Comm) -> None:
        model = copy.deepcopy(layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = Options(bucket_bytes=64, step_in_backward=True)
        engine = Engine(model, [optimizer], stage=2, comm=comm, options=options)
        with engine.forward():
            loss = model[ways[comm.rank]](torch.ones(2, 4)).square().mean()
        with engine.backward():
            loss.backward()
        optimizer.step()
        engine.close()

    ThreadWorld(2, sanitize=True).run(act)


@pytest.mark.parametrize("layer_left_out", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_that_a_user_gives_after_backward_is_refused(stage: int, layer_left_out: bool) -> None:
    layer = 2 if layer_left_out else 1

    def put_a_gradient(model: nn.Module) -> None:
        model[layer].weight.grad = torch.ones(16, 16)

    act = functools.partial(train_tower, start=Tower(), make=torch.optim.AdamW, then=put_a_gradient, stage=stage)
    with pytest.raises(RuntimeError, match=f"nothing left for what you have put into {layer}.weight.grad. Leave"):
        ThreadWorld(2).run(functools.partial(act, step_in_backward=True))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_second_backward_before_the_step_is_refused(stage: int) -> None:
    def pass_again(model: nn.Module) -> None:
        model(BATCHES[0]).sum().backward()

    act = functools.partial(train_tower, start=Tower(), make=torch.optim.AdamW, then=pass_again, stage=stage)
    with pytest.raises(RuntimeError, match=r"nothing left for a second backward: .* has been stepped, and optimizer"):
        ThreadWorld(2).run(functools.partial(act, step_in_backward=True))


KEPT: list[Any] = []  # what user code looks at and does not let go of


def keep_views(model: nn.Module) -> None:
    KEPT.extend(parameter.view(-1) for parameter in model.parameters())


def measure(model: nn.Module) -> None:
    KEPT.extend(parameter.detach().norm() for parameter in model.parameters())


def reach_data(model: nn.Module) -> None:
    KEPT.extend(parameter.data for parameter in model.parameters())


@torch.no_grad()
def halve(model: nn.Module) -> None:
    """Where autograd does not refuse it: backward needs the weights of layers above the first."""
    for name, parameter in model.named_parameters():
        if name.startswith("0.") or name.endswith("bias"):
            parameter.mul_(0.5)


@torch.no_grad()
def halve_views(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.view(-1)[1:].mul_(0.5)


def assign_halves(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


@pytest.mark.parametrize("use", [keep_views, measure, reach_data, halve, halve_views, assign_halves])
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_read_and_edited_before_backward_leaves_its_steps_as_they_are(
    world: int, stage: int, autocast: bool, offloads: bool, use: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    start, trained = Tower(), {}
    offload = at("optimizer on the host", tmp_path) if offloads else None
    how = {"stage": stage, "bucket_bytes": 1024, "autocast": autocast, "offload": offload, "before": use}
    for is_early in (False, True):
        act = functools.partial(train_tower, start=start, make=torch.optim.AdamW, step_in_backward=is_early, **how)
        trained[is_early] = act(LocalComm())[0] if world == 1 else ThreadWorld(2).run(act)[0][0]
        KEPT.clear()
    assert_same_bits(trained[True], trained[False])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_hooks_that_read_weights_in_backward_leave_its_steps_as_they_are(stage: int, autocast: bool) -> None:
    def read_in_backward(model: nn.Module) -> None:
        def read(_: Tensor) -> None:
            handle.remove()
            measure(model)
            keep_views(model)

        handle = next(model.parameters()).register_hook(read)

    start, trained = Tower(), {}
    how = {"stage": stage, "bucket_bytes": 1024, "autocast": autocast, "before": read_in_backward}
    for is_early in (False, True):
        act = functools.partial(train_tower, start=start, make=torch.optim.AdamW, step_in_backward=is_early, **how)
        trained[is_early] = ThreadWorld(2).run(act)[0][0]
        KEPT.clear()
    assert_same_bits(trained[True], trained[False])


@pytest.mark.parametrize("stage", [2, 3])
def test_edits_after_a_backward_that_failed_half_way_are_kept(stage: int) -> None:
    def act(comm: Comm) -> dict[str, Tensor]:
        model = Tower()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = Options(bucket_bytes=1024, step_in_backward=True)
        engine = Engine(model, [optimizer], stage=stage, comm=comm, options=options)

        def fail(_: Tensor) -> None:
            keep_views(model)  # of layers that have been stepped, too
            raise ArithmeticError

        model[0].weight.register_hook(fail)
        with engine.forward():
            loss = model(BATCHES[0]).sum()
        with pytest.raises(ArithmeticError), engine.backward():
            loss.backward()
        for parameter in model.parameters():
            parameter.data.view(-1).fill_(0.5)  # through views: only the next boundary takes the edits over
        with engine.full_parameters():
            weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        engine.close()
        return weights

    for weights in ThreadWorld(2).run(act):
        assert all((values == 0.5).all() for values in weights.values())
    KEPT.clear()


@pytest.mark.parametrize("bucket_bytes", [None, 2 * WIDTH * WIDTH])
@pytest.mark.parametrize("who", [{0, 1}, {0}, {1}], ids=["all", "rank 0", "rank 1"])
@pytest.mark.parametrize("stage", [2, 3])
def test_half_a_step_in_backward_is_told_of_on_every_rank_once_the_backward_has_ended(
    stage: int, who: set[int], bucket_bytes: int | None
) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> None:
        take_step(model, engine, optimizer, 0)
        optimizer.fails = lambda changes: changes == 1 and comm.rank in who
        with pytest.raises(TornStepError) as told:
            take_step(model, engine, optimizer, 1)
        assert isinstance(told.value.__cause__, ArithmeticError) == (len(optimizer.changed) == 1 and comm.rank in who)
        optimizer.fails = lambda changes: False
        for number in range(2, 4):
            take_step(model, engine, optimizer, number)

    on_engine(tower(), act, stage, Fails, step_in_backward=True, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("stage", [2, 3])
def test_training_goes_on_after_a_step_in_backward_that_has_changed_nothing(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for number in range(5):
            fails = number in (0, 2)
            optimizer.fails = lambda changes, fails=fails: fails and changes == 0
            with pytest.raises(ArithmeticError) if fails else nullcontext():
                take_step(model, engine, optimizer, number)
        return state_of(model, engine)

    assert_as_on_one_device(tower(), act, stage, Fails, step_in_backward=True)
