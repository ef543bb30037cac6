"""Finds out what an optimizer looks at, by trying it on small tensors.

A step on pieces is right where the optimizer updates each element by itself. That is known of torch's own optimizers.
Any other one, whatever its name, steps a few small tensors, whole and in pieces, and the updates must agree: in its
first steps, with small and with large gradients, and in much later ones, which are reached by moving on whatever counts
the steps. So none trains wrongly in silence, as long as it goes by gradients, values, shapes, options and a count only:
a dependence on anything else, such as the time of day, cannot be found this way.

It is tried on the host, in fp64. One that cannot step there, as its kernels are those of a device, is tried on the
device that it will step on, in fp32.
"""

import copy
import itertools
import pickle
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, final

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
from lightning_zero.shards.unseen import unseen
from lightning_zero.tiers.alignment import round_up
from lightning_zero.torch_private import OPTIMIZER_HOOKS

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

_ONE_AT_A_TIME = Lock()

BLOCK = 256  # elements that share one scale in 8-bit state (Dettmers et al., arXiv 2110.02861)
BY_BLOCK = f"looks at blocks of {BLOCK} elements"
BY_TENSOR = "looks at whole tensors"
BY_ALL = "looks at all parameters together"
NOTHING = "changed nothing when it was tried on small tensors"
BY_CHANCE = "draws random numbers"

Groups = Sequence[Sequence[Tensor]]  # one sequence for each parameter group of an optimizer


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
    if type(optimizer) in ELEMENT_WISE or not any(group["params"] for group in optimizer.param_groups):
        return None
    for bench in _benches(device):
        try:
            with _trying(optimizer), torch.inference_mode(False), torch.no_grad():
                return _what_it_looks_at(optimizer, bench)
        except Exception as error:  # an optimizer may ask for anything
            told = f"could not be tried on small tensors ({type(error).__name__}: {error})"
    return told


def _what_it_looks_at(optimizer: Optimizer, bench: _Bench) -> str | None:
    whole = list(_updates(optimizer, _tensors_in_turn, 1, bench))
    if not any(update.any() for updates in whole for update in updates):
        return NOTHING
    if _draws(optimizer, bench):  # pieces may agree where it draws a number for each, but not on a rank that has none
        return BY_CHANCE
    for reason, part in ((None, _piece), (BY_BLOCK, _piece_of_blocks), (BY_TENSOR, _tensors_in_turn)):
        if _agrees(whole, optimizer, part, 2, bench):
            return reason
    return BY_ALL if _agrees(whole, optimizer, _tensors_in_turn, 1, bench) else BY_CHANCE


def steps_nothing(optimizer: Optimizer) -> bool:
    """Whether an optimizer can be given tensors without elements. It then keeps the same state of them as of others.
    Torch's kernels are known to leave such a tensor alone; those of other packages may end the process."""
    return type(optimizer) in ELEMENT_WISE


def leaves_idle(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to leave a parameter alone that has no gradient."""
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
        with _trying(optimizer), suppress(Exception):  # an optimizer may ask for anything
            trial = _trial_of(optimizer, [[tried] for _ in optimizer.param_groups])
            unhooked(type(optimizer).step)(trial)
            state = trial.state[tried].values()
            return sum(isinstance(value, Tensor) and value.shape == tried.shape for value in state)
    return 2


def calls_closure_again(optimizer: Optimizer, device: torch.device = HOST) -> bool:
    """Whether an optimizer, which steps on `device`, calls the closure several times in a step, found by a step on
    small tensors."""
    if type(optimizer) in ELEMENT_WISE:
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

        with _trying(optimizer), suppress(Exception):  # it may ask for anything, and hold what cannot be copied
            trial = _trial_of(optimizer, [[parameter] for parameter in tried])
            unhooked(type(optimizer).step)(trial, closure)
            break
    return calls > 1


@contextmanager
def _trying(optimizer: Optimizer) -> Iterator[None]:
    """Inside, steps of copies of an optimizer leave training's random numbers and what its class records alone, and
    compile nothing: what torchao's optimizers compile for each small shape took a minute and a half. Random state and
    compiler stance are those of the process, so ranks that are threads take turns: a stance that one of them restored
    while another one tries would stay."""
    with (
        _ONE_AT_A_TIME,
        unseen(map(type, wrapped_in(optimizer))),
        _restoring_random_state(),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


@contextmanager
def _restoring_random_state() -> Iterator[None]:
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


# (rank, ranks, tensor, index of the tensor) -> what the rank steps: the tensor, a flat part of it, or None
Part = Callable[[int, int, Tensor, int], Tensor | None]


def _piece(rank: int, ranks: int, tensor: Tensor, index: int, block: int = 1) -> Tensor | None:
    cut = round_up(-(-tensor.numel() // SHARE), block)
    part = tensor.reshape(-1)[cut:] if rank else tensor.reshape(-1)[:cut]
    return part if part.numel() else None


_piece_of_blocks = partial(_piece, block=BLOCK)


def _tensors_in_turn(rank: int, ranks: int, tensor: Tensor, index: int) -> Tensor | None:
    return tensor if index % ranks == rank else None


def _agrees(whole: Groups, optimizer: Optimizer, part: Part, ranks: int, bench: _Bench) -> bool:
    """Whether ranks that each step a part of the tensors make the updates `whole`, which one rank alone has made."""
    try:
        found = _updates(optimizer, part, ranks, bench)
        return all(_are_close(next(found), expected, bench.tolerance) for expected in whole)
    except Exception:  # it steps matrices only, say, or fewer steps succeed
        return False


def _draws(optimizer: Optimizer, bench: _Bench) -> bool:
    """Whether a step draws random numbers: from torch, numpy or Python, or from a generator of the optimizer's own,
    which gives the same ones to each copy of the optimizer. Other threads, which load data, draw from the first three
    too: one that does so during each of several steps would have to draw without a pause."""
    return all(_has_drawn_meanwhile(optimizer, bench) for _ in range(TRIES))


def _has_drawn_meanwhile(optimizer: Optimizer, bench: _Bench) -> bool:
    """Whether somebody draws random numbers during a step of a copy of the optimizer."""
    values = [_values(group["params"], 0, bench) for group in optimizer.param_groups]
    trial = _Trial(optimizer, values, lambda tensor, _: tensor, bench)
    with _restoring_random_state():  # one that seeds torch itself would find the state that it left in the last try
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
    for place, holder in enumerate(_holders(optimizer)):
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


def _updates(optimizer: Optimizer, part: Part, ranks: int, bench: _Bench) -> Iterator[list[Tensor]]:
    """Yields what each step of `MOMENTS` changes in the small tensors of every group. Ends early where a later step
    fails, or its updates are not finite."""
    values = [_values(group["params"], 0, bench) for group in optimizer.param_groups]
    trials = [_Trial(optimizer, values, partial(part, rank, ranks), bench) for rank in range(ranks)]
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
        yield updates


@final
class _Trial:
    """A copy of an optimizer, which steps what one rank has of the tensors of each group."""

    def __init__(
        self, optimizer: Optimizer, values: Groups, part: Callable[[Tensor, int], Tensor | None], bench: _Bench
    ) -> None:
        self._part = part
        self._values = self._cut(values)
        nothing = torch.empty(0, dtype=bench.dtype, device=bench.device)
        self._stepped = [Parameter(nothing if value is None else value.clone()) for value in self._values]
        left = iter(self._stepped)
        self.optimizer = _trial_of(optimizer, [[next(left) for _ in group] for group in values])
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

    def move_on(self, steps: int) -> None:
        """Adds `steps` to every number that has counted the latest step."""
        for holder, name in _numbers(self.optimizer):
            before, now = self._counts.get((id(holder), name)), holder[name]
            if before is not None and now == before + 1:
                holder[name] = now + steps


def _numbers(optimizer: Optimizer) -> list[tuple[dict[Any, Any], Any]]:
    """Returns where an optimizer, and those that it wraps, keep single numbers: dictionary and key of each."""
    return [(holder, name) for holder in _holders(optimizer) for name, value in holder.items() if _is_single(value)]


def _holders(optimizer: Optimizer) -> list[dict[Any, Any]]:
    """Returns the dictionaries in which an optimizer, and those that it wraps, keep what they know."""
    optimizers = wrapped_in(optimizer)
    return [holder for one in optimizers for holder in (vars(one), *one.param_groups, *one.state.values())]


def _is_single(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


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


def _are_close(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> bool:
    largest = max((float(update.abs().max()) for update in expected), default=0.0)
    pairs = zip(found, expected, strict=True)
    return all(bool(((one - other).abs() <= tolerance * largest).all()) for one, other in pairs)


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


def _trial_of(optimizer: Optimizer, groups: Groups) -> Optimizer:
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
    own.update({name: OrderedDict() for name in OPTIMIZER_HOOKS})
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
