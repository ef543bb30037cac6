"""Offload changes where things rest, and no bit: every tier beside none, on ranks as threads of this process."""

import copy
import dataclasses
import functools
import importlib
import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from compare import assert_same_bits
from lightning_zero.config import Offload
from lightning_zero.run.engine import Engine, Options
from lightning_zero.shards.gradient import gradient_of
from lightning_zero.shards.offload import Machine, choose_offloaded
from lightning_zero.shards.setting import Places
from lightning_zero.shards.window import may_fuse
from lightning_zero.tiers.array import OnDisk
from lightning_zero.tiers.disk import DiskError
from lightning_zero.tiers.ledger import Category, Ledger, Tier
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from models import assorted, clone, loss_of, weights
from reference import Run
from thread_world import ThreadWorld
from unit_jobs import WIDTH, assert_as_on_one_device, state_of, tower, x
from wrappers import Lookahead

# The host's memory stands in for another tier than the "device", which is memory of the host here, too.
APART = Machine(host_is_apart=True)
TIERS = {
    "optimizer on the host": Offload(optimizer="cpu"),
    "optimizer on disk": Offload(optimizer="nvme", path="."),
    "half of it on the host": Offload(optimizer="cpu", fraction=0.5),
    "half of it on disk": Offload(optimizer="nvme", path=".", fraction=0.5),
    "parameters on the host": Offload(parameters="cpu"),
    "both on the host": Offload(parameters="cpu", optimizer="cpu"),
    "both on disk": Offload(parameters="nvme", optimizer="nvme", path="."),
    "parameters on disk, optimizer on the host": Offload(parameters="nvme", optimizer="cpu", path="."),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"accumulate": 2, "clip": "norm"},
    "local": {"accumulate": 2, "accumulation": "local", "clip": "value"},
    "autocast": {"autocast_dtype": torch.bfloat16},
    "two bytes": {"param_dtype": torch.bfloat16, "accumulate": 2},
}
Maker = Callable[[nn.Module], tuple[Optimizer, LRScheduler | None]]


def fused_adamw(model: nn.Module) -> tuple[Optimizer, LRScheduler]:
    """The kernel that offload takes where the choice is torch's, with two groups and a scheduler."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, total_iters=3)


def momentum(model: nn.Module) -> tuple[Optimizer, None]:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True), None


def rmsprop(model: nn.Module) -> tuple[Optimizer, None]:
    return torch.optim.RMSprop([p for p in model.parameters() if p.requires_grad], lr=1e-3), None


class Counting(torch.optim.SGD):
    """Counts its steps by itself and in its groups, and goes by both."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            group["lr"] = 0.05 / (self.steps + group["taken"])
        return super().step(closure)


def counting(model: nn.Module) -> tuple[Optimizer, None]:
    return Counting(model.parameters(), lr=0.05, momentum=0.9, fused=True), None


def head_first(model: nn.Module) -> tuple[Optimizer, None]:
    """All but the last block and the norm is frozen, and unknown to the optimizer."""
    model.requires_grad_(False)
    trained = [*model.blocks[1].parameters(), *model.norm.parameters()]  # type: ignore[index, operator, union-attr]
    for parameter in trained:
        parameter.requires_grad_(True)
    return torch.optim.AdamW(trained, lr=1e-2, fused=True), None


def thaw(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Half of what is frozen trains from the second step on, and the rest from the third."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    newly = {1: frozen[::2], 2: frozen}.get(step, [])
    for parameter in newly:
        parameter.requires_grad_(True)
    if newly:
        optimizer.add_param_group({"params": newly, "lr": 5e-3})


def look(optimizer: Optimizer, model: nn.Module, seen: list[dict[str, Any]]) -> None:
    """What a curious callback does: weights, gradients and state."""
    seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
    seen.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for parameter in model.parameters():
        seen.append({name: value.clone() for name, value in optimizer.state.get(parameter, {}).items()})


def train(
    comm: Comm,
    stage: int,
    make: Maker = fused_adamw,
    *,
    accumulate: int = 1,
    clip: str | None = None,
    steps: int = 3,
    looks: bool = False,
    zeroes: bool = False,
    thaws: bool = False,
    **options: Any,
) -> tuple[Run, list[dict[str, Any]]]:
    model, run, seen = clone(assorted()), Run(), []
    optimizer, scheduler = make(model)
    options = {"machine": APART, **options}
    engine = Engine(model, [optimizer], stage=stage, comm=comm, options=Options(**options))
    dtype = options.get("autocast_dtype")
    for step in range(steps):
        if thaws:
            thaw(model, optimizer, step)
        for micro in range(accumulate):
            reduces = micro == accumulate - 1
            with engine.forward(reduces=reduces), torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = loss_of(model, comm.rank, step, micro) / accumulate
            if micro == 0:
                optimizer.zero_grad(set_to_none=not zeroes)
            with nullcontext() if reduces else engine.accumulating(), engine.backward():
                loss.backward()
        if looks:
            look(optimizer, model, seen)
        run.losses.append(loss.item())
        if clip == "norm":
            run.grad_norms.append(engine.gradients.clip_by_norm_(optimizer, 0.5).item())
        if clip == "value":
            engine.gradients.clip_by_value_(optimizer, 0.01)
        optimizer.step()
        if looks:
            look(optimizer, model, seen)
        if scheduler is not None:
            scheduler.step()
    run.optimizer = engine.states.full_optimizer(optimizer)
    engine.close()
    run.weights = weights(model)
    return run, seen


def on_ranks(world: int, stage: int, make: Maker = fused_adamw, **kwargs: Any) -> tuple[Run, list[dict[str, Any]]]:
    if world == 1:
        return train(LocalComm(), stage, make, **kwargs)
    return ThreadWorld(world).run(lambda comm: train(comm, stage, make, **kwargs))[0]


@functools.cache
def without(
    world: int, stage: int, way: str, make: Maker = fused_adamw, looks: bool = False
) -> tuple[Run, list[dict[str, Any]]]:
    return on_ranks(world, stage, make, looks=looks, **WAYS[way])


def flat(state: dict[str, Any]) -> dict[str, Any]:
    return {f"{index} {name}": value for index, of_one in state["state"].items() for name, value in of_one.items()}


def assert_same_run(found: Run, expected: Run) -> None:
    assert (found.losses, found.grad_norms) == (expected.losses, expected.grad_norms)
    assert_same_bits(found.weights, expected.weights)
    assert_same_bits(flat(found.optimizer), flat(expected.optimizer))


def at(tiers: str, folder: Path) -> Offload:
    offload = TIERS[tiers]
    return dataclasses.replace(offload, path=folder) if offload.path else offload


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_offload_changes_no_bit(world: int, stage: int, way: str, tmp_path: Path) -> None:
    expected, _ = without(world, stage, way)
    for tiers in TIERS:
        offload = at(tiers, tmp_path)
        if offload.parameters is None or stage == 3:
            found, _ = on_ranks(world, stage, offload=offload, **WAYS[way])
            assert_same_run(found, expected)


@pytest.mark.parametrize("way", ["clipped", "autocast", "two bytes"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_what_begins_to_train_later_is_offloaded_without_changing_a_bit(
    world: int, stage: int, way: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"make": head_first, "thaws": True, "steps": 4, **WAYS[way]}
    expected, _ = on_ranks(world, stage, **options)
    for tiers in TIERS:
        offload = at(tiers, tmp_path)
        if offload.parameters is None or stage == 3:
            found, _ = on_ranks(world, stage, offload=offload, **options)
            assert_same_run(found, expected)


@pytest.mark.parametrize(
    ("stage", "tiers"),
    [(stage, tiers) for stage in (1, 2, 3) for tiers in ("optimizer on the host", "optimizer on disk")]
    + [(3, "both on disk")],
)
@pytest.mark.parametrize("world", [1, 2])
def test_who_looks_at_weights_gradients_or_state_at_any_moment_sees_what_a_serial_step_left(
    world: int, stage: int, tiers: str, tmp_path: Path
) -> None:
    expected, seen = without(world, stage, "clipped", looks=True)
    found, also = on_ranks(world, stage, offload=at(tiers, tmp_path), looks=True, **WAYS["clipped"])
    assert_same_run(found, expected)
    for mine, theirs in zip(also, seen, strict=True):
        assert_same_bits(mine, theirs)


def rounding(model: nn.Module) -> tuple[Optimizer, LRScheduler]:
    """What `state_dtype` says that it does: the state is rounded after each step."""
    optimizer, scheduler = fused_adamw(model)

    def round_state(optimizer: Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                if state[name].numel() > 1:  # scalars stay as they are
                    state[name].copy_(state[name].bfloat16())

    optimizer.register_step_post_hook(round_state)
    return optimizer, scheduler


@pytest.mark.parametrize("way", ["clipped", "two bytes"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_state_in_two_bytes_is_the_state_rounded_after_each_step(
    world: int, stage: int, way: str, tmp_path: Path
) -> None:
    expected, _ = on_ranks(world, stage, rounding, **WAYS[way])
    assert_differs(expected, without(world, stage, way)[0])
    for tiers in ("optimizer on the host", "half of it on disk", "optimizer on disk"):
        narrow = dataclasses.replace(at(tiers, tmp_path), state_dtype="bf16")
        found, _ = on_ranks(world, stage, offload=narrow, **WAYS[way])
        if narrow.fraction == 1.0:
            assert_same_run(found, expected)
        else:
            assert_differs(found, expected)
    where_it_is, _ = on_ranks(
        world, stage, offload=Offload(optimizer="cpu", state_dtype=torch.bfloat16), machine=Machine(), **WAYS[way]
    )
    assert_same_run(where_it_is, expected)


def assert_differs(found: Run, expected: Run) -> None:
    with pytest.raises(AssertionError):
        assert_same_run(found, expected)


@pytest.mark.parametrize("fused", [None, True], ids=["torch's choice", "fused"])
@pytest.mark.parametrize(
    ("stage", "kind"), [(1, "AdamW"), (2, "AdamW"), (3, "AdamW"), (1, "Adam"), (2, "Adagrad"), (3, "SGD")]
)
def test_offload_changes_no_bit_whoever_has_chosen_the_kernel(
    stage: int, kind: str, fused: bool | None, tmp_path: Path
) -> None:
    def make(model: nn.Module) -> tuple[Optimizer, None]:
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return getattr(torch.optim, kind)(trainable, lr=0.01, fused=fused), None

    expected, _ = on_ranks(2, stage, make)
    for tiers in ("optimizer on the host", "both on disk" if stage == 3 else "optimizer on disk"):
        found, _ = on_ranks(2, stage, make, offload=at(tiers, tmp_path))
        assert_same_run(found, expected)


@pytest.mark.parametrize(
    ("options", "fuses"),
    [({}, True), ({"foreach": True}, False), ({"fused": False}, False), ({"differentiable": True}, False)],
)
def test_a_kernel_is_chosen_where_the_user_has_left_that_open(options: dict[str, bool], fuses: bool) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], **options)  # type: ignore[arg-type]
    assert may_fuse(optimizer, optimizer.param_groups[0]) == fuses
    of_users_own = type("Own", (torch.optim.AdamW,), {})([nn.Parameter(torch.ones(1))], **options)
    assert not may_fuse(of_users_own, of_users_own.param_groups[0])  # its methods may be part of the step


class Widens(torch.optim.Optimizer):
    """Sums gradients in fp32 in its first step, and in fp64 from then on."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            before = state["sum"].double() if state else torch.zeros_like(parameter)
            state["sum"] = before + parameter.grad / 3
            parameter.sub_(state["sum"], alpha=0.1)


def test_state_that_an_optimizer_widens_rests_in_the_wider_dtype(tmp_path: Path) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, torch.Tensor]:
        for step in range(3):
            model(x(1 + step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict() if engine is None else engine.states.full_optimizer(optimizer)
        return {**state_of(model, engine), **{str(at): of["sum"] for at, of in state["state"].items()}}

    offload = Offload(optimizer="nvme", path=tmp_path)
    assert_as_on_one_device(tower(), act, 2, Widens, offload=offload, machine=APART)


@pytest.mark.parametrize("make", [momentum, rmsprop, counting])
@pytest.mark.parametrize("world", [1, 2])
def test_any_element_wise_optimizer_steps_where_its_state_rests(world: int, make: Maker, tmp_path: Path) -> None:
    expected, _ = without(world, 2, "plain", make)
    for tiers in ("optimizer on the host", "optimizer on disk", "half of it on disk"):
        found, _ = on_ranks(world, 2, make, offload=at(tiers, tmp_path))
        assert_same_run(found, expected)


@pytest.mark.parametrize("tiers", ["optimizer on the host", "optimizer on disk"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_are_zeroed_in_place_are_stepped_first(stage: int, tiers: str, tmp_path: Path) -> None:
    expected, _ = on_ranks(2, stage, zeroes=True)
    found, _ = on_ranks(2, stage, offload=at(tiers, tmp_path), zeroes=True)
    assert_same_run(found, expected)


def fused_sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)


@pytest.mark.parametrize("tiers", ["optimizer on the host", "optimizer on disk"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_a_gradient_that_is_edited_after_the_call_of_step_is_stepped_as_it_was(
    world: int, stage: int, tiers: str, tmp_path: Path
) -> None:
    def act(model: Any, engine: Any, optimizer: Optimizer, comm: Any) -> dict[str, torch.Tensor]:
        for edit in (lambda grad: grad.mul_(100), lambda grad: grad[0].fill_(3), lambda grad: grad.data.zero_()):
            optimizer.zero_grad()
            model(x()).square().mean().backward()
            optimizer.step()
            for parameter in model.parameters():
                edit(parameter.grad)
        return {**{f"grad {name}": p.grad.clone() for name, p in model.named_parameters()}, **state_of(model, engine)}

    options = {"offload": at(tiers, tmp_path), "machine": APART}
    assert_as_on_one_device(tower(), act, stage, fused_sgd, world=world, **options)


def train_step(model: Any, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(x()).square().mean().backward()
    optimizer.step()


def fused_adam(parameters: Any) -> Optimizer:
    first, *others = parameters
    return torch.optim.Adam([{"params": [first]}, {"params": others, "lr": 0.02}], lr=0.01, fused=True)


def _forget_each(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state.pop(parameter)


def _empty_first(optimizer: Optimizer) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {}


def _drop_last(optimizer: Optimizer) -> None:
    optimizer.param_groups[1]["params"].pop()


def _move_one(optimizer: Optimizer) -> None:
    first, second = optimizer.param_groups
    first["params"].append(second["params"].pop(0))


AFTER_STEP: dict[str, Callable[[Optimizer], None]] = {
    "clear": lambda optimizer: optimizer.state.clear(),
    "pop": _forget_each,
    "empty": _empty_first,
    "set": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
    "drop": _drop_last,
    "move": _move_one,
    "reverse": lambda optimizer: optimizer.param_groups.reverse(),
    "remove": lambda optimizer: optimizer.param_groups.pop(),
}


@pytest.mark.parametrize("edit", AFTER_STEP)
@pytest.mark.parametrize("tiers", ["optimizer on the host", "optimizer on disk"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_whose_state_or_groups_are_edited_after_the_call_of_step_has_stepped_as_it_was(
    stage: int, tiers: str, edit: str, tmp_path: Path
) -> None:
    def act(model: Any, engine: Any, optimizer: Optimizer, comm: Any) -> dict[str, torch.Tensor]:
        for step in range(3):
            train_step(model, optimizer)
            if step == 1:
                AFTER_STEP[edit](optimizer)
        return state_of(model, engine)

    options = {"offload": at(tiers, tmp_path), "machine": APART}
    assert_as_on_one_device(tower(), act, stage, fused_adam, **options)


@pytest.mark.parametrize("tiers", [None, "optimizer on the host", "optimizer on disk"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_goes_back_to_a_state_of_its_own_from_before(
    stage: int, tiers: str | None, tmp_path: Path
) -> None:
    def act(model: Any, engine: Any, optimizer: Optimizer, comm: Any) -> dict[str, torch.Tensor]:
        saved = {}
        for step in range(4):
            train_step(model, optimizer)
            if step == 1:
                saved = copy.deepcopy(optimizer.state_dict())
            if step == 2:
                optimizer.load_state_dict(saved)
        state = optimizer.state_dict() if engine is None else engine.states.full_optimizer(optimizer)
        moments = {str(index): state["state"][index]["exp_avg"] for index in sorted(state["state"])}
        return {**state_of(model, engine), **moments}

    offload = None if tiers is None else at(tiers, tmp_path)
    assert_as_on_one_device(tower(), act, stage, fused_adam, offload=offload, machine=APART)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_may_be_taken_inside_a_transform_of_torch_func(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Optimizer, comm: Any) -> dict[str, torch.Tensor]:
        seen: dict[str, torch.Tensor] = {}

        def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(model, weights, (x(),)).square().mean()

        for step in range(3):
            train_step(model, optimizer)
            found = torch.func.grad(loss)(dict(model.named_parameters()))
            seen |= {f"{step} {name}": grad.clone() for name, grad in found.items()}
        return {**seen, **state_of(model, engine)}

    assert_as_on_one_device(tower(), act, stage, fused_adam, offload=Offload(optimizer="cpu"), machine=APART)


@pytest.mark.parametrize("make", [fused_adam, lambda p: torch.optim.Adafactor(p, lr=0.01)], ids=["pieces", "whole"])
@pytest.mark.parametrize("tiers", [None, "optimizer on the host", "optimizer on disk"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_takes_its_pieces_of_a_state_of_one_device(
    stage: int, tiers: str | None, make: Any, tmp_path: Path
) -> None:
    def act(model: Any, engine: Any, optimizer: Optimizer, comm: Any) -> dict[str, torch.Tensor]:
        saved = {}
        for step in range(4):
            train_step(model, optimizer)
            if step == 0:
                saved = optimizer.state_dict() if engine is None else engine.states.full_optimizer(optimizer)
                saved = copy.deepcopy(saved)
            if step == 2:
                optimizer.load_state_dict(saved)
        return state_of(model, engine)

    offload = None if tiers is None else at(tiers, tmp_path)
    assert_as_on_one_device(tower(), act, stage, make, offload=offload, machine=APART)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_that_owns_all_that_has_state_takes_a_state_of_one_device_too(stage: int) -> None:
    """Its pieces have as many elements as that, in another shape."""

    class LastLayer(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[-1](x)

    model = LastLayer([nn.Linear(9, 9), nn.Linear(4, 3)])

    def momentum(parameters: Any) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)

    def act(model: Any, engine: Any, optimizer: Optimizer, comm: Any) -> dict[str, torch.Tensor]:
        saved = {}
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 4), 0.5)).square().mean().backward()
            optimizer.step()
            if step == 0:
                saved = optimizer.state_dict() if engine is None else engine.states.full_optimizer(optimizer)
                saved = copy.deepcopy(saved)
            if step == 1:
                optimizer.load_state_dict(saved)
        if engine is not None:
            assert engine.states.full_optimizer(optimizer)["state"].keys() == saved["state"].keys()
        return state_of(model, engine)

    assert_as_on_one_device(model, act, stage, momentum)


@pytest.mark.parametrize("tiers", ["optimizer on the host", "optimizer on disk"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_that_a_wrapper_shares_with_what_it_wraps_is_one_state_to_both(
    stage: int, tiers: str, tmp_path: Path
) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, torch.Tensor]:
        for owner in (optimizer, optimizer.base, optimizer):
            train_step(model, optimizer)
            for parameter in model.parameters():
                owner.state[parameter]["exp_avg"].mul_(0.5)
        return state_of(model, engine)

    def make(parameters: Any) -> Optimizer:
        return Lookahead(torch.optim.Adam(parameters, lr=0.01, fused=True))

    assert_as_on_one_device(tower(), act, stage, make, offload=at(tiers, tmp_path), machine=APART)


@pytest.mark.parametrize("tiers", ["optimizer on the host", "optimizer on disk"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_of_two_parameters_one_may_be_edited_in_place_and_the_other_assigned(
    stage: int, tiers: str, tmp_path: Path
) -> None:
    def act(model: Any, engine: Any, optimizer: Optimizer, comm: Any) -> dict[str, torch.Tensor]:
        for _ in range(3):
            optimizer.zero_grad()
            model(x()).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model[0][0].weight.mul_(0.5)
            model[2][0].weight.data = torch.full((WIDTH, WIDTH), 0.25)
        return state_of(model, engine)

    options = {"offload": at(tiers, tmp_path), "machine": APART}
    assert_as_on_one_device(tower(), act, stage, fused_sgd, **options)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tiers", [None, *(name for name, offload in TIERS.items() if offload.parameters)])
@pytest.mark.parametrize("world", [1, 2])
def test_edits_of_parameters_persist_wherever_they_rest(
    world: int, tiers: str | None, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    def act(model: Any, engine: Any, optimizer: Optimizer, comm: Any) -> dict[str, torch.Tensor]:
        outputs = {}
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
                outputs[f"output {step}"] = model(x()).float()
            outputs[f"output {step}"].square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model[0][0].weight.mul_(0.5)
                model[1][0].bias.add_(1e-4)  # too little for two bytes to show
            model[2][0].weight.data = model[2][0].weight.data * 0.9
        return {**outputs, **state_of(model, engine)}

    options = {"offload": None if tiers is None else at(tiers, tmp_path), "machine": APART, "autocast_dtype": dtype}
    assert_as_on_one_device(tower(), act, 3, fused_sgd, world=world, **options)


class Steps:
    """A tower of three, and which of its layers the optimizer has stepped. The first ones may be `frozen`."""

    def __init__(
        self, stage: int, offload: Offload, comm: Comm | None = None, machine: Machine = APART, *, frozen: int = 0
    ) -> None:
        self.model = nn.Sequential(*[nn.ModuleList([nn.Linear(8, 8)])[0] for _ in range(3)])
        self.model[:frozen].requires_grad_(False)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad])
        options = Options(offload=offload, machine=machine)
        self.engine = Engine(self.model, [self.optimizer], stage=stage, comm=comm or LocalComm(), options=options)

    def step(self) -> None:
        with self.engine.forward():
            loss = self.model(torch.ones(2, 8)).sum()
        self.optimizer.zero_grad()
        with self.engine.backward():
            loss.backward()
        self.optimizer.step()

    @property
    def stepped(self) -> list[bool]:
        """Of each layer: whether its weight has state, without looking at it."""
        return [dict.__contains__(self.optimizer.state, layer.weight) for layer in self.model]


def test_a_layer_is_stepped_when_the_next_forward_comes_to_it() -> None:
    run = Steps(3, Offload(optimizer="cpu", parameters="cpu"))
    run.step()
    assert run.stepped == [False, False, False]
    seen: list[list[bool]] = []
    for layer in run.model:
        layer.register_forward_hook(lambda *_: seen.append(run.stepped))
    with run.engine.forward():
        run.model(torch.ones(2, 8))
    assert seen == [[True, True, False], [True, True, True], [True, True, True]]  # one unit is gathered ahead
    run.engine.close()


@pytest.mark.parametrize("stage", [2, 3])
def test_looking_at_a_group_takes_no_postponed_step(stage: int) -> None:
    run = Steps(stage, Offload(optimizer="cpu", parameters="cpu" if stage == 3 else None))
    run.step()
    engine = run.engine
    slots = [slot for group in engine.groups for slot in group.slots]
    gradients = [gradient_of(slot) for slot in slots]
    averaged = [gradient.averaged for gradient in gradients]
    parts = [*engine.groups, *slots, *gradients, *averaged, engine.loans, *engine.runner.stepping.steppers.values()]
    for one in parts:
        for name in dir(one):
            getattr(one, name)
    assert run.stepped == [False, False, False]
    before = [group.master.read().clone() for group in engine.groups]
    engine.catch_up()
    for group, values in zip(engine.groups, before, strict=True):
        assert not group.has_postponed
        assert not group.master.read().equal(values)
    engine.close()


def test_at_stage_2_a_layer_waits_for_its_own_weights_alone() -> None:
    run = Steps(2, Offload(optimizer="cpu"))
    run.step()
    assert run.stepped == [False, False, False]
    run.model[0].weight.sum()
    assert run.stepped[0]
    run.engine.close()
    assert run.stepped == [True, True, True]


@pytest.mark.parametrize(
    "ask",
    [
        lambda run: run.optimizer.state_dict(),
        lambda run: list(run.optimizer.state.values()),
        lambda run: run.engine.states.full_model(),
        lambda run: run.engine.gradients.clip_by_norm_(run.optimizer, 1.0),
        lambda run: run.step(),
    ],
    ids=["state_dict", "state", "model", "clip", "next step"],
)
def test_nobody_finds_a_step_that_is_still_to_be_taken(ask: Callable[[Steps], Any]) -> None:
    run = Steps(2, Offload(optimizer="cpu"))
    run.step()
    ask(run)
    assert run.stepped == [True, True, True]
    run.engine.close()


def test_after_close_the_optimizer_is_as_torch_made_it() -> None:
    run = Steps(2, Offload(optimizer="cpu"))
    run.step()
    assert type(copy.deepcopy(run.optimizer).state) is defaultdict
    run.engine.close()
    assert type(run.optimizer.state) is defaultdict
    assert run.stepped == [True, True, True]


@pytest.mark.parametrize("tier", ["the host", "disk"])
def test_state_that_is_loaded_has_taken_no_step_that_was_postponed(tier: str, tmp_path: Path) -> None:
    run = Steps(2, at(f"optimizer on {tier}", tmp_path))
    run.step()
    saved = run.engine.states.full_optimizer(run.optimizer)
    for _ in range(2):
        run.step()
    run.engine.states.load_optimizer(run.optimizer, copy.deepcopy(saved))
    run.engine.catch_up()
    assert_same_bits(flat(run.engine.states.full_optimizer(run.optimizer)), flat(saved))
    run.engine.close()


WAYS_THROUGH = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 1, 3], [0, 1, 2, 3], [3, 2], [0, 1, 2, 3], [0, 1], [3, 0, 1, 2]]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_a_model_that_goes_another_way_than_the_step_before_loses_no_gradient(world: int, prefetch: int) -> None:
    """Also on one rank, which hears from nobody that it does."""

    start = layers()  # made once: ranks are threads here, and share a random state

    def train(comm: Comm, offload: Offload | None) -> dict[str, Tensor]:
        model = clone(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        options = Options(offload=offload, machine=APART, prefetch=prefetch)
        engine = Engine(model, [optimizer], stage=3, comm=comm, options=options)
        for way in WAYS_THROUGH:
            with engine.forward():
                values = torch.ones(2, 8)
                for number in way:
                    values = model[number](values).tanh()
            optimizer.zero_grad()
            with engine.backward():
                values.sum().backward()
            optimizer.step()
        engine.close()
        return weights(model)

    def found(offload: Offload | None) -> dict[str, Tensor]:
        if world == 1:
            return train(LocalComm(), offload)
        return ThreadWorld(world).run(lambda comm: train(comm, offload))[0]

    assert_same_bits(found(Offload(optimizer="cpu", parameters="cpu")), found(None))


@functools.cache
def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.ModuleList([nn.Linear(8, 8)])[0] for _ in range(4)])


def test_evaluation_waits_for_all_steps() -> None:
    run = Steps(2, Offload(optimizer="cpu"))
    run.step()
    with torch.inference_mode(), run.engine.forward():
        pass
    assert run.stepped == [True, True, True]
    assert not any(state["exp_avg"].is_inference() for state in run.optimizer.state.values())
    run.step()
    run.engine.close()


def test_the_learning_rate_of_a_late_step_is_that_of_its_call() -> None:
    found, expected = Steps(2, Offload(optimizer="cpu")), Steps(2, Offload(optimizer="cpu"))
    start = weights(found.model)
    expected.model.load_state_dict(start)
    for run in (found, expected):
        run.step()
        if run is expected:
            run.engine.catch_up()
        run.optimizer.param_groups[0]["lr"] = 100.0
        run.engine.close()
        assert run.optimizer.param_groups[0]["lr"] == 100.0
    assert_same_bits(weights(found.model), weights(expected.model))


def test_a_learning_rate_that_is_a_tensor_is_that_of_its_call_too() -> None:
    """A scheduler writes into it."""

    def make(model: nn.Module) -> tuple[Optimizer, LRScheduler]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False)
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, total_iters=3)

    expected, _ = on_ranks(1, 2, make)
    found, _ = on_ranks(1, 2, make, offload=Offload(optimizer="cpu"))
    assert_same_run(found, expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_r24_the_state_is_where_it_was_asked_to_be_and_nowhere_else(stage: int, tmp_path: Path) -> None:
    numel = 3 * (8 * 8 + 8)

    def tiers_of(category: Category, offload: Offload) -> dict[Tier, int]:
        run = Steps(stage, offload)
        run.step()
        run.engine.catch_up()
        found = {tier: run.engine.ledger.live_in[category, tier] for tier in Tier}
        run.engine.close()
        return found

    scalars = 6 * 4  # Adam's counts of steps
    on_host = tiers_of(Category.OPTIMIZER_STATE, Offload(optimizer="cpu"))
    assert on_host == {Tier.DEVICE: 0, Tier.HOST: 8 * numel + scalars, Tier.DISK: 0}
    on_disk = tiers_of(Category.OPTIMIZER_STATE, Offload(optimizer="nvme", path=tmp_path))
    assert on_disk[Tier.DEVICE] == 0
    assert on_disk[Tier.DISK] == 8 * numel
    masters = tiers_of(Category.MASTER, Offload(optimizer="nvme", path=tmp_path))
    assert masters[Tier.DEVICE] == masters[Tier.HOST] == 0
    assert masters[Tier.DISK] >= 4 * numel
    gradients = tiers_of(Category.GRADIENT, Offload(optimizer="nvme", path=tmp_path))
    assert gradients[Tier.DEVICE] == gradients[Tier.HOST] == 0


@pytest.mark.parametrize("stage", [2, 3])
def test_what_begins_to_train_later_rests_where_it_was_asked_to_be(stage: int, tmp_path: Path) -> None:
    """Nothing is left on the device, whether it had been in a group before, as at stage 3, or not."""
    numel, parameters = 3 * (8 * 8 + 8), "cpu" if stage == 3 else None
    for offload, tier in (
        (Offload("cpu", parameters=parameters), Tier.HOST),
        (Offload("nvme", parameters=parameters, path=tmp_path), Tier.DISK),
    ):
        run = Steps(stage, offload, frozen=2)
        run.step()
        run.model.requires_grad_(True)
        run.optimizer.add_param_group({"params": run.model[:2].parameters()})
        run.step()
        run.engine.catch_up()
        live = run.engine.ledger.live_in
        for category in (Category.OPTIMIZER_STATE, Category.MASTER, Category.GRADIENT):
            assert live[category, Tier.DEVICE] == 0, category
        assert live[Category.OPTIMIZER_STATE, tier] >= 8 * numel
        assert live[Category.GRADIENT, tier] >= 4 * numel
        run.engine.close()


@pytest.mark.parametrize("machine", [APART, Machine()], ids=["host", "device"])
def test_state_in_two_bytes_takes_two_bytes(machine: Machine, tmp_path: Path) -> None:
    numel, scalars = 3 * (8 * 8 + 8), 6 * 4  # Adam counts its steps
    tier = Tier.HOST if machine.host_is_apart else Tier.DEVICE
    run = Steps(2, Offload(optimizer="cpu", state_dtype="bf16"), machine=machine)
    for _ in range(2):
        run.step()
    run.engine.catch_up()
    assert run.engine.ledger.live_in[Category.OPTIMIZER_STATE, tier] == 2 * 2 * numel + scalars
    run.engine.close()
    run = Steps(2, Offload(optimizer="nvme", path=tmp_path, state_dtype="bf16"), machine=machine)
    for _ in range(2):
        run.step()
    run.engine.catch_up()
    assert run.engine.ledger.live_in[Category.OPTIMIZER_STATE, Tier.DISK] == 2 * 2 * numel
    run.engine.close()


def test_state_in_two_bytes_can_be_read_and_edited_as_what_the_optimizer_made() -> None:
    run = Steps(2, Offload(optimizer="cpu", state_dtype="bf16"))
    run.step()
    moment = run.optimizer.state[run.model[0].weight]["exp_avg"]
    assert (moment.dtype, tuple(moment.shape)) == (torch.float32, (8, 8))
    assert moment.clone().equal(moment.bfloat16().float())
    moment[0, 0] = 1 + 2**-20
    assert moment[0, 0] == 1.0  # rounded
    run.engine.close()


def test_half_of_the_state_is_half_of_it() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(10)])
    named = dict(model.named_parameters())
    trainable = {id(parameter) for parameter in named.values()}
    for fraction, expected in ((0.5, 5), (0.1, 1), (1.0, 10), (0.04, 0)):
        chosen = choose_offloaded(Offload(optimizer="cpu", fraction=fraction), named, trainable)
        assert len(chosen) == expected, fraction
    last = choose_offloaded(Offload(optimizer="cpu", fraction=0.1), named, trainable)
    assert last == {id(model[9].weight)}  # needed last in the next forward
    uneven = dict(nn.Sequential(nn.Linear(5, 2, bias=False), nn.Linear(3, 2, bias=False)).named_parameters())
    trainable = {id(parameter) for parameter in uneven.values()}
    nearest = choose_offloaded(Offload(optimizer="cpu", fraction=0.3), uneven, trainable)
    assert nearest == {id(uneven["1.weight"])}  # 6 of 16 elements are nearer to 4.8 than none are


def host_peak(layers: int, folder: Path) -> int:
    """Bytes of host memory that offload to disk takes, at the most."""
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters())
    options = Options(offload=Offload(optimizer="nvme", path=folder), machine=APART, bucket_bytes=2**19)
    engine = Engine(model, [optimizer], stage=2, comm=LocalComm(), options=options)
    for _ in range(3):
        with engine.forward():
            loss = model(torch.ones(2, 256)).sum()
        optimizer.zero_grad()
        with engine.backward():
            loss.backward()
        optimizer.step()
    engine.close()
    return engine.ledger.tier_peak[Tier.HOST]


def test_r58_host_memory_of_offload_to_disk_does_not_grow_with_the_model(tmp_path: Path) -> None:
    layer, bucket = 256 * 256 * 4, 2**19
    # Of each window master, gradient and two moments; three at a time.
    constant = 3 * 4 * (bucket + 64 * 2 * bucket // layer)
    assert 0 < host_peak(4, tmp_path) <= constant
    assert 0 < host_peak(16, tmp_path) <= constant < 16 * layer * 4


@pytest.mark.parametrize("state_dtype", [None, "bf16"])
@pytest.mark.parametrize("tiers", [None, "optimizer on the host", "optimizer on disk", "both on disk"])
@pytest.mark.parametrize("stage", [2, 3])
def test_r42_no_buffer_is_allocated_after_the_second_step(
    stage: int, tiers: str | None, state_dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stage == 2 and tiers == "both on disk":
        tiers = "half of it on disk"
    allocated: list[Category] = []
    allocate = Ledger.allocate

    def spy(ledger: Ledger, category: Category, *args: Any) -> torch.Tensor:
        allocated.append(category)
        return allocate(ledger, category, *args)

    monkeypatch.setattr(Ledger, "allocate", spy)
    offload = Offload() if tiers is None else dataclasses.replace(at(tiers, tmp_path), state_dtype=state_dtype)
    run = Steps(stage, offload)
    for _ in range(2):
        run.step()
    run.engine.catch_up()
    assert allocated
    allocated.clear()
    for _ in range(3):
        run.step()
    run.engine.catch_up()
    assert allocated == []
    run.engine.close()


def test_r58_nothing_is_left_in_the_folder_even_while_it_is_used(tmp_path: Path) -> None:
    run = Steps(3, Offload(optimizer="nvme", parameters="nvme", path=tmp_path))
    run.step()
    assert list(tmp_path.iterdir()) == []
    run.engine.close()


def test_state_on_disk_can_be_read_copied_and_edited_like_any_other(tmp_path: Path) -> None:
    run = Steps(2, Offload(optimizer="nvme", path=tmp_path))
    run.step()
    state = run.optimizer.state[run.model[0].weight]
    moment = state["exp_avg"]
    assert (tuple(moment.shape), moment.dtype, moment.device.type) == ((8, 8), torch.float32, "cpu")
    before = moment.clone()
    assert type(before) is torch.Tensor
    assert copy.deepcopy(moment).equal(before)
    moment.mul_(2)
    moment[0, 0] = 7.0
    row = moment[1]  # a view, edited later
    row.zero_()
    expected = before * 2
    expected[0, 0], expected[1] = 7.0, 0.0
    assert moment.equal(expected)
    run.optimizer.param_groups[0].update(betas=(1.0, 0.999), fused=True)  # a step that keeps the first moment as it is
    run.step()
    assert run.optimizer.state[run.model[0].weight]["exp_avg"].equal(expected)
    run.engine.close()


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "copy": lambda state: state.copy(),
    "dict": dict,
    "| on the left": lambda state: state | {"more": {}},
    "| on the right": lambda state: {"more": {}} | state,
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_an_optimizers_state_has_the_step_that_was_just_called(how: str) -> None:
    run = Steps(2, Offload(optimizer="cpu"))
    for number in (1, 2):
        run.step()
        copied = COPIES[how](run.optimizer.state)
        assert isinstance(copied, defaultdict) == (how != "dict")
        steps = [float(state["step"]) for key, state in copied.items() if key != "more"]
        assert steps == [number] * 6
    run.engine.close()


@pytest.mark.parametrize("of_a_device", [True, False])
def test_the_host_steps_for_a_device_by_the_fused_kernel_and_options_are_the_users_own_between_steps(
    of_a_device: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the step takes the kernel that torch takes in memory, so that offload changes no bit."""
    kernels, adam = [], importlib.import_module("torch.optim.adam")

    def noting(name: str) -> Callable[..., None]:
        kernel = getattr(adam, name)
        return lambda *args, **kwargs: kernels.append(name) or kernel(*args, **kwargs)  # type: ignore[func-returns-value]

    for name in ("_fused_adam", "_single_tensor_adam"):
        monkeypatch.setattr(adam, name, noting(name))
    if of_a_device:
        monkeypatch.setattr(Places, "steps_on_host", True)
    run = Steps(2, Offload(optimizer="nvme", path=tmp_path))
    kernels.clear()  # it was tried how much state there will be
    before = [dict(group) for group in run.optimizer.param_groups]
    run.step()
    run.engine.catch_up()
    assert [dict(group) for group in run.optimizer.param_groups] == before
    assert before[0]["fused"] is None
    assert set(kernels) == {"_fused_adam" if of_a_device else "_single_tensor_adam"}
    run.engine.close()


def test_a_tier_that_is_the_device_itself_costs_no_copy() -> None:
    """On a CPU the host's memory is where everything is anyway."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    options = Options(offload=Offload(optimizer="cpu"))
    engine = Engine(model, [optimizer], stage=2, comm=LocalComm(), options=options)
    assert engine.ledger.live[Category.MASTER] == engine.ledger.live[Category.GRADIENT] == 0
    engine.close()


# -- what goes wrong


def test_a_folder_that_is_not_there_is_told_on_every_rank(tmp_path: Path) -> None:
    def set_up(comm: Comm) -> str:
        path = tmp_path if comm.rank == 0 else tmp_path / "absent"
        with pytest.raises(RuntimeError) as caught:
            Steps(2, Offload(optimizer="nvme", path=path), comm)
        return str(caught.value)

    told = ThreadWorld(2).run(set_up)
    assert told[0] == told[1]
    assert "rank 1, setting up: Offload(path=" in told[0]
    assert "No such file or directory" in told[0]


def test_a_disk_without_room_is_told_at_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RuntimeError, match=r"960 bytes more are needed there.*No space left.*Choose a larger disk"):
        Steps(2, Offload(optimizer="nvme", path=tmp_path))


@pytest.mark.parametrize(("ranks", "free", "taken"), [(1, 1000, "1,920"), (2, 2000, "3,840")])
def test_state_that_will_not_fit_is_told_at_set_up(
    ranks: int, free: int, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of a machine share its disk."""
    monkeypatch.setattr("lightning_zero.tiers.disk.Disk.free_bytes", free)
    with pytest.raises(RuntimeError, match=rf"will take {taken} bytes more there, and {free:,} are free"):
        Steps(2, Offload(optimizer="nvme", path=tmp_path), machine=dataclasses.replace(APART, ranks=ranks))


def test_state_that_fits_in_two_bytes_is_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_zero.tiers.disk.Disk.free_bytes", 1000)
    run = Steps(2, Offload(optimizer="nvme", path=tmp_path, state_dtype="bf16"))  # of 1,920 bytes in four
    run.step()
    run.engine.close()


def test_room_for_gradients_of_what_may_begin_to_train_is_asked_for_at_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(2)])
    optimizer = torch.optim.AdamW(model.parameters())
    model[0].requires_grad_(False)
    options = Options(offload=Offload(optimizer="nvme", path=tmp_path), machine=APART)
    monkeypatch.setattr("lightning_zero.tiers.disk.Disk.free_bytes", 1100)
    with pytest.raises(RuntimeError, match=r"will take 1,280 bytes more there"):  # 2 * 4 * 128, and 4 * 64
        Engine(model, [optimizer], stage=2, comm=LocalComm(), options=options)


class Votes(torch.optim.Optimizer):
    """Counts, for each element, in whole numbers of more than a byte."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            state["votes"] = state.get("votes", torch.full_like(parameter, 1000, dtype=torch.int32)) + 1
            parameter.sub_(parameter.grad * state["votes"], alpha=1e-5)


def test_state_of_whole_numbers_rests_as_it_is_made_where_other_state_rests_in_two_bytes(tmp_path: Path) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, torch.Tensor]:
        for step in range(3):
            model(x(1 + step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict() if engine is None else engine.states.full_optimizer(optimizer)
        return {**state_of(model, engine), **{str(at): of["votes"] for at, of in state["state"].items()}}

    for offload in (Offload("cpu", state_dtype="bf16"), Offload("nvme", path=tmp_path, state_dtype="bf16")):
        assert_as_on_one_device(tower(), act, 2, Votes, offload=offload, machine=APART)


class OneRate(torch.optim.Optimizer):
    """Takes the learning rate of the first group for all."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])


def test_an_optimizer_of_ones_own_has_all_of_its_groups_in_a_late_step(tmp_path: Path) -> None:
    def make(parameters: Any) -> Optimizer:
        return OneRate([{"params": [one], "lr": 0.1 + at} for at, one in enumerate(parameters)], {})

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, torch.Tensor]:
        for step in range(2):
            model(x(1 + step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model, engine)

    offload = Offload(optimizer="nvme", path=tmp_path)
    assert_as_on_one_device(tower(), act, 2, make, offload=offload, machine=APART, bucket_bytes=64)


def test_state_on_disk_that_is_edited_through_a_view_is_stepped_as_it_is_then(tmp_path: Path) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, torch.Tensor]:
        for step in range(3):
            model(x(1 + step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters():
                optimizer.state[parameter]["exp_avg"].view(-1)[:3].mul_(-1)
        return state_of(model, engine)

    offload = Offload(optimizer="nvme", path=tmp_path)
    assert_as_on_one_device(tower(), act, 2, fused_adam, world=1, offload=offload, machine=APART)


def test_too_little_host_memory_is_told_with_what_is_there_and_needed() -> None:
    model = nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    machine = Machine(host_is_apart=True, host_bytes=100_000)
    options = Options(offload=Offload(optimizer="cpu"), machine=machine)
    needed = r"needs 16\d,\d\d\d bytes of host memory on each rank, and 100,000 were there"
    with pytest.raises(RuntimeError, match=needed):
        Engine(model, [optimizer], stage=2, comm=LocalComm(), options=options)


def test_a_disk_that_fails_in_training_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Steps(2, Offload(optimizer="nvme", path=tmp_path))
    run.step()

    def broken(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwritev", broken)
    with pytest.raises(DiskError, match=rf"{tmp_path}.*failed: Input/output error.*last checkpoint"):
        run.step()
    monkeypatch.undo()
    run.engine.close(whole=False)


class TwoClosures(torch.optim.SGD):
    """Calls its closure twice, as sharpness-aware optimizers do."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
            closure()
        return super().step()


def test_an_optimizer_of_several_closures_is_refused_where_its_parameters_rest_on_disk(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = TwoClosures(model.parameters(), lr=0.1)
    options = Options(offload=Offload(optimizer="nvme", path=tmp_path), machine=APART)
    engine = Engine(model, [optimizer], stage=2, comm=LocalComm(), options=options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=r"TwoClosures calls its closure several times in a step.*to disk"):
        optimizer.step(closure)
    engine.close(whole=False)


def test_masters_on_disk_are_arrays_on_disk(tmp_path: Path) -> None:
    run = Steps(3, Offload(optimizer="nvme", parameters="nvme", path=tmp_path))
    assert all(isinstance(group.master, OnDisk) and group.master is group.owned_param for group in run.engine.groups)
    run.engine.close()
