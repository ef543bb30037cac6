"""Large tensors that Adam and its like step tile by tile on the host: the same bits, and nobody else sees the tiles."""

import copy
import importlib
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Adadelta, Adam, AdamW, NAdam, Optimizer, RAdam

from compare import assert_same_bits
from lightning_zero.config import Offload
from lightning_zero.run.engine import Engine, Options
from lightning_zero.run.notices import TornStepError
from lightning_zero.shards import tiles
from lightning_zero.shards.offload import Machine
from lightning_zero.shards.tiles import stepping_in_tiles
from lightning_zero.torch_private import TorchDispatchMode
from lightning_zero.wire.comm import Comm
from thread_world import ThreadWorld

SMALL = 1024  # bytes of a tile: 256 elements of float32
MAKES: dict[str, Callable[..., Optimizer]] = {
    "Adam": Adam,
    "Adam, weight decay": partial(Adam, weight_decay=0.1),
    "AdamW": AdamW,
    "AdamW, amsgrad, maximize": partial(AdamW, amsgrad=True, maximize=True),
    "AdamW, rate in a tensor": partial(AdamW, lr=torch.tensor(0.01)),
    "NAdam": partial(NAdam, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": partial(RAdam, weight_decay=0.1),
    "Adadelta": partial(Adadelta, weight_decay=0.1, maximize=True),
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", SMALL)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Of each group that torch steps, the numbers of elements that it steps at a time."""
    found: list[list[int]] = []

    def noting(theirs: Callable[..., None], parameters: list[Tensor], *args: Any, **kwargs: Any) -> None:
        found.append([parameter.numel() for parameter in parameters])
        theirs(parameters, *args, **kwargs)

    for kind, name in {Adam: "adam", NAdam: "nadam", RAdam: "radam", Adadelta: "adadelta"}.items():
        module = importlib.import_module(kind.__module__)
        monkeypatch.setattr(module, name, partial(noting, getattr(module, name)))
    return found


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Parameter]:
    draws = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=draws).to(dtype)) for shape in shapes]


def step(optimizer: Optimizer, number: int, *, in_tiles: bool) -> None:
    draws = torch.Generator().manual_seed(number)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=draws))
    if in_tiles:
        with stepping_in_tiles(optimizer):
            optimizer.step()
    else:
        optimizer.step()


def everything(optimizer: Optimizer) -> dict[str, Tensor]:
    """All parameters, and all state of theirs, by name."""
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(any(key is p for p in listed) for key in optimizer.state)
    state = {f"{at} {n}": v.clone() for at, p in enumerate(listed) for n, v in optimizer.state[p].items()}
    return {**{str(at): p.detach().clone() for at, p in enumerate(listed)}, **state}


SHAPES = [(3,), (1000,), (), (256,), (40, 30), (257,)]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_steps_in_tiles_have_the_bits_of_whole_ones(make: Callable[..., Optimizer], dtype: torch.dtype) -> None:
    one, other = (make(parameters(*SHAPES, dtype=dtype)) for _ in range(2))
    for number in range(3):
        step(one, number, in_tiles=False)
        step(other, number, in_tiles=True)
    assert_same_bits(everything(other), everything(one))


@pytest.mark.usefixtures("small_tiles")
def test_what_is_larger_than_a_tile_is_stepped_in_tiles_from_the_first_step_on(seen: list[list[int]]) -> None:
    optimizer = AdamW(parameters(*SHAPES))
    step(optimizer, 0, in_tiles=True)
    step(optimizer, 1, in_tiles=True)
    assert seen == [[3, 256, 256, 256, 232, 1, 256, 256, 256, 256, 256, 176, 256, 1]] * 2


@pytest.mark.usefixtures("small_tiles")
def test_several_threads_step_whole_tensors(monkeypatch: pytest.MonkeyPatch, seen: list[list[int]]) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    step(AdamW(parameters((1000,))), 0, in_tiles=True)
    assert seen == [[1000]]


class Watches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("small_tiles")
def test_who_watches_operations_sees_those_of_whole_tensors(seen: list[list[int]]) -> None:
    with Watches():
        step(AdamW(parameters((1000,))), 0, in_tiles=True)
    assert seen == [[1000]]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_kernels_that_pass_memory_once_or_take_all_tensors_are_left_alone(option: str, seen: list[list[int]]) -> None:
    step(AdamW(parameters((1000,)), **{option: True}), 0, in_tiles=True)
    assert seen == [[1000]]


@pytest.mark.usefixtures("small_tiles")
def test_tensors_that_are_no_run_of_memory_are_stepped_whole(seen: list[list[int]]) -> None:
    image, plain = parameters((8, 16, 4, 4), (600,))
    image.data = image.data.to(memory_format=torch.channels_last)
    step(AdamW([image, plain]), 0, in_tiles=True)
    assert seen == [[2048, 256, 256, 88]]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("lists", ["shared counts", "listed twice"])
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_who_sees_how_many_were_stepped_before_it_sees_as_many_in_tiles(lists: str) -> None:
    found = []
    for in_tiles in (False, True):
        one, other = parameters((1000,), (600,))
        optimizer = AdamW([one, one] if lists == "listed twice" else [one, other])
        step(optimizer, 0, in_tiles=in_tiles)
        if lists == "shared counts":
            optimizer.state[other]["step"] = optimizer.state[one]["step"]
        step(optimizer, 1, in_tiles=in_tiles)
        found.append(everything(optimizer))
    assert_same_bits(found[1], found[0])


@pytest.mark.usefixtures("small_tiles")
def test_hooks_and_state_see_no_tiles() -> None:
    (parameter,) = parameters((1000,))
    optimizer, shown = AdamW([parameter]), []

    def note(optimizer: Optimizer, *_: Any) -> None:
        shown.append(([p is parameter for p in optimizer.param_groups[0]["params"]], len(optimizer.state)))

    optimizer.register_step_pre_hook(note)
    optimizer.register_step_post_hook(note)
    step(optimizer, 0, in_tiles=True)
    assert shown == [([True], 0), ([True], 1)]
    assert optimizer.state[parameter]["exp_avg"].shape == (1000,)


@pytest.mark.usefixtures("small_tiles")
def test_a_count_that_is_no_tensor_is_refused_as_torch_refuses_it() -> None:
    (parameter,) = parameters((1000,))
    optimizer = AdamW([parameter])
    step(optimizer, 0, in_tiles=True)
    optimizer.state[parameter]["step"] = 1
    with pytest.raises(RuntimeError, match="singleton tensors"):
        step(optimizer, 1, in_tiles=True)


@pytest.mark.usefixtures("small_tiles")
def test_a_step_that_autograd_is_to_see_is_left_alone(seen: list[list[int]]) -> None:
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):  # as torch says: not in a leaf
        step(AdamW(parameters((1000,)), differentiable=True), 0, in_tiles=True)
    assert seen == [[1000]]


@pytest.mark.usefixtures("small_tiles")
def test_a_step_in_tiles_is_an_edit_of_the_parameter_for_graphs_that_have_saved_it() -> None:
    (parameter,) = parameters((1000,))
    loss = parameter.square().sum()
    step(AdamW([parameter]), 0, in_tiles=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("small_tiles")
def test_a_step_that_fails_between_two_tiles_counts_as_torchs_does_that_fails_midway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (parameter,) = parameters((1000,))
    optimizer, calls, steps_alone = AdamW([parameter]), [], Tensor.addcdiv_

    def fail_in_the_second_tile(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        if len(calls) == 2:
            raise ArithmeticError
        return steps_alone(*args, **kwargs)

    monkeypatch.setattr(Tensor, "addcdiv_", fail_in_the_second_tile)
    with pytest.raises(ArithmeticError):
        step(optimizer, 0, in_tiles=True)
    assert optimizer.state[parameter]["step"] == 1


class Fails(AdamW):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise ArithmeticError


@pytest.mark.usefixtures("small_tiles")
def test_a_class_over_adam_steps_in_tiles_and_an_error_leaves_nothing_behind(seen: list[list[int]]) -> None:
    optimizer = Fails(parameters((600,)))
    before = {*vars(optimizer)}
    with pytest.raises(ArithmeticError):
        step(optimizer, 0, in_tiles=True)
    assert seen == [[256, 256, 88]]
    assert {*vars(optimizer)} == before


class Gathers(AdamW):
    """Has an `_init_group` of its own, and lists what it likes."""

    def _init_group(self, group: Any, *lists: Any) -> Any:
        return super()._init_group(group, *lists)


@pytest.mark.usefixtures("small_tiles")
def test_a_class_that_gathers_tensors_by_itself_is_left_alone(seen: list[list[int]]) -> None:
    step(Gathers(parameters((600,))), 0, in_tiles=True)
    assert seen == [[600]]


@pytest.mark.usefixtures("small_tiles")
def test_a_compiled_step_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    cut: list[Any] = []
    monkeypatch.setattr(tiles, "_cut", lambda *args: cut.append(args))
    optimizer = AdamW(parameters((600,)))
    monkeypatch.setattr(optimizer, "step", torch.compile(optimizer.step, backend="eager"))
    for number in range(3):
        step(optimizer, number, in_tiles=True)
    assert cut == []
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] == 3


def train(
    comm: Comm, start: nn.Module, make: Callable[..., Optimizer], stage: int, options: Options
) -> dict[str, Tensor]:
    model = copy.deepcopy(start)
    optimizer = make(model.parameters())
    engine = Engine(model, [optimizer], stage=stage, comm=comm, options=options)
    for number in range(3):
        optimizer.zero_grad()
        draws = torch.Generator().manual_seed(number)
        model(torch.randn(4, 40, generator=draws)).square().mean().backward()
        optimizer.step()
    with engine.full_parameters():
        found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine.close()
    return found


@pytest.mark.usefixtures("small_tiles")
def test_an_error_between_two_tiles_has_torn_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last parameter has been changed, and not all of it."""
    left = threading.local()
    steps_alone = Tensor.addcdiv_

    def fail_in_the_second_tile(*args: Any, **kwargs: Any) -> Tensor:
        left.calls = left.calls - 1
        if left.calls < 0 and left.fails:
            raise ArithmeticError
        return steps_alone(*args, **kwargs)

    def act(comm: Comm) -> None:
        model = nn.Linear(50, 40, bias=False)
        optimizer = Adam(model.parameters(), foreach=False)
        engine = Engine(model, [optimizer], stage=2, comm=comm)

        def train() -> None:
            with engine.forward():
                loss = model(torch.ones(2, 50)).sum()
            with engine.backward():
                loss.backward()
            optimizer.step()

        left.calls, left.fails = 1, comm.rank == 1
        with pytest.raises(ArithmeticError) if left.fails else nullcontext():
            train()
        left.fails = False
        with pytest.raises(TornStepError, match=r"rank 1 Adam\.step\(\) had changed 0 of 1 parameters and some"):
            train()
        engine.close()

    monkeypatch.setattr(Tensor, "addcdiv_", fail_in_the_second_tile)
    ThreadWorld(2).run(act)


OFFLOADED = Options(offload=Offload(optimizer="cpu"), machine=Machine(host_is_apart=True))


@pytest.mark.parametrize(
    "make", [partial(AdamW, foreach=False), NAdam, RAdam, Adadelta], ids=["AdamW", "NAdam", "RAdam", "Adadelta"]
)
@pytest.mark.parametrize(
    ("stage", "options"),
    [*((stage, Options()) for stage in range(4)), (2, OFFLOADED)],
    ids=["0", "1", "2", "3", "2, offloaded"],
)
def test_training_steps_pieces_in_tiles_with_the_same_bits(
    stage: int,
    options: Options,
    make: Callable[..., Optimizer],
    monkeypatch: pytest.MonkeyPatch,
    seen: list[list[int]],
) -> None:
    start = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 40))
    act = partial(train, start=start, make=make, stage=stage, options=options)
    whole = ThreadWorld(2).run(act)
    assert max(map(max, filter(None, seen))) > 256
    seen.clear()
    monkeypatch.setattr(tiles, "TILE", SMALL)
    found = ThreadWorld(2).run(act)
    for one, other in zip(found, whole, strict=True):
        assert_same_bits(one, other)
    assert max(map(max, filter(None, seen))) == 256
