"""At stages 1 and 2 new weights arrive while the next forward runs, and no bit is another."""

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compare import assert_same_bits
from lightning_zero.config import Offload
from lightning_zero.run.engine import Engine, Options
from lightning_zero.shards.extents import Extent
from lightning_zero.shards.offload import Machine
from lightning_zero.views.lazy import LazyTensor, Stored
from lightning_zero.wire.comm import Comm
from models import seeded, weights
from test_offload import WAYS, assert_same_run, on_ranks
from thread_world import ThreadWorld
from unit_jobs import on_engine, state_of, tower, x

ALL, PART = (0, 1, 2, 3, 4), (0, 1, 3, 4)  # layers that a micro-batch uses


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_weights_that_arrive_late_change_no_bit(world: int, stage: int, way: str) -> None:
    expected, _ = on_ranks(world, stage, **WAYS[way])
    found, _ = on_ranks(world, stage, late_publish_bytes=0, **WAYS[way])
    assert_same_run(found, expected)


@pytest.mark.parametrize("stage", [1, 2])
def test_who_looks_at_any_moment_sees_the_latest_weights(stage: int) -> None:
    expected, seen = on_ranks(2, stage, looks=True)
    found, also = on_ranks(2, stage, looks=True, late_publish_bytes=0)
    assert_same_run(found, expected)
    for mine, theirs in zip(also, seen, strict=True):
        assert_same_bits(mine, theirs)


class Waiting(torch.optim.SGD):
    """Steps only when told."""

    told: threading.Event | None = None

    def step(self, closure: Any = None) -> Any:
        assert self.told is None or self.told.wait(20)
        return super().step(closure)


def engine_on(comm: Comm, stage: int, **options: Any) -> tuple[Engine, Waiting]:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = Waiting(model.parameters(), lr=0.1)
    return Engine(model, [optimizer], stage=stage, comm=comm, options=Options(**options)), optimizer


def backward(engine: Engine) -> None:
    with engine.forward():
        loss = engine.module(torch.ones(2, 4)).sum()
    with engine.backward():
        loss.backward()


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_does_not_wait_for_the_parts_of_other_ranks(stage: int) -> None:
    returned = threading.Event()

    def run(comm: Comm) -> dict[str, torch.Tensor]:
        engine, optimizer = engine_on(comm, stage, late_publish_bytes=0)
        backward(engine)
        optimizer.told = returned if comm.rank == 1 else None
        optimizer.step()  # rank 1's ends after rank 0's has
        if comm.rank == 0:
            returned.set()
        backward(engine)
        engine.close()
        return weights(engine.module)

    first, second = ThreadWorld(2).run(run)
    assert_same_bits(first, second)


class Fused(nn.Module):
    """Hands its child's weights to a kernel that torch knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            seen = self.inner.weight.detach().clone()
        return x @ seen.t() + self.inner(x)


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)))


@pytest.mark.parametrize("make", [Fused, scripted])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_kernel_past_torch_sees_the_latest_weights_of_a_child_of_whatever_age(stage: int, make: Any) -> None:
    def run(comm: Comm, **options: Any) -> dict[str, torch.Tensor]:
        model = seeded(lambda: nn.Sequential(make(), nn.ModuleDict({"a": make()})["a"]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = Engine(model, [optimizer], stage=stage, comm=comm, options=Options(**options))
        for step in range(4):
            if step == 1:
                model.add_module("later", seeded(make))
                optimizer.add_param_group({"params": [*model[-1].parameters()]})
            backward(engine)
            optimizer.step()
            optimizer.zero_grad()
        engine.close()
        return weights(model)

    fusion = torch.jit.set_fusion_strategy([])  # what TorchScript fuses differs from run to run
    try:
        (expected, _), (found, _) = (
            ThreadWorld(2).run(lambda comm, options=options: run(comm, **options))
            for options in ({"bucket_bytes": 64}, {"bucket_bytes": 64, "late_publish_bytes": 0})
        )
    finally:
        torch.jit.set_fusion_strategy(fusion)
    assert_same_bits(found, expected)


class Noting(nn.Linear):
    """Notes how many groups are still without their latest weights when it is called."""

    engine: Engine | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.engine is not None:
            self.noted = sum(group.publish.is_due for group in self.engine.groups)
        return super().forward(x)


class Around(nn.Sequential):
    """May do anything with the weights of its children."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.parametrize(("kind", "noted"), [(nn.Sequential, [2, 1, 0]), (Around, [0, 0, 0])])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_sequence_of_layers_has_each_wait_for_its_own_weights(stage: int, kind: Any, noted: list[int]) -> None:
    def run(comm: Comm) -> list[int]:
        layers = [Noting(4, 4, bias=False) for _ in range(3)]
        module = kind(*layers)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        options = Options(bucket_bytes=64, late_publish_bytes=0)
        engine = Engine(module, [optimizer], stage=stage, comm=comm, options=options)
        backward(engine)
        optimizer.step()
        for layer in layers:
            layer.engine = engine
        backward(engine)
        engine.close()
        return [layer.noted for layer in layers]

    assert ThreadWorld(2).run(run) == [noted] * 2


class Ones(Stored):
    def __init__(self, parameter: torch.Tensor) -> None:
        super().__init__("ones", tuple(parameter.shape), torch.float32)

    def whole(self) -> torch.Tensor:
        return torch.ones(self.shape)

    def read(self, extent: Extent, into: torch.Tensor) -> None:
        into.fill_(1.0)


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_loaded_while_weights_arrive_replaces_them_and_may_be_edited(stage: int) -> None:
    def run(comm: Comm) -> list[torch.Tensor]:
        engine, optimizer = engine_on(comm, stage, late_publish_bytes=0)
        backward(engine)
        optimizer.step()
        assert all(group.publish.is_due for group in engine.groups)
        with engine.states.loading(lambda: None):
            engine.module.load_state_dict({name: LazyTensor(Ones(p)) for name, p in engine.module.named_parameters()})
            engine.module[0].weight.data.mul_(3)
        engine.close()
        return [parameter.detach() for parameter in engine.module.parameters()]

    for weight, *others in ThreadWorld(2).run(run):
        assert torch.equal(weight, torch.full((4, 4), 3.0))
        assert all(torch.equal(other, torch.ones_like(other)) for other in others)


def test_a_small_model_has_its_weights_at_once() -> None:
    def run(comm: Comm) -> list[bool]:
        engine, optimizer = engine_on(comm, 2)
        backward(engine)
        optimizer.step()
        behind = [group.publish.is_due for group in engine.groups]
        engine.close()
        return behind

    assert ThreadWorld(2).run(run) == [[False], [False]]


@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_plan_may_publish_what_no_step_has_changed_and_keeps_what_users_have_edited(stage: int, edits: bool) -> None:
    """The layer that the second step leaves out is not stepped in it. Its values are on their way when rank 0 leaves
    the plan, in which it is published, and have arrived on rank 1 when that does."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> dict[str, Tensor]:
        for step, micros in enumerate([[ALL, ALL], [PART, PART], [PART if comm.rank else (0, 3, 4), PART], [ALL]]):
            for micro, layers in enumerate(micros):
                hidden = x(1.0 + step)
                for at in layers:
                    hidden = model[at](hidden)
                    if edits and (step, micro, at) == (2, 0, 0):
                        with torch.no_grad():
                            model[2][0].weight.mul_(0.5)
                with engine.accumulating() if micro < len(micros) - 1 else nullcontext():
                    hidden.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model, engine)

    expected = on_engine(tower(5), act, stage, bucket_bytes=256)
    offload = {"offload": Offload(optimizer="cpu"), "machine": Machine(host_is_apart=True)}
    found = on_engine(tower(5), act, stage, bucket_bytes=256, late_publish_bytes=0, **offload)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)
