"""What an optimizer looks at, found by trying it on small tensors: no name is trusted, and none that nobody has heard
of trains wrongly in silence.

A step on pieces is right where each element goes by itself. Of torch's own optimizers it is known which do; any other
one steps a few small tensors, whole and in pieces, and the two must come to the same.
"""

import copy
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

ELEMENT_WISE = {SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Adagrad, Adadelta, Rprop, ASGD}  # not their subclasses
SHAPES = ((), (7,), (4, 6), (2, 3, 4), (2, 3, 2, 2))  # by number of dimensions
# Seventeen blocks of 256, cut in the middle of one: 8-bit state is kept in blocks, and of nothing smaller than 4096.
LARGE = ((), (4352,), (64, 68), (16, 16, 17), (16, 16, 17, 1))
STEPS = 4
RANKS = 2
TOLERANCE = 1e-6  # of the largest update: kernels may round the elements of a piece in another way
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

BY_TENSOR = "looks at whole tensors"
BY_ALL = "looks at all parameters together"

Groups = list[list[Parameter]]


def why_not_in_pieces(optimizer: Optimizer) -> str | None:
    """What is wrong with a step on pieces of the parameters; None where nothing is."""
    if type(optimizer) in ELEMENT_WISE:
        return None
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
            whole = _updates(optimizer, 1, _all_of_it)
            with suppress(Exception):  # of matrices alone, say
                if _are_alike(_updates(optimizer, RANKS, _a_run_of_it), whole):
                    return None
            is_by_tensor = _are_alike(_updates(optimizer, RANKS, _every_other), whole)
    except Exception as error:  # an optimizer may ask for anything
        return f"could not be tried on small tensors ({type(error).__name__}: {error})"
    return BY_TENSOR if is_by_tensor else BY_ALL


def state_tensors_of(optimizer: Optimizer) -> int:
    """How many tensors of a parameter's shape an optimizer keeps for it, tried out on a small one; 2 where that fails,
    as most keep two."""
    tried = Parameter(torch.ones(2))
    tried.grad = torch.ones(2)
    trial = _trial_of(optimizer, [[tried] for _ in optimizer.param_groups])
    try:
        unhooked(type(optimizer).step)(trial)
    except Exception:  # an optimizer may ask for anything
        return 2
    return sum(isinstance(value, Tensor) and value.shape == tried.shape for value in trial.state[tried].values())


def unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's `step` without the hooks that torch wraps around it."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


# -- what a rank has of the `index`-th tensor, flat or whole; None: nothing

Part = Callable[[Tensor, int, int], Tensor | None]


def _all_of_it(tensor: Tensor, index: int, rank: int) -> Tensor | None:
    return tensor


def _a_run_of_it(tensor: Tensor, index: int, rank: int) -> Tensor | None:
    """As if a group were cut in the middle: in the middle of most tensors."""
    flat, half = tensor.reshape(-1), -(-tensor.numel() // RANKS)
    part = flat[rank * half : (rank + 1) * half]
    return part if part.numel() else None


def _every_other(tensor: Tensor, index: int, rank: int) -> Tensor | None:
    return tensor if index % RANKS == rank else None


def _updates(optimizer: Optimizer, ranks: int, part: Part) -> list[Tensor]:
    """What some steps change in small tensors of every group, when each rank steps its parts of them."""
    starts = [_values(group["params"], seed=0) for group in optimizer.param_groups]
    gradients = [[_values(group["params"], seed=1 + step) for group in optimizer.param_groups] for step in range(STEPS)]
    ends = [[torch.zeros_like(tensor) for tensor in group] for group in starts]
    for rank in range(ranks):

        def cut(groups: Sequence[Sequence[Tensor]], rank: int = rank) -> list[list[Tensor | None]]:
            number = itertools.count()
            return [[part(tensor, next(number), rank) for tensor in group] for group in groups]

        parts = cut(starts)
        stepped: Groups = [
            [Parameter(torch.empty(0, dtype=torch.float64) if one is None else one.clone()) for one in group]
            for group in parts
        ]
        trial = _trial_of(optimizer, stepped)
        for of_step in gradients:
            for group, grads in zip(stepped, cut(of_step), strict=True):
                for parameter, grad in zip(group, grads, strict=True):
                    parameter.grad = None if grad is None else grad.clone()
            _step(trial)
        for group, there, begun in zip(stepped, cut(ends), parts, strict=True):
            for parameter, end, start in zip(group, there, begun, strict=True):
                if end is not None and start is not None:
                    end.copy_(parameter - start)
    return [tensor for group in ends for tensor in group]


def _values(parameters: Sequence[Parameter], seed: int) -> list[Tensor]:
    """A small tensor and a larger one for each number of dimensions that the parameters have."""
    generator = torch.Generator().manual_seed(seed)
    dims = sorted({min(parameter.dim(), len(SHAPES) - 1) for parameter in parameters})
    shapes = [shape for dim in dims for shape in (SHAPES[dim], LARGE[dim])]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _are_alike(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    largest = max((float(update.abs().max()) for update in expected), default=0.0)
    pairs = zip(found, expected, strict=True)
    return all(bool(((one - other).abs() <= TOLERANCE * largest).all()) for one, other in pairs)


def _step(trial: Optimizer) -> None:
    given = [(p, p.grad, p.clone()) for group in trial.param_groups for p in group["params"] if p.grad is not None]

    def closure() -> Tensor:
        """Gradients are there already; elsewhere there are others, as SAM asks for."""
        for parameter, grad, start in given:
            parameter.grad = grad + (parameter.detach() - start)
        return torch.zeros(())

    step = unhooked(type(trial).step)
    try:
        step(trial)
    except (TypeError, AssertionError):  # it does not do without
        step(trial, closure)


def _trial_of(optimizer: Optimizer, groups: Groups) -> Optimizer:
    """A copy of an optimizer, and of one that it wraps, with other parameters, no state and no hooks."""
    memo: dict[int, Any] = {}
    for group, others in zip(optimizer.param_groups, groups, strict=True):
        memo[id(group["params"])] = others  # whoever else holds this list
        for parameter in group["params"]:
            memo[id(parameter)] = others[0] if others else parameter
    trial = _copied(optimizer, memo)
    if callable(train := getattr(type(trial), "train", None)):  # schedule-free ones step in no other mode
        train(trial)
    return trial


def _copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Attribute by attribute: torch's own copy has the groups and the state alone."""
    trial = object.__new__(type(optimizer))
    memo[id(optimizer)] = trial
    own = vars(trial)
    own.update({name: OrderedDict() for name in HOOKS})
    state: dict[Any, Any] = optimizer.state
    counts = {key: copy.deepcopy(value) for key, value in state.items() if isinstance(key, str)}
    own["state"] = memo.setdefault(id(optimizer.state), defaultdict(dict, counts))
    for name, value in vars(optimizer).items():
        # A scheduler's wrapper around the step of the optimizer itself; and an engine's around the others.
        if name in own or name in ("step", "train", "eval"):
            continue
        own[name] = _copied(value, memo) if isinstance(value, Optimizer) else copy.deepcopy(value, memo)
    for group in trial.param_groups:
        if isinstance(group.get("lr"), float | int):
            group["lr"] = 0.01  # a scheduler may begin with none
    return trial
