"""Optimizers written from the formulas of papers, under names that nobody has heard of."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer


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
    return average(state, "m", p.grad, beta)


def average(state: dict[str, Any], name: str, value: Tensor, beta: float = 0.9) -> Tensor:
    state[name] = beta * state.get(name, torch.zeros_like(value)) + (1 - beta) * value
    return state[name]


def count(state: dict[str, Any]) -> int:
    state["count"] = state.get("count", 0) + 1
    return state["count"]


def adam(p: Tensor, state: dict[str, Any]) -> Tensor:
    return momentum(p, state) / (average(state, "v", p.grad**2, 0.99).sqrt() + 1e-8)


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
    """Adafactor, arXiv 1804.04235."""
    if p.dim() < 2:
        return momentum(p, state)
    square = p.grad**2
    rows, columns = square.mean(-1, keepdim=True), square.mean(-2, keepdim=True)
    return p.grad / (rows * columns / rows.mean()).sqrt()


def came(p: Tensor, state: dict[str, Any]) -> Tensor:
    """Confidence-guided factored moments, 2307.02047."""
    if p.dim() < 2:
        return adam(p, state)

    def spread(name: str, square: Tensor) -> Tensor:
        rows = average(state, name + " rows", square.mean(-1, keepdim=True))
        columns = average(state, name + " columns", square.mean(-2, keepdim=True))
        return (rows * columns / rows.mean(-2, keepdim=True)).sqrt()

    update = p.grad / spread("square", p.grad**2 + 1e-12)
    update = update / (update.square().mean().sqrt()).clamp(min=1.0)
    smooth = momentum(p, state) if "m" in state else average(state, "m", update)
    state["m"] = 0.9 * smooth + 0.1 * update
    return state["m"] / spread("instability", (update - state["m"]) ** 2 + 1e-12)


def root(matrix: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** power) @ vectors.t()


def shampoo(p: Tensor, state: dict[str, Any]) -> Tensor:
    """1802.09568."""
    if p.dim() < 2:
        return adam(p, state)
    g = p.grad.flatten(1)
    state["left"] = state.get("left", 1e-3 * torch.eye(g.shape[0], dtype=g.dtype)) + g @ g.t()
    state["right"] = state.get("right", 1e-3 * torch.eye(g.shape[1], dtype=g.dtype)) + g.t() @ g
    return (root(state["left"], -0.25) @ g @ root(state["right"], -0.25)).view_as(p)


def soap(p: Tensor, state: dict[str, Any]) -> Tensor:
    """Adam in Shampoo's eigenbasis, 2409.11321."""
    if p.dim() < 2:
        return adam(p, state)
    g = p.grad.flatten(1)
    left = torch.linalg.eigh(average(state, "left", g @ g.t()))[1]
    right = torch.linalg.eigh(average(state, "right", g.t() @ g))[1]
    m, turned = momentum(p, state).flatten(1), left.t() @ g @ right
    step = (left.t() @ m @ right) / (average(state, "v", turned**2, 0.99).sqrt() + 1e-8)
    return (left @ step @ right.t()).view_as(p)


def galore(p: Tensor, state: dict[str, Any]) -> Tensor:
    """Adam of rank 2, in a basis that is renewed every third step, 2403.03507."""
    if p.dim() < 2:
        return adam(p, state)
    g = p.grad.flatten(1)
    if count(state) % 3 == 1:
        state["basis"] = torch.linalg.svd(g, full_matrices=False)[0][:, :2].clone()
    low = state["basis"].t() @ g
    step = average(state, "m", low) / (average(state, "v", low**2, 0.99).sqrt() + 1e-8)
    return (state["basis"] @ step).view_as(p)


def sm3(p: Tensor, state: dict[str, Any]) -> Tensor:
    """A second moment for each row and column, 1901.11150."""
    if p.dim() < 2:
        return adam(p, state)
    rows, columns = state.get("rows", torch.zeros(())), state.get("columns", torch.zeros(()))
    v = torch.minimum(rows, columns) + p.grad**2
    state["rows"], state["columns"] = v.amax(-1, keepdim=True), v.amax(-2, keepdim=True)
    return p.grad / (v.sqrt() + 1e-8)


def novograd(p: Tensor, state: dict[str, Any]) -> Tensor:
    """A second moment for each layer, 1905.11286."""
    v = average(state, "v", p.grad.square().sum(), 0.95)
    return average(state, "m", p.grad / (v.sqrt() + 1e-8) + 0.01 * p)


def adam_mini(p: Tensor, state: dict[str, Any]) -> Tensor:
    """2406.16793."""
    return momentum(p, state) / (average(state, "v", p.grad.square().mean(), 0.99).sqrt() + 1e-8)


def adamp(p: Tensor, state: dict[str, Any]) -> Tensor:
    """What is along the weight is taken out of the update, 2006.08217."""
    step = adam(p, state)
    if p.dim() < 2:
        return step
    along = (p * p.grad).sum().abs() / (p.norm() * p.grad.norm() + 1e-8)
    direction = p / (p.norm() + 1e-8)
    return step - direction * (direction * step).sum() if along < 0.5 else step


def fromage(p: Tensor, state: dict[str, Any]) -> Tensor:
    """2002.03432, with its rate of 0.1."""
    return (p + p.grad * p.norm() / (p.grad.norm() + 1e-8)) / 1.01**0.5 - p / 1.01


def clips_units(p: Tensor, state: dict[str, Any]) -> Tensor:
    """Adaptive gradient clipping by rows, 2102.06171."""
    if p.dim() < 2:
        return p.grad
    dims = tuple(range(1, p.dim()))
    size, grad = p.norm(dim=dims, keepdim=True).clamp(min=1e-3), p.grad.norm(dim=dims, keepdim=True)
    return torch.where(grad > 0.01 * size, p.grad * (0.01 * size / grad.clamp(min=1e-6)), p.grad)


def stable_adamw(p: Tensor, state: dict[str, Any]) -> Tensor:
    """A rate that falls with the update's root mean square, 2304.13013."""
    v = average(state, "v", p.grad**2, 0.5)
    return momentum(p, state) / (v.sqrt() + 1e-8) / (p.grad**2 / (v + 1e-12)).mean().sqrt().clamp(min=1.0)


def stable_from_the_start(p: Tensor, state: dict[str, Any]) -> Tensor:
    """The same without a bias, as packages have it: it looks only at gradients that have grown, and not all alike."""
    number = count(state)
    beta = (0.99 - 0.99**number) / (1 - 0.99**number)
    v = average(state, "v", p.grad**2, beta)
    return momentum(p, state) / (v.sqrt() + 1e-8) / (p.grad**2 / (v + 1e-12)).mean().sqrt().clamp(min=1.0)


def scales_of_32(p: Tensor, state: dict[str, Any]) -> Tensor:
    """Momentum in 8 bits, with one scale for each group of 32, in state of its own."""
    m = p.grad if "codes" not in state else 0.9 * spread_out(state, p) + p.grad
    groups = nn.functional.pad(m.flatten(), (0, -m.numel() % 32)).reshape(-1, 32)
    state["scales"] = groups.abs().amax(1) / 127 + 1e-30
    state["codes"] = (groups / state["scales"][:, None]).round().flatten()[: m.numel()].view_as(m)
    return spread_out(state, p)


def spread_out(state: dict[str, Any], p: Tensor) -> Tensor:
    scales = state["scales"].repeat_interleave(32)[: p.numel()]
    return state["codes"] * scales.view_as(p)


def lars_at_last(p: Tensor, state: dict[str, Any]) -> Tensor:
    """Plain in its first steps."""
    return p.grad * p.norm() / p.grad.norm() if count(state) > 4 else p.grad


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


def sophia(p: Tensor, state: dict[str, Any]) -> Tensor:
    """2305.14342, with the squared gradient for a curvature, taken every third step."""
    if count(state) % 3 == 1:
        average(state, "h", p.grad**2, 0.99)
    return (momentum(p, state) / (0.05 * state["h"]).clamp(min=1e-12)).clamp(-1, 1)


def adan(p: Tensor, state: dict[str, Any]) -> Tensor:
    """2208.06677."""
    change = p.grad - state.get("before", p.grad)
    state["before"] = p.grad.clone()
    n = average(state, "n", (p.grad + 0.92 * change) ** 2, 0.99)
    return (momentum(p, state) + 0.92 * average(state, "change", change, 0.92)) / (n.sqrt() + 1e-8)


def yogi(p: Tensor, state: dict[str, Any]) -> Tensor:
    square, v = p.grad**2, state.get("v", torch.zeros_like(p))
    state["v"] = v - 0.01 * (v - square).sign() * square
    return momentum(p, state) / (state["v"].abs().sqrt() + 1e-3)


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
    "CAME": came,
    "Shampoo": shampoo,
    "SOAP": soap,
    "GaLore": galore,
    "SM3": sm3,
    "NovoGrad": novograd,
    "AdamMini": adam_mini,
    "AdamP": adamp,
    "Fromage": fromage,
    "ClipsUnits": clips_units,
    "StableAdamW": stable_adamw,
    "StableFromTheStart": stable_from_the_start,
    "ScalesOf32": scales_of_32,
    "AtLast": lars_at_last,
}
PIECES = {
    "Lion": lambda p, state: (0.5 * state.get("m", 0.0) + momentum(p, state)).sign(),
    "SignSGD": lambda p, state: p.grad.sign(),
    "Cautious": lambda p, state: momentum(p, state) * (state["m"] * p.grad > 0),
    "Tanh": lambda p, state: torch.tanh(momentum(p, state)),
    "Sophia": sophia,
    "Adan": adan,
    "Yogi": yogi,
    "AdaBelief": lambda p, state: (
        momentum(p, state) / (average(state, "v", (p.grad - state["m"]) ** 2, 0.99).sqrt() + 1e-8)
    ),
}


def agg_mo(p: Tensor, state: dict[str, Any]) -> Tensor:
    """A dictionary of momenta, 1804.00325; and the gradients before, in a list."""
    momenta = state.setdefault("momenta", {beta: torch.zeros_like(p) for beta in (0.9, 0.5)})
    for beta, momentum in momenta.items():
        momentum.mul_(beta).add_(p.grad)
    state["before"] = [*state.get("before", [])[-1:], p.grad.clone()]
    return sum(momenta.values()) / len(momenta) + 0.1 * sum(state["before"])


class Trusting(AdamW):
    """A subclass of an element-wise optimizer, with a norm under a name of its own."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    p.grad.mul_(p.detach().norm() / (p.grad.norm() + 1e-6))
        return super().step(closure)


class ClipsInside(AdamW):
    """A norm over all parameters, in a subclass of an element-wise optimizer."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


class DAdaptation(Optimizer):
    """SGD that finds its own rate from sums over all parameters, 2301.07733; Prodigy does as much."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"d": 1e-3})
        self.weighted = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        d = self.param_groups[0]["d"]
        self.weighted += float(sum(d * (p.grad * self.state[p].get("s", torch.zeros_like(p))).sum() for p in stepped))
        for p in stepped:
            self.state[p]["s"] = self.state[p].get("s", torch.zeros_like(p)) + d * p.grad
        size = float(sum(self.state[p]["s"].square().sum() for p in stepped)) ** 0.5
        for group in self.param_groups:
            group["d"] = max(d, self.weighted / max(size, 1e-12))
        for p in stepped:
            p.sub_(self.param_groups[0]["d"] * p.grad)


class Prodigy(Optimizer):
    """2306.06101: the distance from where it began, over all parameters, which it takes for very small at first."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self.d, self.numerator = [1e-6], [0.0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        d, numerator, size = self.d[0], 0.9 * self.numerator[0], 0.0
        for p in stepped:
            state = self.state[p]
            begin = state.setdefault("begin", p.clone())
            numerator += float(d * d * (p.grad * (begin - p)).sum())
            average(state, "s", d * d * p.grad)
            size += float(state["s"].abs().sum())
        self.d, self.numerator = [max(d, numerator / max(size, 1e-30))], [numerator]
        for p in stepped:
            p.sub_(self.param_groups[0]["lr"] * self.d[0] * adam(p, self.state[p]))


OF_ALL = {
    "ClipsInside": lambda parameters: ClipsInside(parameters, weight_decay=0.0, eps=1.0),
    "D": DAdaptation,
    "Prodigy": Prodigy,
}
