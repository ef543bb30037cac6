"""What an optimizer looks at is found by trying it: the formulas of papers, under names that nobody has heard of."""

import math
import pickle
import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from itertools import count
from threading import Lock, Thread
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from lightning_zero.device import HOST
from lightning_zero.run.engine import Engine, Options
from lightning_zero.shards.granularity import choose_stepped
from lightning_zero.shards.probe import BLOCK, ELEMENT_WISE, MOMENTS, find, state_tensors_of
from lightning_zero.wire.comm import Comm
from thread_world import ThreadWorld
from zoo import OF_ALL, PIECES, WHOLE, ByFormula, Trusting, agg_mo, decays_matrices, made
from zoo import count as count_steps

BY_TENSOR, BY_ALL = "looks at whole tensors", "looks at all parameters together"


def why_not_in_pieces(optimizer: Optimizer) -> str | None:
    return find(optimizer).why_not_in_pieces


def parameters(*shapes: tuple[int, ...]) -> list[Parameter]:
    return [Parameter(torch.ones(shape)) for shape in shapes or ((30, 20), (20,), (3, 4, 5), ())]


@pytest.mark.parametrize("name", WHOLE)
def test_what_looks_at_whole_tensors_is_found_whatever_its_name(name: str) -> None:
    assert why_not_in_pieces(made("Plain", WHOLE[name])(parameters())) == BY_TENSOR


class Patient(Optimizer):
    """Halves the learning rate of a tensor when the norm of its gradient has not fallen for long."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state, found = self.state[p], p.grad.norm()
            least = state.get("least", found)
            state["waits"] = 0 if found < least else state.get("waits", 0) + 1
            state["least"] = torch.minimum(least, found)
            p.sub_(p.grad, alpha=0.1 * 0.5 ** (state["waits"] // 1000))


def test_a_number_of_a_whole_tensor_that_is_kept_to_act_on_later_is_found_before_that() -> None:
    assert why_not_in_pieces(Patient(parameters())) == BY_TENSOR


class Remembers(ByFormula):
    """Keeps the largest norm of all parameters in its group, to act on much later."""

    unit = 1.0

    def step(self, closure: Any = None) -> None:
        size = self.unit * float(
            sum(p.grad.square().sum() for p in self.param_groups[0]["params"] if p.grad is not None)
        )
        self.param_groups[0]["largest"] = max(size, self.param_groups[0].get("largest", 0.0))
        super().step(closure)

    def change(self, p: Tensor, state: dict[str, Any]) -> Tensor:  # type: ignore[override]
        return p.grad


@pytest.mark.parametrize("unit", [1.0, 1e-20])
def test_a_number_of_all_parameters_that_a_group_keeps_to_act_on_later_is_found_before_that(unit: float) -> None:
    optimizer = Remembers(parameters())
    optimizer.unit = unit
    assert why_not_in_pieces(optimizer) == BY_ALL


def directions(p: Tensor, state: dict[str, Any]) -> Tensor:
    state["direction"] = (p.grad / p.grad.norm()).flatten()
    return p.grad


def test_a_table_of_a_whole_tensor_that_is_as_long_as_its_pieces_is_none_of_theirs() -> None:
    assert why_not_in_pieces(made("Directed", directions)(parameters())) == BY_TENSOR


def refusing_large_ones(p: Tensor, state: dict[str, Any]) -> Tensor:
    if p.grad.abs().max() > 100:
        raise ValueError("a gradient has exploded")
    return p.grad


def test_an_optimizer_whose_later_steps_fail_is_not_known_by_its_first_ones() -> None:
    told = why_not_in_pieces(made("Careful", refusing_large_ones)(parameters()))
    assert told == "could not be tried on small tensors (ValueError: a gradient has exploded)"


def test_a_number_that_says_how_many_elements_there_are_is_no_sum_over_all() -> None:
    class Sized(SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["size"] = sum(p.numel() for p in group["params"])
            return super().step(closure)

    assert why_not_in_pieces(Sized(parameters(), lr=0.1)) is None


class Late(ByFormula):
    """Steps by the gradient of ten steps ago, over its largest element."""

    def change(self, p: Tensor, state: dict[str, Any]) -> Tensor:  # type: ignore[override]
        state["seen"] = [*state.get("seen", []), p.grad.clone()]
        if len(state["seen"]) <= 10:
            return torch.zeros_like(p)
        old = state["seen"].pop(0)
        return old / (old.abs().max() + 1e-8)


def test_what_changes_nothing_in_its_first_steps_is_tried_for_longer() -> None:
    assert why_not_in_pieces(Late(parameters())) == BY_TENSOR


class Begun(ByFormula):
    """Makes its state at construction, also some that is no parameter's."""

    def __init__(self, parameters: Iterable[Any], change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(parameters)
        self.changed, self.state["rate"] = change, torch.ones(())
        for p in filter(lambda p: p.requires_grad, self.param_groups[0]["params"]):
            off = torch.zeros_like(p, dtype=torch.bool)
            self.state[p].update(begin=p.detach().clone(), total=torch.full_like(p, 0.1), off=off, steps=0)

    def change(self, p: Tensor, state: dict[str, Any]) -> Tensor:  # type: ignore[override]
        state["total"].add_(p.grad.square())
        grad = torch.where(state["off"], 0, p.grad)
        return self.changed(grad / state["total"].sqrt() + 0.1 * (p - state["begin"])) * self.state["rate"]


def test_what_makes_state_at_construction_is_tried_with_the_like() -> None:
    for make in (torch.ones, torch.zeros, torch.rand):
        weights = [Parameter(make(5), requires_grad=False), Parameter(make(30, 20)), Parameter(make(20))]
        assert why_not_in_pieces(Begun(weights, lambda update: update)) is None
        assert why_not_in_pieces(Begun(weights, lambda update: update / update.norm())) == BY_TENSOR
    drawn = Begun(parameters(), lambda update: update)
    drawn.state[drawn.param_groups[0]["params"][0]]["mask"] = torch.rand(30, 20) > 0.5
    assert "could not be tried on small tensors" in str(why_not_in_pieces(drawn)), "what it would be cannot be told"


class Asks(SGD):
    """Refuses a step without a closure, by an error of its own."""

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError("Asks needs a closure")
        return super().step(closure)


class Single(SGD):
    """Keeps an average in fp32, whatever the parameter's dtype, in a way that takes no other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p, dtype=torch.float32))
                p.sub_(mean.lerp_(p.grad, 0.1), alpha=0.1)


@pytest.mark.parametrize("kind", [Asks, Single])
def test_what_steps_with_a_closure_only_or_in_fp32_only_can_be_tried(kind: Any) -> None:
    assert why_not_in_pieces(kind(parameters(), lr=0.1)) is None


class Preconditions(SGD):
    largest = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.numel():
                type(self).largest = max(self.largest, *p.shape) if p.dim() else self.largest
                p.sub_(p.grad / p.grad.norm())
        assert self.largest > 0


def test_what_looks_at_whole_tensors_takes_no_step_on_ones_whose_square_is_large() -> None:
    with patch.object(Preconditions, "largest", 0), patch("lightning_zero.shards.probe.trying", nullcontext):
        assert why_not_in_pieces(Preconditions(parameters(), lr=0.1)) == BY_TENSOR
        assert 0 < Preconditions.largest <= 600


class ByLoss(SGD):
    """Polyak's step: the loss over the squared gradient of each element."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad * loss / (p.grad.square() + 1.0))
        return loss


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_goes_by_the_loss_is_refused_unless_the_user_knows_that_it_is_the_same_on_every_rank(stage: int) -> None:
    def set_up(comm: Comm, **options: Any) -> None:
        model = nn.Linear(4, 4)
        optimizer = ByLoss(model.parameters(), lr=0.1)
        Engine(model, [optimizer], stage=stage, comm=comm, options=Options(**options)).close()

    with pytest.raises(ValueError, match=r"ByLoss goes by the loss that its closure returns.*train apart.*stage=0"):
        ThreadWorld(2).run(set_up)
    for granularity in ("element", "tensor"):
        ThreadWorld(2).run(lambda comm, asked=granularity: set_up(comm, granularity=asked))


class MovesFirst(SGD):
    """Takes gradients at a point further on, where it goes before it calls its closure."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        for p in parameters:
            p.add_(self.state[p].setdefault("ahead", torch.zeros_like(p)))
        loss = torch.enable_grad()(closure)()
        for p in parameters:
            if p.grad is not None:
                p.sub_(self.state[p]["ahead"])
                self.state[p]["ahead"] = -0.1 * p.grad
                p.add_(self.state[p]["ahead"])
        return loss


@pytest.mark.parametrize("granularity", ["auto", "tensor"])
def test_what_moves_weights_before_it_calls_its_closure_is_refused_with_the_remedy(granularity: Any) -> None:
    optimizer = MovesFirst(parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"MovesFirst changes weights.*before it calls its closure.*stage=0"):
        choose_stepped([optimizer], Options(granularity=granularity), False, HOST)


class Noisy(SGD):
    """Langevin dynamics, by a source of random numbers."""

    def __init__(self, parameters: Iterable[Any], source: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.source, self.taken = source, 0
        self.of_torch, self.of_numpy = torch.Generator().manual_seed(0), np.random.default_rng(0)
        self.param_groups[0]["of_python"] = random.Random(0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.taken += 1
        if self.source == "seeded":
            torch.manual_seed(self.taken)
        for p in (p for group in self.param_groups for p in group["params"]):
            p.add_(torch.as_tensor(self.drawn(p), dtype=p.dtype), alpha=1e-3)

    def drawn(self, p: Tensor) -> Any:
        return {
            "torch": lambda: torch.randn_like(p),
            "seeded": lambda: torch.randn_like(p),
            "numpy": lambda: np.random.standard_normal(p.shape),
            "python": random.random,
            "system": random.SystemRandom().random,
            "torch of its own": lambda: torch.randn(p.shape, generator=self.of_torch),
            "numpy of its own": lambda: self.of_numpy.standard_normal(p.shape),
            "python of its own": self.param_groups[0]["of_python"].random,
        }[self.source]()


SOURCES = [
    "torch",
    "seeded",
    "numpy",
    "python",
    "system",
    *(f"{name} of its own" for name in ("torch", "numpy", "python")),
]


@pytest.mark.parametrize("source", SOURCES)
def test_what_draws_random_numbers_is_told_from_what_looks_at_all_parameters(source: str) -> None:
    before = torch.get_rng_state(), pickle.dumps(np.random.get_state()), random.getstate()
    assert why_not_in_pieces(Noisy(parameters(), source)) == "draws random numbers"
    assert torch.get_rng_state().equal(before[0])
    assert (pickle.dumps(np.random.get_state()), random.getstate()) == before[1:], "training's own are left alone"


class RoundsByChance(SGD):
    """Rounds gradients up or down by chance, but leaves those in fp64 as they are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.dtype != torch.float64:
                p.grad.copy_((p.grad * 256 + torch.rand_like(p)).floor() / 256)
        super().step()


def test_what_draws_random_numbers_in_fp32_alone_is_found_to_draw_some() -> None:
    assert why_not_in_pieces(RoundsByChance(parameters(), lr=0.1)) == "draws random numbers"


class Interrupted(SGD):
    """During all of its steps but one another thread draws a number: one that loads data, say."""

    def __init__(self, parameters: Iterable[Any], but_in: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["steps"], self.but_in = Count(), but_in

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        if next(self.param_groups[0]["steps"]) != self.but_in:
            other = Thread(target=random.random)
            other.start()
            other.join()


class Count:
    """Counts for all copies of what holds it."""

    def __init__(self) -> None:
        self.numbers = count()

    def __next__(self) -> int:
        return next(self.numbers)

    def __deepcopy__(self, memo: Any) -> "Count":
        return self


def test_numbers_that_another_thread_draws_meanwhile_are_none_of_the_optimizers() -> None:
    assert why_not_in_pieces(Interrupted(parameters(), -1)) == "draws random numbers"
    for number in range(5):  # the steps that ask whether it draws come after those that tell what it changes
        assert why_not_in_pieces(Interrupted(parameters(), len(MOMENTS) + number)) is None


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_that_draws_random_numbers_is_refused_and_told_that_it_does(stage: int) -> None:
    def set_up(comm: Comm, **options: Any) -> None:
        model = nn.Linear(4, 4)
        optimizer = Noisy(model.parameters(), "torch of its own")
        Engine(model, [optimizer], stage=stage, comm=comm, options=Options(**options)).close()

    with pytest.raises(ValueError, match=r"Noisy draws random numbers, for the parameters in turn.*stage=0.*'element'"):
        ThreadWorld(2).run(set_up)
    for granularity, what in (("tensor", "tensors"), ("block", "blocks"), ("element", "pieces")):
        with pytest.warns(UserWarning, match=rf"Noisy draws random numbers.*for the {what} that it.*not DDP's"):
            ThreadWorld(2).run(lambda comm, asked=granularity: set_up(comm, granularity=asked))


class SharpnessAware(SGD):
    """Goes by the gradients at a point that it has moved each tensor to, by the norm of its gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.zero_grad()  # what closures of users do
        closure()
        stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        moves = [(p, p.grad / p.grad.norm()) for p in stepped]
        for p, move in moves:
            p.add_(move)
        closure()
        for p, move in moves:
            p.sub_(move)
        super().step()


def test_gradients_of_a_closure_are_those_of_where_it_is_called() -> None:
    assert why_not_in_pieces(SharpnessAware(parameters(), lr=0.1)) == BY_TENSOR


def test_matrices_alone_are_tried_where_an_optimizer_has_matrices_alone() -> None:
    assert why_not_in_pieces(torch.optim.Muon(parameters((8, 4), (4, 4)), lr=0.1)) == BY_TENSOR
    assert why_not_in_pieces(torch.optim.Adafactor(parameters((8, 4)))) == BY_TENSOR
    assert why_not_in_pieces(made("Vectors", decays_matrices)(parameters((8,)))) is None


@pytest.mark.parametrize("name", PIECES)
def test_what_goes_by_element_is_found_to_do_so(name: str) -> None:
    assert why_not_in_pieces(made("Plain", PIECES[name])(parameters())) is None


def known_to_end(p: Tensor, state: dict[str, Any]) -> Tensor:
    """Has a table of rates for so many steps as a run takes."""
    return ([0.1] * 50)[count_steps(state)] * p.grad


def growing(p: Tensor, state: dict[str, Any]) -> Tensor:
    """A rate that no number holds, in a step that training never comes to."""
    return p.grad * torch.tensor(1.1, dtype=p.dtype) ** count_steps(state)


def without_a_best(p: Tensor, state: dict[str, Any]) -> Tensor:
    state["best loss"] = math.nan  # it has been told none
    return p.grad


def with_a_phase(p: Tensor, state: dict[str, Any]) -> Tensor:
    """Keeps complex numbers, of which none is a count or a sum: one by itself, and some in a table."""
    state["phase"] = state.get("phase", torch.tensor(1.0 + 0j, device="cpu")) * 1j
    state["turns"] = torch.tensor([1.0 + 0j, 1j], device="cpu") * state["phase"]
    return p.grad * float(state["phase"].real.abs() + state["phase"].imag.abs())


@pytest.mark.parametrize("formula", [known_to_end, growing, without_a_best, with_a_phase])
def test_steps_that_training_never_comes_to_and_numbers_that_are_none_tell_nothing(formula: Any) -> None:
    assert why_not_in_pieces(made("Plain", formula)(parameters())) is None


def scaled_in_blocks(p: Tensor, state: dict[str, Any]) -> Tensor:
    state["seen"] = [p.grad.clone()]
    blocks = p.grad.reshape(-1).split(BLOCK)
    return torch.cat([block / (block.abs().max() + 1e-8) for block in blocks]).view_as(p)


def test_what_keeps_tensors_in_containers_is_found_to_do_so_and_told_what_that_costs_in_pieces() -> None:
    def set_up(comm: Comm, granularity: Any) -> bool:
        model = nn.Linear(4, 4)
        optimizer = made("AggMo", agg_mo)(model.parameters())
        engine = Engine(model, [optimizer], stage=2, comm=comm, options=Options(granularity=granularity))
        steps_whole = engine.regrouping.imbalance is not None
        engine.close()
        return steps_whole

    told = "keeps tensors in lists or dictionaries of its state"
    assert why_not_in_pieces(made("Plain", agg_mo)(parameters())) == told
    assert why_not_in_pieces(made("InBlocks", scaled_in_blocks)(parameters())) == told
    assert ThreadWorld(2).run(lambda comm: set_up(comm, "auto")) == [True, True]
    with pytest.warns(UserWarning, match=rf"AggMo {told}: in pieces.*cannot be saved"):
        assert ThreadWorld(2).run(lambda comm: set_up(comm, "element")) == [False, False]
    with pytest.warns(UserWarning, match=r"which granularity='block' asks for, it trains, and cannot be saved"):
        assert ThreadWorld(2).run(lambda comm: set_up(comm, "block")) == [False, False]


@pytest.mark.parametrize(("granularity", "what"), [("tensor", "tensors"), ("block", "blocks")])
def test_what_steps_more_than_elements_is_refused_beside_tensor_parallelism(granularity: Any, what: str) -> None:
    optimizer = SGD([Parameter(torch.ones(2))], 0.1)
    with pytest.raises(ValueError, match=f"SGD steps whole {what}, which tensor-parallel ranks have parts of"):
        choose_stepped([optimizer], Options(granularity=granularity), True, HOST)


def test_a_subclass_of_an_element_wise_optimizer_is_not_taken_for_one() -> None:
    assert why_not_in_pieces(Trusting(parameters())) == BY_TENSOR


@pytest.mark.parametrize("make", OF_ALL.values(), ids=OF_ALL)
def test_a_sum_over_all_parameters_is_told_from_one_of_each_tensor(make: Callable[[Any], Optimizer]) -> None:
    assert why_not_in_pieces(make(parameters())) == BY_ALL


def test_lbfgs_is_known_to_look_at_more_than_elements() -> None:
    assert why_not_in_pieces(torch.optim.LBFGS(parameters())) in (BY_ALL, BY_TENSOR)


class Slower(torch.optim.AdamW):
    """Changes an option, which is no harm; a scheduler may have begun with a rate of nothing."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.5
        return super().step(closure)


def test_a_harmless_subclass_is_found_to_be_harmless_also_under_a_scheduler() -> None:
    optimizer = Slower(parameters(), fused=True)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    assert why_not_in_pieces(optimizer) is None


def test_what_others_have_put_in_the_place_of_its_methods_is_not_copied() -> None:
    """A scheduler, an engine and Fabric's strategy do; what they hold may be larger than the model."""
    optimizer = Slower(parameters())
    for name in ("step", "train", "eval", "load_state_dict"):
        vars(optimizer)[name] = partial(print, Lock())  # cannot be copied
    assert why_not_in_pieces(optimizer) is None


class Lookahead(Optimizer):
    """Wraps another one, whose groups and state are its own; every second step goes half the way back."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.taken = base, 0
        super().__init__(base.param_groups, {})
        self.param_groups, self.state = base.param_groups, base.state
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.taken += 1


def test_trying_a_wrapper_touches_neither_it_nor_what_it_wraps() -> None:
    held = parameters((30, 20), (20,))
    for base, reason in ((torch.optim.AdamW(held), None), (made("Plain", WHOLE["LARS"])(held), BY_TENSOR)):
        for p in held:
            p.grad = torch.ones_like(p)
        wrapper = Lookahead(base)
        torch.optim.lr_scheduler.ConstantLR(base)
        before = torch.random.get_rng_state()
        assert why_not_in_pieces(wrapper) == reason
        assert torch.random.get_rng_state().equal(before)
        assert (wrapper.taken, len(base.state)) == (0, 0)
        assert all(p.eq(1).all() for p in held)


class Unheard(Optimizer):
    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        raise RuntimeError("needs a certain device")


def test_pieces_that_are_asked_for_and_right_are_nothing_to_warn_of(recwarn: pytest.WarningsRecorder) -> None:
    def set_up(comm: Comm) -> None:
        model = nn.Linear(4, 4)
        optimizer = Slower(model.parameters())
        Engine(model, [optimizer], stage=2, comm=comm, options=Options(granularity="element")).close()

    ThreadWorld(2).run(set_up)
    assert not [warning for warning in recwarn if issubclass(warning.category, UserWarning)]


def test_what_cannot_be_tried_is_not_trusted() -> None:
    told = why_not_in_pieces(Unheard(parameters()))
    assert told == "could not be tried on small tensors (RuntimeError: needs a certain device)"


def test_what_cannot_be_copied_trains_as_its_user_says() -> None:
    """It holds a lock, as others hold a process group."""

    def set_up(comm: Comm) -> bool:
        model = nn.Linear(4, 4)
        optimizer = made("Holds", WHOLE["LAMB"])(model.parameters())
        optimizer.lock = Lock()  # type: ignore[attr-defined]
        assert "could not be tried" in str(why_not_in_pieces(optimizer))
        assert state_tensors_of(optimizer) == 2
        options = Options(granularity="tensor")
        engine = Engine(model, [optimizer], stage=2, comm=comm, options=options)
        model(torch.ones(2, 4)).sum().backward()
        before = engine.states.full_model()["weight"]
        optimizer.step()
        return not torch.equal(engine.states.full_model()["weight"], before)

    assert all(ThreadWorld(2).run(set_up))


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)])
def test_a_scheduler_that_begins_with_no_learning_rate_hides_nothing(lr: Any) -> None:
    assert why_not_in_pieces(made("Plain", WHOLE[next(iter(WHOLE))])(parameters(), lr=lr)) == BY_TENSOR


def test_an_optimizer_that_changes_nothing_when_it_is_tried_steps_pieces_and_is_told_of() -> None:
    def set_up(comm: Comm) -> bool:
        model = nn.Linear(4, 4)
        engine = Engine(model, [made("Idle", lambda p, state: 0 * p.grad)(model.parameters())], stage=2, comm=comm)
        steps_pieces = not engine.regrouping.imbalance
        engine.close()
        return steps_pieces

    with pytest.warns(UserWarning, match=r"Idle changed nothing when it was tried.*granularity='tensor'"):
        assert ThreadWorld(2).run(set_up) == [True, True]


def counted_in_a_tensor(p: Tensor, state: dict[str, Any]) -> Tensor:
    state["step"] = state.get("step", torch.zeros(())) + 1
    state["mean"] = p.grad.lerp(state.get("mean", p.grad), 0.9)
    return state["mean"]


def test_state_is_counted_by_tensors_of_the_parameters_shape_in_the_group_that_keeps_most() -> None:
    one, other = parameters((4, 4), (4,))
    assert state_tensors_of(made("Plain", counted_in_a_tensor)([one])) == 1
    assert state_tensors_of(torch.optim.Adam([{"params": [one]}, {"params": [other], "amsgrad": True}])) == 3


def test_state_is_counted_without_a_step_of_the_optimizer() -> None:
    held = parameters((4, 4))
    held[0].grad = torch.ones(4, 4)
    assert state_tensors_of(torch.optim.AdamW(held)) == 2
    assert state_tensors_of(Lookahead(torch.optim.SGD(held, lr=0.1, momentum=0.9))) == 1
    assert state_tensors_of(Unheard(held)) == 2
    assert held[0].eq(1).all()


KEPT: list[tuple[type[Any], dict[str, Any]]] = [
    *((kind, {}) for kind in sorted(ELEMENT_WISE, key=repr)),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"amsgrad": True, "fused": True}),
    *((torch.optim.RMSprop, {"momentum": m, "centered": c}) for m in (0.0, 0.9) for c in (False, True)),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
]


@pytest.mark.parametrize(("kind", "options"), KEPT, ids=lambda value: getattr(value, "__name__", ""))
def test_what_torchs_own_optimizers_keep_is_known_without_a_step(kind: Any, options: dict[str, Any]) -> None:
    (held,) = parameters((3, 3))
    optimizer = kind([held], lr=0.1, **options)
    with patch.object(kind, "step") as step:
        known = state_tensors_of(optimizer)
    assert not step.called
    held.grad = torch.ones(3, 3).to_sparse() if kind is torch.optim.SparseAdam else torch.ones(3, 3)
    optimizer.step()
    assert known == sum(torch.is_tensor(made) and made.shape == held.shape for made in optimizer.state[held].values())


class OfAll(ByFormula):
    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step(closure)

    def change(self, p: Tensor, state: dict[str, Any]) -> Tensor:  # type: ignore[override]
        return p.grad


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_that_looks_at_all_parameters_is_refused_unless_the_user_insists(stage: int) -> None:
    def set_up(comm: Comm, **options: Any) -> None:
        model = nn.Linear(4, 4)
        Engine(model, [OfAll(model.parameters())], stage=stage, comm=comm, options=Options(**options)).close()

    for options in ({}, {"granularity": "tensor"}):
        with pytest.raises(ValueError, match=r"OfAll looks at all parameters together, and each rank.*stage=0"):
            ThreadWorld(2).run(lambda comm, options=options: set_up(comm, **options))
    with pytest.warns(UserWarning, match="not DDP's"):
        ThreadWorld(2).run(lambda comm: set_up(comm, granularity="element"))
