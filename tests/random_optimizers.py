"""The optimizers of a random training: their classes, the options of their groups, and schedules that change these."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR


class Extragradient(Optimizer):
    """Steps, and then from where it began, by the gradient of where it has come to: calls its closure twice."""

    def __init__(self, params: Any, lr: float = 0.05, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for is_trial in (True, False) if closure is not None else (True,):
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for group in self.param_groups:
                for p in group["params"]:
                    if is_trial:
                        self.state[p]["before"] = p.clone()
                    else:
                        p.copy_(self.state[p]["before"])
                    if p.grad is not None:
                        p.sub_(p.grad + group["weight_decay"] * p, alpha=group["lr"])
        return None if closure is None else loss


KINDS: dict[str, Callable[..., Optimizer]] = {
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True, weight_decay=0.1, foreach=True),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=0.01),
    "adadelta": lambda groups: torch.optim.Adadelta(groups, lr=0.5),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=0.01),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=0.01),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=0.01),
}
TWICE = {"extragradient": Extragradient}  # call a closure twice


def _by_group(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, [lambda step, n=n: 0.5 ** (step * n) for n in range(len(optimizer.param_groups))])


def _one_cycle(optimizer: Optimizer) -> LRScheduler:
    """Changes momentum, too, where there is one."""
    rates = [0.01 * (1 + number) for number in range(len(optimizer.param_groups))]
    cycles = bool({"betas", "momentum"} & optimizer.defaults.keys())
    return OneCycleLR(optimizer, rates, total_steps=5, cycle_momentum=cycles)


SCHEDULES: dict[str, Callable[[Optimizer], LRScheduler]] = {"by group": _by_group, "one cycle": _one_cycle}


def optimizer_of(kind: str, share: Sequence[nn.Parameter], groups: int) -> Optimizer:
    """Over `groups` that take turns at the parameters, each with options of its own."""
    optimizer = {**KINDS, **TWICE}[kind]([{"params": share[number::groups]} for number in range(groups)])
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] /= 1 + number
        if number % 2:
            group["weight_decay"] = 0.2
            group["maximize"] = not group.get("maximize", False)
            group["betas"] = (0.5, 0.75)
            group["foreach"] = not (group.get("foreach") or group.get("fused"))
    return optimizer
