"""`Trial`: a copy of an optimizer that steps small tensors, and leaves no trace in training; see `probe`."""

import copy
import itertools
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.shards.moment import wrapped_in
from lightning_zero.shards.unseen import unseen
from lightning_zero.torch_private import COLLECTIVES, TorchDispatchMode

Groups = Sequence[Sequence[Tensor]]  # one sequence for each parameter group of an optimizer

_ONE_AT_A_TIME = Lock()


class CommunicatesError(RuntimeError):
    """A step has come to a collective."""


class _Alone(TorchDispatchMode):
    """Raises at collectives: one rank may try what others do not, and they would wait for each other."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", COLLECTIVES):
            raise CommunicatesError(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def trying(optimizer: Optimizer) -> Iterator[None]:
    """Inside, steps of copies of an optimizer leave training's random numbers and what its class records alone, come to
    no other rank, and compile nothing: what torchao's optimizers compile for each small shape took a minute and a half.
    Random state and compiler stance are those of the process, so ranks that are threads take turns: a stance that one
    of them restored while another one tries would stay."""
    with (
        _ONE_AT_A_TIME,
        unseen(map(type, wrapped_in(optimizer))),
        restoring_random_state(),
        torch.compiler.set_stance("force_eager"),
        _Alone(),
    ):
        yield


@contextmanager
def restoring_random_state() -> Iterator[None]:
    """Restores, in the end, the state that torch on the host, numpy and Python draw random numbers from."""
    state, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(of_numpy)


def unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an optimizer's `step` without the hooks that torch wraps around it."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


@final
class Trial:
    """A copy of an optimizer, which steps what one rank has of the tensors of each group."""

    def __init__(self, optimizer: Optimizer, values: Groups, part: Callable[[Tensor, int], Tensor | None]) -> None:
        self._part = part
        self._values = self._cut(values)
        tensors = zip(itertools.chain(*values), self._values, strict=True)
        self._stepped = [Parameter(whole.new_empty(0) if own is None else own.clone()) for whole, own in tensors]
        left = iter(self._stepped)
        self.optimizer = trial_of(optimizer, [[next(left) for _ in group] for group in values])
        self._counts: dict[tuple[int, Any], float] = {}  # before the latest step, by id of the dictionary and key

    def _cut(self, groups: Groups) -> list[Tensor | None]:
        return [self._part(tensor, index) for index, tensor in enumerate(itertools.chain(*groups))]

    def step(self, gradients: Groups) -> None:
        """Takes one step, and writes the results into this rank's part of the tensors."""
        for parameter, grad in zip(self._stepped, self._cut(gradients), strict=True):
            parameter.grad = None if grad is None else grad.clone()
        self._counts = {(id(holder), name): float(holder[name]) for holder, name in _numbers(self.optimizer)}
        _step(self.optimizer)
        for parameter, value in zip(self._stepped, self._values, strict=True):
            if value is not None:
                value.copy_(parameter)

    def numbers(self) -> dict[tuple[int, int, Any], float]:
        """Returns the single numbers that the optimizer, and those that it wraps, keep for each tensor of which this
        rank has anything, by index of optimizer and tensor."""
        wrapped, found = wrapped_in(self.optimizer), dict[tuple[int, int, Any], float]()
        for at, (parameter, value) in enumerate(zip(self._stepped, self._values, strict=True)):
            for number, one in enumerate(wrapped):
                state = one.state.get(parameter) if value is not None else None
                kept = state.items() if isinstance(state, dict) else ()
                found.update({(number, at, name): float(value) for name, value in kept if _is_single(value)})
        return found

    def move_on(self, steps: int) -> None:
        """Adds `steps` to every number that has counted the latest step."""
        for holder, name in _numbers(self.optimizer):
            before, now = self._counts.get((id(holder), name)), holder[name]
            if before is not None and now == before + 1:
                holder[name] = now + steps


def _numbers(optimizer: Optimizer) -> list[tuple[dict[Any, Any], Any]]:
    """Returns where an optimizer, and those that it wraps, keep single numbers: dictionary and key of each."""
    return [(holder, name) for holder in holders(optimizer) for name, value in holder.items() if _is_single(value)]


def holders(optimizer: Optimizer) -> list[dict[Any, Any]]:
    """Returns the dictionaries in which an optimizer, and those that it wraps, keep what they know."""
    optimizers = wrapped_in(optimizer)
    return [holder for one in optimizers for holder in (vars(one), *one.param_groups, *one.state.values())]


def _is_single(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _step(trial: Optimizer) -> None:
    given = [(p, p.grad, p.clone()) for group in trial.param_groups for p in group["params"] if p.grad is not None]

    def closure() -> Tensor:
        """A quadratic loss, which has the given gradients at the start. Where SAM moves to there are others, and a line
        search gets somewhere, as it would not where the loss is constant."""
        loss = given[0][0].new_zeros(())
        for parameter, grad, start in given:
            way = parameter.detach() - start
            parameter.grad = grad + way
            loss += (way * (grad + way / 2)).sum()
        return loss

    step = unhooked(type(trial).step)
    try:
        step(trial)
    except (TypeError, AssertionError):  # it needs a closure
        step(trial, closure)


def trial_of(optimizer: Optimizer, groups: Groups) -> Optimizer:
    """Copies an optimizer, and those that it wraps, with other parameters and without state and hooks."""
    memo: dict[int, Any] = {}
    for group, others in zip(optimizer.param_groups, groups, strict=True):
        memo[id(group["params"])] = others  # also where something else holds this list
        for parameter in group["params"]:
            memo[id(parameter)] = others[0] if others else parameter
    trial = _copied(optimizer, memo)
    if callable(train := getattr(type(trial), "train", None)):  # schedule-free optimizers step in this mode only
        train(trial)
    return trial


def _copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Copies attribute by attribute: a copy by `copy.deepcopy` would have torch's own attributes only."""
    trial = object.__new__(type(optimizer))
    memo[id(optimizer)] = trial
    own = vars(trial)
    # All of torch's tables of hooks are left empty: what hooks refer to, an engine among it, would be copied, too.
    hooks = (name for name, value in vars(optimizer).items() if isinstance(value, OrderedDict))
    own.update({name: OrderedDict() for name in hooks if name.endswith("_hooks")})
    state: dict[Any, Any] = optimizer.state
    counts = {key: copy.deepcopy(value) for key, value in state.items() if isinstance(key, str)}
    own["state"] = memo.setdefault(id(optimizer.state), defaultdict(dict, counts))
    for name, value in vars(optimizer).items():
        # A scheduler wraps `step` of the optimizer itself, an engine `train` and `eval`, Fabric's strategy the last.
        if name in own or name in ("step", "train", "eval", "load_state_dict"):
            continue
        own[name] = _copied(value, memo) if isinstance(value, Optimizer) else copy.deepcopy(value, memo)
    for group in trial.param_groups:
        lr = group.get("lr")  # None where a scheduler sets it later
        if isinstance(lr, Tensor):
            group["lr"] = torch.full_like(lr, 0.01)
        elif isinstance(lr, float | int):
            group["lr"] = 0.01
    return trial
