"""DDP in one process: every rank's gradients computed in turn, averaged in rank order, one ordinary step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from models import Maker, clone, loss_of, weights


@dataclass
class Run:
    """What a training run left behind."""

    losses: list[float] = field(default_factory=list)  # of rank 0's last micro-batch, each step
    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict = field(default_factory=dict)  # state_dict
    grad_norms: list[float] = field(default_factory=list)


def clip_like_torch(model: nn.Module, clip: str | None) -> list[float]:
    """Returns the norm, if it was asked for."""
    if clip == "norm":
        return [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()]
    if clip == "value":
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return []


def average_gradients(model: nn.Module, losses: Iterable[Callable[[], Tensor]]) -> None:
    """Of what each rank's loss gives, in the order of ranks, as DDP leaves them."""
    gathered = []
    for loss in losses:
        model.zero_grad()
        loss().backward()
        gathered.append([parameter.grad for parameter in model.parameters()])
    for parameter, first, *others in zip(model.parameters(), *gathered, strict=True):
        parameter.grad = None if first is None else sum(others, start=first.clone()) / len(gathered)


def ddp(
    model: nn.Module, make: Maker, *, world: int, accumulate: int = 1, clip: str | None = None, steps: int = 4
) -> Run:
    model, run = clone(model), Run()
    optimizer, scheduler = make(model)
    parameters = list(model.parameters())
    for step in range(steps):
        gathered = []
        for rank in range(world):
            model.zero_grad()
            for micro in range(accumulate):
                loss = loss_of(model, rank, step, micro) / accumulate
                loss.backward()
            if rank == 0:
                run.losses.append(loss.item())
            gathered.append([parameter.grad for parameter in parameters])
        for index, parameter in enumerate(parameters):
            mine = [grads[index] for grads in gathered]
            parameter.grad = None if mine[0] is None else sum(mine[1:], start=mine[0].clone()) / world
        run.grad_norms += clip_like_torch(model, clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    run.weights, run.optimizer = weights(model), optimizer.state_dict()
    return run
