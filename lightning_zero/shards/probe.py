"""Finds out what an optimizer looks at, by trying it on small tensors.

A step on pieces is right where the optimizer updates each element by itself. That is known of torch's own optimizers.
Any other one, whatever its name, steps a few small tensors, whole and in pieces, and the updates must agree: in its
first steps, with small and with large gradients, and in much later ones, which are reached by moving on whatever counts
the steps. So must single numbers that it keeps for a tensor (a norm, say), on which it may act later. So none trains
wrongly in silence, as long as it goes by gradients, values, shapes, options and a count only: a dependence on anything
else, such as the time of day, cannot be found this way.

It is tried on the host, in fp64. One that cannot step so is tried there in fp32, and then, as its kernels may be those
of a device, on the device that it will step on.
"""

import itertools
import pickle
import random
from collections.abc import Callable, Container, Iterator, Sequence
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

from lightning_zero.device import HOST
from lightning_zero.shards.trial import (
    BLOCK,
    CommunicatesError,
    Groups,
    Trial,
    holders,
    restoring_random_state,
    step_alone,
    trial_of,
    trying,
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
# 3 blocks: what looks at whole tensors is known by these, and takes no step on larger ones: a preconditioner of the
# square of 5376 elements takes minutes.
MIDDLE = ((), (600,), (24, 26), (8, 11, 7), (8, 11, 7, 1))
DRAWN = (*MIDDLE[:2], *LARGE[2:])
# Of the gradients of the first steps: some optimizers clip large ones, others those that have grown a little.
SCALES = (1e-3, 2e-3, 1e3, 1.0, 1.0)
# Steps that are tried: one for each scale, and later ones past thresholds, multiples of nearly everything up to 100.
MOMENTS = (1, 2, 3, 4, 5, 10, 100, 5_544_000)
IDLE = 20  # steps that are taken first where none of them changes anything
TRIES = 5  # of a step that draws random numbers
SHARE = 5  # one piece is a fifth of a tensor, the other one the rest

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
    larger: Sequence[tuple[int, ...]] = MIDDLE  # shapes beside the small ones, by number of dimensions
    begins: int = 0  # steps that are taken before it is looked at
    loss_power: int = 1  # a closure returns the number of the step to this power


class Findings(NamedTuple):
    """What was found about an optimizer."""

    why_not_in_pieces: str | None = None  # why it cannot step pieces of its parameters; None if it can
    # The two below say nothing of one that steps no part of its parameters rightly: it may not have been tried so far.
    goes_by_loss: bool = False  # a step goes by the loss that its closure returns
    acts_before_closure: bool = False  # a step changes weights, or makes state of them, before it calls its closure


class _Step(NamedTuple):
    """What a step on small tensors has done."""

    updates: list[Tensor]
    kept: list[dict[tuple[Any, ...], Tensor]]  # of each rank, see `Trial.kept`
    nests: bool  # tensors are in containers in the state of a parameter
    acts_before_closure: bool


def _benches(device: torch.device) -> list[_Bench]:
    """Some step in fp32 alone: they make state of it, whatever the dtype of a parameter."""
    return [
        _Bench(HOST, torch.float64, 1e-6),
        *(_Bench(at, torch.float32, 1e-3) for at in dict.fromkeys((HOST, device))),
    ]


def find(optimizer: Optimizer, device: torch.device = HOST) -> Findings:
    """Tries an optimizer, which steps on `device`, and returns what was found."""
    if is_element_wise(optimizer) or not any(group["params"] for group in optimizer.param_groups):
        return Findings()
    for bench in _benches(device):
        try:
            with trying(optimizer), torch.inference_mode(False), torch.no_grad():
                return _find(optimizer, bench)
        except CommunicatesError:
            return Findings(BY_RANKS)
        except Exception as error:  # an optimizer may ask for anything
            told = f"could not be tried on small tensors ({type(error).__name__}: {error})"
    return Findings(told)


def _find(optimizer: Optimizer, bench: _Bench) -> Findings:
    whole = list(_updates(optimizer, _tensors_in_turn, 1, bench))
    if not any(update.any() for step in whole for update in step.updates):
        # It may look at gradients of many steps before its first change.
        return Findings(NOTHING) if bench.begins else _find(optimizer, bench._replace(begins=IDLE))
    # Pieces may agree where it draws a number for each, but not on a rank that has none.
    if _draws(optimizer, bench):
        return Findings(BY_CHANCE)
    # Losses that fall, and not grow, tell in one go that it neither goes by them nor by anything unknown.
    goes_by_loss = not _agrees(whole, optimizer, _tensors_in_turn, 1, bench._replace(loss_power=-1))
    if goes_by_loss and not _agrees(whole, optimizer, _tensors_in_turn, 1, bench):
        return Findings(BY_CHANCE)
    reason = _least(whole, optimizer, bench)
    if reason in (None, BY_BLOCK) and any(step.nests for step in whole):
        reason = NESTED
    return Findings(reason, goes_by_loss, any(step.acts_before_closure for step in whole))


def _least(whole: Sequence[_Step], optimizer: Optimizer, bench: _Bench) -> str | None:
    """Returns why an optimizer cannot step the least, which are pieces; `whole` is what it does on one rank."""
    large, whole_large = bench._replace(larger=LARGE), list[_Step]()
    for reason, part in ((None, _piece), (BY_BLOCK, _piece_of_blocks)):
        if _agrees(whole, optimizer, part, 2, bench):
            whole_large = whole_large or list(_updates(optimizer, _tensors_in_turn, 1, large))
            if _agrees(whole_large, optimizer, part, 2, large):
                return reason
    return BY_TENSOR if _agrees(whole, optimizer, _tensors_in_turn, 2, bench) else BY_ALL


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
            step_alone(trial)
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
            step_alone(trial, closure)
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


def _agrees(whole: Sequence[_Step], optimizer: Optimizer, part: Part, ranks: int, bench: _Bench) -> bool:
    """Whether ranks that each step a part of the tensors do what one rank alone has done with the `whole`."""
    try:
        found = _updates(optimizer, part, ranks, bench)
        facts = _facts(whole)
        return all(_are_alike(next(found), expected, facts, bench.tolerance) for expected in whole)
    except Exception:  # it steps matrices only, say, or fewer steps succeed
        return False


def _draws(optimizer: Optimizer, bench: _Bench) -> bool:
    """Whether a step draws random numbers: from torch, numpy or Python, or from a generator of the optimizer's own,
    which gives the same ones to each copy of the optimizer. Other threads, which load data, draw from the first three
    too: one that does so during each of several steps would have to draw without a pause."""
    return all(_has_drawn_meanwhile(optimizer, bench) for _ in range(TRIES))


def _has_drawn_meanwhile(optimizer: Optimizer, bench: _Bench) -> bool:
    """Whether somebody draws random numbers during a step of a copy of the optimizer."""
    bench = bench._replace(larger=DRAWN, dtype=torch.float32)  # in fp64 some have nothing to round, by chance or not
    values = [_values(group["params"], 0, bench) for group in optimizer.param_groups]
    trial = Trial(optimizer, values, lambda tensor, _: tensor)
    with restoring_random_state():  # one that seeds torch itself would find the state that it left in the last try
        before = _random_states(trial.optimizer)
        trial.step(next(_gradients(optimizer, bench)))
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
    if bench.begins:
        first = next(_gradients(optimizer, bench))
        for trial in trials * bench.begins:
            trial.step(first)
    for number, (moment, gradients) in enumerate(zip(MOMENTS, _gradients(optimizer, bench), strict=False)):
        is_late = number >= len(SCALES)
        before = [tensor.clone() for group in values for tensor in group]
        try:
            for trial in trials:
                if is_late:
                    trial.move_on(moment - MOMENTS[number - 1] - 1)
                trial.step(gradients, float(moment) ** bench.loss_power)
        except Exception:  # the steps before a late one were never taken
            if is_late:
                return
            raise
        updates = [now - then for now, then in zip(itertools.chain(*values), before, strict=True)]
        if is_late and not all(update.isfinite().all() for update in updates):
            return
        kept, nests = [trial.kept() for trial in trials], any(trial.nests() for trial in trials)
        yield _Step(updates, kept, nests, any(trial.acts_before_closure for trial in trials))


def _gradients(optimizer: Optimizer, bench: _Bench) -> Iterator[Groups]:
    """Makes gradients of step after step, alike in all, as those of training are: some optimizers go faster by it."""
    groups = optimizer.param_groups
    always = [_values(group["params"], 1, bench) for group in groups]
    for number in itertools.count():
        scale = SCALES[number] if number < len(SCALES) else 1.0
        now = [_values(group["params"], 2 + number, bench) for group in groups]
        yield [
            [scale * (one + other) for one, other in zip(*pair, strict=True)] for pair in zip(always, now, strict=True)
        ]


def _values(parameters: Sequence[Parameter], seed: int, bench: _Bench) -> list[Tensor]:
    """Makes a small tensor and a larger one for each number of dimensions that the parameters have."""
    generator = torch.Generator(HOST).manual_seed(seed)
    dims = sorted({min(parameter.dim(), len(SHAPES) - 1) for parameter in parameters})
    shapes = [shape for dim in dims for shape in (SHAPES[dim], bench.larger[dim])]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64, device=HOST) for shape in shapes]
    return [values.to(bench.device, bench.dtype) for values in drawn]


def _facts(whole: Sequence[_Step]) -> set[tuple[Any, ...]]:
    """Returns which numbers of an optimizer and its groups are the same after every step, as their parameters' is."""
    first, *others = (step.kept[0] for step in whole)
    return {key for key, value in first.items() if key[1] != "state" and all(value.equal(one[key]) for one in others)}


def _are_alike(found: _Step, expected: _Step, facts: Container[tuple[Any, ...]], tolerance: float) -> bool:
    """Whether a step of ranks that have a part each has done what one rank alone has (`expected`), and keeps the same,
    `facts` aside."""
    known = {key: value for key, value in expected.kept[0].items() if key not in facts}
    # A table of a whole tensor (scales, say) that is shaped as its piece is would be none of the piece.
    has_all = known.keys() <= set().union(*found.kept)
    pairs = [(value, known[key]) for kept in found.kept for key, value in kept.items() if key in known]
    are_same = has_all and all(_is_same(*pair, tolerance) for pair in pairs)
    return are_same and _are_close(found.updates, expected.updates, tolerance)


def _is_same(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether two numbers or tables are the same, relative to each entry."""
    return one.shape == other.shape and one.double().allclose(other.double(), tolerance, 0.0, equal_nan=True)


def _are_close(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> bool:
    largest = max((float(update.abs().max()) for update in expected), default=0.0)
    pairs = zip(found, expected, strict=True)
    return all(bool(((one - other).abs() <= tolerance * largest).all()) for one, other in pairs)
