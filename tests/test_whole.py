"""Optimizers that look at whole tensors train as under DDP: each tensor is stepped once, by one rank."""

import functools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_avg_fn

from compare import assert_same_bits
from engine_checkpoints import (
    Everything,
    Place,
    differences,
    resume,
    resumed_at,
    states_of,
    strange,
    train,
    train_and_save,
)
from lightning_zero.checkpoint import StoredCheckpoint
from lightning_zero.config import Offload
from lightning_zero.run.average import Average
from lightning_zero.run.engine import Engine, Options
from lightning_zero.shards.slot import slot_of
from lightning_zero.shards.whole import Imbalance, rounds
from lightning_zero.tiers.ledger import Category, Tier
from lightning_zero.wire.comm import Comm
from models import seeded
from reference import Run
from test_offload import APART, WAYS, Maker, assert_differs, assert_same_run, flat, on_ranks
from thread_world import ThreadWorld
from unit_jobs import assert_as_on_one_device, state_of, tower, x
from zoo import WHOLE, agg_mo, made


def trainable(model: nn.Module) -> list[Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def maker(name: str) -> Maker:
    unheard = made("Unheard", WHOLE[name])

    def make(model: nn.Module) -> tuple[Optimizer, None]:
        return unheard(trainable(model), lr=0.01), None

    return make


def adafactor(model: nn.Module) -> tuple[Optimizer, None]:
    return torch.optim.Adafactor(trainable(model), lr=0.01), None


class Both(Optimizer):
    """Muon's usual form: matrices are orthogonalised, the rest goes by element, as each group says."""

    def __init__(self, model: nn.Module) -> None:
        matrices = [parameter for parameter in trainable(model) if parameter.dim() > 1]
        others = [parameter for parameter in trainable(model) if parameter.dim() < 2]
        super().__init__([{"params": matrices, "kind": "Muon"}, {"params": others, "kind": "SGD"}], {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                is_matrix = group["kind"] == "Muon"
                change = WHOLE["Muon"](parameter, self.state[parameter]) if is_matrix else parameter.grad
                parameter.sub_(group["lr"] * change)


def aggregates(model: nn.Module) -> tuple[Optimizer, None]:
    return made("AggMo", agg_mo)(trainable(model), lr=0.01), None


def both(model: nn.Module) -> tuple[Optimizer, None]:
    return Both(model), None


MAKERS: dict[str, Maker] = {
    **{name: maker(name) for name in ("LAMB", "Muon")},
    "Adafactor": adafactor,
    "both": both,
    "AggMo": aggregates,
}


# Without accumulation in shards, which stage 0 has not: it sums in another order.
HOW: dict[str, dict[str, Any]] = {
    "clipped": {"clip": "norm"},
    "local": WAYS["local"],
    "autocast": WAYS["autocast"],
    "two bytes": {"param_dtype": torch.bfloat16},
}


@functools.cache
def under_ddp(name: str, way: str | None = None, world: int = 2, rounds: bool = False) -> Run:
    """At stage 0, made once: what runs of other stages and tiers are compared with, and none of them may change."""
    make = rounding(MAKERS[name]) if rounds else MAKERS[name]
    return on_ranks(world, 0, make, **(HOW[way] if way else {}))[0]


@pytest.mark.parametrize("way", HOW)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_whole_tensors_are_stepped_as_under_ddp_in_every_way_of_training(world: int, stage: int, way: str) -> None:
    for name in ["LAMB", "both"] if way == "clipped" else ["LAMB", "Adafactor"]:
        found, _ = on_ranks(world, stage, MAKERS[name], **HOW[way])
        assert_same_run(found, under_ddp(name, way, world))


def test_pieces_would_be_wrong() -> None:
    with pytest.warns(UserWarning, match="Unheard looks at whole tensors, and steps pieces: not DDP's"):
        found, _ = on_ranks(2, 2, MAKERS["LAMB"], granularity="element")
    assert_differs(found, under_ddp("LAMB"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_goes_by_element_may_be_stepped_whole(stage: int) -> None:
    expected, _ = on_ranks(2, 0)
    found, _ = on_ranks(2, stage, granularity="tensor")
    assert_same_run(found, expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_whole_tensors_are_stepped_in_the_tier_where_their_state_rests(stage: int) -> None:
    parameters = {"parameters": "cpu"} if stage == 3 else {}
    found, _ = on_ranks(2, stage, MAKERS["LAMB"], offload=Offload(optimizer="cpu", **parameters), **HOW["clipped"])
    assert_same_run(found, under_ddp("LAMB", "clipped"))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", ["LAMB", "both"])
def test_who_looks_before_a_late_step_of_whole_tensors_sees_what_a_serial_one_left(stage: int, name: str) -> None:
    expected, seen = on_ranks(2, stage, MAKERS[name], looks=True, **HOW["clipped"])
    late, also = on_ranks(2, stage, MAKERS[name], offload=Offload(optimizer="cpu"), looks=True, **HOW["clipped"])
    assert_same_run(late, expected)
    for mine, theirs in zip(also, seen, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("offload", [None, Offload(optimizer="cpu")], ids=["in the call", "late"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_that_is_called_under_autocast_multiplies_in_its_dtype(stage: int, offload: Offload | None) -> None:
    """As Lightning calls it in manual optimization; and so does `ddp`."""

    def act(model: Any, engine: Any, optimizer: Optimizer, comm: Any) -> dict[str, Tensor]:
        for _ in range(3):
            optimizer.zero_grad()
            model(x()).square().mean().backward()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                optimizer.step()
        return state_of(model, engine)

    def make(parameters: Any) -> Optimizer:
        return torch.optim.Adafactor(parameters, lr=0.1)

    assert_as_on_one_device(tower(), act, stage, make, offload=offload, machine=APART)


class Counts:
    """How often a tensor was stepped, in the world."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, parameter: Tensor, state: dict[str, Any]) -> Tensor:
        self.shapes.append(tuple(parameter.shape))
        return parameter.grad * parameter.norm()


def train_tower(comm: Comm, stage: int, counts: Counts, **options: Any) -> tuple[Engine, Optimizer]:
    model = seeded(lambda: nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)]))
    optimizer = made("Unheard", counts)(model.parameters())
    engine = Engine(model, [optimizer], stage=stage, comm=comm, options=Options(machine=APART, **options))
    counts.shapes.clear()  # what it was tried on
    with engine.forward():
        loss = model(torch.ones(2, 16)).sum()
    with engine.backward():
        loss.backward()
    optimizer.step()
    return engine, optimizer


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [2, 4])
def test_each_tensor_is_stepped_once_in_the_world_and_evenly(world: int, stage: int) -> None:
    def run(comm: Comm) -> tuple[list[tuple[int, ...]], Imbalance | None]:
        counts = Counts()
        engine, _ = train_tower(comm, stage, counts)
        engine.close()
        return counts.shapes, engine.regrouping.imbalance

    ranks = ThreadWorld(world).run(run)
    stepped = [shape for shapes, _ in ranks for shape in shapes]
    assert sorted(stepped) == [(16,)] * 8 + [(16, 16)] * 8
    assert {imbalance for _, imbalance in ranks} == {Imbalance(0.0, 0.0)}


def test_tensors_of_two_tiers_are_stepped_in_rounds_of_their_own() -> None:
    """Else an optimizer would be shown tensors of two devices in one step."""

    def run(comm: Comm) -> list[set[Tier]]:
        model = nn.ParameterList([torch.zeros(16, 16) for _ in range(4)])
        offload = Offload(optimizer="cpu", fraction=0.5)
        options = Options(granularity="tensor", offload=offload, machine=APART)
        engine = Engine(model, [torch.optim.SGD(model.parameters(), 0.1)], stage=2, comm=comm, options=options)
        slots = [slot for slot in map(slot_of, model.parameters()) if slot is not None]
        found = rounds(slots, slots[0].group.setting, is_lazy=False)
        engine.close()
        return [{slot.group.places.optimizer.tier for slot in run} for run in found]

    assert ThreadWorld(2).run(run) == [[{Tier.DEVICE}, {Tier.HOST}]] * 2


@pytest.mark.parametrize("stage", [2, 3])
def test_whole_tensors_on_the_host_are_stepped_when_somebody_wants_their_values(stage: int) -> None:
    def run(comm: Comm) -> tuple[list[int], bool]:
        counts = Counts()
        engine, optimizer = train_tower(comm, stage, counts, offload=Offload(optimizer="cpu"))
        moments = [len(counts.shapes)]
        if comm.rank == 0:  # alone: of its own state, which no other rank has to do with
            assert len(optimizer.state) == 8
            moments.append(len(counts.shapes))
        waiting = engine.ledger.live_in[Category.GATHERED, Tier.HOST]
        with torch.no_grad(), engine.forward():
            pass
        moments.append(len(counts.shapes))
        is_free = waiting > engine.ledger.live_in[Category.GATHERED, Tier.HOST] == 0
        engine.close()
        return moments, is_free

    first, second = ThreadWorld(2).run(run)
    assert first == ([0, 8, 8], True)
    assert second == ([0, 8], True)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_late_step_of_whole_tensors_finds_ranks_that_go_different_ways(stage: int) -> None:
    def run(comm: Comm, offload: Offload | None) -> dict[str, Tensor]:
        model = seeded(lambda: nn.ModuleDict({name: nn.Linear(8, 8) for name in ("stem", "left", "right", "both")}))
        optimizer = made("Unheard", WHOLE["LAMB"])(model.parameters())
        options = Options(machine=APART, offload=offload)
        engine = Engine(model, [optimizer], stage=stage, comm=comm, options=options)
        for step in range(6):
            with engine.forward():
                hidden = model["stem"](torch.full((2, 8), comm.rank + step + 1.0))
                ways = ["left", "right"] if (comm.rank + step // 2) % 2 else ["right"]
                for name in [*ways, "both"]:
                    hidden = torch.tanh(model[name](hidden))
            with engine.backward():
                hidden.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        found = {**engine.states.full_model(), **flat(engine.states.full_optimizer(optimizer))}
        engine.close()
        return found

    expected = ThreadWorld(2).run(lambda comm: run(comm, None))[0]
    late = ThreadWorld(2).run(lambda comm: run(comm, Offload(optimizer="cpu")))[0]
    assert_same_bits(late, expected)


def test_an_average_takes_in_a_late_step_of_whole_tensors() -> None:
    def run(comm: Comm, offload: Offload | None) -> dict[str, Any]:
        counts = Counts()
        engine, optimizer = train_tower(comm, 2, counts, offload=offload)
        average = Average(engine, get_ema_avg_fn(0.9))
        for _ in range(3):
            with engine.forward():
                loss = engine.module(torch.ones(2, 16)).sum()
            with engine.backward():
                loss.backward()
            optimizer.step()
            average.update_parameters()
            assert len(optimizer.state) == 8
        average.swap()
        found = engine.states.full_model()
        engine.close()
        return found

    expected = ThreadWorld(2).run(lambda comm: run(comm, None))[0]
    late = ThreadWorld(2).run(lambda comm: run(comm, Offload(optimizer="cpu")))[0]
    assert_same_bits(late, expected)


def example_gpt(**sizes: int) -> nn.Module:
    sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
    from gpt import GPT  # with Lightning

    return GPT(**sizes)


def dealt(comm: Comm, tensors: list[Tensor]) -> tuple[list[int | None], Imbalance | None]:
    """Returns the stepper of each of them."""
    model = nn.ParameterList(tensors)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = Engine(model, [optimizer], stage=1, comm=comm, options=Options(granularity="tensor"))
    steppers = [slot.stepper for slot in map(slot_of, model.parameters()) if slot is not None]
    engine.close()
    return steppers, engine.regrouping.imbalance


def test_tensors_are_dealt_by_bytes_and_work_and_what_is_uneven_is_told() -> None:
    """A long vector takes the bytes of both matrices, and next to none of the work: each rank gets one of these."""

    def run(comm: Comm) -> tuple[list[int | None], Imbalance | None]:
        return dealt(comm, [torch.zeros(8192), torch.zeros(64, 64), torch.zeros(64, 64)])

    for (of_vector, *of_matrices), imbalance in ThreadWorld(2).run(run):
        assert sorted(of_matrices) == [0, 1]
        assert of_vector in (0, 1)
        work = 2 * 64**3 + 8192
        assert imbalance == pytest.approx((12288 / 8192 - 1, (64**3 + 8192) * 2 / work - 1))


@pytest.mark.parametrize(
    ("of_one", "of_other"),
    [
        pytest.param([torch.zeros(8192)], [torch.zeros(4096)] * 2, id="the largest first"),
        pytest.param([torch.zeros(8192)], [torch.zeros(8192).bfloat16()] * 2, id="by bytes, not elements"),
        pytest.param([torch.zeros(64, 64)], [torch.zeros(64, 64)], id="a matrix each"),
    ],
)
def test_what_is_as_much_together_is_dealt_to_one_rank(of_one: list[Tensor], of_other: list[Tensor]) -> None:
    """A tall matrix, beside these, is as little work as a wide one: it is multiplied by its smaller side."""
    tall = [torch.zeros(512, 8)] * (of_one[0].dim() - 1)

    def run(comm: Comm) -> list[int | None]:
        return dealt(comm, [tensor.clone() for tensor in (*of_other, *of_one, *tall)])[0]

    for steppers in ThreadWorld(2).run(run):
        others, one = {*steppers[: len(of_other)]}, steppers[len(of_other)]
        assert len(others) == 1
        assert others != {one}


@pytest.mark.parametrize(("tier", "sizes"), [(Tier.DEVICE, [4, 4]), (Tier.HOST, [2] * 4), (Tier.DISK, [4, 4])])
def test_a_round_has_a_bucket_for_each_rank_and_tensors_of_one_group_where_it_may_be_late(
    tier: Tier, sizes: list[int], tmp_path: Path
) -> None:
    """Of eight tensors in four groups a bucket holds two. What rests on disk is stepped in the user's call."""
    tiers = {Tier.HOST: Offload("cpu"), Tier.DISK: Offload("nvme", path=tmp_path)}

    def run(comm: Comm) -> list[int]:
        model = nn.ParameterList([torch.zeros(16, 16) for _ in range(8)])
        options = Options(granularity="tensor", offload=tiers.get(tier), machine=APART, bucket_bytes=2 * 4 * 16 * 16)
        engine = Engine(model, [torch.optim.SGD(model.parameters(), 0.1)], stage=2, comm=comm, options=options)
        slots = [slot for slot in map(slot_of, model.parameters()) if slot is not None]
        assert len({slot.group for slot in slots}) == 4
        found = rounds(slots, slots[0].group.setting, is_lazy=True)
        engine.close()
        return [len(run) for run in found]

    assert ThreadWorld(2).run(run) == [sizes] * 2


def test_what_travels_for_a_step_of_a_whole_tensor_is_booked_and_let_go_of() -> None:
    def run(comm: Comm) -> tuple[int, int]:
        model = nn.Linear(64, 64, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        engine = Engine(model, [optimizer], stage=1, comm=comm, options=Options(granularity="tensor"))
        model(torch.ones(2, 64)).sum().backward()
        engine.ledger.peak[Category.GATHERED] = 0
        optimizer.step()
        found = engine.ledger.peak[Category.GATHERED], engine.ledger.live[Category.GATHERED]
        engine.close()
        return found

    nbytes = 4 * 64 * 64
    # The stepper has what came, and value and gradient in one piece; the other rank what it has sent of both.
    assert ThreadWorld(2).run(run) == [(4 * nbytes, 0), (2 * nbytes // 2, 0)]


@pytest.mark.parametrize("bucket_bytes", [2**25, 2**20])
def test_bytes_and_work_of_the_examples_gpt_are_dealt_to_within_a_tenth(bucket_bytes: int) -> None:
    def run(comm: Comm) -> Imbalance | None:
        model = seeded(lambda: example_gpt(width=128, depth=4, heads=4, context=256))
        optimizer = torch.optim.AdamW(model.parameters())
        options = Options(granularity="tensor", bucket_bytes=bucket_bytes)
        engine = Engine(model, [optimizer], stage=1, comm=comm, options=options)
        engine.close()
        return engine.regrouping.imbalance

    (found,) = set(ThreadWorld(4).run(run))
    assert found is not None
    assert found.nbytes <= 0.1
    assert found.work <= 0.1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_by_category_is_that_of_pieces_to_within_the_largest_tensor(stage: int) -> None:
    def run(comm: Comm, granularity: Any) -> dict[str, int]:
        model = seeded(lambda: example_gpt(width=32, depth=2, heads=4, context=16))
        optimizer = torch.optim.AdamW(model.parameters())
        engine = Engine(model, [optimizer], stage=stage, comm=comm, options=Options(granularity=granularity))
        tokens = torch.zeros(1, 16, dtype=torch.int64)
        with engine.forward():
            loss = model(tokens).square().sum()
        with engine.backward():
            loss.backward()
        optimizer.step()
        found = engine.bytes_by_category()
        engine.close()
        return found

    largest = 2 * 4 * 256 * 32  # the token embedding's two averages
    pieces = ThreadWorld(4).run(lambda comm: run(comm, "element"))
    for rank, whole in enumerate(ThreadWorld(4).run(lambda comm: run(comm, "tensor"))):
        state = whole.pop(Category.OPTIMIZER_STATE)
        assert state <= pieces[rank].pop(Category.OPTIMIZER_STATE) + largest
        assert whole == pieces[rank]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_travels_is_three_nths_of_the_parameters_more(stage: int) -> None:
    def run(comm: Comm) -> int:
        engine, _ = train_tower(comm, stage, Counts())
        engine.close()
        return comm.bytes_sent["all_to_all"]

    world, numel = 4, 8 * (16 * 16 + 16)
    sent = sum(ThreadWorld(world).run(run))
    assert sent <= 3 * 4 * numel
    assert sent > 3 * 4 * numel * (world - 2) / world  # a piece of a tensor may be with its stepper already


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST, Tier.DISK])
def test_state_rests_whole_where_it_is_stepped_and_nowhere_else(tier: Tier, tmp_path: Path) -> None:
    offload = {
        Tier.DEVICE: None,
        Tier.HOST: Offload(optimizer="cpu"),
        Tier.DISK: Offload(optimizer="nvme", path=tmp_path),
    }[tier]

    def run(comm: Comm) -> tuple[Counter[Any], dict[Tier, int]]:
        model = seeded(lambda: nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(8)]))
        optimizer = made("Unheard", WHOLE["Muon"])(model.parameters())
        options = Options(machine=APART, offload=offload)
        engine = Engine(model, [optimizer], stage=1, comm=comm, options=options)
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        shapes = Counter(tuple(state["m"].shape) for state in optimizer.state.values())
        engine.runner.stepping.finish()  # what is written to disk is on the host until then
        nbytes = {where: engine.ledger.live_in[Category.OPTIMIZER_STATE, where] for where in Tier}
        engine.close()
        return shapes, {where: each for where, each in nbytes.items() if each}

    assert ThreadWorld(4).run(run) == [({(16, 16): 2, (0,): 6}, {tier: 2 * 4 * 256})] * 4


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    def run(comm: Comm) -> dict[str, Tensor]:
        model = seeded(lambda: nn.ModuleDict({"used": nn.Linear(4, 4), "not": nn.Linear(4, 4)}))
        optimizer = made("Unheard", WHOLE["LARS"])(model.parameters())
        engine = Engine(model, [optimizer], stage=2, comm=comm)
        before = model["not"].weight.detach().clone()
        model["used"](torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert model["not"].weight.equal(before)
        state = engine.states.full_optimizer(optimizer)
        engine.close()
        return flat(state)

    first, second = ThreadWorld(2).run(run)
    assert_same_bits(first, second)


@pytest.mark.parametrize(
    "saved_at", [Place(0, 2), Place(1, 3), Place(2, 2), Place(3, 2), Place(2, 4, replicate_size=2)]
)
@pytest.mark.parametrize("name", ["Muon", "Adafactor", "AggMo"])
def test_a_checkpoint_does_not_know_what_was_stepped_where(name: str, saved_at: Place, tmp_path: Path) -> None:
    start = seeded(Everything)

    def make(model: nn.Module) -> list[Optimizer]:
        return [MAKERS[name](model)[0]]

    saved = train_and_save(start, make, saved_at, tmp_path / "ckpt")

    for place in (Place(0, 1), Place(1, 2), Place(2, 3), Place(3, 2), Place(3, 4, replicate_size=2)):
        for found in resumed_at(place, start, make, tmp_path / "ckpt"):
            assert differences(found, saved) == []


@pytest.mark.parametrize("stage", [1, 3])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(stage: int, tmp_path: Path) -> None:
    start, place = seeded(Everything), Place(stage, 2)

    def make(model: nn.Module) -> list[Optimizer]:
        return [maker("Muon")(model)[0]]

    straight = train_and_save(start, make, place, tmp_path / "straight", steps=4)
    train_and_save(start, make, place, tmp_path / "half", steps=2)

    def go_on(comm: Comm) -> dict[str, Any]:
        model = strange(start, comm.rank)
        optimizers = make(model)
        engine = resume(comm, model, optimizers, place, StoredCheckpoint(tmp_path / "half"))
        train(model, optimizers, place, steps=2, start=2)
        return states_of(engine, optimizers)

    for found in place.run(go_on):
        assert differences(found, straight) == []


def test_a_step_in_the_middle_of_a_backward_is_refused_on_every_rank() -> None:
    def run(comm: Comm) -> str:
        with pytest.raises(
            ValueError, match=r"Unheard steps whole tensors, which travel .* Leave step_in_backward"
        ) as told:
            train_tower(comm, 2, Counts(), step_in_backward=True)
        return str(told.value)

    assert len(set(ThreadWorld(2).run(run))) == 1


OF_WHOLE = ("LAMB", "Adafactor")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whole_tensors_whose_state_rests_on_disk_change_no_bit(stage: int, tmp_path: Path) -> None:
    parameters: dict[str, Any] = {"parameters": "nvme"} if stage == 3 else {}
    for name in OF_WHOLE:
        for way in ("clipped", "two bytes"):
            for fraction in (1.0, 0.5):
                offload = Offload(optimizer="nvme", path=tmp_path, fraction=fraction, **parameters)
                found, _ = on_ranks(2, stage, MAKERS[name], offload=offload, **HOW[way])
                assert_same_run(found, under_ddp(name, way))


def rounding(make: Maker) -> Maker:
    """Rounds the state after each step: what is as large as its parameter, unless that is a scalar."""

    def made(model: nn.Module) -> tuple[Optimizer, Any]:
        optimizer, scheduler = make(model)

        def round_state(optimizer: Optimizer, *_: Any) -> None:
            for parameter, state in optimizer.state.items():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
                        state[name] = value.bfloat16().to(value.dtype)

        optimizer.register_step_post_hook(round_state)
        return optimizer, scheduler

    return made


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whole_state_in_two_bytes_is_the_state_rounded_after_each_step(stage: int, tmp_path: Path) -> None:
    for name in OF_WHOLE:
        expected = under_ddp(name, "clipped", rounds=True)
        assert_differs(expected, under_ddp(name, "clipped"))
        for where in ({"optimizer": "cpu"}, {"optimizer": "nvme", "path": tmp_path}):
            offload = Offload(state_dtype="bf16", **where)  # type: ignore[arg-type]
            found, _ = on_ranks(2, stage, MAKERS[name], offload=offload, **HOW["clipped"])
            assert_same_run(found, expected)


@pytest.mark.parametrize("narrow", [None, "bf16"], ids=["as it is", "rounded"])
def test_whole_state_on_disk_is_resumed_with_and_without(narrow: Any, tmp_path: Path) -> None:
    start, offload = seeded(Everything), Offload(optimizer="nvme", path=tmp_path, state_dtype=narrow)

    def make(model: nn.Module) -> list[Optimizer]:
        return [MAKERS["Muon"](model)[0]]

    saved = train_and_save(start, make, Place(2, 2, offload=offload), tmp_path / "ckpt")
    if narrow is None:
        without = train_and_save(start, make, Place(2, 2), tmp_path / "without")
        assert differences(saved, without) == []

    def resumed(comm: Comm, place: Place) -> dict[str, Any]:
        model = strange(start, comm.rank)
        optimizers = make(model)
        return states_of(resume(comm, model, optimizers, place, StoredCheckpoint(tmp_path / "ckpt")), optimizers)

    for place in (Place(0, 2), Place(3, 2), Place(1, 3, offload=offload), Place(3, 2, offload=offload)):
        for found in resumed_at(place, start, make, tmp_path / "ckpt"):
            assert differences(found, saved) == []
