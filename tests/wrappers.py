"""Optimizers that wrap others, keep state under other keys, or have modes; from the formulas of their papers."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """The loss, where `step` was given what computes it."""
    return None if closure is None else torch.enable_grad()(closure)()


class Lookahead(Optimizer):
    """arXiv 1907.08610: every `k` steps slow weights go the part `alpha` of the way to the fast ones. Groups and state
    are those of the optimizer that it wraps; the count is kept under a name."""

    def __init__(self, base: Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.k, self.alpha = base, k, alpha
        self._share()
        self.state["lookahead"] = {"steps": 0}

    def _share(self) -> None:
        self.param_groups, self.state = self.base.param_groups, self.base.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        begun = {p: p.clone() for p in stepped if "slow" not in self.state[p]}
        self.base.step()
        for p, slow in begun.items():
            self.state[p]["slow"] = slow
        self.state["lookahead"]["steps"] += 1
        if self.state["lookahead"]["steps"] % self.k == 0:
            for p in stepped:
                slow = self.state[p]["slow"]
                p.copy_(slow.add_(p - slow, alpha=self.alpha))
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)
        self._share()


class LookaheadApart(Optimizer):
    """The same, as some packages have it: slow weights in the state of the wrapped optimizer, which is not its own, and
    the count in the groups."""

    def __init__(self, base: Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.k, self.alpha = base, k, alpha
        self.param_groups = base.param_groups
        for group in self.param_groups:
            group["lookahead"] = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and "slow" not in self.base.state[p]:
                    self.base.state[p]["slow"] = p.clone()
        self.base.step()
        for group in self.param_groups:
            group["lookahead"] += 1
            for p in group["params"] if group["lookahead"] % self.k == 0 else ():
                if p.grad is not None:
                    slow = self.base.state[p]["slow"]
                    p.copy_(slow.add_(p - slow, alpha=self.alpha))
        return loss

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)
        self.param_groups = self.base.param_groups


class SAM(Optimizer):
    """arXiv 2010.01412, equation 2 for p = infinity, q = 1: climbs by ``rho * sign(gradient)``, and steps from where it
    was with the gradient there. The first closure is evaluated at the weights, the second one above them."""

    def __init__(self, parameters: Any, make: Callable[[Any], Optimizer], rho: float = 0.05) -> None:
        super().__init__(parameters, {"rho": rho})
        self.base = make(self.param_groups)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None, "SAM looks at the gradient twice"
        closure = torch.enable_grad()(closure)
        loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["before"] = p.clone()
                    p.add_(self.climb(p), alpha=group["rho"])
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(self.state[p]["before"])
        self.base.step()
        return loss

    def climb(self, p: Tensor) -> Tensor:
        return p.grad.sign()


class SAMByNorm(SAM):
    """For p = 2: by the gradient over its norm, of all parameters together."""

    def climb(self, p: Tensor) -> Tensor:
        norms = [q.grad.norm() for group in self.param_groups for q in group["params"] if q.grad is not None]
        return p.grad / (torch.stack(norms).norm() + 1e-12)


class SAMInTwoCalls(SAMByNorm):
    """As most have it: users call two methods with gradients of their own, and never `step`."""

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        climbs = [self.climb(p) for p in parameters]  # by a norm of all, before any has moved
        for p, climb in zip(parameters, climbs, strict=True):
            self.state[p]["before"] = p.data.clone()
            p.add_(climb, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["before"].clone()
        self.base.step()
        self.zero_grad()


class ScheduleFree(Optimizer):
    """arXiv 2405.15682, over SGD: steps z, evaluates the average x, and takes gradients at y between the two. Weights
    are y in training and x in evaluation; the state has z."""

    def __init__(self, parameters: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0, "trains": False})

    @torch.no_grad()
    def train(self) -> None:
        self._move(True, lambda beta: 1 - beta)

    @torch.no_grad()
    def eval(self) -> None:
        self._move(False, lambda beta: 1 - 1 / beta)

    def _move(self, trains: bool, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            if group["trains"] != trains:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight(group["beta"]))
                group["trains"] = trains

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        for group in self.param_groups:
            if not group["trains"]:
                raise RuntimeError("call train() before step()")
            weight, lr, beta = 1 / (group["k"] + 1), group["lr"], group["beta"]
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, weight).add_(p.grad, alpha=lr * (beta * (1 - weight) - 1))
                    z.sub_(p.grad, alpha=lr)
            group["k"] += 1
        return loss


class Unmade(LookaheadApart):
    """Has made itself without torch's help, as timm's Lookahead: of torch's hooks it has those around a step."""

    def __init__(self, base: Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.base, self.k, self.alpha = base, k, alpha
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, defaultdict(dict)
        for group in self.param_groups:
            group["lookahead"] = 0


class Averages(torch.optim.SGD):
    """Averages weights, and shows the averages in evaluation. After a step it takes it that every parameter has one."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            group["shows"] = "weights"
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("average", p.detach().clone()).lerp_(p.detach(), 0.5)
        return loss

    def eval(self) -> None:
        self.train(False)

    @torch.no_grad()
    def train(self, mode: bool = True) -> None:
        """Or what `eval` does, which calls it so: heavyball's do."""
        if mode:
            self._show("weights", lambda p, state: state["weights"])
        else:
            self._show("averages", lambda p, state: state.update(weights=p.clone()) or state["average"])

    def _show(self, what: str, value: Callable[[Tensor, dict[str, Any]], Tensor]) -> None:
        for group in self.param_groups:
            if group.get("shows", what) != what:
                group["shows"] = what
                for p in group["params"]:
                    p.copy_(value(p, self.state[p]))


class WithoutLoadHooks(LookaheadApart):
    """Has torch's hooks around its step, and no table for those of loading, which the wrapped optimizer does."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base)
        for name in [name for name in vars(self) if "load_state_dict" in name]:
            delattr(self, name)


class GroupsOfBase(LookaheadApart):
    """Its groups are a property, those of the optimizer that it wraps and has as `optimizer`, as Lightning has its."""

    def __init__(self, optimizer: Optimizer) -> None:
        own = {"base": optimizer, "optimizer": optimizer, "k": 2, "alpha": 0.5, "defaults": optimizer.defaults}
        self.__setstate__(own | {"state": optimizer.state})  # has torch's hooks, as unpickled ones have
        for group in self.param_groups:
            group["lookahead"] = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)
        self.state = self.base.state


class Counts(torch.optim.SGD):
    """Keeps the count of its steps under a name, as a tensor with a dimension: MADGRAD (2101.11075) does."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        self.state["k"] = self.state.get("k", torch.zeros(1)) + 1
        for group in self.param_groups:
            group["lr"] = 0.1 / float(self.state["k"])
        super().step()
        return loss


class CountsInGroups(torch.optim.SGD):
    """Keeps the count of its steps in groups, of those alone that list a gradient: heavyball's do."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        for group in self.param_groups:
            if any(p.grad is not None for p in group["params"]):
                group["steps"] = group.get("steps", 0) + 1
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=0.1 / group["steps"])
        return loss


class CountsInTable(torch.optim.SGD):
    """Keeps the count of its steps in a dictionary of its own, as heavyball's do, and the rate of each."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss, table = evaluated(closure), vars(self).setdefault("table", {"steps": 0})
        table["steps"] += 1
        table[f"rate {len(table)}"] = rate = 0.1 / len(table)
        for group in self.param_groups:
            group["lr"] = rate
        super().step()
        return loss


class Bare(LookaheadApart):
    """Has made itself without torch's help, and has nothing that torch's optimizers have but parameters and state."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.param_groups, self.state = base, base.param_groups, base.state


class Hoarder(torch.optim.SGD):
    """Keeps tensors where nobody can tell what they are of."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        self.state["seen"] = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        return loss


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def momentum(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


WRAPPERS: dict[str, Callable[[Any], Optimizer]] = {
    "Lookahead": lambda parameters: Lookahead(adamw(parameters)),
    "LookaheadApart": lambda parameters: LookaheadApart(momentum(parameters)),
    "Unmade": lambda parameters: Unmade(momentum(parameters)),
    "SAM": lambda parameters: SAM(parameters, momentum),
    "ScheduleFree": ScheduleFree,
    "GroupsOfBase": lambda parameters: GroupsOfBase(momentum(parameters)),
    "WithoutLoadHooks": lambda parameters: WithoutLoadHooks(momentum(parameters)),
    "Averages": lambda parameters: Averages(parameters, lr=0.1, momentum=0.9),
    "CountsInTable": lambda parameters: CountsInTable(parameters, lr=0.1),
    "Counts": lambda parameters: Counts(parameters, lr=0.1),
}
# A rank that has nothing of a group does not count there.
UNEVEN: dict[str, Callable[[Any], Optimizer]] = {
    "CountsInGroups": lambda parameters: CountsInGroups(parameters, lr=0.1)
}
