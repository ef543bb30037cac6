"""What users change in the middle of training: gradients, values between forward and backward, and what trains."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from models import seeded
from random_models import Model


def _first(tensor: Tensor) -> Tensor:
    return tensor.view(-1)[:1]


def _zero_first_item(grad: Tensor) -> None:
    grad[0 if grad.dim() else ()] = 0


def _edit_kept_views(grad: Tensor) -> None:
    views = [_first(grad), grad.t(), grad.detach()]
    views[0].add_(0.125)
    views[1].mul_(0.5)
    views[2].clamp_(-0.01, 0.01)


# Of gradients, between backward and step. None of them is empty.
OF_GRADIENTS: dict[str, Callable[[Tensor], Any]] = {
    "whole": lambda grad: grad.mul_(0.5),
    "item": _zero_first_item,
    "view": lambda grad: _first(grad).zero_(),
    "rows": lambda grad: [row.clamp_(-0.01, 0.01) for row in (grad if grad.dim() else [grad])],
    "transposed": lambda grad: (grad.t()[0] if grad.dim() == 2 else grad).mul_(0.5),
    "diagonal": lambda grad: (grad.diagonal() if grad.dim() == 2 else grad).fill_(0.25),
    "chunk": lambda grad: [part.mul_(0.75) for part in grad.view(-1).chunk(2)],
    "unbind": lambda grad: (grad.unbind()[-1] if grad.dim() else grad).mul_(2),
    "data": lambda grad: _first(grad.data).zero_(),
    "out": lambda grad: torch.mul(grad, 0.5, out=grad),
    "view as out": lambda grad: torch.add(_first(grad), 0.125, out=_first(grad)),
    "several views": _edit_kept_views,
}


def _assign(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.flip(0) * 0.9 if parameter.dim() else parameter.data * 0.9


# Of parameters, between forward and backward.
OF_DATA: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda parameter: parameter.data.mul_(0.9),
    "view": lambda parameter: _first(parameter.data).fill_(0.25),
    "assigned": _assign,
}


def trained_by(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    return [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]


def _give(model: Model, optimizers: list[Optimizer], rank: int) -> None:
    """To the last optimizer, a group of all that it could train."""
    given = set(trained_by(optimizers))
    if rest := [parameter for parameter in model.parameters() if parameter.requires_grad and parameter not in given]:
        optimizers[-1].add_param_group({"params": rest, "lr": 0.02})


def _thaw(model: Model, optimizers: list[Optimizer], rank: int) -> None:
    model.requires_grad_(True)
    _give(model, optimizers, rank)


def _freeze(model: Model, optimizers: list[Optimizer], rank: int) -> None:
    for parameter in trained_by(optimizers)[1::2]:
        parameter.requires_grad_(False)


def _grow(model: Model, optimizers: list[Optimizer], rank: int) -> None:
    """The ranks start from different values, which the first one's must replace."""
    if model.more is None:
        width = model.head.in_features
        model.more = seeded(lambda: nn.Linear(width, width), rank)
        optimizers[-1].add_param_group({"params": model.more.parameters()})


def _assign_all(model: Model, optimizers: list[Optimizer], rank: int) -> None:
    """Other parameters take the place of all; tied ones are tied no more."""
    state = {name: 0.9 * value if value.is_floating_point() else value for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for number, optimizer in enumerate(optimizers):
        optimizer.state.clear()
        del optimizer.param_groups[1:]
        optimizer.param_groups[0]["params"] = trainable[number :: len(optimizers)]


# Between two steps.
OF_WHAT_TRAINS: dict[str, Callable[[Model, list[Optimizer], int], None]] = {
    "thaw": _thaw,
    "give": _give,
    "freeze": _freeze,
    "grow": _grow,
    "assign": _assign_all,
}
