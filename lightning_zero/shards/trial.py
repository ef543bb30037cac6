"""`Trial`: a copy of an optimizer that steps small tensors, and leaves no trace in training; see `probe`."""

import copy
import itertools
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.device import HOST
from lightning_zero.distributed_private import COLLECTIVES
from lightning_zero.shards.moment import wrapped_in
from lightning_zero.shards.unseen import unseen
from lightning_zero.torch_private import TorchDispatchMode

Groups = Sequence[Sequence[Tensor]]  # one sequence for each parameter group of an optimizer

LEFT_IN_PIECES = "_left_in_pieces"  # attribute of an optimizer: the `OptimizerState` of an engine that has ended
BLOCK = 256  # elements that share one scale in 8-bit state (Dettmers et al., arXiv 2110.02861)
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
    """Inside, steps of copies of an optimizer (`step_alone`) leave training's random numbers and what its class records
    alone, and compile nothing: what torchao's optimizers compile for each small shape took a minute and a half.
    Random state and compiler stance are those of the process, so ranks that are threads take turns: a stance that one
    of them restored while another one tries would stay."""
    with (
        _ONE_AT_A_TIME,
        unseen(map(type, wrapped_in(optimizer))),
        restoring_random_state(),
        torch.compiler.set_stance("force_eager"),
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


def step_alone(trial: Optimizer, *closure: Callable[[], Tensor]) -> None:
    """Steps a copy of an optimizer without hooks and other ranks: raises CommunicatesError where it asks them."""
    with _Alone():
        unhooked(type(trial).step)(trial, *closure)


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
        if LEFT_IN_PIECES not in vars(optimizer):
            _begin_state(optimizer, self.optimizer)
        self.acts_before_closure = False  # any of its steps has changed tensors, or made state of them, by then
        self._counts: dict[tuple[int, Any], float] = {}  # before the latest step, by id of the dictionary and key

    def _cut(self, groups: Groups) -> list[Tensor | None]:
        return [self._part(tensor, index) for index, tensor in enumerate(itertools.chain(*groups))]

    def step(self, gradients: Groups, loss: float = 1.0) -> None:
        """Takes one step, and writes the results into this rank's part of the tensors. A closure returns the `loss`."""
        for parameter, grad in zip(self._stepped, self._cut(gradients), strict=True):
            parameter.grad = None if grad is None else grad.clone()
        self._counts = {(id(holder), name): float(holder[name]) for holder, name in _numbers(self.optimizer)}
        self.acts_before_closure |= _step(self.optimizer, loss)
        for parameter, value in zip(self._stepped, self._values, strict=True):
            if value is not None:
                value.copy_(parameter)

    def kept(self) -> dict[tuple[Any, ...], Tensor]:
        """Returns what the optimizer, and those that it wraps, keep beside what is shaped as the tensors are: single
        numbers of their own and of their groups; and, for each tensor of which this rank has anything, numbers and
        tables, by index of optimizer and tensor. What has an entry for each block of the rank's part is no table."""
        wrapped, found = wrapped_in(self.optimizer), dict[tuple[Any, ...], Tensor]()
        for number, one in enumerate(wrapped):
            holders_of_one: tuple[dict[Any, Any], ...] = (vars(one), one.state, *one.param_groups)
            for place, holder in enumerate(holders_of_one):
                # Some write there, for others to see, at which rate they have stepped the latest tensor.
                names = [name for name, value in holder.items() if is_single(value) and name != "lr"]
                found.update({(number, place, name): _number(holder[name]) for name in names})
            for at, (parameter, value) in enumerate(zip(self._stepped, self._values, strict=True)):
                state = one.state.get(parameter) if value is not None else None
                entries = state.items() if isinstance(state, dict) else ()
                numbers = {name: _number(entry) for name, entry in entries if is_single(entry)}
                tables = {name: entry.clone() for name, entry in entries if _is_table(entry, parameter)}
                found.update({(number, "state", at, n): entry for n, entry in (numbers | tables).items()})
        return found

    def nests(self) -> bool:
        """Returns whether there are tensors in containers in the state of a parameter. Of these no other rank can be
        told whether they are cut as the parameter is."""
        return any(nested_in(state) for one in wrapped_in(self.optimizer) for state in one.state.values())

    def move_on(self, steps: int) -> None:
        """Adds `steps` to every number that has counted the latest step."""
        for holder, name in _numbers(self.optimizer):
            before, now = self._counts.get((id(holder), name)), holder[name]
            if before is not None and now == before + 1:
                holder[name] = now + steps


def _numbers(optimizer: Optimizer) -> list[tuple[dict[Any, Any], Any]]:
    """Returns where an optimizer, and those that it wraps, keep single numbers: dictionary and key of each."""
    return [(holder, name) for holder in holders(optimizer) for name, value in holder.items() if is_single(value)]


def holders(optimizer: Optimizer) -> list[dict[Any, Any]]:
    """Returns the dictionaries in which an optimizer, and those that it wraps, keep what they know."""
    optimizers = wrapped_in(optimizer)
    found = [holder for one in optimizers for holder in (vars(one), *one.param_groups, one.state, *one.state.values())]
    return [holder for holder in found if isinstance(holder, dict)]  # state under a name may be a number


def is_single(value: Any) -> bool:
    """Whether a value is a single number, perhaps as a tensor."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64, device=HOST)


def _is_table(value: Any, parameter: Tensor) -> bool:
    """Whether a tensor in the state of a parameter is neither shaped as it is, nor has an entry for each block of it.
    What is larger is a preconditioner, say, and nothing that could be cut as the parameter is."""
    if not isinstance(value, Tensor) or not 1 < value.numel() <= parameter.numel() or value.is_complex():
        return False
    return value.shape not in (parameter.shape, (-(-parameter.numel() // BLOCK),))


def nested_in(state: Any) -> list[str]:
    """Returns where in the state of one parameter tensors with dimensions stand in containers."""
    entries = state.items() if isinstance(state, Mapping) else ()
    return [found for name, value in entries if not isinstance(value, Tensor) for found in large_in(value, name)]


def large_in(tree: Any, place: str = "") -> list[str]:
    """Returns where in a tree there are tensors with dimensions."""
    if isinstance(tree, Tensor):
        return [repr(place)] if tree.dim() else []
    if isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        return [found for key, value in items for found in large_in(value, f"{place}.{key}".lstrip("."))]
    return []


def _begin_state(optimizer: Optimizer, trial: Optimizer) -> None:
    """Gives a trial the state that optimizers make at their construction, if it can be told what it would be of other
    parameters: numbers, copies of the parameter, and tensors of its shape that hold one value. Else it has none."""
    for one, other in zip(wrapped_in(optimizer), wrapped_in(trial), strict=True):
        for group, tried in zip(one.param_groups, other.param_groups, strict=True):
            # Not one that is a single number: what is shaped as it is may be a count.
            known = next((p for p in group["params"] if p in one.state and p.numel() > 1), None)
            if known is None or not isinstance(state := one.state[known], dict):
                continue
            with suppress(_UnknownError):
                begun = [{name: _alike(value, known, p) for name, value in state.items()} for p in tried["params"]]
                other.state.update(zip(tried["params"], begun, strict=True))


class _UnknownError(Exception):
    """What state would be of another parameter cannot be told."""


def _alike(value: Any, known: Tensor, tried: Tensor) -> Any:
    """Returns what an entry of the state of a `known` parameter would be of the one that is `tried`."""
    if isinstance(value, Tensor) and not is_single(value):
        is_same = value.dtype == known.dtype
        dtype = tried.dtype if is_same else value.dtype
        # A mask of zeros is no copy of a bias that begins with zeros.
        if value.shape == known.shape and (is_same or value.is_floating_point()) and value.equal(known):
            return tried.detach().to(dtype, copy=True)
        if value.shape != known.shape or not value.numel() or not bool((value == value.flatten()[0]).all()):
            raise _UnknownError
        return torch.full_like(tried, value.flatten()[0].item(), dtype=dtype, requires_grad=False)
    return copy.deepcopy(value)


def _step(trial: Optimizer, loss_before: float) -> bool:
    """Takes a step. Returns whether it changes tensors, or makes state of them, before it calls its closure."""
    given = [(p, p.grad, p.clone()) for group in trial.param_groups for p in group["params"] if p.grad is not None]
    had_state, early = [len(one.state.get(p, ())) for one in wrapped_in(trial) for p, *_ in given], list[bool]()

    def closure() -> Tensor:
        """A quadratic loss, which has the given gradients at the start. Where SAM moves to there are others, and a line
        search gets somewhere, as it would not where the loss is constant."""
        has_state = [len(one.state.get(p, ())) for one in wrapped_in(trial) for p, *_ in given]
        moved = [(p, grad, p.detach() - before) for p, grad, before in given if not p.equal(before)]
        early.append(has_state != had_state or bool(moved))
        for parameter, grad, _ in given:
            parameter.grad = grad.clone()
        loss = given[0][0].new_full((), loss_before)
        for parameter, grad, way in moved:
            parameter.grad = grad + way
            loss += (way * (grad + way / 2)).sum()
        return loss

    try:
        step_alone(trial, closure)  # as in training by the Trainer; some need it, others go by the loss
    except Exception:
        step_alone(trial)
    return any(early[:1])


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
        if name in own or name in ("step", "train", "eval", "load_state_dict", LEFT_IN_PIECES):
            continue
        is_new = isinstance(value, Optimizer) and id(value) not in memo  # a wrapper may have one under two names
        own[name] = _copied(value, memo) if is_new else copy.deepcopy(value, memo)
    for group in trial.param_groups:
        lr = group.get("lr")  # None where a scheduler sets it later
        if isinstance(lr, Tensor):
            group["lr"] = lr.clamp(min=0.01)
        elif isinstance(lr, float | int):
            group["lr"] = max(lr, 0.01)  # those that find their own rate want 1, and a scheduler may begin with nothing
    return trial
