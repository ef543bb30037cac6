"""What an optimizer looks at is found by trying it: the formulas of papers, under names that nobody has heard of."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.run.engine import Engine, Options
from lightning_zero.shards.probe import state_tensors_of, why_not_in_pieces
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.threads import ThreadWorld

BY_TENSOR, BY_ALL = "looks at whole tensors", "looks at all parameters together"


class ByFormula(Optimizer):
    """Steps each tensor by `change(p, state)`; keeps its momentum."""

    change: Callable[["ByFormula", Tensor, dict[str, Any]], Tensor]

    def __init__(self, parameters: Iterable[Any], lr: float = 0.1, **options: Any) -> None:
        super().__init__(parameters, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.change(p, self.state[p]))


def made(name: str, change: Any) -> type[ByFormula]:
    return type(name, (ByFormula,), {"change": lambda self, p, state: change(p, state)})


def momentum(p: Tensor, state: dict[str, Any], beta: float = 0.9) -> Tensor:
    state["m"] = beta * state.get("m", torch.zeros_like(p)) + (1 - beta) * p.grad
    return state["m"]


def orthogonal(p: Tensor, state: dict[str, Any]) -> Tensor:
    """Newton-Schulz, as Muon does with matrices."""
    m = momentum(p, state)
    if m.dim() < 2:
        return m.sign()
    x = m.flatten(1) / m.norm()
    for _ in range(5):
        x = 1.5 * x - 0.5 * x @ x.t() @ x
    return x.view_as(m)


def factored(p: Tensor, state: dict[str, Any]) -> Tensor:
    if p.dim() < 2:
        return momentum(p, state)
    square = p.grad**2
    rows, columns = square.mean(-1, keepdim=True), square.mean(-2, keepdim=True)
    return p.grad / (rows * columns / rows.mean()).sqrt()


def decays_matrices(p: Tensor, state: dict[str, Any]) -> Tensor:
    return momentum(p, state) + (0.1 * p if p.dim() > 1 else 0.0)


def in_blocks(p: Tensor, state: dict[str, Any]) -> Tensor:
    """Momentum of large tensors in 8 bits, with one scale for each block of 256."""
    m = momentum(p, state)
    if m.numel() < 4096:
        return m
    blocks = m.reshape(-1, 256)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    state["m"] = ((blocks / scales).round() * scales).view_as(m)
    return state["m"]


WHOLE = {
    "LARS": lambda p, state: p.grad * p.norm() / p.grad.norm(),
    "LAMB": lambda p, state: momentum(p, state) * p.norm() / (momentum(p, state).norm() + 1e-6),
    "Centralised": lambda p, state: p.grad - p.grad.mean(),
    "Muon": orthogonal,
    "Factored": factored,
    "PerRow": lambda p, state: p.grad / (p.grad.norm(dim=-1, keepdim=True) if p.dim() > 1 else 1.0),
    "ClipsEachTensor": lambda p, state: p.grad / max(1.0, float(p.grad.norm())),
    "DecaysMatrices": decays_matrices,
    "EightBits": in_blocks,
    "Noisy": lambda p, state: p.grad + torch.randn_like(p),
}
PIECES = {
    "Lion": lambda p, state: (0.5 * state.get("m", 0.0) + momentum(p, state)).sign(),
    "SignSGD": lambda p, state: p.grad.sign(),
    "Cautious": lambda p, state: momentum(p, state) * (state["m"] * p.grad > 0),
    "Tanh": lambda p, state: torch.tanh(momentum(p, state)),
}


def parameters(*shapes: tuple[int, ...]) -> list[Parameter]:
    return [Parameter(torch.ones(shape)) for shape in shapes or ((30, 20), (20,), (3, 4, 5), ())]


@pytest.mark.parametrize("name", WHOLE)
def test_what_looks_at_whole_tensors_is_found_whatever_its_name(name: str) -> None:
    assert why_not_in_pieces(made("Plain", WHOLE[name])(parameters())) in (BY_TENSOR, BY_ALL)


def test_matrices_alone_are_tried_where_an_optimizer_has_matrices_alone() -> None:
    assert why_not_in_pieces(torch.optim.Muon(parameters((8, 4), (4, 4)), lr=0.1)) == BY_TENSOR
    assert why_not_in_pieces(torch.optim.Adafactor(parameters((8, 4)))) == BY_TENSOR
    assert why_not_in_pieces(made("Vectors", decays_matrices)(parameters((8,)))) is None


@pytest.mark.parametrize("name", PIECES)
def test_what_goes_by_element_is_found_to_do_so(name: str) -> None:
    assert why_not_in_pieces(made("Plain", PIECES[name])(parameters())) is None


class ClipsInside(torch.optim.AdamW):
    """A subclass of an element-wise optimizer, which is not."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


def test_a_norm_over_all_parameters_inside_the_step_is_told_from_one_of_each_tensor() -> None:
    assert why_not_in_pieces(ClipsInside(parameters(), weight_decay=0.0, eps=1.0)) == BY_ALL
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


def test_what_cannot_be_tried_is_not_trusted() -> None:
    told = why_not_in_pieces(Unheard(parameters()))
    assert told == "could not be tried on small tensors (RuntimeError: needs a certain device)"


def test_state_is_counted_without_a_step_of_the_optimizer() -> None:
    held = parameters((4, 4))
    held[0].grad = torch.ones(4, 4)
    assert state_tensors_of(torch.optim.AdamW(held)) == 2
    assert state_tensors_of(Lookahead(torch.optim.SGD(held, lr=0.1, momentum=0.9))) == 1
    assert state_tensors_of(Unheard(held)) == 2
    assert held[0].eq(1).all()


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
            ThreadWorld(2, 10).run(lambda comm, options=options: set_up(comm, **options))
    with pytest.warns(UserWarning, match="not DDP's"):
        ThreadWorld(2, 10).run(lambda comm: set_up(comm, granularity="element"))
