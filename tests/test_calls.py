"""Optimizers that do more than `super().step()`, or whose step fails: one call is one step, from begin to end."""

import copy
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from compare import assert_same_bits
from lightning_zero.checkpoint import Saver, StoredCheckpoint
from lightning_zero.config import Offload
from lightning_zero.run.engine import Engine
from lightning_zero.run.notices import TornStepError
from lightning_zero.shards.offload import Machine
from lightning_zero.wire.comm import Comm
from thread_world import ThreadWorld
from unit_jobs import WIDTH, Fails, assert_as_on_one_device, on_engine, state_of, take_step, tower, x

BATCHES = [torch.linspace(-1, number, 32).view(2, 16) for number in range(4)]


class Nudges(AdamW):
    """Goes on along its average of gradients, which it has, as its parameters and gradients, in pieces."""

    nudges = 0
    fails_in = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.nudge()
        return loss

    @torch.no_grad()
    def nudge(self) -> None:
        self.nudges += 1
        if self.nudges == self.fails_in:
            raise ArithmeticError
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.addcmul_(self.state[parameter]["exp_avg"], parameter.grad, value=0.1)


class NudgesThoughTheParentFails(Nudges):
    def step(self, closure: Any = None) -> Any:
        with suppress(TypeError):
            super(Nudges, self).step(closure, "an argument too many")
        return super().step(closure)


class NudgesBefore(Nudges):
    """Calls the closure by itself, and the parent's step without one."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        AdamW.step(self)
        self.nudge()
        return loss if closure is not None else None


def train(
    comm: Comm,
    start: nn.Module,
    make: Callable[..., Nudges],
    stage: int,
    closes: bool,
    fails_in: int = 0,
    compiles: bool = False,
) -> dict[str, Tensor]:
    model = copy.deepcopy(start)
    optimizer = make(model.parameters(), lr=0.1)
    engine = Engine(model, [optimizer], stage=stage, comm=comm)
    optimizer.fails_in = fails_in
    step = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step
    for batch in BATCHES:

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            with engine.forward():
                loss: Tensor = model(batch).square().sum()
            with engine.backward():
                loss.backward()
            return loss

        try:
            if closes:
                step(closure)
            else:
                closure()
                step()
        except ArithmeticError:
            pass
    with engine.full_parameters():
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine.close()
    return weights


@pytest.mark.parametrize("closes", [False, True], ids=["no closure", "closure"])
@pytest.mark.parametrize("make", [Nudges, NudgesBefore, NudgesThoughTheParentFails])
def test_what_follows_the_parents_step_is_in_the_same_step(make: Callable[..., Nudges], closes: bool) -> None:
    AdamW([Parameter(torch.zeros(1))])  # from here on torch has hooks around the parent's step, too
    act = partial(train, start=nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), make=make, closes=closes)
    expected, *found = (ThreadWorld(2).run(partial(act, stage=stage))[0] for stage in range(4))
    for weights in found:
        assert_same_bits(weights, expected)


@pytest.mark.usefixtures("ranks_in_turn")
@pytest.mark.parametrize("closes", [False, True], ids=["no closure", "closure"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_compiled_step_is_the_same_step(stage: int, closes: bool) -> None:
    torch.compiler.reset()  # what has been compiled often enough runs as it is, which rounds in another way
    act = partial(train, start=nn.Linear(16, 16), make=Nudges, closes=closes, compiles=True)
    expected = ThreadWorld(2).run(partial(act, stage=0))[0]
    assert_same_bits(ThreadWorld(2).run(partial(act, stage=stage))[0], expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_closure_may_run_its_backward_in_another_thread(stage: int) -> None:
    """As autograd does on a GPU, where nobody has announced the backward to the engine."""

    def train_in_threads(comm: Comm, stage: int) -> dict[str, Tensor]:
        model = copy.deepcopy(start)
        optimizer = Nudges(model.parameters(), lr=0.1)
        engine = Engine(model, [optimizer], stage=stage, comm=comm)
        for batch in BATCHES:

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                with engine.forward():
                    loss: Tensor = model(batch).square().sum()
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(loss.backward).result()
                return loss

            optimizer.step(closure)
        with engine.full_parameters():
            weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        engine.close()
        return weights

    start = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    expected = ThreadWorld(2).run(partial(train_in_threads, stage=0))[0]
    assert_same_bits(ThreadWorld(2).run(partial(train_in_threads, stage=stage))[0], expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_call_after_one_that_failed_is_a_step_again(stage: int) -> None:
    AdamW([Parameter(torch.zeros(1))])
    act = partial(train, start=nn.Linear(16, 16), make=Nudges, closes=False, fails_in=2)
    expected = ThreadWorld(2).run(partial(act, stage=0))[0]
    assert_same_bits(ThreadWorld(2).run(partial(act, stage=stage))[0], expected)


class Clears(Nudges):
    def nudge(self) -> None:
        self.zero_grad()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_a_step_clears_are_not_there_after_it(stage: int) -> None:
    def gradients(comm: Comm, stage: int) -> tuple[dict[str, Tensor], list[bool]]:
        model = copy.deepcopy(start)
        optimizer = Clears(model.parameters(), lr=0.1)
        engine = Engine(model, [optimizer], stage=stage, comm=comm)
        for batch in BATCHES:
            with engine.forward():
                loss = model(batch).square().sum()
            with engine.backward():
                loss.backward()
            optimizer.step()
        are_left = [parameter.grad is not None for parameter in model.parameters()]
        with engine.full_parameters():
            weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        engine.close()
        return weights, are_left

    start = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    expected, _ = ThreadWorld(2).run(partial(gradients, stage=0))[0]
    for weights, are_left in ThreadWorld(2).run(partial(gradients, stage=stage)):
        assert_same_bits(weights, expected)
        assert not any(are_left)


@torch.no_grad()
def _bound_gradients(optimizer: Optimizer, *_: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.div_(parameter.grad.norm())


@torch.no_grad()
def _bound_weights(optimizer: Optimizer, *_: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.div_(parameter.norm())
        optimizer.state[parameter]["momentum_buffer"].mul_(0.5)


@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_users_hooks_on_the_step_find_whole_tensors_whenever_they_came_in(stage: int, is_offloaded: bool) -> None:
    def hooked(optimizer: Optimizer) -> Optimizer:
        optimizer.register_step_pre_hook(_bound_gradients)
        optimizer.register_step_post_hook(_bound_weights)
        return optimizer

    def make(parameters: Any) -> Optimizer:
        return hooked(torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True))

    def act(model: Any, engine: Any, optimizer: Optimizer, comm: Any) -> dict[str, Tensor]:
        for step in range(3):
            optimizer.zero_grad()
            model(x()).square().mean().backward()
            if step:
                hooked(optimizer)
            optimizer.step()
        return state_of(model, engine)

    offload, machine = Offload("cpu") if is_offloaded else None, Machine(host_is_apart=True)
    assert_as_on_one_device(tower(), act, stage, make, offload=offload, machine=machine)


HOST_APART = {"offload": Offload("cpu"), "machine": Machine(host_is_apart=True)}
PLACES: dict[str, dict[str, Any]] = {
    "resting": {},
    "on the host": {"offload": Offload("cpu")},
    "whole": {"granularity": "tensor"},
    "whole, in rounds": {"granularity": "tensor", "bucket_bytes": 2 * WIDTH * WIDTH},
}
MORE: dict[str, dict[str, Any]] = {
    "bf16": {"autocast_dtype": torch.bfloat16},
    "from a device": HOST_APART,
    "whole, from a device": {**HOST_APART, "granularity": "tensor"},
    "on disk": {},
}


# Where all is stepped apart from the user's call, this has no parameters: it fails before all of its changes.
BEFORE, AFTER = [(name, 0) for name in PLACES], [(name, None) for name in ("resting", "on the host")]


@pytest.mark.parametrize(("name", "place"), [*BEFORE, *AFTER])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_goes_on_as_on_one_device_after_a_step_that_failed_before_or_after_all_of_its_changes(
    stage: int, name: str, place: int | None
) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for number in range(5):
            fails = number in (0, 2)
            optimizer.fails = lambda at, fails=fails: fails and at == place
            with pytest.raises(ArithmeticError) if fails else nullcontext():
                take_step(model, engine, optimizer, number)
        return state_of(model, engine)

    assert_as_on_one_device(tower(), act, stage, Fails, **PLACES[name])


@pytest.mark.parametrize("who", [{0, 1}, {0}, {1}], ids=["all", "rank 0", "rank 1"])
@pytest.mark.parametrize("name", [*PLACES, *MORE])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_after_a_step_that_failed_in_the_middle_all_ranks_are_told_once_and_go_on_from_a_checkpoint(
    stage: int, name: str, who: set[int], tmp_path: Path
) -> None:
    options = {**PLACES, **MORE}[name]
    if name == "on disk":
        options = {"offload": Offload("nvme", path=tmp_path)}

    def go_on(model: Any, engine: Any, optimizer: Any) -> dict[str, Tensor]:
        for number in range(2, 4):
            take_step(model, engine, optimizer, number)
        return state_of(model, engine)

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> list[dict[str, Tensor]]:
        for number in range(2):
            take_step(model, engine, optimizer, number)
        saved = copy.deepcopy((engine.states.full_model(), engine.states.full_optimizer(optimizer)))
        unbroken = go_on(model, engine, optimizer)
        optimizer.fails = lambda changes: changes == 1 and comm.rank in who
        raised = []
        for number in range(4, 8):  # an offloaded step is taken later, and so is its error raised
            try:
                take_step(model, engine, optimizer, number)
            except ArithmeticError as error:
                raised.append(error)
                optimizer.fails = lambda changes: False
            except TornStepError as error:
                told = str(error)
                break
        else:
            pytest.fail("nobody was told")
        assert re.search(r"on rank . Fails\.step\(\) had changed . of . parameters", told)
        assert len(raised) == (comm.rank in who)
        with engine.states.loading(lambda: None):
            model.load_state_dict(saved[0])
        engine.states.load_optimizer(optimizer, saved[1])
        return [unbroken, go_on(model, engine, optimizer)]

    for unbroken, again in on_engine(tower(), act, stage, Fails, **options):
        assert_same_bits(again, unbroken)


def save(model: Any, engine: Engine, optimizer: Any, path: Path, comm: Comm) -> None:
    tree = {"model": engine.states.spread_model(), "optimizer": engine.states.spread_optimizer(optimizer)}
    Saver(comm.board).save(tree, str(path), {})


def clip(model: Any, engine: Engine, optimizer: Any, path: Path, comm: Comm) -> None:
    optimizer.zero_grad()
    with engine.forward():
        loss = model(x()).square().mean()
    with engine.backward():
        loss.backward()
    engine.gradients.clip_by_norm_(optimizer, 1.0)


@pytest.mark.parametrize("use", [save, clip])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_half_a_step_is_told_of_before_it_is_saved_or_trained_on(
    stage: int, use: Callable[..., None], tmp_path: Path
) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> None:
        optimizer.fails = lambda changes: changes == 1 and comm.rank == 0
        with pytest.raises(ArithmeticError) if comm.rank == 0 else nullcontext():
            take_step(model, engine, optimizer, 0)
        optimizer.fails = lambda changes: False
        with pytest.raises(
            TornStepError, match=r"on rank 0 Fails\.step\(\) had changed 1 of . parameters and some of their state\. "
        ):
            use(model, engine, optimizer, tmp_path / "half", comm)
        use(model, engine, optimizer, tmp_path / "all the same", comm)

    on_engine(tower(), act, stage, Fails)
    assert not (tmp_path / "half").exists()


@pytest.mark.parametrize("granularity", ["element", "tensor"])
@pytest.mark.parametrize("who", [{0, 1}, {0}], ids=["all", "rank 0"])
@pytest.mark.parametrize("stage", [1, 3])
def test_half_a_step_is_told_of_once_where_ranks_have_met_between_the_halves(
    stage: int, who: set[int], granularity: Any, tmp_path: Path
) -> None:
    """One half of the model is stepped in the call. The other one is stepped for a save, which begins with a meeting,
    and fails before it has changed anything; its own error is told with that of the step, and not raised later."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> None:
        take_step(model, engine, optimizer, 0)
        engine.runner.rendezvous.meet()
        optimizer.fails = lambda changes: changes is not None and comm.rank in who
        with pytest.raises(TornStepError) as told:
            save(model, engine, optimizer, tmp_path / "half", comm)
        optimizer.fails = lambda changes: False
        assert isinstance(told.value.__cause__, ArithmeticError) == (comm.rank in who)
        for number in range(1, 3):
            take_step(model, engine, optimizer, number)

    options = {"offload": Offload("cpu", fraction=0.5), "machine": Machine(host_is_apart=True)}
    on_engine(tower(), act, stage, Fails, granularity=granularity, **options)


@pytest.mark.parametrize("use", [save, Engine.close])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_are_whole_again_when_they_are_saved_or_left_after_a_step_that_failed(
    stage: int, use: Callable[..., None], tmp_path: Path
) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> None:
        optimizer.fails = lambda changes: changes == 0
        with pytest.raises(ArithmeticError):
            take_step(model, engine, optimizer, 0)
        if use is save:
            save(model, engine, optimizer, tmp_path / "saved", comm)
        engine.close()
        assert_same_bits(state_of(model, None), state_of(start, None))

    start = tower()
    on_engine(start, act, stage, Fails)
    if use is save:
        assert_same_bits(StoredCheckpoint(tmp_path / "saved").load()["model"], state_of(start, None))


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_have_their_shapes_on_a_rank_that_leaves_alone_after_its_step_has_failed(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> None:
        optimizer.fails = lambda changes: changes == 0
        with pytest.raises(ArithmeticError):
            take_step(model, engine, optimizer, 0)
        if comm.rank == 0:
            engine.close(whole=False)
            assert_same_bits(state_of(model, None), state_of(start, None))

    start = tower()
    on_engine(start, act, stage, Fails)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_engine_is_closed_when_the_error_of_its_last_step_is_raised_late(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> None:
        optimizer.fails = lambda changes: changes == 0
        take_step(model, engine, optimizer, 0)
        with pytest.raises(ArithmeticError):
            engine.close()
        assert engine.closed
        assert_same_bits(state_of(model, None), state_of(start, None))

    start = tower()
    on_engine(start, act, stage, Fails, **HOST_APART)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_half_a_step_is_warned_of_where_an_engine_is_closed_after_it(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> list[tuple[int, ...]]:
        optimizer.fails = lambda changes: changes == 1
        with pytest.raises(ArithmeticError):
            take_step(model, engine, optimizer, 0)
        engine.close()
        return [tuple(parameter.shape) for parameter in model.parameters()]

    with pytest.warns(UserWarning, match="has ended with an error in the middle"):
        shapes = on_engine(tower(), act, stage, Fails)
    assert shapes == 2 * [[tuple(parameter.shape) for parameter in tower().parameters()]]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_that_failed_before_it_changed_anything_is_none_beside_that_of_another_optimizer(stage: int) -> None:
    def act(comm: Comm) -> None:
        model = tower()
        optimizers = [Fails(model[:1].parameters()), Fails(model[1:].parameters())]
        engine = Engine(model, optimizers, stage=stage, comm=comm)
        for number in range(4):
            with engine.forward():
                loss = model(x(1.0 + number)).square().mean()
            with engine.backward():
                loss.backward()
            for which, optimizer in enumerate(optimizers):
                optimizer.changed.clear()
                optimizer.fails = lambda changes, fails=which == number % 2: fails and changes == 0
                with suppress(ArithmeticError):  # not raised by a rank that steps none of its parameters
                    optimizer.step()
        engine.close()

    ThreadWorld(2).run(act)


class Ignores(Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            parameter.sub_(momentum.mul_(0.9).add_(parameter.grad), alpha=0.1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_who_ignores_closures_steps_whole_parameters_on_every_rank_and_is_told(stage: int) -> None:
    """As Lightning gives one to each step, also in manual optimization."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for step in range(3):
            optimizer.zero_grad()
            model(x(1.0 + step)).square().mean().backward()
            optimizer.step(lambda: None)
        return state_of(model, engine)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_as_on_one_device(tower(), act, stage, Ignores)
    told = [str(one.message) for one in caught if "has not called the closure" in str(one.message)]
    assert len(told) == (2 if stage else 0)  # once on each rank
