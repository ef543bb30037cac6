"""`Moment`: an optimizer as it was when its user called `step`, kept for parameters that are stepped later."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

VERDICT = ("found_inf", "grad_scale")  # by which a `GradScaler` tells a fused kernel of an overflow, for one call


def wrapped_in(optimizer: Optimizer) -> list[Optimizer]:
    """Returns an optimizer and those that it wraps, as Lookahead and SAM do."""
    found = [optimizer]
    for one in found:
        inner = [value for value in vars(one).values() if isinstance(value, Optimizer)]
        found += [other for other in inner if not any(other is known for known in found)]
    return found


@dataclass(frozen=True)
class Moment:
    """The options of an optimizer, and the counts that it and those it wraps keep, at one moment."""

    options: list[dict[str, Any]]  # of each parameter group
    numbers: list[dict[str, Any]]  # attributes of each optimizer that are numbers
    counts: list[dict[Any, Any]]  # entries of each optimizer's state whose keys are no parameters
    default_dtype: torch.dtype  # of the scalars that a step makes; precision 64-true changes it during forward
    autocast: torch.dtype | None  # on the CPU; manual optimization under *-mixed calls `step` inside of it

    @classmethod
    def of(cls, optimizer: Optimizer, *, clones: bool = False) -> "Moment":
        """Returns the optimizer as it is now. A moment that outlives the call needs `clones` of options that are
        tensors: a scheduler writes into a learning rate that is one."""

        def kept(value: Any) -> Any:
            return value.clone() if clones and isinstance(value, Tensor) else value

        options = [{n: kept(value) for n, value in g.items() if n != "params"} for g in optimizer.param_groups]
        optimizers = wrapped_in(optimizer)
        numbers = [{n: value for n, value in vars(one).items() if _is_number(n, value)} for one in optimizers]
        counts = [copy.deepcopy(_counts_of(one)) for one in optimizers]
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        return cls(options, numbers, counts, torch.get_default_dtype(), autocast)

    @contextmanager
    def back(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, the optimizer is as it was at this moment, except for its parameters and their state."""
        now = Moment.of(optimizer)
        self._put(optimizer)
        autocast = torch.autocast("cpu", self.autocast, enabled=self.autocast is not None, cache_enabled=False)
        try:
            with torch.inference_mode(False), torch.no_grad(), autocast:
                yield
        finally:
            now._put(optimizer)

    def _put(self, optimizer: Optimizer) -> None:
        for group, options in zip(optimizer.param_groups, self.options, strict=False):
            parameters = group["params"]
            group.clear()
            group.update(params=parameters, **options)
        for one, numbers, counts in zip(wrapped_in(optimizer), self.numbers, self.counts, strict=True):
            own = vars(one)
            for name in [name for name, value in own.items() if _is_number(name, value)]:
                del own[name]
            own.update(numbers)
            for key in _counts_of(one):
                dict.pop(one.state, key)
            dict.update(one.state, copy.deepcopy(counts))
        torch.set_default_dtype(self.default_dtype)


def _counts_of(optimizer: Optimizer) -> dict[Any, Any]:
    """Returns the entries of its state whose keys are no parameters, without taking postponed steps."""
    state: dict[Any, Any] = optimizer.state
    return {key: value for key, value in dict.items(state) if not isinstance(key, Tensor)}


def _is_number(name: str, value: Any) -> bool:
    """Whether an attribute belongs to a moment: a number, or what a `GradScaler` has told the optimizer."""
    return isinstance(value, int | float) or name in VERDICT


def _caught_up(name: str) -> Any:
    """Returns the method of `defaultdict` of that name, which takes the postponed steps first."""
    look_up = getattr(defaultdict, name)

    def catch_up_first(self: "CaughtUpState", *args: Any) -> Any:
        self._catch_up()
        return look_up(self, *args)

    return catch_up_first


class CaughtUpState(defaultdict[Any, Any]):
    """`optimizer.state` where steps may be postponed: it calls `catch_up`, which takes them, before each look-up."""

    def __init__(self, state: Mapping[Any, Any], catch_up: Callable[[], None]) -> None:
        super().__init__(dict, state)
        self._catch_up = catch_up

    __getitem__ = _caught_up("__getitem__")
    __contains__ = _caught_up("__contains__")
    __iter__ = _caught_up("__iter__")
    __len__ = _caught_up("__len__")
    get = _caught_up("get")
    keys = _caught_up("keys")
    items = _caught_up("items")
    values = _caught_up("values")

    def as_made(self) -> defaultdict[Any, Any]:
        """Returns the same state as a plain `defaultdict`, as torch makes it."""
        made: defaultdict[Any, Any] = defaultdict(dict)
        dict.update(made, dict.items(self))
        return made

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self.items()))
