"""`Average` on ranks as threads, beside `torch.optim.swa_utils.AveragedModel` on one device, to the bit."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from compare import assert_same_bits
from lightning_zero.config import Offload
from lightning_zero.run.average import Average
from lightning_zero.shards.offload import Machine
from lightning_zero.tiers.ledger import Category, Tier
from lightning_zero.views.lazy import LazyTensor
from models import seeded
from unit_jobs import WIDTH, on_engine, on_one_device, state_of, tower, x

DECAY = 0.7
STEPS = 4
FROZEN = ("5.weight", "5.bias")


def net() -> nn.Module:
    """Nothing in it divides evenly; one layer is frozen, one weight is tied."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, 7), nn.BatchNorm1d(7), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, WIDTH))
        model.append(nn.Linear(WIDTH, WIDTH).requires_grad_(False))
        model.append(nn.Linear(7, WIDTH))
        model[6] = nn.Sequential(nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH))
        model[6][1].weight = model[4].weight
        return model

    return seeded(make)


class Averaged:
    """Either of the two, called alike."""

    def __init__(self, model: Any, engine: Any, **arguments: Any) -> None:
        self.model, self.engine = model, engine
        use_buffers = arguments.get("use_buffers", True)
        if engine is None:
            self.one = AveragedModel(model, avg_fn=get_ema_avg_fn(DECAY), use_buffers=use_buffers)
        else:
            self.ours = Average(engine, get_ema_avg_fn(DECAY), **arguments)

    def update(self) -> None:
        if self.engine is None:
            self.one.update_parameters(self.model)
            self.one.module.load_state_dict({name: net().state_dict()[name] for name in FROZEN}, strict=False)
        else:
            self.ours.update_parameters()

    def evaluated(self) -> Tensor:
        """The averaged model's output."""
        if self.engine is None:
            self.one.eval()
            with torch.no_grad():
                return self.one(x())
        self.ours.swap()
        self.model.eval()
        with torch.inference_mode(), self.engine.forward(reduces=False):
            found = self.model(x())
        self.model.train()
        with torch.inference_mode():  # where Lightning calls it
            self.ours.swap()
        return found.clone()

    def state(self) -> dict[str, Tensor]:
        """What is frozen is left out: torch's average of it drifts by rounding, ours is what it is."""
        state = self.one.module.state_dict() if self.engine is None else self.ours.full()
        if self.engine is not None:
            assert all(state[name].equal(value) for name, value in net().state_dict().items() if name in FROZEN)
        return {name: value.detach().clone() for name, value in state.items() if name not in FROZEN}


def train(
    model: Any, engine: Any, optimizer: Any, averaged: Averaged, steps: int = STEPS, *, edits: bool = False
) -> list[Tensor]:
    seen = []
    for step in range(steps):
        if engine is None:
            model(x(1 + step)).square().mean().backward()
        else:
            with engine.forward():
                loss = model(x(1 + step)).square().mean()
            with engine.backward():
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # through views, as which users hold the values
            if edits:
                model[0].weight[1].mul_(2)
            averaged.update()
            if step % 2:
                if edits:
                    model[2].weight[1].add_(1)
                seen.append(averaged.evaluated())
    return seen


def act_with(*, edits: bool = False, **arguments: Any) -> Any:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        averaged = Averaged(model, engine, **arguments)
        outputs = train(model, engine, optimizer, averaged, edits=edits)
        seen = {f"seen {number}": value for number, value in enumerate(outputs)}
        own = {f"own {name}": value for name, value in state_of(model, engine).items()}
        return {**seen, **own, **averaged.state()}

    return act


def adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.mark.parametrize("world", [1, 2, 4])  # means of equal gradients are exact
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_is_torchs_average_to_the_bit(stage: int, world: int) -> None:
    expected = on_one_device(net(), act_with(), adam)
    for found in on_engine(net(), act_with(), stage, adam, world=world, unit_classes=None, bucket_bytes=64):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_edits_before_an_update_are_averaged_and_those_before_a_swap_are_the_models_own(stage: int) -> None:
    expected = on_one_device(net(), act_with(edits=True), adam)
    for found in on_engine(net(), act_with(edits=True), stage, adam, unit_classes=None, bucket_bytes=64):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_edits_before_it_begins_are_in_it(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        with torch.no_grad():
            model[0].weight[1].mul_(2)
        return Average(engine, get_ema_avg_fn(DECAY)).full(), state_of(model, engine)

    for found, expected in on_engine(net(), act, stage, unit_classes=None):
        assert_same_bits(found, expected)


def test_one_rank_may_read_a_weight_alone_before_it_begins_or_is_loaded() -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> int:
        def look(layer: int) -> None:
            if comm.rank == 1:
                float(model[layer][0].weight.sum())

        look(0)
        average = Average(engine, get_ema_avg_fn(DECAY))
        state = average.full()
        look(1)
        average.load(state, 3)
        return average.updates

    assert on_engine(tower(), act, 3, wait_timeout=20) == [3, 3]


def test_names_of_compiled_modules_are_read_as_written() -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        average = Average(engine, get_ema_avg_fn(DECAY))
        average.load({name: value + 1 for name, value in average.full().items()}, 4)
        return average.full()

    start = tower()
    expected = {name: value + 1 for name, value in start.state_dict().items()}
    start[1] = torch.compile(start[1], backend="eager")
    for found in on_engine(start, act, 2):
        assert_same_bits(found, expected)


def test_a_state_that_was_taken_stays_as_it_is() -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        averaged = Averaged(model, engine)
        train(model, engine, optimizer, averaged)
        taken = averaged.ours.full()
        then = {name: value.clone() for name, value in taken.items()}
        train(model, engine, optimizer, averaged)
        return taken, then

    for taken, then in on_engine(net(), act, 2, adam, unit_classes=None):
        assert_same_bits(taken, then)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_swap_may_publish_late_as_a_step_may(stage: int) -> None:
    expected = on_one_device(net(), act_with(), adam)
    for found in on_engine(net(), act_with(), stage, adam, unit_classes=None, late_publish_bytes=0):
        assert_same_bits(found, expected)


@pytest.mark.parametrize(
    ("stage", "offload"),
    [*((stage, None) for stage in range(4)), (1, Offload("cpu")), (3, Offload("cpu", parameters="cpu"))],
)
def test_what_begins_to_train_later_is_averaged_from_there_on(stage: int, offload: Offload | None) -> None:
    """With a decay of a half, which leaves torch's average of what is frozen as it is. Whoever goes on from it begins
    with all of it, also of what it thaws after reading."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        rule = get_ema_avg_fn(0.5)
        average = AveragedModel(model, avg_fn=rule) if engine is None else Average(engine, rule)
        for step in range(5):
            if step == 2:
                model[1].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[1].parameters())})
            with nullcontext() if engine is None else engine.forward():
                loss = model(x(1 + step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        state = average.module.state_dict() if engine is None else average.full()
        return {name: value.detach().clone() for name, value in state.items()}

    def make(parameters: Any) -> Any:
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9)

    start = tower()
    start[1].requires_grad_(False)
    expected = on_one_device(start, act, make)
    options: dict[str, Any] = {"offload": offload, "machine": Machine(host_is_apart=True)}
    for found in on_engine(start, act, stage, make, **options):
        assert_same_bits(found, expected)

    def go_on(model: Any, engine: Any, optimizer: Any, comm: Any) -> list[dict[str, Tensor]]:
        found = []
        for updates in (0, 1):
            average = Average(engine, get_ema_avg_fn(0.5))
            average.load(expected, updates=5)
            if updates:
                average.update_parameters()
            model[updates + 1].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[updates + 1].parameters())})
            engine.regroup()
            found.append(average.full())
        return found

    start[2].requires_grad_(False)
    for before, after in on_engine(start, go_on, stage, make, **options):
        assert_same_bits(before, {name: expected[name] if name[0] != "2" else value for name, value in before.items()})
        began = {name: value for name, value in start.state_dict().items() if name[0] == "2"}  # with what it is
        assert_same_bits({name: after[name] for name in began}, began)


@pytest.mark.parametrize("stage", [1, 3])
def test_replicas_each_have_it(stage: int) -> None:
    expected = on_one_device(net(), act_with(), adam)
    for found in on_engine(net(), act_with(), stage, adam, world=4, replicate_size=2):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_may_be_taken_as_they_are(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        averaged = Averaged(model, engine, use_buffers=False)
        train(model, engine, optimizer, averaged, steps=2)
        return averaged.state()

    expected = on_one_device(net(), act, adam)
    for found in on_engine(net(), act, stage, adam):
        assert_same_bits(found, expected)


OFFLOADED = [(2, "cpu", None), (3, "cpu", "cpu"), (1, "nvme", None), (3, "nvme", "nvme")]


@pytest.mark.parametrize(("stage", "optimizer", "parameters"), OFFLOADED)
def test_offloaded_it_rests_with_the_state_and_is_updated_with_the_step(
    stage: int, optimizer: str, parameters: Any, tmp_path: Path
) -> None:
    expected = on_one_device(net(), act_with(), adam)
    path = tmp_path if "nvme" in (optimizer, parameters) else None
    offload = Offload(optimizer=optimizer, parameters=parameters, path=path)  # type: ignore[arg-type]

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> Any:
        found = act_with()(model, engine, optimizer, comm)
        tier = Tier.DISK if offload.optimizer == "nvme" else Tier.DEVICE  # a CPU's own memory
        return found, engine.ledger.peak_in[Category.AVERAGE, tier]

    for found, nbytes in on_engine(net(), act, stage, adam, offload=offload):
        assert_same_bits(found, expected)
        assert nbytes > 0


def test_it_begins_with_what_a_postponed_step_makes() -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        model(x()).square().mean().backward()
        optimizer.step()
        assert engine is None or any(group.has_postponed for group in engine.groups)
        return Averaged(model, engine).state()

    expected = on_one_device(net(), act, adam)
    for found in on_engine(net(), act, 2, adam, offload=Offload("cpu"), machine=Machine(host_is_apart=True)):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("asks", ["whole", "spread", "pieces"])
@pytest.mark.parametrize("world", [1, 2])
def test_who_asks_for_it_while_a_step_is_postponed_gets_it_as_updated(world: int, asks: str) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        averaged = Averaged(model, engine)
        train(model, engine, optimizer, averaged, steps=3)  # no evaluation is the last to use it
        assert engine is None or any(group.has_postponed for group in engine.groups)
        if engine is None or asks == "whole":
            return averaged.state()
        spread = {name: value for name, value in averaged.ours.spread().items() if name not in FROZEN}
        if asks == "spread":
            return {name: value.clone() for name, value in spread.items()}
        lazy = [value.source for value in spread.values() if isinstance(value, LazyTensor)]
        pieces = [(piece.extent, piece.read().clone()) for source in lazy for piece in source.pieces()]
        assert pieces
        whole = averaged.ours.full()
        for extent, values in pieces:
            assert whole[extent.name.partition(":")[2]].view(-1)[extent.start : extent.stop].equal(values)
        return {name: value for name, value in whole.items() if name not in FROZEN}

    expected = on_one_device(net(), act, adam)
    offload, machine = Offload(optimizer="cpu"), Machine(host_is_apart=True)
    for found in on_engine(net(), act, 2, adam, world=world, offload=offload, machine=machine):
        assert_same_bits(found, expected)


def test_whole_tensors_that_are_stepped_late_are_averaged_once_they_are_back_whoever_looks_at_their_state() -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        averaged = Averaged(model, engine)
        train(model, engine, optimizer, averaged, steps=3)
        assert engine is None or any(group.needs_all for group in engine.groups)
        assert all(optimizer.state[parameter] for parameter in model[0].parameters())  # takes the steps, on this rank
        return averaged.state()

    expected = on_one_device(net(), act, adam)
    options = {"offload": Offload(optimizer="cpu"), "machine": Machine(host_is_apart=True), "granularity": "tensor"}
    for found in on_engine(net(), act, 2, adam, **options):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_rests_in_two_bytes_is_averaged_as_it_is_stepped(stage: int) -> None:
    """The oracle is torch's average of the masters."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        ours, masters = Average(engine, get_ema_avg_fn(DECAY)), tower()
        theirs = AveragedModel(masters, avg_fn=get_ema_avg_fn(DECAY))
        for _ in range(STEPS):
            model(x().bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ours.update_parameters()
            masters.load_state_dict(state_of(model, engine))
            theirs.update_parameters(masters)
            ours.swap()
            ours.swap()
        assert_same_bits(state_of(model, engine), masters.state_dict())
        return ours.full(), theirs.module.state_dict()

    for found, expected in on_engine(tower(), act, stage, adam, param_dtype=torch.bfloat16):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_average_of_weights_of_two_bytes_has_four(stage: int) -> None:
    """In two it would stand still, as torch's does."""
    rule = get_ema_avg_fn(0.999)

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        ours, expected = Average(engine, rule), dict[str, Tensor]()
        for updates in range(STEPS):
            model(x().bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ours.update_parameters()
            for name, value in state_of(model, engine).items():
                expected[name] = rule(expected[name], value, updates) if updates else value.float()
        return ours.full(), expected

    for found, expected in on_engine(tower().bfloat16(), act, stage, adam):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_has_its_share_and_an_evaluation_takes_no_more(stage: int) -> None:
    world, width = 2, 64

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> tuple[dict[str, int], int, int]:
        averaged = Averaged(model, engine)
        train(model, engine, optimizer, averaged, steps=1)
        before, peaks = dict(engine.ledger.live), dict(engine.ledger.peak)
        averaged.ours.swap()
        swapped = dict(engine.ledger.live)
        averaged.ours.swap()
        assert swapped[Category.AVERAGE] == before[Category.AVERAGE]
        assert sum(swapped.values()) <= sum(before.values())
        assert dict(engine.ledger.peak) == peaks
        return engine.bytes_by_category(), sum(group.layout.numel for group in engine.groups), len(engine.groups)

    start = seeded(lambda: nn.Sequential(*[nn.Linear(WIDTH, width), nn.Linear(width, width), nn.Linear(width, WIDTH)]))
    for report, numel, _ in on_engine(start, act, stage, world=world):
        assert report["average"] == 4 * numel // (world if stage else 1)
        assert (
            report["average"] <= 4 * sum(p.numel() for p in start.parameters()) / (world if stage else 1) + 4 * 64 * 8
        )


@pytest.mark.parametrize("stage", [1, 3])
def test_an_update_takes_a_bucket_at_a_time(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> int:
        seen = []

        def rule(averaged: Tensor, current: Tensor, updates: int) -> Tensor:
            seen.append(current.numel())
            return averaged.lerp(current, 0.1)

        average = Average(engine, rule)
        for _ in range(2):
            average.update_parameters()
        return max(seen)

    start = seeded(lambda: nn.Linear(64, 64, bias=False))
    assert on_engine(start, act, stage, bucket_bytes=1024) == [256, 256]


def test_entries_of_a_checkpoint_are_read_in_part_or_whole() -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> tuple[dict[str, Tensor], ...]:
        averaged = Averaged(model, engine)
        train(model, engine, optimizer, averaged)
        whole = averaged.state()
        spread = averaged.ours.spread()
        assert {type(value) for name, value in spread.items() if "weight" in name} == {LazyTensor}
        assert spread["4.weight"].source.name == "average:4.weight"
        read = {name: value.clone() for name, value in spread.items() if name not in FROZEN}  # gathers lazy values
        other = Averaged(model, engine)
        other.ours.load({**whole, "0.bias": torch.zeros(3)}, 4)
        assert other.ours.updates == 4
        other.update()
        averaged.update()
        return whole, read, averaged.state(), other.state()

    for whole, read, expected, found in on_engine(net(), act, 3, adam):
        assert_same_bits(read, whole)
        for state in (expected, found):
            state.pop("0.bias")  # of another shape in the checkpoint: as it was
        assert_same_bits(found, expected)
