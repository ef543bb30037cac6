"""Finds out what an optimizer looks at, by trying it on small tensors.

A step on pieces is right where the optimizer updates each element by itself. That is known of torch's own optimizers.
Any other one, whatever its name, steps a few small tensors, whole and in pieces, and the updates must agree: in its
first steps, with small and with large gradients, and in much later ones, which are reached by moving on whatever counts
the steps. So must single numbers that it keeps for a tensor (a norm, say), on which it may act later. So none trains
wrongly in silence, as long as it goes by gradients, values, shapes, options and a count only: a dependence on anything
else, such as the time of day, cannot be found this way.

It is tried on the host, in fp64. One that cannot step there, as its kernels are those of a device, is tried on the
device that it will step on, in fp32.
"""

import itertools
import math
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from lightning_zero.device import HOST, is_host
from lightning_zero.shards.moment import wrapped_in
from lightning_zero.shards.trial import (
    CommunicatesError,
    Groups,
    Trial,
    holders,
    restoring_random_state,
    trial_of,
    trying,
    unhooked,
)
from lightning_zero.tiers.alignment import round_up

# Torch's element-wise optimizers, without their subclasses; and how many tensors of a parameter's shape each keeps for
# it, by the options of a parameter group. None of these is ever tried.
_KEPT: dict[type, Callable[[dict[str, Any]], int]] = {
    SGD: lambda options: int(options["momentum"] != 0),
    Adam: lambda options: 2 + options["amsgrad"],
    AdamW: lambda options: 2 + options["amsgrad"],
    RMSprop: lambda options: 1 + options["centered"] + (options["momentum"] > 0),
    **dict.fromkeys((Adamax, NAdam, RAdam, Adadelta, Rprop, SparseAdam), lambda _: 2),
    **dict.fromkeys((Adagrad, ASGD), lambda _: 1),
}
ELEMENT_WISE = set(_KEPT)
SHAPES = ((), (7,), (4, 6), (2, 3, 4), (2, 3, 2, 2))  # by number of dimensions
# 21 or 67 blocks of 256, cut in the middle of one: 8-bit state is kept in blocks, and often not for fewer than 4096
# elements, as one of the two pieces has. Google's Adafactor factors no side shorter than 128.
LARGE = ((), (5376,), (128, 134), (16, 16, 21), (16, 16, 21, 1))
SCALES = (1e-3, 1e3, 1.0, 1.0)  # of the gradients of the first steps: some optimizers clip large ones
# Steps that are tried: one for each scale, and later ones past thresholds, multiples of nearly everything up to 100.
MOMENTS = (1, 2, 3, 4, 10, 100, 5_544_000)
TRIES = 5  # of a step that draws random numbers
SHARE = 5  # one piece is a fifth of a tensor, the other one the rest

BLOCK = 256  # elements that share one scale in 8-bit state (Dettmers et al., arXiv 2110.02861)
BY_BLOCK = f"looks at blocks of {BLOCK} elements"
BY_TENSOR = "looks at whole tensors"
BY_ALL = "looks at all parameters together"
NOTHING = "changed nothing when it was tried on small tensors"
BY_CHANCE = "draws random numbers"
BY_RANKS = "asks the other ranks in its step"
NESTED = "keeps tensors in lists or dictionaries of its state"


class _Bench(NamedTuple):
    """Where an optimizer is tried."""

    device: torch.device
    dtype: torch.dtype
    # Of two updates, relative to the largest one: kernels may round the elements of a piece in another way. Updates are
    # differences of values about a hundred times larger.
    tolerance: float


def _benches(device: torch.device) -> list[_Bench]:
    benches = [_Bench(HOST, torch.float64, 1e-6)]
    return benches if is_host(device) else [*benches, _Bench(device, torch.float32, 1e-3)]


def why_not_in_pieces(optimizer: Optimizer, device: torch.device = HOST) -> str | None:
    """Returns why an optimizer, which steps on `device`, cannot step pieces of its parameters; None if it can."""
    if is_element_wise(optimizer) or not any(group["params"] for group in optimizer.param_groups):
        return None
    for bench in _benches(device):
        try:
            with trying(optimizer), torch.inference_mode(False), torch.no_grad():
                return _what_it_looks_at(optimizer, bench)
        except CommunicatesError:
            return BY_RANKS
        except Exception as error:  # an optimizer may ask for anything
            told = f"could not be tried on small tensors ({type(error).__name__}: {error})"
    return told


def _what_it_looks_at(optimizer: Optimizer, bench: _Bench) -> str | None:
    whole = list(_updates(optimizer, _tensors_in_turn, 1, bench))
    if not any(update.any() for step in whole for update in step.updates):
        return NOTHING
    if _draws(optimizer, bench):  # pieces may agree where it draws a number for each, but not on a rank that has none
        return BY_CHANCE
    for reason, part in ((None, _piece), (BY_BLOCK, _piece_of_blocks), (BY_TENSOR, _tensors_in_turn)):
        if _agrees(whole, optimizer, part, 2, bench):
            return NESTED if reason != BY_TENSOR and _nests(optimizer, bench) else reason
    return BY_ALL if _agrees(whole, optimizer, _tensors_in_turn, 1, bench) else BY_CHANCE


def is_element_wise(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to step each element by itself, and to leave a parameter alone that has no
    gradient. It can be given tensors without elements, and keeps the same state of them as of others. Torch's kernels
    leave such a tensor alone; those of other packages may end the process."""
    return type(optimizer) in ELEMENT_WISE


def state_tensors_of(optimizer: Optimizer, device: torch.device = HOST) -> int:
    """Returns how many tensors of a parameter's shape an optimizer, which steps on `device`, keeps for it: known of
    torch's own, and found by a step on a small one of any other. Where the step fails it is taken to be 2, as for most
    optimizers."""
    if (kept := _KEPT.get(type(optimizer))) is not None:
        return max(map(kept, optimizer.param_groups), default=0)
    for bench in _benches(device):
        tried = Parameter(torch.ones(2, device=bench.device))
        tried.grad = torch.ones_like(tried)
        with trying(optimizer), suppress(Exception):  # an optimizer may ask for anything
            trial = trial_of(optimizer, [[tried] for _ in optimizer.param_groups])
            unhooked(type(optimizer).step)(trial)
            state = trial.state[tried].values()
            return sum(isinstance(value, Tensor) and value.shape == tried.shape for value in state)
    return 2


def calls_closure_again(optimizer: Optimizer, device: torch.device = HOST) -> bool:
    """Whether an optimizer, which steps on `device`, calls the closure several times in a step, found by a step on
    small tensors."""
    if is_element_wise(optimizer):
        return False
    for bench in _benches(device):
        calls = 0
        tried = [Parameter(torch.ones(2, 2, device=bench.device)) for _ in optimizer.param_groups]

        def closure(tried: list[Parameter] = tried) -> Tensor:
            nonlocal calls
            calls += 1
            for parameter in tried:
                parameter.grad = torch.full_like(parameter, 0.1)
            return torch.ones((), device=tried[0].device)

        with trying(optimizer), suppress(Exception):  # it may ask for anything, and hold what cannot be copied
            trial = trial_of(optimizer, [[parameter] for parameter in tried])
            unhooked(type(optimizer).step)(trial, closure)
            break
    return calls > 1


# (rank, ranks, tensor, index of the tensor) -> what the rank steps: the tensor, a flat part of it, or None
Part = Callable[[int, int, Tensor, int], Tensor | None]


def _piece(rank: int, ranks: int, tensor: Tensor, index: int, block: int = 1) -> Tensor | None:
    cut = round_up(-(-tensor.numel() // SHARE), block)
    part = tensor.reshape(-1)[cut:] if rank else tensor.reshape(-1)[:cut]
    return part if part.numel() else None


_piece_of_blocks = partial(_piece, block=BLOCK)


def _tensors_in_turn(rank: int, ranks: int, tensor: Tensor, index: int) -> Tensor | None:
    return tensor if index % ranks == rank else None


class _Step(NamedTuple):
    """What a step on small tensors has done."""

    updates: list[Tensor]
    numbers: list[dict[tuple[int, int, Any], float]]  # of each rank, see `Trial.numbers`


def _agrees(whole: Sequence[_Step], optimizer: Optimizer, part: Part, ranks: int, bench: _Bench) -> bool:
    """Whether ranks that each step a part of the tensors do what one rank alone has done with the `whole`."""
    try:
        found = _updates(optimizer, part, ranks, bench)
        return all(_are_alike(next(found), expected, bench.tolerance) for expected in whole)
    except Exception:  # it steps matrices only, say, or fewer steps succeed
        return False


def _nests(optimizer: Optimizer, bench: _Bench) -> bool:
    """Whether, in its first steps, an optimizer puts tensors into containers in the state of a parameter. Of these no
    other rank can be told whether they are cut as the parameter is."""
    values = [_values(group["params"], 0, bench) for group in optimizer.param_groups]
    trial = Trial(optimizer, values, lambda tensor, _: tensor)
    for number in range(len(SCALES)):
        trial.step(_gradients(optimizer, number, bench))
    return any(nested_in(state) for one in wrapped_in(trial.optimizer) for state in one.state.values())


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


def _draws(optimizer: Optimizer, bench: _Bench) -> bool:
    """Whether a step draws random numbers: from torch, numpy or Python, or from a generator of the optimizer's own,
    which gives the same ones to each copy of the optimizer. Other threads, which load data, draw from the first three
    too: one that does so during each of several steps would have to draw without a pause."""
    return all(_has_drawn_meanwhile(optimizer, bench) for _ in range(TRIES))


def _has_drawn_meanwhile(optimizer: Optimizer, bench: _Bench) -> bool:
    """Whether somebody draws random numbers during a step of a copy of the optimizer."""
    values = [_values(group["params"], 0, bench) for group in optimizer.param_groups]
    trial = Trial(optimizer, values, lambda tensor, _: tensor)
    with restoring_random_state():  # one that seeds torch itself would find the state that it left in the last try
        before = _random_states(trial.optimizer)
        trial.step(_gradients(optimizer, 0, bench))
        after = _random_states(trial.optimizer)
    return any(before.get(source) != state for source, state in after.items())


def _random_states(optimizer: Optimizer) -> dict[Any, bytes]:
    """Returns the states of the sources of random numbers that an optimizer may know."""
    states: dict[Any, Any] = {
        "torch": torch.get_rng_state().tolist(),  # the pickle of a tensor says where it lies
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    for place, holder in enumerate(holders(optimizer)):
        for name, value in holder.items():
            if isinstance(value, torch.Generator):
                states[place, name] = value.get_state().tolist()
            elif isinstance(value, np.random.RandomState):
                states[place, name] = value.get_state()
            elif isinstance(value, np.random.Generator):
                states[place, name] = value.bit_generator.state
            elif isinstance(value, random.Random):
                states[place, name] = value.getstate()
    return {source: pickle.dumps(state) for source, state in states.items()}


def _updates(optimizer: Optimizer, part: Part, ranks: int, bench: _Bench) -> Iterator[_Step]:
    """Yields what each step of `MOMENTS` does with the small tensors of every group. Ends early where a later step
    fails, or its updates are not finite."""
    values = [_values(group["params"], 0, bench) for group in optimizer.param_groups]
    trials = [Trial(optimizer, values, partial(part, rank, ranks)) for rank in range(ranks)]
    for number, moment in enumerate(MOMENTS):
        is_late = number >= len(SCALES)
        before = [tensor.clone() for group in values for tensor in group]
        try:
            for trial in trials:
                if is_late:
                    trial.move_on(moment - MOMENTS[number - 1] - 1)
                trial.step(_gradients(optimizer, number, bench))
        except Exception:  # the steps before a late one were never taken
            if is_late:
                return
            raise
        updates = [now - then for now, then in zip(itertools.chain(*values), before, strict=True)]
        if is_late and not all(update.isfinite().all() for update in updates):
            return
        yield _Step(updates, [trial.numbers() for trial in trials])


def _gradients(optimizer: Optimizer, number: int, bench: _Bench) -> Groups:
    scale = SCALES[number] if number < len(SCALES) else 1.0
    groups = [_values(group["params"], 1 + number, bench) for group in optimizer.param_groups]
    return [[scale * grad for grad in group] for group in groups]


def _values(parameters: Sequence[Parameter], seed: int, bench: _Bench) -> list[Tensor]:
    """Makes a small tensor and a larger one for each number of dimensions that the parameters have."""
    generator = torch.Generator(HOST).manual_seed(seed)
    dims = sorted({min(parameter.dim(), len(SHAPES) - 1) for parameter in parameters})
    shapes = [shape for dim in dims for shape in (SHAPES[dim], LARGE[dim])]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64, device=HOST) for shape in shapes]
    return [values.to(bench.device, bench.dtype) for values in drawn]


def _are_alike(found: _Step, expected: _Step, tolerance: float) -> bool:
    (known,) = expected.numbers
    pairs = [(value, known[key]) for numbers in found.numbers for key, value in numbers.items() if key in known]
    are_same = all(math.isclose(*pair, rel_tol=tolerance) or all(map(math.isnan, pair)) for pair in pairs)
    return are_same and _are_close(found.updates, expected.updates, tolerance)


def _are_close(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> bool:
    largest = max((float(update.abs().max()) for update in expected), default=0.0)
    pairs = zip(found, expected, strict=True)
    return all(bool(((one - other).abs() <= tolerance * largest).all()) for one, other in pairs)
