"""Optimizers that wrap others or have modes, at every stage as on one device, to the bit; and what is read of state."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compare import assert_same_bits
from lightning_zero.config import Offload
from lightning_zero.run.engine import Engine, Options
from lightning_zero.wire.comm import Comm
from models import seeded
from test_offload import APART
from thread_world import ThreadWorld
from unit_jobs import WIDTH, on_engine, on_one_device, state_of, tower, x
from wrappers import UNEVEN, WRAPPERS, Bare, Hoarder, SAMByNorm, SAMInTwoCalls, momentum
from zoo import agg_mo, made

STAGES = [1, 2, 3]
ALL = WRAPPERS | UNEVEN
HOW: dict[str, dict[str, Any]] = {
    "on disk": {"offload": Offload(optimizer="nvme", path=".")},
    "on the host": {"offload": Offload(optimizer="cpu")},
    "half on the host": {"offload": Offload(optimizer="cpu", fraction=0.5)},
    "whole": {"granularity": "tensor"},
    "whole on the host": {"granularity": "tensor", "offload": Offload(optimizer="cpu")},
}
REFUSED = {("on disk", "SAM")}  # in the middle of its step all parameters would have to be in memory


def train(model: Any, optimizer: Any, steps: range) -> dict[str, Tensor]:
    """With a look at the model in evaluation after each step. Returns what was seen."""
    seen = {}
    modes = [getattr(optimizer, name, lambda: None) for name in ("train", "eval")]
    for step in steps:

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(x(1 + step)).square().mean()
            loss.backward()
            return loss.detach()

        modes[0]()
        seen[f"loss {step}"] = optimizer.step(closure)
        modes[1]()
        with torch.no_grad():
            seen[f"output {step}"] = model(x()).clone()
    return seen


def flat(state_dict: dict[str, Any]) -> dict[str, Tensor]:
    found = {}
    for key, state in state_dict["state"].items():
        state = {"": state} if isinstance(state, Tensor) else state
        found |= {f"{key}.{name}": torch.as_tensor(value) for name, value in state.items()}
    numbers = [{k: v for k, v in group.items() if isinstance(v, int | float)} for group in state_dict["param_groups"]]
    return found | {f"group {i}.{k}": torch.tensor(v) for i, group in enumerate(numbers) for k, v in group.items()}


def run(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
    """Slow weights, which go every other step, have gone once, are those that the state has, and a step follows."""
    seen = train(model, optimizer, range(3))
    state = optimizer.state_dict() if engine is None else engine.states.full_optimizer(optimizer)
    return {**seen, **state_of(model, engine), **flat(copy.deepcopy(state))}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("stage", [0, *STAGES])
def test_a_wrapper_trains_as_on_one_device_and_its_state_can_be_had_whole(stage: int, name: str) -> None:
    expected = on_one_device(tower(), run, WRAPPERS[name])
    for world in (1, 2, 4) if stage == 3 else (2,):
        for found in on_engine(tower(), run, stage, WRAPPERS[name], world=world):
            assert_same_bits(found, expected)


@pytest.mark.parametrize(("how", "name"), [(how, name) for how in HOW for name in ALL if (how, name) not in REFUSED])
@pytest.mark.parametrize("stage", STAGES)
def test_a_wrapper_trains_so_where_some_parameters_are_stepped_after_the_others(
    stage: int, how: str, name: str, tmp_path: Path
) -> None:
    """Each counts once, has both of its modes, and calls its closure as often as it wants to."""
    options = {"machine": APART, **HOW[how]}
    if "offload" in options and options["offload"].path:
        options["offload"] = Offload(optimizer="nvme", path=tmp_path)

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        # Slow weights go with the second step, and with the fourth, from where the second has left them.
        return {**train(model, optimizer, range(4)), **state_of(model, engine)}

    expected = on_one_device(tower(), act, ALL[name])
    for found in on_engine(tower(), act, stage, ALL[name], bucket_bytes=256, **options):
        assert_same_bits(found, expected)


def test_a_wrapper_with_groups_of_its_own_is_refused_there(tmp_path: Path) -> None:
    def make(parameters: Any) -> Any:
        optimizer = WRAPPERS["Lookahead"](parameters)
        optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
        return optimizer

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> None:
        with pytest.raises(RuntimeError, match=r"Lookahead wraps a AdamW with param_groups of its own"):
            train(model, optimizer, range(2))

    on_engine(tower(), act, 2, make, offload=Offload(optimizer="nvme", path=tmp_path))


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize(("stage", "then"), [(1, 3), (3, 2), (0, 1)])
def test_a_wrapper_goes_on_from_a_checkpoint_at_another_stage(stage: int, then: int, name: str) -> None:
    """SAM saves what one device would: nothing of the optimizer that it wraps."""

    def first(model: Any, engine: Any, optimizer: Any, comm: Any) -> Any:
        train(model, optimizer, range(3))
        state = optimizer.state_dict() if engine is None else engine.states.full_optimizer(optimizer)
        return state_of(model, engine), copy.deepcopy(state)

    def second(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        model.load_state_dict(weights)
        if engine is None:
            optimizer.load_state_dict(copy.deepcopy(state))
        else:
            engine.states.load_optimizers([copy.deepcopy(state)])
        return {**train(model, optimizer, range(3, 6)), **state_of(model, engine)}

    weights, state = on_one_device(tower(), first, WRAPPERS[name])
    expected = on_one_device(tower(), second, WRAPPERS[name])
    weights, state = on_engine(tower(), first, stage, WRAPPERS[name])[1]
    for found in on_engine(tower(), second, then, WRAPPERS[name], world=4):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_looking_at_state_raises_nowhere_and_leaves_nothing_in_checkpoints(stage: int) -> None:
    """Also of a parameter that is never used."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> None:
        train(model[0], optimizer, range(2))
        before = engine.states.full_optimizer(optimizer)
        saved = engine.states.spread_optimizer(optimizer)
        looked = [optimizer.state[parameter] for parameter in model.parameters()]
        assert any(not state for state in looked)
        assert_same_bits(flat(engine.states.full_optimizer(optimizer)), flat(before))
        after = engine.states.spread_optimizer(optimizer)
        assert {key: list(of) for key, of in after["state"].items() if of} == {
            key: list(of) for key, of in saved["state"].items() if of
        }
        train(model[0], optimizer, range(2, 4))

    start = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(3, 3)))
    on_engine(start, act, stage, momentum, world=4)


@pytest.mark.parametrize("stage", STAGES)
def test_modes_after_the_end_are_kept_or_refused(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> None:
        train(model, optimizer, range(2))
        before = copy.deepcopy(engine.states.full_optimizer(optimizer))
        engine.close()
        assert_same_bits(flat(engine.states.full_optimizer(optimizer)), flat(before))
        optimizer.eval()  # as it is
        with pytest.raises(RuntimeError, match=r"ScheduleFree.train\(\) changes weights.*on_train_end"):
            optimizer.train()

    on_engine(tower(), act, stage, WRAPPERS["ScheduleFree"])


@pytest.mark.parametrize("granularity", ["element", "tensor"])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_that_a_mode_changes_in_the_way_of_backward_end_in_torchs_error_on_every_rank(
    stage: int, granularity: str
) -> None:
    """Also on ranks that step nothing: of two tensors, two of four ranks step none."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> None:
        train(model, optimizer, range(2))
        loss = model(x()).square().mean()
        optimizer.train()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    start = seeded(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]))
    on_one_device(start, act, WRAPPERS["ScheduleFree"])
    on_engine(start, act, stage, WRAPPERS["ScheduleFree"], world=4, granularity=granularity)


@pytest.mark.parametrize("stage", STAGES)
def test_tensors_that_are_no_state_of_a_parameter_are_refused_on_every_rank(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> None:
        train(model, optimizer, range(1))
        for take in (engine.states.full_optimizer, engine.states.spread_optimizer):
            with pytest.raises(RuntimeError, match=r"'seen.0'.*Keep tensors in state\[p\]\[name\]"):
                take(optimizer)

    on_engine(tower(), act, stage, lambda parameters: Hoarder(parameters, lr=0.1), granularity="element")


class Counts(torch.optim.SGD):
    """Keeps a number that is of no parameter."""

    def step(self, closure: Any = None) -> Any:
        state: Any = self.state
        state["steps"] = state.get("steps", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_state_of_no_parameter_is_written_once(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> Any:
        train(model, optimizer, range(2))
        return engine.states.spread_optimizer(optimizer)["state"].get("steps")

    found = on_engine(tower(), act, stage, lambda parameters: Counts(parameters, lr=0.1), granularity="element")
    assert found == [2, None]


@pytest.mark.parametrize("stage", STAGES)
def test_pieces_in_containers_are_refused_on_every_rank(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> None:
        model(x()).square().mean().backward()
        optimizer.step()
        for take in (engine.states.full_optimizer, engine.states.spread_optimizer):
            with pytest.raises(RuntimeError, match=r"'before.0', 'momenta.0.5', 'momenta.0.9'.*granularity='tensor'"):
                take(optimizer)

    on_engine(tower(), act, stage, made("AggMo", agg_mo), granularity="element")


class Lookback(torch.optim.SGD):
    """Has slow weights beside the state, as one of those that are called Lookahead."""

    def state_dict(self) -> dict[str, Any]:
        slow = {0: {"weights": torch.zeros(3)}}
        return {**super().state_dict(), "slow_state": slow}


class LookbackOfPairs(Lookback):
    """Has pieces in a container, too."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["pair"] = (torch.zeros_like(parameter), torch.zeros_like(parameter))
        return loss


@pytest.mark.parametrize("kind", [Lookback, LookbackOfPairs])
@pytest.mark.parametrize("granularity", ["element", "tensor"])
def test_tensors_beside_the_state_are_refused_without_advice_that_does_not_help(
    granularity: str, kind: type[Lookback]
) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> None:
        model(x()).square().mean().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="it cannot be saved") as told:
            engine.states.full_optimizer(optimizer)
        assert "granularity" not in str(told.value)

    on_engine(tower(), act, 2, lambda parameters: kind(parameters, lr=0.1), granularity=granularity)


def test_an_optimizer_that_torch_has_not_made_is_refused_with_the_remedy() -> None:
    def set_up(comm: Comm) -> None:
        model = tower()
        Engine(model, [Bare(momentum(model.parameters()))], stage=2, comm=comm)

    with pytest.raises(ValueError, match=r"Bare.*super\(\).__init__"):
        ThreadWorld(2).run(set_up)


@pytest.mark.parametrize("stage", STAGES)
def test_a_norm_of_all_gradients_is_refused_at_set_up(stage: int) -> None:
    def set_up(comm: Comm) -> None:
        model = tower()
        Engine(model, [SAMByNorm(model.parameters(), momentum)], stage=stage, comm=comm, options=Options())

    with pytest.raises(ValueError, match=r"SAMByNorm looks at all parameters together.*stage=0.*granularity='tensor'"):
        ThreadWorld(2).run(set_up)


def test_who_asks_for_whole_tensors_is_not_told_to_ask_for_them() -> None:
    def set_up(comm: Comm) -> None:
        model, options = tower(), Options(granularity="tensor")
        Engine(model, [SAMByNorm(model.parameters(), momentum)], stage=1, comm=comm, options=options)

    with pytest.raises(ValueError, match="looks at all parameters together") as refused:
        ThreadWorld(2).run(set_up)
    assert "granularity='tensor'" not in str(refused.value)


@pytest.mark.parametrize("options", [{}, {"offload": Offload(optimizer="cpu"), "machine": APART}], ids=["", "offload"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.filterwarnings("ignore:SAMInTwoCalls looks at all parameters together")  # in `step`, which nobody calls
def test_a_sam_whose_two_steps_users_call_themselves_trains_as_on_one_device(
    stage: int, options: dict[str, Any]
) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        for step in range(3):
            for part in (optimizer.first_step, optimizer.second_step):
                model(x(1 + step)).square().mean().backward()
                part()
        return state_of(model, engine)

    def make(parameters: Any) -> Any:
        return SAMInTwoCalls(parameters, momentum)

    expected = on_one_device(tower(), act, make)
    for found in on_engine(tower(), act, stage, make, granularity="element", **options):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("stage", [0, *STAGES])
def test_two_optimizers_may_step_the_same_parameters(stage: int) -> None:
    """Which is nothing that ddp would refuse."""

    def turns(model: Any, engine: Any, both: list[Any]) -> dict[str, Tensor]:
        for step in range(4):
            train(model, both[step % 2], range(step, step + 1))
        return state_of(model, engine)

    def make(model: Any) -> list[Any]:
        return [momentum(model.parameters()), torch.optim.AdamW(model.parameters(), lr=0.01)]

    def on_rank(comm: Comm) -> dict[str, Tensor]:
        model = copy.deepcopy(start)
        both = make(model)
        return turns(model, Engine(model, both, stage=stage, comm=comm), both)

    start, plain = tower(), tower()
    expected = turns(plain, None, make(plain))
    for found in ThreadWorld(2).run(on_rank):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("stage", [0, *STAGES])
def test_parameters_of_another_model_are_refused_on_every_rank(stage: int) -> None:
    refused = []

    def set_up(comm: Comm) -> None:
        model, other = tower(), nn.Linear(3, 2)
        with pytest.raises(ValueError, match=r"Optimizer 0 \(SGD\) has a parameter of shape \(2, 3\) that is not"):
            Engine(model, [momentum([*model.parameters(), *other.parameters()])], stage=stage, comm=comm)
        refused.append(comm.rank)

    ThreadWorld(2).run(set_up)
    assert sorted(refused) == [0, 1]
