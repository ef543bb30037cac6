"""Edits of weights in place persist as under DDP: whole runs on two real ranks, at every stage and in two bytes."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import edit_jobs
from compare import differing
from lightning_zero.config import Offload
from lightning_zero.run.watch import fingerprint_of
from lightning_zero.shards.offload import Machine
from lightning_zero.tiers.ledger import Category, Tier
from models import seeded
from older import NO_OTHER_DTYPE
from ranks import RankPool
from unit_jobs import WIDTH, assert_as_on_one_device, on_engine, on_one_device, state_of, tower, x

DDP = "ddp_find_unused_parameters_true"

# The gradients of a weight used once, not added to: what DDP sums in two bytes is fp32 here. Numpy has no such dtype.
IN_TWO_BYTES = [
    *("TeacherByLerp", "TeacherAveraged", "TargetSoftly", "Clamped", "Reinitialised", "Rewound", "Perturbed"),
    *("EditedBeforeOptimizerStep", "EditedInTheWayOfBackward", "Pruned", "BoundedEmbedding", "EditedByAnother"),
]
OTHERWISE_ALIKE = {"Teacher", "TeacherByLerp", "TeacherAveraged", "TargetSoftly", "PrunedByCallback", "Averaged"}
in_fp32 = pytest.mark.skipif(bool(NO_OTHER_DTYPE), reason=NO_OTHER_DTYPE)  # it averages weights in two bytes
RUNS = [
    *((name, "32-true", stage) for name in edit_jobs.MODULES for stage in (2, 3)),
    *((name, "bf16-mixed", stage) for name in edit_jobs.MODULES if name not in OTHERWISE_ALIKE for stage in (1, 3)),
    *((name, "bf16-true", stage) for name in IN_TWO_BYTES for stage in (1, 3)),
    *(pytest.param("Averaged", "bf16-true", stage, marks=in_fp32) for stage in (1, 3)),
]

Outcome = Callable[..., list[dict[str, Any]]]  # of the ranks


def runs_once(ranks: RankPool, fit: Callable[..., dict[str, Any]], path: Path) -> Outcome:
    """`outcome(strategy, name, precision)` fits once, whoever asks."""

    def outcome(strategy: str | int, name: str, precision: str) -> list[dict[str, Any]]:
        given = {"stage": strategy} if isinstance(strategy, int) else strategy
        return ranks.once(fit, given, name, precision, path)

    return outcome


@pytest.fixture(scope="module")
def outcome(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return runs_once(two_ranks, edit_jobs.fit, tmp_path_factory.mktemp("edits") / "run")


@pytest.mark.parametrize(("name", "precision", "stage"), RUNS)
def test_edits_persist_as_under_ddp(name: str, precision: str, stage: int, outcome: Outcome) -> None:
    for mine, theirs in zip(outcome(stage, name, precision), outcome(DDP, name, precision), strict=True):
        assert mine["error"] == theirs["error"]
        assert mine["losses"] == theirs["losses"]
        for part in ("seen", "weights", "saved"):
            assert differing(mine[part], theirs[part]) == []


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("strategy", [{"stage": 1}, {"stage": 3}, {"stage": 3, "checkpoint": "full"}], ids=str)
def test_what_is_saved_right_after_edits_has_them(
    strategy: Any, precision: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    expected = two_ranks.once(edit_jobs.saved_as_edited, DDP, precision, tmp_path.parent / f"ddp-{precision}.ckpt")
    found = two_ranks.run(edit_jobs.saved_as_edited, strategy, precision, tmp_path / "saved.ckpt")
    for mine, theirs in zip(found, expected, strict=True):
        assert differing(mine, theirs) == []


@pytest.mark.parametrize(("precision", "error"), [("32-true", edit_jobs.IN_THE_WAY), ("bf16-mixed", None)])
def test_edits_in_the_way_of_backward_end_in_torchs_error_unless_autocast_made_a_copy(
    precision: str, error: str | None, outcome: Outcome
) -> None:
    for name in ("EditedInTheWayOfBackward", "EditedBetweenForwards"):
        assert [of_rank["error"] for of_rank in outcome(3, name, precision)] == [error, error]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_edited_element_leaves_its_neighbours_masters_every_bit(stage: int) -> None:
    """They rest in two bytes: taken over from there, all of the tensor would be rounded."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> tuple[Tensor, Tensor]:
        before = state_of(model, engine)["0.0.weight"]
        with torch.no_grad():
            model[0][0].weight[1, 2] = 0.5
        model(x().bfloat16())
        return before, state_of(model, engine)["0.0.weight"]

    for before, after in on_engine(tower(), act, stage, param_dtype=torch.bfloat16):
        assert after.dtype == torch.float32
        assert not torch.equal(before, before.bfloat16().float())
        assert after[1, 2] == 0.5
        before[1, 2] = 0.5
        assert torch.equal(after, before)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_call_may_have_a_parameter_and_its_gradient(stage: int) -> None:
    """At stage 3 the values of both are elsewhere."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        model(x()).square().mean().backward()
        found = {}
        for name, parameter in model.named_parameters():
            found[f"{name} after"] = (parameter.grad + parameter).detach().clone()
            found[f"{name} before"] = torch.stack([parameter, parameter.grad]).detach().clone()
            with torch.no_grad():
                parameter.grad.add_(parameter, alpha=0.5)
        optimizer.step()
        return {**found, **state_of(model, engine)}

    expected = on_one_device(tower(), act)
    for found in on_engine(tower(), act, stage):
        assert differing(found, expected) == []


def _replaced(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.flip(0) * 0.9


def _replaced_unread(parameter: nn.Parameter) -> None:
    parameter.data = torch.full(parameter.shape, 0.25)


@pytest.mark.parametrize("units", [None, ("Sequential",)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_put_into_data_before_backward_counts_where_autograd_has_saved_the_parameter_itself(
    stage: int, units: tuple[str, ...] | None
) -> None:
    """Norms and convolutions save it, and see the new values; a linear layer saves a view, which keeps the old ones."""

    def make() -> nn.Module:
        norm, twice = nn.BatchNorm2d(3), nn.LayerNorm(6)
        first = nn.Sequential(nn.Conv2d(1, 3, 3), norm, nn.Tanh(), nn.Flatten(), nn.Linear(48, 6))
        return nn.Sequential(first, nn.Sequential(twice, nn.Linear(6, 6), nn.Tanh(), twice), nn.Linear(6, 2))

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        images = 2 * torch.linspace(-1, 1, 4 * 36).sin().view(4, 1, 6, 6)
        found: dict[str, Tensor] = {}
        for edit in (_replaced, _replaced_unread, lambda parameter: parameter.data.mul_(0.9)):
            first = model(images).square().mean()
            for parameter in model.parameters():
                edit(parameter)
            loss = first + model(images).square().mean() if edit is _replaced else first
            loss.backward()
            found |= {f"{len(found)} {name}": p.grad.clone() for name, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        return {**found, **state_of(model, engine)}

    assert_as_on_one_device(seeded(make), act, stage, unit_classes=units)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_parameters_may_change_places_through_their_data(stage: int, autocast: torch.dtype | None) -> None:
    """What `p.data` has shown keeps the old values, as the tensor that it was, also of two-byte weights."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
                loss = model(x(1.0 + step)).square().mean()
            loss.backward()
            first, second = model[0][0].weight, model[1][0].weight
            first.data, second.data = second.data, first.data
            optimizer.step()
        return state_of(model, engine)

    assert_as_on_one_device(tower(), act, stage, autocast_dtype=autocast)


class Middle(nn.Module):
    """A layer between two others: one that recomputes, or not."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.recomputes = recomputes

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(hidden))
        again = checkpoint(self.middle, hidden, use_reentrant=False) if self.recomputes else self.middle(hidden)
        return self.last(torch.tanh(again)).float().square().mean()


def _in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(0.9)


@pytest.mark.parametrize("autocasts", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_graphs_keep_the_weights_that_an_edit_replaced_and_what_is_recomputed_sees_the_edit(
    stage: int, recomputes: bool, autocasts: bool
) -> None:
    """The edited weight lies in rank 0's shard alone, and all ranks tell that graphs have saved another one."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for forwards in (1, 2):
            for edit in (_replaced, lambda parameter: parameter.data.mul_(0.9), _in_place):
                if edit is _in_place and not (recomputes or autocasts):
                    continue  # an error of torch's
                losses = []
                for number in range(forwards):
                    autocast = torch.autocast("cpu", torch.bfloat16, enabled=autocasts, cache_enabled=False)
                    with nullcontext() if engine is None else engine.forward(), autocast:
                        losses.append(model(x(1.0 + number)))
                    if number == 0:
                        edit(model.middle.weight)
                sum(losses).backward()
                found |= {f"{len(found)} {name}": p.grad.clone() for name, p in model.named_parameters()}
                optimizer.step()
                optimizer.zero_grad()
        return {**found, **state_of(model, engine)}

    dtype = torch.bfloat16 if autocasts else None
    start = seeded(lambda: Middle(recomputes))
    assert_as_on_one_device(start, act, stage, unit_classes=("Linear",), autocast_dtype=dtype)


class OnTheWay(Middle):
    """Edits a weight through a view, and then uses it."""

    def forward(self, hidden: Tensor) -> Tensor:
        view = self.middle.weight.view(-1)
        with torch.no_grad():
            view.mul_(0.5)
        return super().forward(hidden)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_graphs_keep_the_weights_that_an_edit_in_their_forward_has_left(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        losses = []
        for number in range(2):
            autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
            with nullcontext() if engine is None else engine.forward(), autocast:
                losses.append(model(x(1.0 + number)))
        sum(losses).backward()
        optimizer.step()
        return state_of(model, engine)

    start = seeded(lambda: OnTheWay(recomputes=False))
    assert_as_on_one_device(start, act, stage, unit_classes=("Linear",), autocast_dtype=torch.bfloat16)


class Borrows(nn.Linear):
    """A layer that also uses the weight of another one."""

    lender: list[nn.Linear]

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(super().forward(hidden), self.lender[0].weight)


def test_a_replaced_weight_of_another_unit_is_what_a_recomputed_layer_has_used() -> None:
    def make() -> nn.Module:
        model = Middle(recomputes=True)
        model.middle = Borrows(WIDTH, WIDTH)
        return model

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        model.middle.lender = [model.last]
        with nullcontext() if engine is None else engine.forward():
            loss = model(x())
        _replaced(model.last.weight)
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if name.startswith("first")}

    assert_as_on_one_device(seeded(make), act, 3, unit_classes=("Linear",))


# -- ranks that have read or used different things come to an edit at different times


def _scaled(weight: Tensor) -> None:
    weight.mul_(1.5)


def _scaled_unseen(weight: Tensor) -> None:
    weight.data.mul_(1.5)


def _normalised(weight: Tensor) -> None:
    weight.div_(weight.norm())


def _assigned(weight: Tensor) -> None:
    weight.data = weight.data * 1.5


EDITS = [_scaled, _scaled_unseen, _normalised, _assigned]


def _loss_of(engine: Any, forward: Callable[[], Tensor], dtype: torch.dtype | None) -> Tensor:
    cast = torch.autocast("cpu", dtype=dtype, enabled=dtype is not None, cache_enabled=False)
    with engine.forward(), cast:
        return forward().float().square().mean()


@pytest.mark.parametrize("look", [Tensor.norm, Tensor.detach])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_one_rank_may_read_a_weight_alone_before_all_edit_it_or_another_one(
    dtype: torch.dtype | None, look: Callable[[Tensor], Tensor]
) -> None:
    """It keeps what it has read, and so comes to what follows before or after the others."""

    def act_with(edit: Callable[[Tensor], None], order: tuple[int, ...], when: str) -> Any:
        def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            kept = []

            def looks_at(number: int, now: str) -> None:
                if comm.rank == 0 and step and when == now:  # the first step is what plans are made of
                    kept.append(look(model[number][0].weight))

            for step in range(3):
                loss = _loss_of(engine, lambda scale=1.0 + step: model(x(scale)), dtype)
                with engine.backward():
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    looks_at(0, "before")
                    for number in order:
                        edit(model[number][0].weight)
                        looks_at((number + 1) % 3, "between")
                    found |= {f"norm {step} {n}": model[n][0].weight.norm().clone() for n in range(3)}
            return found | state_of(model, engine)

        return act

    for edit in EDITS:
        for order in [(0, 1, 2), (2, 1, 0), (1, 0, 0, 2)]:
            expected = on_engine(tower(), act_with(edit, order, "never"), 3, autocast_dtype=dtype)[0]
            for when in ("before", "between"):
                for found in on_engine(tower(), act_with(edit, order, when), 3, autocast_dtype=dtype):
                    assert differing(found, expected) == []


def test_ranks_that_edit_a_weight_itself_wait_for_one_that_edits_a_view_of_it() -> None:
    """Its edit is noticed at the next boundary, and theirs are by then: none runs ahead with its older values."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        weight = model[2][0].weight
        with torch.no_grad():
            _scaled(weight.detach() if comm is not None and comm.rank == 0 else weight)
        with nullcontext() if engine is None else engine.forward():
            found = model(x()).detach()
        return {"output": found, **state_of(model, engine)}

    assert_as_on_one_device(tower(), act, 3, unit_classes=("Linear",), prefetch=0)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(("dtype", "stages"), [(None, [3]), (torch.bfloat16, [1, 2, 3])], ids=["fp32", "bf16"])
def test_one_rank_may_run_a_forward_alone_between_an_edit_by_all_and_the_step(
    dtype: torch.dtype | None, stages: list[int], edit: Callable[[Tensor], None]
) -> None:
    """The others wait for it at the next meeting, where they keep their parts of the edit before they serve it."""

    def act_with(runs_on: Callable[[int], bool]) -> Any:
        def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            weights = [model[number][0].weight for number in (0, 3)]
            for step in range(3):
                for micro, way in enumerate((engine.accumulating, nullcontext)):
                    with way():
                        loss = _loss_of(engine, lambda scale=1.0 + step + micro: model(x(scale)), dtype)
                        comm.all_reduce(torch.ones(1), "by the user", "max")
                        with engine.backward():
                            loss.backward()
                    with torch.no_grad():
                        for weight in weights:
                            edit(weight)
                    if step and runs_on(comm.rank):  # the first step is what plans are made of
                        found[f"loss {step}.{micro}"] = _loss_of(engine, lambda: model(x(0.5)), dtype).detach()
                        found[f"norms {step}.{micro}"] = torch.stack([p.detach().norm() for p in model.parameters()])
                    if not micro:  # from here on no rank waits for another one at an edit that all have made before
                        engine.runner.rendezvous.meet_before_collective()
                if step == 2:  # the others come to a meeting while they hold views, through which they edit once more
                    for weight, view in [(weight, weight.data) for weight in weights]:
                        view.sub_(weight.grad, alpha=0.1)
                optimizer.step()
                optimizer.zero_grad()
            return found | state_of(model, engine)

        return act

    start, options = tower(4), {"autocast_dtype": dtype, "accumulation": "local", "prefetch": 0}
    expected = on_engine(start, act_with(lambda _: True), 0, **options)[0]  # type: ignore[arg-type]
    for stage in stages:
        found = on_engine(start, act_with(lambda rank: rank == 0), stage, **options)  # type: ignore[arg-type]
        assert found[0].keys() == expected.keys()
        for mine in found:
            assert differing(mine, {name: expected[name] for name in mine}) == []


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(("dtype", "stages"), [(None, [3]), (torch.bfloat16, [1, 2, 3])], ids=["fp32", "bf16"])
def test_one_rank_may_run_a_forward_alone_between_an_edit_by_all_and_the_backward(
    dtype: torch.dtype | None, stages: list[int], edit: Callable[[Tensor], None]
) -> None:
    """The others are in their backward by then. What is recomputed in it sees the edit on every rank."""

    def act_with(runs_on: Callable[[int], bool]) -> Any:
        def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            for step in range(3):
                loss = _loss_of(engine, lambda scale=1.0 + step: model(x(scale)), dtype)
                with torch.no_grad():
                    edit(model.middle.weight)
                    found[f"called {step}"] = model.middle(x())  # which sees the edit before it is kept
                    if step and runs_on(comm.rank):
                        found[f"loss {step}"] = _loss_of(engine, lambda: model(x(0.5)), dtype)
                        found[f"norm {step}"] = model.middle.weight.norm().clone()
                with engine.backward():
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return found | state_of(model, engine)

        return act

    start = seeded(lambda: Middle(True))
    options = {"autocast_dtype": dtype, "unit_classes": ("Linear",), "prefetch": 0}
    expected = on_engine(start, act_with(lambda _: True), 0, **options)[0]  # type: ignore[arg-type]
    for stage in stages:
        found = on_engine(start, act_with(lambda rank: rank == 0), stage, **options)  # type: ignore[arg-type]
        assert found[0].keys() == expected.keys()
        for mine in found:
            assert differing(mine, {name: expected[name] for name in mine}) == []


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_may_be_edited_between_two_forwards_of_a_step_in_which_ranks_use_different_modules(
    dtype: torch.dtype | None, evaluates: bool
) -> None:
    def act_with(edit: Callable[[Tensor], None], numbers: tuple[int, ...], paths: list[tuple[int, ...]]) -> Any:
        def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
            def forward(path: Any) -> Tensor:
                h = x(1.0 + comm.rank)
                for number in path:
                    h = model[number](h)
                return h

            for step in range(3):
                path = paths[comm.rank if step else 0]  # the first step is what plans are made of
                with torch.set_grad_enabled(not evaluates):
                    first = _loss_of(engine, lambda path=path: forward(path), dtype)
                if not evaluates:
                    with engine.backward():
                        first.backward()
                with torch.no_grad():
                    for number in numbers:
                        edit(model[number][0].weight)
                second = _loss_of(engine, lambda: forward(range(6)), dtype)
                with engine.backward():
                    second.backward()
                optimizer.step()
                optimizer.zero_grad()
            return state_of(model, engine)

        return act

    start, options = tower(6), {"autocast_dtype": dtype, "accumulation": "local"}
    for edit in EDITS:
        for numbers in [(5,), (5, 4, 0)]:
            for paths in [[(0, 1, 2, 3, 4, 5), (0,)], [(0,), (0, 1, 2, 3, 4, 5)], [(0, 1, 5), (0, 2, 3, 5)]]:
                act = act_with(edit, numbers, paths)
                expected = on_engine(start, act, 2, **options)  # type: ignore[arg-type]
                found = on_engine(start, act, 3, **options)  # type: ignore[arg-type]
                assert [differing(mine, theirs) for mine, theirs in zip(found, expected, strict=True)] == [[], []]


class Twice(nn.Module):
    """A layer that a rank may use two times, kept or recomputed each time."""

    def __init__(self, recomputes: tuple[bool, ...]) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.recomputes = recomputes

    def forward(self, hidden: Tensor, uses_middle: bool) -> Tensor:
        hidden = torch.tanh(self.first(hidden))
        for again in self.recomputes if uses_middle else ():
            hidden = checkpoint(self.middle, hidden, use_reentrant=False) if again else self.middle(hidden)
        return self.last(torch.tanh(hidden))


@pytest.mark.parametrize("recomputes", [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_may_be_edited_between_forward_and_backward_while_ranks_use_different_modules(
    dtype: torch.dtype | None, recomputes: tuple[bool, ...]
) -> None:
    """What is recomputed sees the edit, what was kept wants the old values: on the ranks that have used the layer."""

    def act_with(edit: Callable[[Tensor], None], uses: Callable[[int, int], bool]) -> Any:
        def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            for step in range(3):
                uses_middle = uses(comm.rank, step)
                loss = _loss_of(engine, lambda scale=1.0 + step, used=uses_middle: model(x(scale), used), dtype)
                with torch.no_grad():
                    edit(model.middle.weight)
                with engine.backward():
                    loss.backward()
                for name, parameter in model.named_parameters():
                    if parameter.grad is not None:
                        found[f"gradient {step} {name}"] = parameter.grad.clone()
                optimizer.step()
                optimizer.zero_grad()
            return found | state_of(model, engine)

        return act

    start = seeded(lambda: Twice(recomputes))
    in_the_way = not all(recomputes) and dtype is None  # an edit that torch can tell is its error
    for edit in [_scaled_unseen, _assigned] if in_the_way else EDITS:
        for uses in [lambda rank, _: rank == 0, lambda rank, _: rank == 1, lambda rank, step: (rank + step) % 2 == 0]:
            expected = on_engine(start, act_with(edit, uses), 0, autocast_dtype=dtype)
            found = on_engine(start, act_with(edit, uses), 3, autocast_dtype=dtype, unit_classes=("Linear",))
            assert [differing(mine, theirs) for mine, theirs in zip(found, expected, strict=True)] == [[], []]


def test_values_that_only_change_places_are_edited_too() -> None:
    """As where neurons are put into another order through `p.data`: rows, columns, and both."""
    values = torch.randn(2, 2 * 4096)
    for moved in (values.flip(0), values.roll(2, 1), values.flip(0).roll(2, 1)):
        assert fingerprint_of(moved.flatten()) != fingerprint_of(values.flatten())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_graph_keeps_the_values_that_an_edit_replaces_and_nobody_else_does(dtype: torch.dtype | None) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> list[int]:
        found = []

        def note() -> None:
            found.append(engine.ledger.live_in[Category.GATHERED, Tier.DEVICE])

        for is_used in (False, True):
            loss = _loss_of(engine, lambda used=is_used: model(x(), used), dtype)
            note()
            _assigned(model.middle.weight)
            with engine.forward():  # which takes the edit over
                pass
            note()
            with engine.backward():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            note()
        return found

    start = seeded(lambda: Twice((False,)))
    kept = WIDTH * WIDTH * (4 if dtype is None else 2)
    for found in on_engine(start, act, 3, autocast_dtype=dtype, unit_classes=("Linear",)):
        assert [at - found[0] for at in found] == [0, 0, 0, 0, kept, 0]


@pytest.mark.parametrize(
    "options",
    [{}, {"offload": Offload("cpu"), "machine": Machine(host_is_apart=True)}, {"autocast_dtype": torch.bfloat16}],
    ids=["fp32", "offloaded", "bf16"],
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_that_were_edited_before_the_state_of_an_optimizer_is_loaded_stay_edited(
    stage: int, options: dict[str, Any]
) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        (model(x()).sum() * 0).backward()  # so that there is state, and weights stay what they are
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict() if engine is None else engine.states.full_optimizer(optimizer))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        if engine is not None:
            engine.states.load_optimizer(optimizer, saved)
        return state_of(model, engine)

    make = partial(torch.optim.AdamW, weight_decay=0.0)
    assert_as_on_one_device(tower(), act, stage, make, **options)


def test_weights_that_each_rank_draws_are_its_own_until_the_boundary_and_then_each_has_given_its_piece() -> None:
    """As docs/reading.md tells of samples that are drawn in an evaluation."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            model[0].weight.copy_(torch.full((WIDTH, WIDTH), 1.0 + comm.rank))
        own = model[0](torch.ones(1, WIDTH)).detach() - model[0].bias.detach()
        return own, state_of(model, engine)["0.weight"].reshape(-1)

    for rank, (own, weight) in enumerate(on_engine(nn.Sequential(nn.Linear(WIDTH, WIDTH)), act, 3)):
        assert torch.allclose(own, torch.full((1, WIDTH), WIDTH * (1.0 + rank)))
        assert weight.unique_consecutive().tolist() == [1.0, 2.0]
