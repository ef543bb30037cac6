"""A run saved anywhere is resumed anywhere, and has every bit that it had: stages, ranks, dtypes, optimizers, models.

A campaign: RANDOM_MODELS=5000 pytest --timeout=0 tests/test_checkpoint_matrix.py. Otherwise the same few, always.
"""

import contextlib
import copy
import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from engine_checkpoints import (
    MAKERS,
    Place,
    Toy,
    differences,
    everything,
    one_of_each,
    resume,
    resumed_at,
    save,
    states_of,
    strange,
    train,
    train_and_save,
    trainable,
    wrong_pieces,
)
from lightning_zero.checkpoint import StoredCheckpoint, verify
from lightning_zero.run.engine import Engine, Options
from lightning_zero.wire.comm import Comm
from models import seeded
from random_models import Place as Forward
from random_models import Spec, build, specs
from ranks import SHORT
from thread_world import ThreadWorld

STAGES, WORLDS = [0, 1, 2, 3], [1, 2, 3, 4, 8]
CAMPAIGN = int(os.environ.get("RANDOM_MODELS", 0))


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and what the engine had that saved it."""

    path: Path
    states: dict[str, Any]


@pytest.fixture(scope="module")
def start() -> nn.Module:
    return everything()


@pytest.fixture(scope="module")
def saved_at(start: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Place], Saved]:
    """A run with three optimizers, saved there; made once."""
    made: dict[Place, Saved] = {}
    folder = tmp_path_factory.mktemp("matrix")

    def get(place: Place) -> Saved:
        if place not in made:
            path = folder / f"{len(made)}"
            made[place] = Saved(path, train_and_save(start, one_of_each, place, path))
        return made[place]

    return get


def wrong_after_resume(
    start: nn.Module,
    saved: Saved,
    place: Place,
    make: Callable[[nn.Module], list[Optimizer]] = one_of_each,
    *,
    gathers: bool = True,
) -> list[str]:
    """What is not as it was saved, on any rank, and after it was gathered."""

    def on_rank(comm: Comm) -> list[str]:
        model = strange(start, comm.rank)
        optimizers = make(model)
        with contextlib.closing(StoredCheckpoint(saved.path)) as checkpoint:
            engine = resume(comm, model, optimizers, place, checkpoint)
        told = wrong_pieces(engine, optimizers, saved.states)
        if gathers:
            told += differences(states_of(engine, optimizers), saved.states)
        return [f"{place}, rank {comm.rank}: {problem}" for problem in told]

    return [problem for problems in place.run(on_rank) for problem in problems]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_what_any_stage_and_world_saved_is_resumed_in_every_bit(
    stage: int, world: int, start: nn.Module, saved_at: Callable[[Place], Saved]
) -> None:
    for saved_stage in (0, 2, 3):  # stage 1 writes what stage 2 writes, as the next test says
        for saved_world in WORLDS:
            saved = saved_at(Place(saved_stage, saved_world))
            # Masters are made of what was read, wherever that was written: both meet every place, of either kind.
            autocast = (stage + world + saved_stage + saved_world) % 2 == 1
            gathers = saved_world == 3 and not autocast  # which costs the most
            assert wrong_after_resume(start, saved, Place(stage, world, autocast), gathers=gathers) == []


@pytest.mark.parametrize("world", WORLDS)
def test_stages_1_and_2_write_the_same_bytes(world: int, saved_at: Callable[[Place], Saved]) -> None:
    one, two = (saved_at(Place(stage, world)).path for stage in (1, 2))
    written, again = (sorted(path.glob("shard-*")) for path in (one, two))
    assert len(written) == len(again) >= world
    for mine, theirs in zip(written, again, strict=True):
        assert mine.read_bytes() == theirs.read_bytes(), mine.name
    assert StoredCheckpoint(one).manifest.tensors == StoredCheckpoint(two).manifest.tensors


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_r01_a_checkpoint_of_four_ranks_is_resumed_by_one_two_three_and_eight(
    stage: int, start: nn.Module, saved_at: Callable[[Place], Saved]
) -> None:
    saved = saved_at(Place(stage, 4))
    for world in (1, 2, 3, 8):
        assert wrong_after_resume(start, saved, Place(stage, world)) == []


@pytest.mark.parametrize("stage", STAGES)
def test_weights_that_rest_in_two_bytes_are_saved_as_their_masters(
    stage: int, start: nn.Module, saved_at: Callable[[Place], Saved]
) -> None:
    for world in (1, 3):
        saved = saved_at(Place(stage, world, autocast=True))
        weight = StoredCheckpoint(saved.path).load()["state_dict"]["second.weight"]
        assert weight.dtype == torch.float32
        assert not torch.equal(weight, weight.bfloat16().float())
        for place in (Place(2, 2), Place(3, 3, autocast=True), Place(0, 1)):
            assert wrong_after_resume(start, saved, place) == []


@pytest.mark.parametrize("stage", STAGES)
def test_replicas_save_together_and_may_be_resumed_without_any(
    stage: int, start: nn.Module, saved_at: Callable[[Place], Saved]
) -> None:
    replicated = Place(stage, 4, replicate_size=2)
    assert verify(saved_at(replicated).path) == []
    for place in (Place(1, 3), Place(3, 2), Place(0, 1), replicated, Place(3, 8, replicate_size=4)):
        assert wrong_after_resume(start, saved_at(replicated), place) == []
    assert wrong_after_resume(start, saved_at(Place(3, 3)), replicated) == []


def test_replicas_share_the_writing(tmp_path: Path) -> None:
    train_and_save(seeded(lambda: Layers(3, 4000)), MAKERS["adamw"], Place(3, 4, replicate_size=2), tmp_path / "ckpt")
    sizes = [file.nbytes for file in StoredCheckpoint(tmp_path / "ckpt").manifest.files]
    assert len(sizes) == 4
    assert max(sizes) < 1.1 * min(sizes)


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 3), (2, 2), (3, 3), (3, 4)])
def test_a_run_that_was_resumed_goes_on_as_if_it_had_never_stopped(
    stage: int, world: int, start: nn.Module, tmp_path: Path
) -> None:
    place = Place(stage, world)
    straight = train_and_save(start, one_of_each, place, tmp_path / "straight", steps=5)
    train_and_save(start, one_of_each, place, tmp_path / "half", steps=2)

    def go_on(comm: Comm) -> dict[str, Any]:
        model = strange(start, comm.rank)
        optimizers = one_of_each(model)
        engine = resume(comm, model, optimizers, place, StoredCheckpoint(tmp_path / "half"))
        train(model, optimizers, place, steps=3, start=2)
        save(comm, engine, optimizers, tmp_path / "again")
        return states_of(engine, optimizers)

    for states in place.run(go_on):
        assert differences(states, straight) == []
    assert (
        differences(StoredCheckpoint(tmp_path / "again").load(), StoredCheckpoint(tmp_path / "straight").load()) == []
    )


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_alone_may_be_taken(
    stage: int, world: int, start: nn.Module, saved_at: Callable[[Place], Saved]
) -> None:
    saved = saved_at(Place(2, 2))

    def on_rank(comm: Comm, autocast: bool) -> list[str]:
        model = strange(start, comm.rank)
        place = Place(stage, world, autocast)
        with contextlib.closing(StoredCheckpoint(saved.path)) as checkpoint:
            engine = resume(comm, model, one_of_each(model), place, checkpoint, weights_only=True)
        alone = {**saved.states, "optimizer_states": []}
        return wrong_pieces(engine, [], alone) + differences(states_of(engine, []), alone)

    for autocast in (False, True):
        assert not any(Place(stage, world).run(functools.partial(on_rank, autocast=autocast)))


# -- models


@pytest.mark.parametrize("stage", STAGES)
def test_r07_tied_frozen_and_odd_tensors_are_saved_as_one_device_would(
    stage: int, start: nn.Module, saved_at: Callable[[Place], Saved]
) -> None:
    plain = copy.deepcopy(start)
    expected = plain.state_dict()
    for world in WORLDS:
        found = StoredCheckpoint(saved_at(Place(stage, world)).path).load()["state_dict"]
        assert found.keys() == expected.keys()
        assert "scratch" not in found
        assert {name: (value.dtype, value.shape) for name, value in found.items()} == {
            name: (value.dtype, value.shape) for name, value in expected.items()
        }
        for name in ("frozen.weight", "frozen.bias", "frozen_too.bias", "table", "mean", "nothing", "unused"):
            assert differences(found[name], expected[name], name) == []
        assert found["count"] == 2**40 + 3
        assert found["third.weight"] is found["second.weight"]
        assert found["frozen_too.weight"] is found["frozen.weight"]
        assert found["same_mean"] is found["mean"]
        assert found["second.bias"] is not found["third.bias"]


@pytest.mark.parametrize("thaws", [True, False])
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [((0, 2), (2, 3)), ((1, 2), (3, 4)), ((2, 3), (1, 2)), ((3, 4), (0, 2)), ((2, 2), (2, 1)), ((3, 1), (3, 3))],
)
def test_what_an_optimizer_has_frozen_is_resumed_thawed_and_the_reverse(
    saved: tuple[int, int], resumed: tuple[int, int], thaws: bool, tmp_path: Path
) -> None:
    """Frozen parameters are in groups of their own, and so each rank has other pieces of the rest, too."""

    def give_all(model: nn.Module) -> list[Optimizer]:
        return [torch.optim.AdamW(model.parameters(), lr=0.01)]

    frozen, thawed = everything(), everything()
    for name, parameter in thawed.named_parameters():
        parameter.requires_grad_(name != "nothing")
    frozen.first.requires_grad_(False)
    before, after = (frozen, thawed) if thaws else (thawed, frozen)
    expected = train_and_save(before, give_all, Place(*saved), tmp_path / "ckpt")
    for found in resumed_at(Place(*resumed), after, give_all, tmp_path / "ckpt"):
        assert differences(found, expected) == []


@pytest.mark.parametrize("stage", STAGES)
def test_r07_parameters_are_tied_after_a_resume(
    stage: int, start: nn.Module, saved_at: Callable[[Place], Saved]
) -> None:
    def on_rank(comm: Comm) -> None:
        model: Any = strange(start, comm.rank)
        optimizers = one_of_each(model)
        engine = resume(comm, model, optimizers, Place(stage, 2), StoredCheckpoint(saved_at(Place(2, 3)).path))
        engine.close()
        assert model.third.weight is model.second.weight
        assert model.frozen_too.weight is model.frozen.weight
        assert model.same_mean.data_ptr() == model.mean.data_ptr()
        assert model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(model.scratch, torch.full((2,), 3.0))  # is not saved: rank 0's, as it was

    saved_at(Place(2, 3))
    Place(stage, 2).run(on_rank)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_in_another_dtype_takes_the_values_in_its_own(stage: int, dtype: torch.dtype, tmp_path: Path) -> None:
    layer = seeded(Layers)
    saved = train_and_save(layer, MAKERS["sgd"], Place(stage, 3), tmp_path / "ckpt")

    def on_rank(comm: Comm) -> dict[str, Any]:
        model = strange(layer, comm.rank).to(dtype)
        optimizers = MAKERS["sgd"](model)
        engine = resume(comm, model, optimizers, Place(stage, 2), StoredCheckpoint(tmp_path / "ckpt"))
        return states_of(engine, optimizers)

    found = Place(stage, 2).run(on_rank)[0]
    cast = {name: value.to(dtype) for name, value in saved["state_dict"].items()}
    assert differences(found["state_dict"], cast) == []
    for index, state in saved["optimizer_states"][0]["state"].items():
        moments = {name: value.to(dtype) for name, value in state.items()}
        assert differences(found["optimizer_states"][0]["state"][index], moments) == []


@st.composite
def journeys(draw: Any) -> tuple[Spec, "Journey", "Journey"]:
    spec = draw(specs([torch.float32, torch.float32, torch.float64, torch.bfloat16]))
    return spec, draw(stops()), draw(stops())


@dataclass(frozen=True)
class Journey:
    """Where a random model is, and how it is divided there."""

    place: Place
    units: tuple[str, ...] | None
    bucket_bytes: int

    def options(self) -> Options:
        place = self.place.options()
        return Options(
            autocast_dtype=place.autocast_dtype,
            replicate_size=place.replicate_size,
            unit_classes=self.units,
            bucket_bytes=self.bucket_bytes,
        )


@st.composite
def stops(draw: Any) -> Journey:
    world = draw(st.sampled_from([2, 1, 3, 4]))
    replicas = draw(st.sampled_from([1, 1, *(size for size in range(1, world + 1) if world % size == 0)]))
    place = Place(draw(st.sampled_from(STAGES)), world, draw(st.booleans()), replicas)
    return Journey(place, draw(st.sampled_from([None, ("Linear",)])), draw(st.sampled_from([2**20, 64, 1024])))


def optimizers_of(model: nn.Module) -> list[Optimizer]:
    parameters = trainable(model)
    made: list[Optimizer] = [torch.optim.AdamW(parameters[0::3], lr=0.01)]
    if len(parameters) > 2:
        made += [torch.optim.SGD(parameters[1::3], lr=0.01, momentum=0.9), Toy(parameters[2::3])]
    return made


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@settings(
    max_examples=CAMPAIGN or 15,
    derandomize=not CAMPAIGN,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(journey=journeys())
def test_a_random_model_is_resumed_anywhere(
    journey: tuple[Spec, Journey, Journey], tmp_path_factory: pytest.TempPathFactory
) -> None:
    spec, before, after = journey
    path = tmp_path_factory.mktemp("random") / "ckpt"
    models = [build(spec, seed) for seed in range(2 * 4)]

    def run(comm: Comm) -> dict[str, Any]:
        model = models[comm.rank]
        optimizers = optimizers_of(model)
        engine = Engine(model, optimizers, stage=before.place.stage, comm=comm, options=before.options())
        for step in range(2):
            signal = torch.linspace(-1, 1, 3 * spec.width).view(3, spec.width) * (step + 1)
            engine.loans.end_all()
            engine.runner.begin_forward()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=before.place.autocast, cache_enabled=False):
                losses = model(signal, Forward(comm.rank, step, 0))
            with engine.backward():
                losses[-1].backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            with engine.forward():
                pass  # every rank takes rank 0's buffers
        save(comm, engine, optimizers, path)
        return states_of(engine, optimizers)

    def go_on(comm: Comm) -> dict[str, Any]:
        model = models[4 + comm.rank]
        optimizers = optimizers_of(model)
        with contextlib.closing(StoredCheckpoint(path)) as checkpoint:
            tree = checkpoint.tree()
            with checkpoint.reading_together(model, comm):
                model.load_state_dict(tree["state_dict"])
            engine = Engine(model, optimizers, stage=after.place.stage, comm=comm, options=after.options())
            engine.states.load_optimizers(tree["optimizer_states"])
        return states_of(engine, optimizers)

    expected = before.place.run(run)[0]
    for found in after.place.run(go_on):
        assert differences(found, expected) == []
    loaded = StoredCheckpoint(path).load()
    assert differences(loaded, expected) == []


# -- optimizers


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("stage", STAGES)
def test_r45_the_state_of_any_optimizer_is_resumed_anywhere(
    stage: int, maker: str, start: nn.Module, tmp_path: Path
) -> None:
    for world in (1, 3):
        path = tmp_path / f"{world}"
        saved = Saved(path, train_and_save(start, MAKERS[maker], Place(stage, world), path))
        for place in (Place(3, 4, autocast=True), Place(1, 2), Place(0, 1)):
            assert wrong_after_resume(start, saved, place, MAKERS[maker]) == []


@pytest.mark.parametrize("stage", STAGES)
def test_r45_the_file_holds_the_state_as_one_device_would_with_plain_values_of_every_kind(
    stage: int, start: nn.Module, tmp_path: Path
) -> None:
    def with_text(model: nn.Module) -> list[Optimizer]:
        optimizer = Toy(trainable(model))

        def say(*_: Any) -> None:
            for state in optimizer.state.values():
                state["says"] = "toy"

        optimizer.register_step_post_hook(say)
        return [optimizer]

    states = train_and_save(start, with_text, Place(stage, 3), tmp_path / "ckpt")
    loaded = StoredCheckpoint(tmp_path / "ckpt").load()
    assert differences(loaded, states) == []
    state = loaded["optimizer_states"][0]["state"][0]
    assert state["window"].shape == (2, 13)
    assert state["hollow"].shape == (0, 4)
    assert {name: value for name, value in state.items() if not isinstance(value, Tensor)} == {
        "seen": 2,
        "decay": 0.1 / 3 / 3,
        "knows": None,
        "warm": True,
        "says": "toy",
    }
    assert type(state["seen"]) is int
    assert type(state["warm"]) is bool


def on_disk_with(
    optimizer_class: Callable[[Any], Optimizer], place: Place, path: Path, model: nn.Module
) -> dict[int, Any]:
    """The state of an optimizer after a step, as the file has it."""
    train_and_save(model, lambda module: [optimizer_class(trainable(module))], place, path, steps=1)
    return dict(StoredCheckpoint(path).load()["optimizer_states"][0]["state"])


class Plain(Optimizer):
    """Its state is what `state_of(number, parameter)` makes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def state_of(self, number: int, parameter: Tensor) -> dict[Any, Any]:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            if parameter.grad is not None:
                self.state[parameter] = self.state_of(number, parameter)


class Nested(Plain):
    """As Shampoo and LBFGS have it, and with keys that are no text. It steps, so that trying it tells what it keeps."""

    def state_of(self, number: int, parameter: Tensor) -> dict[Any, Any]:
        assert parameter.grad is not None
        parameter.sub_(parameter.grad, alpha=0.1)
        history = [torch.full((2,), float(number)), torch.full((3,), float(number))]
        return {
            "trace": torch.zeros_like(parameter),
            "history": history,
            "by order": {0: torch.ones(1) * number},
            7: number,
        }


class Layers(nn.Module):
    """Long enough that small parameters are divided over ranks."""

    def __init__(self, features: int = 3, width: int = 40) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(features, width), nn.Linear(width, 3)

    def forward(self, signal: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.tanh(self.up(signal[:, :3])))).sum()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_tensors_in_containers_of_the_state_are_written_by_whoever_has_them(
    stage: int, world: int, tmp_path: Path
) -> None:
    found = on_disk_with(Nested, Place(stage, world), tmp_path / "ckpt", seeded(Layers))
    assert len(found) == 4
    for number, state in found.items():
        assert differences(state["history"], [torch.full((2,), float(number)), torch.full((3,), float(number))]) == []
        assert differences(state["by order"], {0: torch.ones(1) * number}) == []
        assert state[7] == number
        assert state["trace"].dim() == (2 if number in (0, 2) else 1)


class Gated(nn.Module):
    """In its first pass it uses a single number alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.layer, self.passes = nn.Parameter(torch.ones(())), nn.Linear(3, 3), 0

    def forward(self, signal: Tensor) -> Tensor:
        self.passes += 1
        return ((signal if self.passes == 1 else self.layer(signal)) * self.gain).square().sum()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_count_of_steps_is_none_of_the_parameter_that_is_a_single_number(
    stage: int, world: int, tmp_path: Path
) -> None:
    def on_rank(comm: Comm) -> None:
        model = Gated()
        optimizer = torch.optim.Adam(model.parameters())
        engine = Engine(model, [optimizer], stage=stage, comm=comm)
        for _ in range(2):
            with engine.forward():
                loss = model(torch.ones(2, 3))
            with engine.backward():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        save(comm, engine, [optimizer], tmp_path / "ckpt")

    ThreadWorld(world).run(on_rank)
    state = StoredCheckpoint(tmp_path / "ckpt").load()["optimizer_states"][0]["state"]
    assert {index: (float(of["step"]), tuple(of["exp_avg"].shape)) for index, of in state.items()} == {
        0: (2.0, ()),
        1: (1.0, (3, 3)),
        2: (1.0, (3,)),
    }


class Fixed(Plain):
    """Beside what is as long as the parameter, its state has a tensor of one shape for all of them."""

    shape: tuple[int, ...] = ()

    def state_of(self, number: int, parameter: Tensor) -> dict[Any, Any]:
        table = torch.full(self.shape, float(number), dtype=parameter.dtype)
        return {"trace": torch.zeros_like(parameter), "table": table}


@pytest.mark.parametrize(
    "shape",
    [
        (9,),
        (2, 20),
        (40,),  # as long as a bias
        (24,),  # as what a rank has of one
    ],
)
def test_a_tensor_of_the_state_may_have_the_shape_of_a_parameter_or_of_a_piece(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    start = seeded(Layers)

    def make(model: nn.Module) -> list[Optimizer]:
        optimizer = Fixed(trainable(model))
        optimizer.shape = shape
        return [optimizer]

    def on_rank(comm: Comm, place: Place, path: Path) -> list[str]:
        model = strange(start, comm.rank)
        optimizers = make(model)
        resume(comm, model, optimizers, place, StoredCheckpoint(path))
        states = [optimizers[0].state.get(parameter, {}) for parameter in model.parameters()]
        return [
            told
            for number, state in enumerate(states)
            if state["table"].numel()  # else another rank has it
            for told in differences(state["table"], torch.full(shape, float(number)), f"table {number}")
        ]

    for number, saved in enumerate([Place(1, 2), Place(3, 4)]):
        path = tmp_path / f"{number}"
        train_and_save(start, make, saved, path)
        for index, state in StoredCheckpoint(path).load()["optimizer_states"][0]["state"].items():
            assert differences(state["table"], torch.full(shape, float(index))) == []
        for place in (Place(0, 1), Place(2, 2), Place(3, 4)):
            assert not any(place.run(functools.partial(on_rank, place=place, path=path)))


class Hollow(nn.Module):
    """With a parameter that trains and has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.hollow = nn.Linear(5, 7), nn.Parameter(torch.empty(0, 3))

    def forward(self, signal: Tensor) -> Tensor:
        return self.layer(signal).sum() + self.hollow.sum()


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_without_elements_has_its_state_once(stage: int, tmp_path: Path) -> None:
    start = seeded(Hollow)
    saved = Saved(tmp_path / "ckpt", train_and_save(start, MAKERS["adamw"], Place(stage, 2), tmp_path / "ckpt"))
    assert wrong_after_resume(start, saved, Place(stage, 3), MAKERS["adamw"]) == []


# -- plain files, plain torch


def plain_run(start: nn.Module, steps: int = 2) -> tuple[nn.Module, list[Optimizer]]:
    model = copy.deepcopy(start)
    optimizers = one_of_each(model)
    train(model, optimizers, Place(0, 1), steps)
    return model, optimizers


def plain_states(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "state_dict": {name: value.detach() for name, value in model.state_dict().items()},
            "optimizer_states": [optimizer.state_dict() for optimizer in optimizers],
        }
    )


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_single_file_of_plain_torch_is_resumed_by_an_engine(
    stage: int, world: int, start: nn.Module, tmp_path: Path
) -> None:
    expected = plain_states(*plain_run(start))
    torch.save(expected, tmp_path / "plain.ckpt")

    def on_rank(comm: Comm, autocast: bool) -> list[str]:
        model = strange(start, comm.rank)
        optimizers = one_of_each(model)
        tree = torch.load(tmp_path / "plain.ckpt", weights_only=True)
        model.load_state_dict(tree["state_dict"])
        place = Place(stage, world, autocast)
        engine = Engine(model, optimizers, stage=stage, comm=comm, options=place.options())
        engine.states.load_optimizers(tree["optimizer_states"])
        return differences(states_of(engine, optimizers), expected) + wrong_pieces(engine, optimizers, expected)

    for autocast in (False, True):
        assert not any(Place(stage, world).run(lambda comm, autocast=autocast: on_rank(comm, autocast)))  # type: ignore[misc]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_of_an_engine_loads_into_plain_torch(
    stage: int, world: int, start: nn.Module, saved_at: Callable[[Place], Saved]
) -> None:
    saved = saved_at(Place(stage, world))
    tree = StoredCheckpoint(saved.path).load()
    assert differences(tree, saved.states) == []
    model = strange(start, 0)
    optimizers = one_of_each(model)
    model.load_state_dict(tree["state_dict"])
    for optimizer, state in zip(optimizers, tree["optimizer_states"], strict=True):
        optimizer.load_state_dict(state)
    assert differences(plain_states(model, optimizers), saved.states) == []


def test_what_plain_torch_and_an_engine_of_one_rank_save_is_the_same(
    start: nn.Module, saved_at: Callable[[Place], Saved]
) -> None:
    assert differences(StoredCheckpoint(saved_at(Place(2, 1)).path).load(), plain_states(*plain_run(start))) == []


# -- size


def bytes_on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("maker", ["adamw", "sgd"])
def test_r52_a_checkpoint_is_as_large_as_the_states_however_many_ranks_save_it(
    stage: int, maker: str, tmp_path: Path
) -> None:
    model = seeded(lambda: Layers(3, 100_003))

    def in_memory(states: dict[str, Any]) -> int:
        values = list(states["state_dict"].values())
        for optimizer in states["optimizer_states"]:
            values += [value for state in optimizer["state"].values() for value in state.values()]
        return sum(value.nbytes for value in values)

    sizes = []
    for world in (1, 2, 4):
        states = train_and_save(model, MAKERS[maker], Place(stage, world), tmp_path / f"{world}", steps=1)
        sizes.append(bytes_on_disk(tmp_path / f"{world}"))
        assert 5e6 < in_memory(states) <= sizes[-1] <= 1.02 * in_memory(states)
    assert max(sizes) <= 1.01 * min(sizes)


def test_tied_and_viewed_tensors_are_written_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(300, 300, bias=False), nn.Linear(300, 300, bias=False)
            self.other.weight = self.one.weight
            self.one.requires_grad_(False)
            row = torch.zeros(90_000)[:10]
            self.register_buffer("row", row)
            self.register_buffer("same_row", row)

    def on_rank(comm: Comm) -> None:
        model = copy.deepcopy(start)
        save(comm, Engine(model, [], stage=stage, comm=comm), [], tmp_path / f"{stage}")

    start = seeded(Tied)
    for stage in STAGES:
        Place(stage, 2).run(on_rank)
        assert bytes_on_disk(tmp_path / f"{stage}") < 1.02 * 4 * 90_000


# -- trouble


def test_damage_is_told_alike_on_every_rank(start: nn.Module, tmp_path: Path) -> None:
    train_and_save(start, one_of_each, Place(2, 2), tmp_path / "ckpt")
    file = sorted((tmp_path / "ckpt").glob("*.safetensors"))[1]
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)

    def on_rank(comm: Comm) -> str:
        model = strange(start, comm.rank)
        with pytest.raises(RuntimeError, match="is damaged") as raised:
            resume(comm, model, one_of_each(model), Place(3, 3), StoredCheckpoint(tmp_path / "ckpt"))
        return str(raised.value)

    told = Place(3, 3).run(on_rank)
    assert len(set(told)) == 1
    assert file.name in told[0]


def test_one_rank_alone_may_read_into_other_tensors_while_all_load_the_model(
    start: nn.Module, saved_at: Callable[[Place], Saved]
) -> None:
    saved = saved_at(Place(2, 2))

    def on_rank(comm: Comm) -> tuple[Tensor, Tensor]:
        model, checkpoint = strange(start, comm.rank), StoredCheckpoint(saved.path)
        weights = checkpoint.tree()["state_dict"]
        name, lazy = next((name, weights[name]) for name, _ in model.named_parameters())
        mine, later = torch.zeros(lazy.shape), model.get_parameter(name)
        if comm.rank == 1:
            with contextlib.suppress(KeyError), checkpoint.reading_together(model, comm):
                mine.copy_(lazy)
                raise KeyError("as a hook of users may")
            with torch.no_grad():  # and into those of the model, when that is over
                later.copy_(lazy)
        torch.testing.assert_close(lazy.source.whole(), saved.states["state_dict"][name], rtol=0, atol=0)
        return mine, later.detach()

    mine, later = ThreadWorld(2, wait_timeout=SHORT).run(on_rank)[1]
    assert torch.equal(mine, later)
    assert mine.count_nonzero()


def test_who_has_waited_in_vain_for_a_tensor_does_not_wait_for_the_others(
    start: nn.Module, saved_at: Callable[[Place], Saved]
) -> None:
    saved = saved_at(Place(2, 2))

    def on_rank(comm: Comm) -> float:
        if comm.rank == 1:
            return 0.0
        model, checkpoint = strange(start, comm.rank), StoredCheckpoint(saved.path)
        weights = checkpoint.tree()["state_dict"]
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r"Ranks \[1\] never came"), checkpoint.reading_together(model, comm):
            model.load_state_dict(weights)
        return time.monotonic() - started

    wait = 2.0
    assert len(start.state_dict()) > 5
    assert wait < ThreadWorld(2, wait_timeout=wait).run(on_rank)[0] < 4 * wait


@pytest.mark.parametrize("stage", STAGES)
def test_who_edits_a_checkpoint_edits_nothing_of_the_model(stage: int) -> None:
    def on_rank(comm: Comm) -> list[Tensor]:
        model = seeded(lambda: nn.Linear(3, 4))
        engine = Engine(model, optimizers := MAKERS["sgd"](model), stage=stage, comm=comm)
        state = engine.states.spread_model()
        edited = state["weight"].zero_()
        model(torch.ones(2, 3)).sum().backward()
        optimizers[0].step()
        found = engine.states.full_model()
        return [edited.clone(), found["weight"], found["bias"]]

    expected = seeded(lambda: nn.Linear(3, 4))
    (optimizer,) = MAKERS["sgd"](expected)
    expected(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    for edited, weight, bias in Place(stage, 2).run(on_rank):
        assert not edited.count_nonzero()
        assert torch.equal(weight, expected.weight)
        assert torch.equal(bias, expected.bias)


def test_a_save_over_an_older_checkpoint_leaves_only_the_new_one(start: nn.Module, tmp_path: Path) -> None:
    train_and_save(start, one_of_each, Place(2, 4), tmp_path / "ckpt", steps=1)
    saved = Saved(tmp_path / "ckpt", train_and_save(start, one_of_each, Place(3, 2), tmp_path / "ckpt", steps=3))
    assert wrong_after_resume(start, saved, Place(1, 3)) == []
    assert len(list((tmp_path / "ckpt").iterdir())) == 2 * 2 + 2
    assert verify(tmp_path / "ckpt") == []


def test_a_model_of_another_shape_is_refused_before_anything_is_read(
    saved_at: Callable[[Place], Saved],
) -> None:
    model: Any = everything()
    model.halves = nn.Parameter(torch.zeros(12, dtype=torch.bfloat16))
    checkpoint = StoredCheckpoint(saved_at(Place(2, 2)).path)
    with pytest.raises(RuntimeError, match=r"size mismatch for halves"):
        model.load_state_dict(checkpoint.tree()["state_dict"])
